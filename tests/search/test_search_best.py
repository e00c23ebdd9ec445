"""The search against brute force, and laws it must obey."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from meshwright.core.cluster import Cluster
from meshwright.core.plan import Plan
from meshwright.core.technique import Axis, Choice, PerLayer, technique_named, technique_names
from meshwright.models.config import PRESETS, preset
from meshwright.models.cost import decoder_profile
from meshwright.probe.names import cluster
from meshwright.search.explain import explain
from meshwright.search.search import Found, found_as_json, search
from meshwright.search.split import balanced_stages
from meshwright.simulate.forecast import Forecast, forecast

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


def _every_plan(machine: Cluster) -> list[Plan]:
    """All plans there are, one at a time, from the options alone. Two blocks: counts 0, 1, 2 are all counts."""
    ways: list[list[object]] = []
    for name in technique_names():
        kind = technique_named(name)
        options = kind.options(TINY, machine)
        if kind.exactness != "exact" or name == "compile" or not options:
            continue
        fields = []
        for option in options:
            values = getattr(option, "sizes", None) or getattr(option, "values", None)
            if isinstance(option, PerLayer):
                fields.append([(option.fields[0], count) for count in range(1, TINY.num_blocks + 1)])
                continue
            assert isinstance(option, Axis | Choice)
            fields.append([(option.field, value) for value in values])
        ways.append([None, *(kind(**dict(chosen)) for chosen in itertools.product(*fields))])
    plans = []
    for chosen in itertools.product(*ways):
        base = Plan(techniques=tuple(t for t in chosen if t is not None), batch=BATCH)  # type: ignore[misc]
        if base.num_ranks != machine.num_devices:
            continue
        largest = max(base.blocks_of_stages(TINY))
        if any(getattr(t, "layers", 0) > largest for t in base.techniques):
            continue  # the same as recomputing all of a stage
        for microbatch in range(1, BATCH + 1):
            plan = replace(base, microbatch=microbatch)
            if not plan.check(TINY, machine):
                plans.append(plan)
    return plans


@cache
def _brute_force(name: str) -> dict[Plan, Forecast]:
    machine = MACHINES[name]
    return {plan: forecast(TINY, plan, machine, sequence=SEQUENCE) for plan in _every_plan(machine)}


def _search(machine: Cluster, **wishes: object) -> Found:
    return search(TINY, machine, batch=BATCH, sequence=SEQUENCE, allow="exact", **wishes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MACHINES)
def test_search_finds_what_brute_force_finds(name: str) -> None:
    every = _brute_force(name)
    fitting = sorted(told.step_seconds for told in every.values() if told.fits)
    assert 0 < len(fitting) < len(every), "the memory limit must matter"
    found = _search(MACHINES[name], ban=["compile"])
    assert found.evaluated == len(every)
    assert found.gap_fraction == 0.0
    assert [told.step_seconds for _, told in found.ranked] == pytest.approx(fitting[: len(found.ranked)], rel=1e-9)
    assert found.rejected["does not fit in memory"] == len(every) - len(fitting)
    for plan, told in found.ranked:
        assert every[plan] == told


@pytest.mark.parametrize("name", MACHINES)
def test_without_room_the_nearest_miss_is_the_smallest(name: str) -> None:
    machine = _with_memory(MACHINES[name], 1000)
    found = _search(machine, ban=["compile"])
    assert found.best is None
    assert found.ranked == ()
    assert found.nearest_miss is not None
    assert found.nearest_miss[1].peak_bytes == min(told.peak_bytes for told in _brute_force(name).values())
    assert "Nothing fits" in explain(found, machine)[0]


def test_more_of_anything_never_gives_a_slower_plan() -> None:
    machine = MACHINES["slow"]
    best = _search(machine).best
    assert best is not None
    better = [_with_memory(machine, factor * machine.device.memory_bytes) for factor in (2, 100)]
    for factor in (1.5, 10.0):
        better += [
            replace(machine, **{link: replace(getattr(machine, link), bytes_per_second=factor * 1e8)})  # type: ignore[arg-type]
            for link in ("inner", "outer")
        ]
        flops = {dtype: factor * rate for dtype, rate in machine.device.flops_per_second.items()}
        better.append(replace(machine, device=replace(machine.device, flops_per_second=flops)))
    for other in better:
        faster = _search(other).best
        assert faster is not None
        assert faster[1].step_seconds <= best[1].step_seconds * (1 + 1e-9)


def test_the_same_question_has_the_same_answer() -> None:
    first, second = (_search(MACHINES["node"]) for _ in range(2))
    assert first.ranked == second.ranked
    assert first.rejected == second.rejected


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
    assert found.search_seconds < 5.0  # 0.5 on a quiet core; the machine may be busy
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
    assert all(each.found is not None for each in found.alternatives if each.technique == "tensor")


def test_too_large_a_model_says_by_how_much() -> None:
    profile, machine = decoder_profile(preset("llama3-70b"), "llama3-70b"), cluster("h100")
    found = search(profile, machine, batch=8, sequence=8192)
    told = json.loads(json.dumps(found_as_json(found), allow_nan=False))
    assert told["best"] is None
    assert told["ranked"] == []
    assert told["nearest_miss"]["forecast"]["fits"] is False
    assert any("too much" in line for line in explain(found, machine))


def test_a_laptop_computes_in_full_precision() -> None:
    found = search(decoder_profile(preset("gpt2-124m"), "gpt2-124m"), cluster("2xlaptop"), batch=8, sequence=256)
    assert found.best is not None
    assert all(t.exactness == "exact" for t in found.best[0].techniques)


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
        "import sys; from meshwright.search.search import search; from meshwright.probe.names import cluster;"
        "from meshwright.models.config import preset; from meshwright.models.cost import decoder_profile;"
        "found = search(decoder_profile(preset('byte-3m'), 'm'), cluster('2xlaptop'), batch=8, sequence=64);"
        "assert found.best and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
