"""Forecasts, links and timelines: sums add up, units are right, and hand-computed cases agree.

Tests of `simulator/pricing.py`, `simulator/stage_seconds.py`.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

import meshwright as mw
from meshwright.core.cluster import Cluster, Device, Link, Topology
from meshwright.core.codec import decode, encode
from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.core.technique import Technique, technique_named
from meshwright.core.timeline import Timeline
from meshwright.core.work import Compute
from meshwright.machine.named_clusters import cluster
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.presets import preset
from meshwright.simulator.forecast import Forecast, forecast
from meshwright.simulator.pricing import price, runs_of, straight
from meshwright.simulator.simulate import simulate
from meshwright.simulator.stage_seconds import (
    LATENCY_BY_RANK,
    Charge,
    compute_seconds,
    host_seconds,
    routes,
    stage_cost,
)

PROFILE = decoder_profile(preset("byte-3m"), "byte-3m")
NODES = cluster("2x4xh100")


def _t(name: str, **settings: object) -> Technique:
    return technique_named(name)(**settings)


PLANS = [
    Plan(techniques=(), batch=4),
    Plan(techniques=(_t("shard", size=8), _t("precision"), _t("recompute", layers="first 2")), batch=16),
    Plan(techniques=(_t("pipeline", size=4), _t("replicate", size=2)), batch=16, microbatch=2),
    Plan(techniques=(_t("pipeline", size=2, schedule="gpipe"), _t("tensor", size=2), _t("shard", size=2)), batch=16),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_forecast_and_its_timeline_agree(plan: Plan) -> None:
    told = forecast(PROFILE, plan, NODES, sequence=128)
    assert sum(told.seconds_by_origin.values()) == pytest.approx(told.step_seconds, rel=1e-6)
    assert abs(sum(told.peak_bytes_by_category.values()) - told.peak_bytes) < 20  # rounded up one by one
    assert told.tokens_per_second * told.step_seconds == pytest.approx(plan.batch * 128)
    assert told.step_seconds_low < told.step_seconds < told.step_seconds_high
    assert decode(Forecast, json.loads(json.dumps(encode(told))), "forecast") == told
    line = simulate(PROFILE, plan, NODES, sequence=128)
    assert line.seconds == pytest.approx(told.step_seconds)
    assert max(point.bytes for point in line.memory) == pytest.approx(told.peak_bytes, abs=2)
    assert {span.device for span in line.spans} == {
        stage * (plan.num_ranks // len(plan.blocks_of_stages(PROFILE)))
        for stage in range(len(plan.blocks_of_stages(PROFILE)))
    }
    assert Timeline.from_json(line.to_json()) == line


def test_a_very_long_step_is_drawn_in_part_and_told_whole() -> None:
    plan = replace(PLANS[2], batch=10**8)
    line, told = simulate(PROFILE, plan, NODES, sequence=128), forecast(PROFILE, plan, NODES, sequence=128)
    assert line.environment["microbatches"] == f"512 of {plan.num_microbatches}"
    assert len(line.spans) < 50_000
    assert line.seconds < told.step_seconds / 1000


def test_a_step_that_never_ends_is_refused() -> None:
    with pytest.raises(MeshwrightError, match="never ends: the device has no bf16 rate"):
        forecast(PROFILE, PLANS[1], cluster("8xv100"), sequence=128)
    assert "do not compute in bf16" in str(PLANS[1].check(PROFILE, cluster("8xv100"))[0])


def test_the_link_follows_the_axis_on_the_machines() -> None:
    found = routes(NODES, {"a": 2, "b": 2, "c": 2})
    assert [bool(found[axis].is_inner) for axis in "abc"] == [False, True, True]
    assert found["c"].ring_bytes_per_second == NODES.inner.bytes_per_second
    assert found["a"].ring_bytes_per_second == NODES.outer.bytes_per_second
    # A ring over all eight enters each node by four cards at once.
    whole = routes(NODES, {"a": 8})["a"]
    assert whole.ring_bytes_per_second == 4 * NODES.outer.bytes_per_second
    assert whole.direct_bytes_per_second == NODES.outer.bytes_per_second
    # Behind a switch that passes half of it on, ranks of two nodes have half the rate.
    switched = replace(NODES, topology=Topology(switches=(1, 1), oversubscription=2.0))
    assert routes(switched, {"a": 8})["a"].ring_bytes_per_second == 2 * NODES.outer.bytes_per_second
    assert routes(replace(switched, topology=Topology(switches=(2,), oversubscription=2.0)), {"a": 8})["a"] == whole
    assert switched.resized(4, 3).topology is None
    # Where a switch joins cards of one place, three of four partners in another node are behind others; rings are not.
    rails = replace(NODES, topology=Topology(switches=(2,), oversubscription=2.0, rails=True))
    assert routes(rails, {"a": 8})["a"].ring_bytes_per_second == whole.ring_bytes_per_second
    assert routes(rails, {"a": 8})["a"].direct_bytes_per_second == whole.direct_bytes_per_second / 1.75
    assert routes(rails, {"a": 2, "b": 4})["a"].direct_bytes_per_second == whole.direct_bytes_per_second
    stepping = replace(NODES, outer=replace(NODES.outer, step_seconds=1.0))
    ring, plain = (routes(each, {"a": 8})["a"] for each in (stepping, NODES))
    # A ring has as many steps as ranks less one; sums take a tree.
    assert ring.seconds("all_gather", 0.0) == ring.seconds("reduce_scatter", 0.0) == 7
    assert ring.seconds("all_reduce", 0.0) == plain.seconds("all_reduce", 0.0)
    arrays = routes(NODES, {"a": np.array([2, 8]), "b": np.array([4, 1])})
    assert arrays["a"].ring_bytes_per_second.tolist() == [found["a"].ring_bytes_per_second, 4 * 50e9]
    crowded = replace(NODES, outer=replace(NODES.outer, by_nodes=((1, 1.0), (2, 0.5))))
    assert routes(crowded, {"a": 8})["a"].ring_bytes_per_second == pytest.approx(4 * 25e9)


def test_collectives_move_what_a_ring_moves() -> None:
    link = Link(bytes_per_second=1e9, latency_seconds=1e-3)
    device = Device(kind="cpu", memory_bytes=1, memory_bytes_per_second=1.0, flops_per_second={"fp32": 1.0})
    sources = {"inner": "measured", "outer": "measured"}
    one = Cluster(name="x", device=device, inner=link, outer=link, devices_per_node=4, sources=sources)
    route = routes(one, {"a": 4})["a"]
    four = 1e-3 * (1 + 2 * LATENCY_BY_RANK)
    assert route.seconds("all_reduce", 1e9) == pytest.approx(four + 1.5, rel=1e-9)
    assert route.seconds("all_gather", 1e9) == pytest.approx(four + 0.75, rel=1e-9)
    assert route.seconds("send", 1e9) == pytest.approx(1e-3 + 1.0)
    assert routes(one, {"a": 1})["a"].seconds("all_reduce", 1e9) == 0.0
    # Of seven partners three are in the node: four sevenths of what goes to all take the slow way, meanwhile.
    two = replace(one, num_nodes=2, outer=replace(link, bytes_per_second=1e8))
    assert routes(two, {"a": 8})["a"].seconds("all_to_all", 1e9) == pytest.approx(1e-3 + 7 / 8 * 4 / 7 * 10.0)
    assert route.seconds("all_to_all", 1e9) == pytest.approx(four + 0.75)


def test_an_op_takes_the_slower_of_arithmetic_and_memory() -> None:
    rates = {"fp32": 1e13, "bf16": 1e14}
    device = Device(kind="cuda", memory_bytes=1, memory_bytes_per_second=1e12, flops_per_second=rates)
    common = {"layer": "l", "name": "n", "phase": "forward", "repeat": 1}
    big = Compute(**common, kind="matmul", flops=1e14, moved_bytes=1.0, dtype="bf16")  # type: ignore[arg-type]
    assert compute_seconds(big, device) == pytest.approx(1 / 0.7)
    thin = Compute(**common, kind="memory", moved_bytes=1e12)  # type: ignore[arg-type]
    assert compute_seconds(thin, device) == pytest.approx(1 / 0.8)
    assert host_seconds(thin, device) == device.launch_seconds
    assert compute_seconds(replace(big, dtype="compute"), device) > 9 * compute_seconds(big, device)
    assert compute_seconds(replace(big, dtype="int1"), device) == math.inf
    assert compute_seconds(replace(thin, moved_bytes=0.0), device) == 0.0


def test_a_matmul_pays_for_its_last_wave_its_depth_and_its_odd_width() -> None:
    rates = {"fp32": 1e13, "bf16": 1e14}
    plain = Device(kind="cuda", memory_bytes=1, memory_bytes_per_second=1e30, flops_per_second=rates, matmul_fraction=1)

    def seconds(device: Device, m: int, n: int, k: int, phase: str = "forward") -> float:
        products = 1.0 if phase == "forward" else 2.0
        task = Compute(
            layer="l",
            name="n",
            kind="matmul",
            phase=phase,  # type: ignore[arg-type]
            repeat=1,
            flops=2.0 * m * n * k * products,
            dtype="bf16",
            shape=(n, k),
            kernels=products,
        )
        return float(compute_seconds(task, device)) / (2.0 * m * n * k * products / 1e14)

    # 4 x 8 tiles of 256 x 128 on 16 processors are two full waves; one row more begins a third.
    waves = replace(plain, num_processors=16)
    assert seconds(waves, 1024, 1024, 64) == pytest.approx(1.0)
    assert 1.2 < seconds(waves, 1025, 1024, 64) <= 1.5
    # One tile on four processors, each a quarter of k: 0.85 of the rate instead of a quarter.
    assert seconds(replace(plain, num_processors=4), 256, 128, 4096) == pytest.approx(1 / 0.85)
    assert seconds(replace(plain, k_half=100.0), 512, 512, 300) == pytest.approx(4 / 3)
    odd = replace(plain, unaligned_slowdown=6.0)
    assert [seconds(odd, 512, n, 512) for n in (512, 513)] == pytest.approx([1.0, 6.0])
    # What was measured at a shape is what is said of it; going back the products have other shapes.
    timed = replace(
        plain, residuals=((512.0, 256.0, 128.0, 2.0), (512.0, 128.0, 256.0, 1.0), (256.0, 128.0, 512.0, 1.0))
    )
    assert seconds(timed, 512, 256, 128) == pytest.approx(2.0, rel=0.02)
    assert seconds(timed, 512, 256, 128, "backward") == pytest.approx(1.0, rel=0.02)


def test_the_host_runs_ahead_until_the_update() -> None:
    """A device waits for its host as long as that is slower; what it is ahead after forward helps it in backward."""
    device = replace(
        NODES.device, launch_seconds=1e-3, kernel_seconds=0.0, memory_half_bytes=0.0, memory_bytes_per_second=1e9
    )
    machine = replace(NODES, device=replace(device, bandwidth_fraction=1.0))

    def waits(forward: tuple[float, float], backward: tuple[float, float]) -> list[float]:
        work = price(PROFILE, Plan(techniques=(), batch=1, microbatch=1), sequence=128)
        parts = {"forward": forward, "backward": backward}
        tasks = tuple(
            Compute(layer="l", name="n", kind="memory", phase=phase, repeat=1, moved_bytes=mb * 1e6, kernels=launches)  # type: ignore[arg-type]
            for phase, (mb, launches) in parts.items()
        )
        cost = stage_cost(replace(work, tasks=tasks), machine, {})
        return [float(cost.charges[Charge("launch", "", part)]) for part in ("forward", "backward")]

    assert waits((10.0, 4.0), (10.0, 4.0)) == pytest.approx([0.0, 0.0])
    assert waits((4.0, 10.0), (4.0, 10.0)) == pytest.approx([6e-3, 6e-3])
    assert waits((10.0, 4.0), (4.0, 10.0)) == pytest.approx([0.0, 0.0])
    assert waits((10.0, 4.0), (4.0, 12.0)) == pytest.approx([0.0, 2e-3])


def test_equal_inner_stages_fold_and_the_ends_do_not() -> None:
    def runs(*blocks: int) -> list[tuple[int, int]]:
        profile = decoder_profile(preset("llama3-8b"), "llama3-8b")
        return [(run.start, run.count) for run in runs_of(profile, straight(blocks))]

    assert runs(4, 4, 4, 4, 3) == [(0, 1), (1, 3), (4, 1)]
    assert runs(2, 2) == [(0, 1), (1, 1)]
    assert runs(7) == [(0, 1)]
    assert runs(3, 3, 4, 4, 3) == [(0, 1), (1, 1), (2, 2), (4, 1)]


def test_of_chunks_only_the_last_one_has_its_sums_to_show() -> None:
    """Those before it have the passes of the chunks after them to hide behind."""
    slow = replace(NODES, outer=replace(NODES.outer, bytes_per_second=1e6))
    shown = {}
    for chunks, schedule in ((1, "1f1b"), (2, "interleaved")):
        techniques = (_t("pipeline", size=2, schedule=schedule, chunks=chunks), _t("replicate", size=4))
        work = price(PROFILE, Plan(techniques=techniques, batch=16), sequence=128)
        cost = stage_cost(work, slow, routes(slow, {"dp": 4, "pp": 2}))
        shown[chunks] = sum(s for c, s in cost.charges.items() if c.axis == "dp" and c.part == "step")
    assert np.allclose(shown[2], shown[1] / 2)


def test_links_driven_by_the_cores_hide_nothing() -> None:
    plan = Plan(techniques=(_t("replicate", size=2),), batch=4)
    machine = cluster("2xlaptop")
    hiding = replace(machine, inner=replace(machine.inner, shared=False))
    exposed, hidden = (
        forecast(PROFILE, plan, m, sequence=128).seconds_by_origin["replicate"] for m in (machine, hiding)
    )
    assert hidden < exposed


def test_convolutions_of_float32_run_in_tf32_and_matmuls_do_not() -> None:
    """torch's defaults: `cudnn.allow_tf32` is on, `cuda.matmul.allow_tf32` off."""
    machine = cluster("1xh200")
    without = {name: rate for name, rate in machine.device.flops_per_second.items() if name != "tf32"}
    older = replace(machine, device=replace(machine.device, flops_per_second=without))
    plan = Plan(batch=32, microbatch=32)

    def seconds(name: str, where: Cluster) -> float:
        profile = mw.model(name).profile
        told = forecast(profile, plan, where, sequence=1 if profile.counts == "samples" else 1024)
        assert told.mfu < 1
        return told.step_seconds

    assert seconds("vgg16", machine) < 0.5 * seconds("vgg16", older)
    assert seconds("gpt2-124m", machine) == seconds("gpt2-124m", older)


