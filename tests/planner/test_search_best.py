"""What a search comes back with.

Tests of `models/cost_decoder.py`, `planner/scoreboard.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from small_spaces import Space, bare

from meshwright.ask.explain import explain
from meshwright.core.cluster import Cluster
from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named
from meshwright.core.work import ADAM
from meshwright.machine.named_clusters import cluster
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.presets import PRESETS, preset
from meshwright.planner.search import SearchResult, search
from meshwright.planner.splits import balanced_stages
from meshwright.report.answer_json import result_as_json
from meshwright.simulator.forecast import Forecast, forecast
from meshwright.simulator.pricing import stage_plan

TINY = decoder_profile(PRESETS["byte-tiny"], "byte-tiny")
SEQUENCE, BATCH = 32, 8


def _with_memory(machine: Cluster, num_bytes: int) -> Cluster:
    # As a CPU: a GPU's allocator and communicators would take more than all of it.
    return replace(machine, device=replace(machine.device, kind="cpu", memory_bytes=num_bytes, reserved_bytes=0))


def _slow(machine: Cluster) -> Cluster:
    """Links slow enough for every choice of axis to matter to a tiny model."""
    slower = {
        name: replace(getattr(machine, name), bytes_per_second=1e8, latency_seconds=1e-6) for name in ("inner", "outer")
    }
    return replace(machine, device=replace(machine.device, launch_seconds=1e-9), **slower)


MACHINES = {
    "node": _with_memory(cluster("4xh100"), 600_000),
    "slow": _with_memory(_slow(cluster("2x2xh100")), 300_000),
    "laptop": _with_memory(cluster("4xlaptop"), 400_000),
}


NAMES = ("pipeline", "recompute", "replicate", "shard", "tensor")


def _space(name: str) -> Space:
    return Space(profile=TINY, machine=MACHINES[name], batch=BATCH, sequence=SEQUENCE, names=NAMES, microbatch=2)


@cache
def _brute_force(name: str) -> dict[Plan, Forecast]:
    space = _space(name)
    return {plan: forecast(TINY, plan, space.machine, sequence=SEQUENCE) for plan in space.plans()}


def _search(machine: Cluster, **wishes: object) -> SearchResult:
    return search(TINY, machine, batch=BATCH, sequence=SEQUENCE, **wishes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MACHINES)
def test_search_finds_what_brute_force_finds(name: str) -> None:
    """And says how many it chose from; `test_exact.py` asks many more questions."""
    every = _brute_force(name)
    fitting = [told.step_seconds for told in every.values() if told.fits]
    assert 0 < len(fitting) < len(every), "the memory limit must matter"
    found = search(TINY, MACHINES[name], **_space(name).question)
    assert found.evaluated == len({bare(plan) for plan in every})
    assert found.gap_fraction == 0.0
    assert found.best is not None
    assert found.ranked[0] == found.best
    seconds = [told.step_seconds for _, told in found.ranked]
    assert seconds[0] == pytest.approx(min(fitting), rel=1e-9)
    assert seconds == sorted(seconds)
    assert len({plan for plan, _ in found.ranked}) == len(found.ranked) > 1
    for plan, told in found.ranked:
        assert told.fits
        assert forecast(TINY, plan, MACHINES[name], sequence=SEQUENCE) == told


@pytest.mark.parametrize("name", MACHINES)
def test_without_room_the_nearest_miss_is_the_smallest(name: str) -> None:
    machine = _with_memory(MACHINES[name], 1000)
    found = search(TINY, machine, **_space(name).question)
    assert found.best is None
    assert found.gap_fraction is None
    assert found.ranked == ()
    assert found.nearest_miss is not None
    assert found.nearest_miss[1].peak_bytes <= min(told.peak_bytes for told in _brute_force(name).values())
    assert "Nothing fits" in explain(found, machine)[0]


def test_whoever_does_not_want_to_wait_gets_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _search(MACHINES["slow"], epsilon=0.0)
    asked = []

    def impatient(*args: Any, **settings: Any) -> Forecast:
        asked.append(args)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return forecast(*args, **settings)

    monkeypatch.setattr("meshwright.planner.scoreboard.forecast", impatient)
    found = _search(MACHINES["slow"], epsilon=0.0)
    assert found.is_interrupted
    assert not whole.is_interrupted
    assert found.best is not None
    assert whole.best is not None
    assert found.gap_fraction is not None
    # What the rest of the search would have found lies within what is said.
    best, least = found.best[1].step_seconds, whole.best[1].step_seconds
    assert best * (1 - found.gap_fraction) <= least <= best
    assert found.best[1].fits


def test_a_plan_that_fits_is_found_where_looks_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _search(MACHINES["slow"])
    monkeypatch.setattr("meshwright.planner.best_first.MOST_LOOKS", 0)
    found = _search(MACHINES["slow"])
    assert whole.best is not None
    assert found.best is not None
    assert found.gap_fraction is not None
    best, fastest = found.best.forecast, whole.best.forecast.step_seconds
    assert best.fits
    assert best.step_seconds >= fastest >= best.step_seconds * (1 - found.gap_fraction)


def test_a_search_ends_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, told = MACHINES["slow"], list[str]()
    monkeypatch.setattr("meshwright.planner.best_first.TELL_SECONDS", 0.0)
    whole = search(TINY, machine, batch=BATCH, sequence=SEQUENCE)
    least = search(TINY, machine, batch=BATCH, sequence=SEQUENCE, seconds=0, tell=told.append)
    assert whole.best is not None
    assert least.best is not None
    assert whole.gap_fraction is not None
    assert least.gap_fraction is not None
    assert not least.is_interrupted
    fastest = whole.best.forecast.step_seconds
    assert least.best.forecast.step_seconds >= fastest >= least.best.forecast.step_seconds * (1 - least.gap_fraction)
    assert all(each.is_settled or each.least_seconds is not None for each in least.alternatives)
    assert "none is more than" in told[-1]


def test_a_known_model_on_a_known_node() -> None:
    profile, machine = decoder_profile(preset("llama3-8b"), "llama3-8b"), cluster("8xh100")
    found = search(profile, machine, batch=128, sequence=8192)
    assert found.best is not None
    plan, told = found.best
    assert told.fits
    assert plan.num_ranks == 8
    assert any(t.exactness == "rounded" for t in plan.techniques)
    assert 0.3 < told.mfu < 0.7
    assert len({plan for plan, _ in found.ranked}) == len(found.ranked) == 10
    lines = explain(found, machine)
    assert any("slower" in line for line in lines)


@pytest.mark.parametrize("sequence", [8191, 8190])
def test_no_plan_is_ranked_that_cannot_take_the_sequence(sequence: int) -> None:
    profile, machine = decoder_profile(preset("llama3-70b"), "llama3-70b"), cluster("32xh100")
    found = search(profile, machine, batch=64, sequence=sequence)
    assert found.ranked
    assert all(plan.check_sequence(sequence) == () for plan, _ in found.ranked)
    assert any(f"a sequence of {sequence} cannot be cut" in reason for reason in found.rejected)
    # Hidden behind those that cannot: the plans that only differ in the setting that objects.
    assert all(each.scored is not None for each in found.alternatives if each.technique == "tensor")


def test_too_large_a_model_says_by_how_much() -> None:
    profile, machine = decoder_profile(preset("llama3-70b"), "llama3-70b"), cluster("h100")
    found = search(profile, machine, batch=8, sequence=8192)
    told = json.loads(json.dumps(result_as_json(found), allow_nan=False))
    assert told["best"] is None
    assert told["ranked"] == []
    assert told["nearest_miss"]["forecast"]["fits"] is False
    assert any("too much" in line for line in explain(found, machine))


def test_a_laptop_computes_in_full_precision() -> None:
    found = search(decoder_profile(preset("gpt2-124m"), "gpt2-124m"), cluster("2xlaptop"), batch=8, sequence=256)
    assert found.best is not None
    assert not any(t.rounds for t in found.best[0].techniques)


@pytest.mark.parametrize(
    ("shape", "batch", "sequence", "blocks"),
    [("4xh100", 16, 128, 1), ("7xh100", 14, 64, 4), ("laptop", 16, 128, 4), ("4xh100", 1, 128, 4)],
)
def test_odd_questions_have_an_answer(shape: str, batch: int, sequence: int, blocks: int) -> None:
    """One layer, seven devices, one CPU, one sample."""
    profile = decoder_profile(replace(preset("byte-3m"), num_layers=blocks), "odd")
    found = search(profile, cluster(shape), batch=batch, sequence=sequence)
    assert found.best is not None
    plan, told = found.best
    assert told.fits
    assert plan.num_ranks == cluster(shape).num_devices
    assert plan.batch == batch
    assert not plan.check(profile, cluster(shape))


def test_a_million_tokens_a_sample() -> None:
    profile, machine = decoder_profile(preset("llama3-8b"), "llama3-8b"), cluster("64xh100")
    found = search(profile, machine, batch=8, sequence=1 << 20)
    plan, told = found.best or found.nearest_miss or (None, None)
    assert plan is not None
    assert told is not None
    assert told.fits == (found.best is not None)
    assert plan.sequence_parts > 1
    assert not plan.check_sequence(1 << 20)


def test_a_batch_nobody_can_share_is_explained() -> None:
    machine = cluster("7xh100")
    found = _search(machine, ban=["pipeline"])
    assert found.best is None
    assert found.nearest_miss is None
    assert any("batch" in reason for reason in found.rejected)
    assert "No plan uses all 7 devices" in explain(found, machine)[0]


@pytest.mark.parametrize(("blocks", "stages"), [(32, 2), (126, 16), (126, 64), (5, 5), (32, 7)])
def test_stages_are_balanced(blocks: int, stages: int) -> None:
    profile = decoder_profile(replace(preset("llama3-8b"), num_layers=blocks), "x")
    split = balanced_stages(profile, stages, 8192)
    assert sum(split) == blocks
    assert len(split) == stages
    assert min(split) >= 1
    assert split[-1] <= max(split)
    assert np.ptp(split[:-1]) <= 1


def test_planning_never_imports_torch() -> None:
    program = (
        "import sys; from meshwright.planner.search import search;"
        "from meshwright.machine.named_clusters import cluster;"
        "from meshwright.models.presets import preset; from meshwright.models.cost_decoder import decoder_profile;"
        "found = search(decoder_profile(preset('byte-3m'), 'm'), cluster('2xlaptop'), batch=8, sequence=64);"
        "assert found.best and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_what_fits_in_pieces_when_all_blocks_are_recomputed_is_found() -> None:
    """With less and less memory the smallest plan of the nearest miss fits in the allocator's pieces: so does one that
    search finds, and none is slower than that."""
    profile, machine = decoder_profile(PRESETS["gpt2-xl"], "gpt2-xl"), cluster("4xh100")
    settings: dict[str, Any] = {"batch": 16, "sequence": 1024, "compares": False, "ban": ("pipeline", "tensor")}

    def sized(num_bytes: int) -> Cluster:
        return replace(machine, device=replace(machine.device, memory_bytes=num_bytes))

    miss = search(profile, sized(machine.device.reserved_bytes + (1 << 20)), **settings).nearest_miss
    assert miss is not None
    budget = miss.forecast.peak_bytes
    while not (told := forecast(profile, miss.plan, sized(budget), sequence=1024)).fits:
        budget = int(budget * 1.01)
    best = search(profile, sized(budget), **settings).best
    assert best is not None
    assert best.forecast.fits
    assert best.forecast.step_seconds <= told.step_seconds


def test_a_second_copy_is_taken_where_nodes_are_far_apart_and_there_is_room() -> None:
    """Replicas of nodes need more; whole shards, which need less, are slower."""
    machine = _slow(_with_memory(cluster("2x2xh100"), 700_000))
    machine = replace(machine, inner=replace(machine.inner, bytes_per_second=1e10, latency_seconds=1e-7))
    space = Space(profile=TINY, machine=machine, batch=BATCH, sequence=SEQUENCE, names=("replicate", "shard"))
    told = {plan: forecast(TINY, plan, machine, sequence=SEQUENCE) for plan in space.plans()}
    best = min((plan for plan in told if told[plan].fits), key=lambda plan: told[plan].step_seconds)
    assert [getattr(each, "secondary", 0) for each in best.techniques] == [2]
    found = search(TINY, machine, **space.question, epsilon=0.0)
    assert found.best == (best, told[best])
    assert found.gap_fraction == 0.0
    # Of what a copy costs in time, nothing is between nodes: with a faster network the gathers of backward are as long.
    backward = [_backward_gathers(replace(machine, outer=link)) for link in (machine.outer, machine.inner)]
    assert backward[0] == backward[1] > 0


def _backward_gathers(machine: Cluster) -> float:
    plan = Plan(techniques=(technique_named("shard")(size=4, secondary=2),), batch=BATCH, microbatch=2)
    staged = stage_plan(TINY, plan, machine, sequence=SEQUENCE, optimizer=ADAM)
    hidden = staged.stages[0].cost.hidden
    return float(sum(item.total_seconds for item in hidden if item.task.within))
