"""The longest path through a schedule, against closed forms and bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.schedules import SCHEDULES as NAMED
from meshwright.schedules import Timetable
from meshwright.schedules.events import halves, sweep
from meshwright.simulator import makespan as subject
from meshwright.simulator.makespan import lower_bound

SCHEDULES = ("gpipe", "1f1b")
durations = st.floats(0.01, 10.0)


def table_of(schedule: str) -> Timetable:
    return Timetable(schedule, NAMED[schedule].chunks)


def makespan(schedule: str, forward: Any, backward: Any, send: Any, count: int) -> Any:
    """With a third of backward apart where the schedule takes it apart."""
    weight = [each / 3 for each in backward]
    return subject.makespan(table_of(schedule), forward, backward, weight, send, count)


def events_of(schedule: str, num_spans: int, count: int) -> Any:
    return table_of(schedule).events(num_spans // NAMED[schedule].chunks, count)


def swept(schedule: str, forward: list[float], backward: list[float], send: float, count: int) -> float:
    seconds = halves(forward, backward, [each / 3 for each in backward])
    return float(max(sweep(events_of(schedule, len(forward), count), seconds, send)[1]))


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, list[float], list[float], float, int]:
    schedule = draw(st.sampled_from(sorted(NAMED)))
    num_spans = draw(st.integers(1, 6)) * NAMED[schedule].chunks
    forward = draw(st.lists(durations, min_size=num_spans, max_size=num_spans))
    backward = draw(st.lists(durations, min_size=num_spans, max_size=num_spans))
    return schedule, forward, backward, draw(st.floats(0.0, 2.0)), draw(st.integers(1, 12))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 7, 8, 40])
def test_equal_stages_have_the_textbook_time(schedule: str, num_stages: int, num_microbatches: int) -> None:
    seconds = makespan(schedule, [1.0] * num_stages, [2.0] * num_stages, 0.0, num_microbatches)
    assert seconds == pytest.approx((num_microbatches + num_stages - 1) * 3.0)


@pytest.mark.parametrize(("forward", "gradient", "weight"), [(1.0, 1.0, 1.0), (2.0, 2.5, 1.5), (1.0, 1.2, 0.8)])
@pytest.mark.parametrize("num_stages", [2, 4, 8])
def test_idle_time_is_the_closed_form(forward: float, gradient: float, weight: float, num_stages: int) -> None:
    """Of a stage, between its first action and its last (planner notes 5.3): with enough microbatches, equal stages."""
    p, m = num_stages, 3 * num_stages
    both = forward + gradient + weight
    closed = {
        "gpipe": (p - 1) * both,
        "1f1b": (p - 1) * both,
        "interleaved": (p - 1) * both,  # of a chunk, half as long as the stage
        "zero_bubble_h1": (p - 1) * (forward + gradient - weight),
        "zero_bubble_h2": (p - 1) * (forward + gradient - 2 * weight),
    }
    for schedule, idle in closed.items():
        chunks = NAMED[schedule].chunks
        spans = p * chunks
        seconds = halves([forward] * spans, [gradient + weight] * spans, [weight] * spans)
        events = events_of(schedule, spans, m)
        ends, finished = sweep(events, seconds, 0.0)
        starts: dict[int, float] = {}
        for event, end in zip(events, ends, strict=True):
            starts.setdefault(event.stage, end - seconds[event.kind][event.span])
        longest = max(end - starts[stage] for stage, end in enumerate(finished))
        if schedule == "zero_bubble_h2" and idle < 1e-9:
            idle = 0.0
        assert longest - m * chunks * both == pytest.approx(idle, abs=1e-9), schedule


def test_latency_costs_every_microbatch_of_1f1b() -> None:
    # planner notes 5.2: p = 8, f = 1, b = 2, c = 0.1, m = 32 takes 123.8, not (m + p - 1) 3 + 2 (p - 1) c = 118.4
    assert makespan("1f1b", [1.0] * 8, [2.0] * 8, 0.1, 32) == pytest.approx(123.8, abs=0.05)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("send", [0.0, 0.1])
@pytest.mark.parametrize("num_microbatches", [600, 1003])
def test_extending_the_steady_state_is_exact_for_equal_stages(
    schedule: str, send: float, num_microbatches: int
) -> None:
    forward, backward = [1.0] * 4, [2.0] * 4
    whole = swept(schedule, forward, backward, send, num_microbatches)
    assert makespan(schedule, forward, backward, send, num_microbatches) == pytest.approx(whole)


@settings(max_examples=30, deadline=None)
@given(st.lists(durations, min_size=3, max_size=3), st.lists(durations, min_size=3, max_size=3), st.floats(0, 1))
def test_extending_is_close_for_any_stages(forward: list[float], backward: list[float], send: float) -> None:
    whole = swept("1f1b", forward, backward, send, 1000)
    assert makespan("1f1b", forward, backward, send, 1000) == pytest.approx(whole, rel=2e-3)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_every_event_runs_once_and_the_bounds_hold(case: tuple[str, list[float], list[float], float, int]) -> None:
    schedule, forward, backward, send, count = case
    events = events_of(schedule, len(forward), count)
    assert len({event[:4] for event in events}) == len(events)
    assert sum(event.kind == "forward" for event in events) == len(forward) * count
    seconds = makespan(schedule, forward, backward, send, count)
    weight = [each / 3 for each in backward]
    assert seconds >= lower_bound(table_of(schedule), forward, backward, weight, send, count) * (1 - 1e-12)
    everything = sum(forward) + sum(backward) + 2 * (len(forward) - 1) * send
    assert seconds <= everything * count * (1 + 1e-12)


def test_the_published_upper_bound_of_1f1b_is_none() -> None:
    """(m - 1) turns of the slowest cycle plus one way through: hypothesis found the case where 1f1b takes longer.

    Stage 1 is busy with a long backward when stage 0, slow going forward, would feed it: no neighbouring cycle is
    slow on average, yet both waits add up.
    """
    forward, backward, count = [3.0, 1.0, 1.0], [0.25, 2.0, 0.25], 3
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    turns = [sum(both[s : e + 1]) / (e - s + 1) for s in range(3) for e in range(s, 3)]
    published = sum(both) + (count - 1) * max(turns)
    assert published == 14.0
    assert makespan("1f1b", forward, backward, 0.0, count) == 14.25


@settings(max_examples=80, deadline=None)
@given(cases(), st.integers(0, 5), st.booleans(), st.floats(0.0, 3.0))
def test_longer_work_never_ends_earlier(
    case: tuple[str, list[float], list[float], float, int], stage: int, is_backward: bool, more: float
) -> None:
    schedule, forward, backward, send, count = case
    before = makespan(schedule, forward, backward, send, count)
    changed = [list(forward), list(backward)]
    changed[is_backward][stage % len(forward)] += more
    assert makespan(schedule, changed[0], changed[1], send, count) >= before
    assert makespan(schedule, forward, backward, send + more, count) >= before


def test_many_candidates_at_once_are_the_same_as_one_by_one() -> None:
    random = np.random.default_rng(0)
    forward, backward = random.uniform(0.1, 2, (2, 4, 50))
    send = random.uniform(0, 0.3, 50)
    together = makespan("1f1b", list(forward), list(backward), send, 700)
    for k in range(0, 50, 5):
        alone = makespan("1f1b", forward[:, k].tolist(), backward[:, k].tolist(), float(send[k]), 700)
        assert together[k] == pytest.approx(alone)