def _islands(link: Link, **settings: object) -> Forecast:
    """Of two devices without launches, joined by this link."""
    there = cluster("2x1xh100")
    device = replace(there.device, launch_seconds=0.0)
    beside = replace(there.beside, **dict.fromkeys(_BOTH, 1.0))
    there = replace(there, device=device, outer=link, beside=beside, jitter_fraction=0.0)
    return forecast(PROFILE, Plan(techniques=(_t("local_steps", size=2, **settings),), batch=4), there, sequence=128)


_BOTH = ("compute_by_collective", "collective_by_compute")


def test_islands_wait_for_each_other_in_every_step() -> None:
    """For a few numbers that all ranks agree on: a link's latency, also between meetings."""
    near, far = (Link(bytes_per_second=1e12, latency_seconds=latency) for latency in (0.0, 0.05))
    seconds = _islands(far, every=100_000).step_seconds - _islands(near, every=100_000).step_seconds
    assert 0.05 < seconds == pytest.approx(0.05, rel=2e-3)


@pytest.mark.parametrize("overlap", [1, 3])
def test_a_streamed_sum_hides_behind_the_steps_until_it_is_used(overlap: int) -> None:
    """Of each of four fragments a meeting every 16 steps, under way for so many steps of compute."""
    slow = Link(bytes_per_second=1e8, latency_seconds=0.0)
    streamed = {"every": 16, "fragments": 4}
    compute = _islands(Link(bytes_per_second=1e14, latency_seconds=0.0), **streamed).step_seconds
    whole = _islands(slow, **streamed).step_seconds - compute
    shown = _islands(slow, **streamed, overlap=overlap).seconds_by_origin["local_steps"]
    passes = _islands(slow, **streamed).seconds_by_origin["compute"]
    extra = _islands(Link(bytes_per_second=1e14, latency_seconds=0.0), **streamed, overlap=overlap)
    bare = extra.seconds_by_origin["local_steps"]
    assert whole > passes, "the link is slower than the compute"
    assert shown - bare == pytest.approx(whole - 4 * overlap / 16 * passes, rel=0.05), "but for the update"
