"""Any schedule of any size: complete, in order, without deadlock, and holding no more than it says.

Tests of `schedules/actions.py`, `schedules/events.py`, `schedules/greedy.py`, `schedules/orders.py`.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.schedules import SCHEDULES, Actions, Timetable
from meshwright.schedules.actions import as_step
from meshwright.schedules.events import BACKWARDS, peak_held, with_transfers
from meshwright.schedules.greedy import span_seconds

laws = settings(max_examples=80, deadline=None)
stages = st.integers(1, 6)
microbatches = st.integers(1, 12)


@st.composite
def timetables(draw: st.DrawFn) -> Timetable:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    if SCHEDULES[name].takes_times:
        times = tuple(draw(st.lists(st.sampled_from((0.5, 1.0, 2.0)), min_size=3, max_size=3)))
        return Timetable(name, times=times, most_held=draw(st.integers(1, 6)))
    chunks = SCHEDULES[name].chunks
    return Timetable(name, draw(st.integers(2, 3)) if name in ("interleaved", "looped_bfs") else chunks)


def all_actions(table: Timetable, num_stages: int, count: int) -> list[Actions]:
    """Of one step; where steps overlap, with a flush after it (`test_async_schedule` looks at the others)."""
    if not table.overlaps_steps:
        return [table.actions(stage, num_stages, count) for stage in range(num_stages)]
    orders, places = table.orders(num_stages, count), table.places(num_stages)
    return [with_transfers(as_step(order, count), stage, places) for stage, order in enumerate(orders)]


def finished(table: Timetable, lists: list[Actions]) -> int:
    """Run all stages: sends never wait, a receive waits for its message. How many actions are left when none can go."""
    places = table.places(len(lists))
    at = [0] * len(lists)
    taken: Counter[tuple[int, str]] = Counter()
    streams: dict[tuple[int, str], list[int]] = {}  # (span that receives, way) -> microbatches, as they were sent
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(lists):
            while at[stage] < len(actions):
                action = actions[at[stage]]
                word, _, way = action.kind.partition("_")
                span = places.span(stage, action.chunk)
                if word == "send":
                    target = span + (1 if way == "forward" else -1)
                    streams.setdefault((target, way), []).append(action.microbatch)
                elif word == "receive":
                    arrived = streams.get((span, way), [])
                    if taken[span, way] == len(arrived):
                        break
                    # Messages carry no name: what comes next must be what is expected next.
                    assert arrived[taken[span, way]] == action.microbatch
                    taken[span, way] += 1
                at[stage] += 1
                moved = True
    assert all(taken[key] == len(sent) for key, sent in streams.items()) or not all(at)
    return sum(len(actions) - place for actions, place in zip(lists, at, strict=True))


@laws
@given(table=timetables(), num_stages=stages, count=microbatches)
def test_every_chunk_runs_every_microbatch_forward_then_backward(table: Timetable, num_stages: int, count: int) -> None:
    for actions in all_actions(table, num_stages, count):
        place = {(action.kind, action.chunk, action.microbatch): at for at, action in enumerate(actions)}
        assert len(place) == len(actions)
        for chunk in range(table.chunks):
            for i in range(count):
                backward = [place[kind, chunk, i] for kind in BACKWARDS if (kind, chunk, i) in place]
                assert len(backward) == 1
                assert place["forward", chunk, i] < backward[0]
                is_split = ("backward_input", chunk, i) in place
                assert is_split == (("backward_weight", chunk, i) in place)
                assert not is_split or backward[0] < place["backward_weight", chunk, i]
                assert not is_split or table.splits_backward


@laws
@given(table=timetables(), num_stages=stages, count=microbatches)
def test_no_schedule_deadlocks_and_messages_come_in_the_order_they_were_sent(
    table: Timetable, num_stages: int, count: int
) -> None:
    assert finished(table, all_actions(table, num_stages, count)) == 0
    forward = [table.forward_actions(stage, num_stages, count) for stage in range(num_stages)]
    assert finished(table, forward) == 0
    for actions in forward:
        assert {action.kind for action in actions} <= {"forward", "send_forward", "receive_forward"}
        assert sum(action.kind == "forward" for action in actions) == count * table.chunks


@laws
@given(table=timetables(), num_stages=stages, count=microbatches)
def test_a_stage_holds_as_many_microbatches_as_it_says(table: Timetable, num_stages: int, count: int) -> None:
    for stage, actions in enumerate(all_actions(table, num_stages, count)):
        most = peak_held(actions, [1.0 / table.chunks] * table.chunks)
        promised = table.held(stage, num_stages, count)
        if table.name in ("gpipe", "1f1b", "looped_bfs", "zero_bubble_h1"):
            assert most == pytest.approx(promised)
        elif table.name != "interleaved" or count % num_stages == 0:
            assert most <= promised + 1e-9


def letters(name: str, stage: int, count: int = 4) -> str:
    short = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}
    actions = Timetable(name).orders(3, count)[stage]
    return " ".join(f"{short[action.kind]}{action.microbatch}" for action in actions)


def test_the_pictures_of_the_files() -> None:
    assert [letters("1f1b", stage) for stage in range(3)] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert letters("gpipe", 1) == "F0 F1 F2 F3 B0 B1 B2 B3"
    assert [letters("zero_bubble_h1", stage) for stage in range(3)] == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


def test_an_interleaved_last_group_may_be_small() -> None:
    """Whole groups need no longer way in than the textbook's; five microbatches on four stages of three chunks do."""
    table = Timetable("interleaved", 3)
    whole, odd = (table.orders(4, count)[0] for count in (8, 5))
    way_in = [next(at for at, a in enumerate(order) if a.kind == "backward") for order in (whole, odd)]
    assert way_in[0] == 2 * 3 + 2 * 4 + 1
    assert way_in[1] > way_in[0] or way_in[1] == 15
    assert finished(table, all_actions(table, 4, 5)) == 0


@settings(max_examples=60, deadline=None)
@given(
    num_stages=st.integers(2, 5),
    count=st.integers(1, 12),
    times=st.lists(st.floats(0.2, 3.0), min_size=3, max_size=3),
    most_held=st.integers(1, 12),
)
def test_greedy_is_never_slower_than_the_named_ones_that_fit(
    num_stages: int, count: int, times: list[float], most_held: int
) -> None:
    table = Timetable("greedy", times=tuple(times), most_held=most_held)
    places, by_span = table.places(num_stages), table.by_span(num_stages)
    orders = table.orders(num_stages, count)
    assert max(peak_held(actions, [1.0]) for actions in orders) <= most_held
    seconds = span_seconds(orders, places, by_span)
    compared = 0
    for schedule in SCHEDULES.values():
        if schedule.chunks == 1 and not schedule.takes_times:
            other = schedule.orders(places, count)
            if max(peak_held(actions, [1.0]) for actions in other) <= most_held:
                compared += 1
                assert seconds <= span_seconds(other, places, by_span) * (1 + 1e-12)
    assert compared or most_held < num_stages


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zbv"])
def test_the_simulation_here_does_notice_a_deadlock(name: str) -> None:
    table = Timetable(name, SCHEDULES[name].chunks)
    first, second = all_actions(table, 2, 2)
    assert finished(table, [first[::-1], second]) > 0
