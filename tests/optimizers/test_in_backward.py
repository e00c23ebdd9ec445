"""Updates inside of backward are those after it, bit for bit, and no gradient outlives its update."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch

from meshwright.ask.question import with_devices
from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.core.technique import Technique
from meshwright.machine.named_clusters import cluster
from meshwright.models.presets import DecoderConfig, profile
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.planner.search import search
from meshwright.run.model import open_config
from meshwright.simulator.forecast import forecast
from meshwright.verify import parity

CONFIG = DecoderConfig(**tiny.GPT | {"num_layers": 2})
UNCLIPPED = OptimizerConfig(clip=0.0)
NARROW = tiny.t("precision", weights="bf16")
BESIDE: tuple[tuple[Technique, ...], ...] = (
    *((), (tiny.RECOMPUTE,), (tiny.CHUNKED,), (tiny.BF16,), (tiny.LOW_BIT,), (NARROW,), (NARROW, tiny.LOW_BIT)),
)


def session_of(optimizer: OptimizerConfig, *techniques: Technique) -> parity.Session:
    plan = Plan(techniques=techniques, batch=4, microbatch=4)
    opened = open_config(CONFIG, "tiny", 0)
    return parity.open_session(plan, opened, optimizer, dtype="float32", device=torch.device("cpu"))


def samples(step: int) -> Any:
    return parity.random_samples(CONFIG.vocab_size, 4, tiny.SEQUENCE)(step, 0, 1)


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion"])
@pytest.mark.parametrize("beside", BESIDE, ids=tiny.joined)
def test_updates_in_backward_are_those_after_it(name: str, beside: tuple[Technique, ...]) -> None:
    optimizer = OptimizerConfig(name=name, clip=0.0)
    if optimizer.problems_with(Plan(techniques=beside)):
        return
    sessions = [session_of(optimizer, *beside), session_of(optimizer, tiny.IN_BACKWARD, *beside)]
    for step in range(3):
        after, during = (session.loop.step(samples(step), 0.05) for session in sessions)
        assert during.loss == after.loss
        assert during.gradient_norm == pytest.approx(after.gradient_norm, rel=1e-12)
    for (name, value), (other, its) in zip(*(session.build.local_parameters() for session in sessions), strict=True):
        assert name == other
        assert torch.equal(value, its)
    states = [{state[:2]: state[2] for state in session.loop.optimizer.state()} for session in sessions]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


def test_gradients_never_all_exist() -> None:
    session = session_of(UNCLIPPED, tiny.IN_BACKWARD)
    parameters = session.loop.optimizer.parameters
    held: list[int] = []

    def look(name: str, gradient: torch.Tensor) -> None:
        held.append(sum(p.grad.nbytes for p in parameters if p.grad is not None))

    session.loop.optimizer.rule.on_gradient.append(look)
    session.loop.step(samples(0), 0.1)
    assert len(held) == len(parameters)
    assert max(held) == max(p.nbytes for p in parameters)
    assert all(p.grad is None for p in parameters)


@pytest.mark.parametrize("name", ["llama3-8b", "llama3.2-1b"])
def test_the_price_has_the_gradients_of_one_layer(name: str) -> None:
    """And that of a weight that two layers share, which is whole only at the end."""
    model = profile(name)
    plans = [Plan(techniques=techniques, batch=1) for techniques in ((), (tiny.IN_BACKWARD,))]
    told = [forecast(model, plan, cluster("h100"), sequence=128, optimizer=UNCLIPPED) for plan in plans]
    gradients = [each.peak_bytes_by_category["gradients"] for each in told]
    sizes = [[4 * math.prod(param.shape) for param in layer.params if not param.tied] for layer in model.layers]
    is_tied = any(param.tied for layer in model.layers for param in layer.params)
    assert gradients[0] == 4 * model.num_params
    assert 0 < gradients[1] <= max(map(sum, sizes)) + is_tied * max(map(max, sizes))
    assert told[0].peak_bytes - told[1].peak_bytes == pytest.approx(gradients[0] - gradients[1], rel=0.05)


def test_numbers_that_are_not_finite_enter_no_weight_and_no_state() -> None:
    session = session_of(UNCLIPPED, tiny.IN_BACKWARD)
    given = samples(0)
    weights = {name: value.clone() for name, value in session.build.local_parameters()}
    with pytest.raises(MeshwrightError, match="loss is nan"):
        session.loop.step(replace(given, weights=given.weights * float("nan")), 0.1)
    assert all(torch.equal(weights[name], value) for name, value in session.build.local_parameters())
    # A gradient that is no number spoils those that come after it, and none of them is used.
    names = [name for name, _ in session.build.local_parameters()]
    arrived: list[str] = []

    def spoil(name: str, gradient: torch.Tensor) -> None:
        arrived.append(name)
        if len(arrived) == 3:
            gradient.fill_(float("nan"))

    session.loop.optimizer.rule.on_gradient.append(spoil)
    with pytest.raises(MeshwrightError, match="backward has updated parameters whose gradients are finite"):
        session.loop.step(given, 0.1)
    changed = {name for name, value in session.build.local_parameters() if not torch.equal(weights[name], value)}
    assert changed == set(names) - {arrived[2]}
    assert all(bool(torch.isfinite(value).all()) for _, _, value, _ in session.loop.optimizer.state())


def test_what_cannot_be_is_refused_with_the_reason() -> None:
    shape = profile("byte-tiny")
    assert Plan(techniques=(tiny.IN_BACKWARD,), batch=4, microbatch=4).check(shape) == ()
    assert Plan(techniques=(tiny.IN_BACKWARD, tiny.SHARD3), batch=4, microbatch=2).check(shape) == ()
    (problem,) = Plan(techniques=(tiny.IN_BACKWARD,), batch=4, microbatch=2).check(shape)
    assert "several microbatches" in problem.what
    for other in (tiny.REPLICATE, tiny.TENSOR, tiny.PIPELINE):
        plan = Plan(techniques=(tiny.IN_BACKWARD, other), batch=2, microbatch=2 // (1 + (other is tiny.REPLICATE)))
        assert any(f"with {other.name}, gradients are whole only after" in each.what for each in plan.check(shape))
    plan = Plan(techniques=(tiny.IN_BACKWARD,))
    assert [problem.what[:22] for problem in OptimizerConfig().problems_with(plan)] == ["gradients are clipped "]
    (problem,) = OptimizerConfig(name="muon", clip=0.0).problems_with(plan)
    assert "whole parameters" in problem.what
    with pytest.raises(MeshwrightError, match="gradients are clipped"):
        session_of(OptimizerConfig(), tiny.IN_BACKWARD)


def test_search_chooses_it_where_gradients_do_not_fit() -> None:
    model = profile("llama3.2-3b")
    machines = with_devices(cluster("h100"), lambda device: replace(device, memory_bytes=42 * 2**30))
    common: dict[str, Any] = {"batch": 1, "sequence": 512}
    found = search(model, machines, optimizer=UNCLIPPED, **common)
    assert found.best is not None
    assert found.best.plan.technique("update_in_backward") is not None
    assert found.best.plan.num_microbatches == 1
    found = search(model, machines, optimizer=UNCLIPPED, pin=["update_in_backward"], **common)
    assert found.best is not None
    assert search(model, machines, optimizer=OptimizerConfig(), ban=["offload_states"], **common).best is None
    with pytest.raises(MeshwrightError, match="pin update_in_backward: gradients are clipped"):
        search(model, machines, pin=["update_in_backward"], **common)
