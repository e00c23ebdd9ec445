"""Steps without a flush between them: the same work in the same order, and weights that are there when promised."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.schedules import Action, Timetable
from meshwright.schedules.actions import COMPUTES
from meshwright.schedules.events import halves, sweep
from meshwright.schedules.orders import stream
from meshwright.simulator.makespan import lower_bound, makespan

ASYNC = Timetable("async")
laws = settings(max_examples=80, deadline=None)


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int]:
    """(stages, microbatches)."""
    num_stages = draw(st.integers(2, 6))
    return num_stages, draw(st.integers(num_stages, 12))


def unrolled(stage: int, num_stages: int, count: int, groups: list[int]) -> list[tuple[str, int, int]]:
    """(kind, batch, microbatch) of runs of so many batches each, with a flush after each run; transfers too."""
    found, batch = [], -1
    for group in groups:
        for call in ["first", *["next"] * (group - 1), "flush"]:
            batch += call != "flush"
            actions = ASYNC.actions(stage, num_stages, count, call)  # type: ignore[arg-type]
            shift = 1 if call == "flush" else 0  # numbers of a flush are below 0, after the batch's own call
            for action in actions:
                i, of = action.microbatch, batch + shift
                found.append((action.kind, of - (i < 0), i % count))
    return found


@laws
@given(sizes())
def test_one_step_and_a_flush_is_1f1b(size: tuple[int, int]) -> None:
    num_stages, count = size
    wanted = Timetable("1f1b").orders(num_stages, count)
    for stage in range(num_stages):
        mine = [*stream(stage, num_stages, count, "first")]
        mine += [Action(a.kind, a.microbatch + count) for a in stream(stage, num_stages, count, "flush")]
        assert [action for action in mine if action.kind in COMPUTES] == list(wanted[stage])
        assert [action for action in mine if action.kind == "update"] == [Action("update", count - 1)]
    assert ASYNC.orders(num_stages, count) == wanted


@laws
@given(sizes(), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_every_microbatch_of_every_batch_goes_both_ways_before_its_update(
    size: tuple[int, int], groups: list[int]
) -> None:
    num_stages, count = size
    for stage in range(num_stages):
        actions = unrolled(stage, num_stages, count, groups)
        place = {action: at for at, action in enumerate(actions)}
        assert len(place) == len(actions)
        for batch in range(sum(groups)):
            ends = [place["backward", batch, i] for i in range(count)]
            assert ends == sorted(ends)
            assert all(place["forward", batch, i] < end for i, end in enumerate(ends))
            assert place["update", batch, count - 1] > ends[-1]


@laws
@given(sizes(), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_two_versions_are_enough(size: tuple[int, int], groups: list[int]) -> None:
    """What a microbatch is promised is the newest version or the one before it, on every stage, forward and back."""
    num_stages, count = size
    flushes = [sum(groups[:at]) for at in range(len(groups))]
    for stage in range(num_stages):
        newest = 0
        for kind, batch, _ in unrolled(stage, num_stages, count, groups):
            if kind == "update":
                assert newest == batch
                newest += 1
            elif kind in COMPUTES:
                promised = max(batch - 1, max(f for f in flushes if f <= batch))
                assert promised in (newest, newest - 1)


@laws
@given(sizes(), st.lists(st.integers(1, 3), min_size=1, max_size=2))
def test_messages_come_in_the_order_they_are_taken_and_nobody_waits_for_ever(
    size: tuple[int, int], groups: list[int]
) -> None:
    num_stages, count = size
    lists = [unrolled(stage, num_stages, count, groups) for stage in range(num_stages)]
    at, moved = [0] * num_stages, True
    wires: dict[tuple[int, str], list[tuple[int, int]]] = {}
    while moved:
        moved = False
        for stage, actions in enumerate(lists):
            while at[stage] < len(actions):
                kind, *key = actions[at[stage]]
                word, _, way = kind.partition("_")
                if word == "send":
                    target = stage + (1 if way == "forward" else -1)
                    wires.setdefault((target, way), []).append(tuple(key))
                elif word == "receive":
                    waiting = wires.get((stage, way), [])
                    if not waiting:
                        break
                    assert waiting.pop(0) == tuple(key)
                at[stage] += 1
                moved = True
    assert at == [len(actions) for actions in lists]
    assert not any(wires.values())


@laws
@given(sizes(), st.lists(st.floats(0.1, 2.0), min_size=12, max_size=12), st.floats(0.0, 0.5))
def test_a_step_takes_the_pace_of_a_long_one_and_has_no_bubble(
    size: tuple[int, int], seconds: list[float], send: float
) -> None:
    num_stages, count = size
    forward, backward, none = seconds[:num_stages], seconds[6 : 6 + num_stages], [0.0] * num_stages
    took = float(makespan(ASYNC, forward, backward, none, send, count))
    assert took >= float(lower_bound(ASYNC, forward, backward, none, send, count))
    assert took <= float(makespan(Timetable("1f1b"), forward, backward, none, send, count)) + 1e-9
    # Long enough to settle; the pace is taken over a number of microbatches that every number of stages divides.
    many = [sweep(ASYNC.events(num_stages, n), halves(forward, backward, none), send)[1] for n in (600, 1200)]
    assert took == pytest.approx(count * (max(many[1]) - max(many[0])) / 600, rel=1e-9)
    if not send:
        assert took == pytest.approx(count * max(f + b for f, b in zip(forward, backward, strict=True)), rel=1e-12)
