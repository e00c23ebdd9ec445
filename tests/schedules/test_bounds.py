"""Every schedule brings bounds of its own, and no simulated step beats them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from meshwright.schedules import SCHEDULES, PipelineTimes, Schedule, Timetable
from meshwright.schedules.orders import gpipe, held_all
from meshwright.simulator.makespan import makespan

DRAWN = 200
ROUNDING = 1 + 1e-9
SIZES = [(2, 1), (2, 2), (2, 5), (3, 2), (3, 7), (4, 3), (4, 4), (4, 16), (5, 3), (6, 6), (8, 4), (8, 20)]
"""Stages and microbatches."""


def missing(name: str, schedule: Schedule) -> str:
    """What a schedule does not bring, for whoever adds one."""
    if not callable(schedule.bound):
        return f"{name} brings no bound: set Schedule.bound, flush_bound holds for every schedule with a flush"
    if schedule.chunks > 1 and schedule.least_held is None:
        return f"{name} has several chunks and no least_held: set it, one_of_each holds for every schedule"
    return ""


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_schedule_brings_its_bounds(name: str) -> None:
    assert missing(name, SCHEDULES[name]) == ""


def test_a_schedule_without_a_bound_is_refused() -> None:
    assert "no bound" in missing("new", Schedule(gpipe, held_all, bound=None))  # type: ignore[arg-type]
    assert "least_held" in missing("new", SCHEDULES["looped_bfs"]._replace(least_held=None))
    with pytest.raises(TypeError, match="bound"):
        Schedule(gpipe, held_all)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_no_split_is_faster_than_the_bound_of_all_splits(name: str) -> None:
    """From sums over all stages and the slowest one's pace alone."""
    draw = np.random.default_rng(1)
    timetable = Timetable(name, chunks := SCHEDULES[name].chunks)
    for stages, microbatches in SIZES:
        shape = (stages * chunks, DRAWN)
        scale = draw.uniform(0.2, 2, size=shape) * draw.choice([1.0, 1.0, 5.0], size=shape)
        share = draw.uniform(0.1, 0.9, size=shape)
        forward, backward = list(scale * share), list(scale * (1 - share))
        weight = list(np.array(backward) * draw.uniform(0, 0.9, size=shape))
        send = draw.choice([0.0, 0.05, 0.5], size=DRAWN)
        simulated = makespan(timetable, forward, backward, weight, send, microbatches)
        places = timetable.places(stages)
        busy = [np.zeros(DRAWN) for _ in range(stages)]
        for span, (f, b) in enumerate(zip(forward, backward, strict=True)):
            busy[places.stage(span)] = busy[places.stage(span)] + f + b
        apart = weight if timetable.splits_backward else [0.0 * each for each in weight]
        each = [(f / (f + b), (f + b - a) / (f + b)) for f, b, a in zip(forward, backward, apart, strict=True)]
        own, way = (np.array(values) for values in zip(*each, strict=True))
        times = PipelineTimes(
            microbatches=np.full(DRAWN, microbatches),
            stages=np.full(DRAWN, stages),
            through=sum(busy),
            pace=np.max(busy, axis=0),
            send=send,
            larger=np.maximum(own, 1 - own).min(axis=0),
            least_forward=own.min(axis=0),
            most_forward=own.max(axis=0),
            least_way=way.min(axis=0),
            later=sum(apart),
        )
        if chunks > 1:
            back = np.array(backward) - np.array(weight) * timetable.splits_backward
            times = times._replace(chunk_forward=np.min(forward, axis=0), chunk_backward=back.min(axis=0))
        assert np.all(timetable.step_bound(times) <= simulated * ROUNDING), (stages, microbatches)


@pytest.mark.parametrize("name", sorted(name for name, each in SCHEDULES.items() if each.chunks > 1))
def test_as_much_is_held_of_every_chunk_as_is_said_at_least(name: str) -> None:
    """At one moment, of every chunk; of the last one least."""
    for chunks in (2, 3, 4) if SCHEDULES[name].any_chunks else (2,):
        timetable = Timetable(name, chunks)
        for stages, count in itertools.product(range(2, 9), (1, 2, 3, 5, 8, 9, 12, 16, 24)):
            if name == "interleaved" and count % stages:
                continue
            for stage, actions in enumerate(timetable.orders(stages, count)):
                least = timetable.least_held(stage, stages, count)
                assert min(least) == least[-1] >= 1
                last = "backward_weight" if any(each.kind == "backward_weight" for each in actions) else "backward"
                held, moments = [0] * chunks, []
                for action in actions:
                    held[action.chunk] += (action.kind == "forward") - (action.kind in (last, "backward"))
                    moments.append(tuple(held))
                reached = [all(map(int.__ge__, held, map(int, least))) for held in moments]
                assert any(reached), (chunks, stages, count, stage)


def test_a_v_is_no_faster_than_its_circle_of_backward_passes() -> None:
    draw, timetable = np.random.default_rng(4), Timetable("zbv", 2)
    for stages, times in itertools.product((2, 3, 4, 5, 6, 8, 11), (1, 2, 3, 5)):
        shape, count = (2 * stages, DRAWN), stages * times + draw.integers(0, 3)
        forward, backward, weight = draw.uniform(0.05, 3, shape), draw.uniform(0.1, 3, shape), draw.uniform(0, 2, shape)
        for each in (forward, backward, weight):
            each[:, : DRAWN // 2] = each[0, : DRAWN // 2]  # spans that are alike
        weight *= draw.choice([0.0, 1.0], DRAWN)
        send = draw.choice([0.0, 0.05, 0.5, 2.0], DRAWN)
        simulated = makespan(timetable, list(forward), list(backward + weight), list(weight), send, count)
        busy = (forward + backward + weight).reshape(2, stages, DRAWN)
        pace = (busy[0] + busy[1][::-1]).max(axis=0)
        times_of = PipelineTimes(count, stages, busy.sum(axis=(0, 1)), pace, send, *[0.0] * 4, weight.sum(axis=0))
        bound = timetable.step_bound(
            times_of._replace(chunk_forward=forward.min(axis=0), chunk_backward=backward.min(axis=0))
        )
        assert np.all(bound <= simulated * ROUNDING), (stages, count)
        is_close = (bound / simulated)[: DRAWN // 2].max() > 0.9
        assert is_close or stages < 4 or times < 3


@pytest.mark.parametrize(("stages", "count"), [(2, 1), (2, 7), (3, 2), (3, 9), (4, 4), (4, 16), (8, 8), (8, 21)])
def test_what_the_search_does_not_try_goes_as_what_it_tries(stages: int, count: int) -> None:
    """Greedy at its default times, and a V where another one has the same order."""
    assert Timetable("greedy").orders(stages, count) == Timetable("zero_bubble_h1").orders(stages, count)
    for name, schedule in SCHEDULES.items():
        other = Timetable(schedule.twin[0], schedule.chunks) if schedule.twin is not None else Timetable(name)
        timetable = Timetable(name, schedule.chunks)
        if timetable.goes_as({other.name}, stages, count):
            assert timetable.orders(stages, count) == other.orders(stages, count)
            assert timetable.held(0, stages, count) >= other.held(0, stages, count)
            assert not timetable.goes_as({"1f1b"}, stages, count)
    assert Timetable("dualpipe_v", 2).goes_as({"zbv"}, stages, count) == (count < 2 * stages)
