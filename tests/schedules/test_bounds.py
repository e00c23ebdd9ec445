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
        return (
            f"{name} has several chunks and no least_held: set Schedule.least_held, one_held holds for every schedule"
        )
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
        assert np.all(timetable.step_bound(times) <= simulated * ROUNDING), (stages, microbatches)


@pytest.mark.parametrize("name", sorted(name for name, each in SCHEDULES.items() if each.chunks > 1))
def test_as_much_is_held_of_every_chunk_as_is_said_at_least(name: str) -> None:
    timetable = Timetable(name, SCHEDULES[name].chunks)
    for (stages, count), stage in itertools.product(SIZES, range(8)):
        if stage < stages:
            least = timetable.least_held(stage, stages, count)
            assert least <= timetable.held(stage, stages, count) * timetable.chunks, (stages, count, stage)
            assert least >= 1
