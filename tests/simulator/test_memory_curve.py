"""Memory over a step: against a list of allocations written by hand, and against what torch allocates on this CPU.

Tests of `simulator/simulate.py`, `simulator/peak_memory.py`.
"""

from __future__ import annotations

from collections import Counter
from itertools import groupby, pairwise
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import meshwright as mw
from meshwright.core.plan import Plan
from meshwright.core.technique import Technique, technique_named
from meshwright.core.timeline import MemoryPoint, Timeline
from meshwright.machine.named_clusters import cluster
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.presets import preset
from meshwright.simulator.forecast import forecast
from meshwright.simulator.simulate import simulate

CONFIG = preset("byte-3m")
PROFILE = decoder_profile(CONFIG, "byte-3m")
NODES = cluster("2x4xh100")
SEQUENCE = 128


def t(name: str, **settings: Any) -> Technique:
    return technique_named(name)(**settings)


def curve(line: Timeline, device: int) -> list[MemoryPoint]:
    return [point for point in line.memory if point.device == device]


def levels(points: list[MemoryPoint], *categories: str) -> list[int]:
    """Without repetitions."""
    sizes = (sum(point.by_category.get(name, 0) for name in categories) for point in points)
    return [size for size, _ in groupby(sizes)]


def replayed(order: str, layers: list[int], gradients: list[int]) -> tuple[list[int], list[int]]:
    """Allocations and releases one by one: levels of activations and of gradients while each layer runs, and between
    microbatches. `order`: `F0 B0 F1`."""
    held: dict[tuple[str, int], int] = {}
    made: dict[int, int] = {}
    kept, summed = [0], [0]
    for action in order.split():
        number = action[1:]
        for layer in range(len(layers)) if action[0] == "F" else reversed(range(len(layers))):
            if action[0] == "F":
                held[number, layer] = layers[layer]
            else:
                made[layer] = gradients[layer]
            kept.append(sum(held.values()))
            summed.append(sum(made.values()))
            if action[0] == "B":
                del held[number, layer]
        kept.append(sum(held.values()))
    assert not held
    return [size for size, _ in groupby(kept)], [size for size, _ in groupby(summed)]


def saved(name: str) -> int:
    layer = next(layer for layer in PROFILE.layers if layer.name == name)
    return round(sum(op.saved(1, SEQUENCE) * 4 for op in layer.ops))


TOKENS = SEQUENCE * 8  # integers of 64 bits
FIRST, *_, LAST = (layer.name for layer in PROFILE.layers)
BLOCK = next(layer.name for layer in PROFILE.block_layers)


def weights(name: str) -> int:
    layer = next(layer for layer in PROFILE.layers if layer.name == name)
    return sum(4 * torch.Size(param.shape).numel() for param in layer.params)


def test_accumulated_gradients_by_hand() -> None:
    line = simulate(PROFILE, Plan(batch=4), NODES, sequence=SEQUENCE)
    sizes = [TOKENS, *[saved(BLOCK)] * 4, saved(LAST)]
    grads = [weights(FIRST), *[weights(BLOCK)] * 4, weights(LAST)]
    kept, summed = replayed("F0 B0 F1 B1 F2 B2 F3 B3", sizes, grads)
    assert levels(curve(line, 0), "activations", "logits") == kept
    assert levels(curve(line, 0), "gradients") == summed


ORDERS = {0: "F0 F1 B0 F2 B1 F3 B2 B3", 1: "F0 B0 F1 B1 F2 B2 F3 B3"}


@pytest.mark.parametrize("stage", ORDERS)
def test_two_stages_and_four_microbatches_by_hand(stage: int) -> None:
    line = simulate(PROFILE, Plan(techniques=(t("pipeline", size=2),), batch=4), NODES, sequence=SEQUENCE)
    sent = SEQUENCE * CONFIG.hidden_size * 4  # the first stage keeps its output, for autograd to begin with
    sizes = [TOKENS, *[saved(BLOCK)] * 2, sent] if stage == 0 else [*[saved(BLOCK)] * 2, saved(LAST)]
    grads = [weights(FIRST), *[weights(BLOCK)] * 2, 0] if stage == 0 else [*[weights(BLOCK)] * 2, weights(LAST)]
    kept, summed = replayed(ORDERS[stage], sizes, grads)
    points = curve(line, line.devices[stage])
    assert levels(points, "activations", "logits") == kept
    assert levels(points, "gradients") == summed


PLANS = [
    Plan(batch=4),
    Plan(techniques=(t("recompute", layers="first 2"),), batch=2),
    Plan(techniques=(t("pipeline", size=4), t("replicate", size=2)), batch=16, microbatch=2),
    Plan(techniques=(t("pipeline", size=2, schedule="interleaved"),), batch=4),
    Plan(techniques=(t("pipeline", size=4, schedule="zero_bubble_h1"),), batch=8),
    Plan(techniques=(t("pipeline", size=2, schedule="async"),), batch=4),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_curve_goes_forward_in_time_and_reaches_the_forecast_peak(plan: Plan) -> None:
    line = simulate(PROFILE, plan, NODES, sequence=SEQUENCE)
    told = forecast(PROFILE, plan, NODES, sequence=SEQUENCE)
    assert max(point.bytes for point in line.memory) == pytest.approx(told.peak_bytes, rel=0.02)
    for device in line.devices:
        points = curve(line, device)
        assert all(first.seconds <= second.seconds for first, second in pairwise(points))
        assert all(sum(point.by_category.values()) == pytest.approx(point.bytes, abs=9) for point in points)
        steps = Counter(point.seconds for point in points)
        assert max(steps.values()) < 10  # drawn over the step, not at its ends
        activations = [point.by_category.get("activations", 0) for point in points]
        assert activations[0] == activations[-1] == 0


def test_the_curve_is_what_torch_allocates_here() -> None:
    """Two microbatches on this CPU, every allocation recorded: the level at the start and end of each action, and its
    peak, beside the simulated ones."""
    torch.manual_seed(0)
    plan = Plan(batch=2)
    built = mw.build(plan, "byte-3m", device="cpu")
    batch = torch.randint(0, 256, (2, SEQUENCE + 1))
    for _ in range(2):  # states exist from the first update on
        built.step(batch[:, :-1], batch[:, 1:])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        built.step(batch[:, :-1], batch[:, 1:])
    events = sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns())  # type: ignore[union-attr]
    now, course = 0, []
    for event in events:
        if event.name() == "[memory]":
            now += event.nbytes()
            course.append((event.start_ns(), now))
    measured = {}
    for event in events:
        name = event.name().removeprefix("mw:")
        if name.startswith(("forward ", "backward ")):
            start, end = event.start_ns(), event.start_ns() + event.duration_ns()
            inside = [size for at, size in course if start <= at <= end]
            measured[name] = inside[-1], max(inside)
    assert list(measured) == ["forward 0", "backward 0", "forward 1", "backward 1"]
    line = simulate(PROFILE, plan, NODES, sequence=SEQUENCE)
    points, base = curve(line, 0), curve(line, 0)[0].bytes
    ends = {span.name: span.end_seconds for span in line.spans if span.name in measured}
    begin = 0.0
    for name, (level, peak) in measured.items():
        inside = [point for point in points if begin <= point.seconds <= ends[name] * (1 + 1e-9)]
        begin = ends[name] * (1 + 1e-9)
        after = next(point for point in reversed(inside) if "working" not in point.by_category)
        assert after.bytes - base == pytest.approx(level, rel=0.01), name
        # A block's activations, gradients and temporaries count as if all of them were there at once.
        assert peak <= max(point.bytes for point in inside) - base <= 1.25 * peak, name
