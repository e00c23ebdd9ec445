"""Laws a search must obey, whatever the model and the machine."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_spaces import Draw, Space

from meshwright.core.cluster import Cluster, Device, Link
from meshwright.core.technique import EXACTNESS
from meshwright.machine.named_clusters import cluster
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.presets import PRESETS
from meshwright.planner.search import SearchResult, search
from meshwright.report.answer_json import result_as_json
from meshwright.simulator.forecast import forecast

FEW = settings(max_examples=6)
QUESTIONS = Draw(
    shapes=("2xh100", "4xh100", "2x2xh100", "3xh100"),
    names=("recompute",),
    num_axes=(2,),
    schedules=("1f1b", "zero_bubble_h1"),
    blocks=(2, 3, 4),
    fewest=8,
    most=400,
)
seeds = st.integers(0, 10_000)
shares = st.floats(0.0, 1.0)
factors = st.floats(1.0, 30.0)


def _found(space: Space, **changes: Any) -> SearchResult:
    question = {"epsilon": 0.0, "top": 1, **space.question, **changes}
    return search(space.profile, space.machine, **question)


def _seconds(found: SearchResult) -> float:
    return float("inf") if found.best is None else found.best[1].step_seconds


def _tight(seed: int, share: float) -> Space:
    """A question whose memory lies between what one of its plans needs least and what is fastest needs."""
    space, _ = QUESTIONS.space(seed)
    free = _found(space)
    least = _found(space.with_memory(1)).nearest_miss
    assert free.best is not None
    assert least is not None
    low, high = least[1].peak_bytes, free.best[1].peak_bytes
    return space.with_memory(round(min(low, high) + share * abs(high - low)))


def _on(space: Space, machine: Cluster) -> Space:
    return replace(space, machine=machine)


def _faster(link: Link, factor: float) -> Link:
    return replace(link, bytes_per_second=factor * link.bytes_per_second, latency_seconds=link.latency_seconds / factor)


def _quicker(device: Device, factor: float) -> Device:
    rates = {dtype: factor * rate for dtype, rate in device.flops_per_second.items()}
    return replace(
        device,
        flops_per_second=rates,
        memory_bytes_per_second=factor * device.memory_bytes_per_second,
        launch_seconds=device.launch_seconds / factor,
        kernel_seconds=device.kernel_seconds / factor,
    )


@given(seeds, shares, factors)
@FEW
def test_more_of_anything_never_gives_a_slower_plan(seed: int, share: float, factor: float) -> None:
    space = _tight(seed, share)
    machine = space.machine
    limit = _seconds(_found(space)) * (1 + 1e-9)
    rates = {dtype: factor * rate for dtype, rate in machine.device.flops_per_second.items()}
    better = {
        "memory": space.with_memory(round(machine.device.memory_bytes * factor)),
        "inner": _on(space, replace(machine, inner=_faster(machine.inner, factor))),
        "outer": _on(space, replace(machine, outer=_faster(machine.outer, factor))),
        "flops": _on(space, replace(machine, device=replace(machine.device, flops_per_second=rates))),
    }
    slower = {name: _seconds(_found(other)) for name, other in better.items()}
    assert {name for name, seconds in slower.items() if seconds > limit} == set()


@given(seeds, shares, st.data())
@FEW
def test_fewer_bans_never_give_a_slower_plan(seed: int, share: float, data: st.DataObject) -> None:
    space = _tight(seed, share)
    limit = _seconds(_found(space)) * (1 + 1e-9)
    bans = space.question["ban"]
    lifted = data.draw(st.sets(st.sampled_from(bans), min_size=1, max_size=3))
    assert _seconds(_found(space, ban=[ban for ban in bans if ban not in lifted])) <= limit
    assert _seconds(_found(space, microbatch=None)) <= limit


@pytest.mark.parametrize("shape", ["h100", "2xh100", "4xlaptop"])
def test_the_more_is_allowed_the_faster_is_the_plan(shape: str) -> None:
    profile = decoder_profile(PRESETS["byte-3m"], "byte-3m")
    machine = cluster(shape)
    seconds = [
        _seconds(search(profile, machine, batch=16, sequence=128, allow=allow, epsilon=0.0)) for allow in EXACTNESS
    ]
    assert seconds == sorted(seconds, reverse=True)


@given(seeds, shares, factors)
@FEW
def test_a_machine_that_does_all_faster_takes_as_much_less_time(seed: int, share: float, factor: float) -> None:
    space = _tight(seed, share)
    machine = space.machine
    fast = replace(
        machine,
        device=_quicker(machine.device, factor),
        inner=_faster(machine.inner, factor),
        outer=_faster(machine.outer, factor),
    )
    assert _seconds(_found(_on(space, fast))) * factor == pytest.approx(_seconds(_found(space)), rel=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_it_does_not_matter_which_of_equal_devices_is_which(seed: int) -> None:
    """In one node any order of the axes is a renumbering of its devices; and so is any order of one device a node."""
    for shape, unused, factor in (("4xh100", "outer", 0.01), ("4x1xh100", "inner", 100.0)):
        space, _ = replace(QUESTIONS, shapes=(shape,), axes=("replicate", "shard", "pipeline")).space(seed)
        found = _found(space)
        assert found.best is not None
        plan, told = found.best
        for order in itertools.permutations(plan.axis_order):
            other = replace(plan, axis_order=order)
            assert forecast(space.profile, other, space.machine, sequence=space.sequence) == told
        # Nor does a link that joins nobody, however slow or fast.
        link = {unused: _faster(getattr(space.machine, unused), factor)}
        assert _told(_found(_on(space, replace(space.machine, name="renamed", **link)))) == _told(found)


@given(seeds, shares)
@FEW
def test_the_same_question_has_the_same_answer_to_the_byte(seed: int, share: float) -> None:
    space = _tight(seed, share)
    assert _told(_found(space, top=10)) == _told(_found(space, top=10))


def _told(found: SearchResult) -> str:
    return json.dumps({**result_as_json(found), "search_seconds": 0})
