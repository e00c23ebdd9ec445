"""Any schedule of any size: complete, in order, without deadlock, and holding no more than it says."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.schedules import SCHEDULES, Actions

laws = settings(max_examples=80, deadline=None)
stages = st.integers(1, 7)
microbatches = st.integers(1, 12)
training = st.sampled_from(sorted(set(SCHEDULES) - {"forward"}))


def all_actions(name: str, num_stages: int, count: int) -> list[Actions]:
    return [SCHEDULES[name].actions(stage, num_stages, count) for stage in range(num_stages)]


def kinds(actions: Actions, kind: str) -> list[int]:
    return [action.microbatch for action in actions if action.kind == kind]


def finished(lists: list[Actions]) -> int:
    """Run all stages: sends never wait, a receive waits for its message. How many actions are left when none can go."""
    places = [0] * len(lists)
    taken: Counter[tuple[int, str]] = Counter()
    streams: dict[tuple[int, str], list[int]] = {}  # (stage that receives, way) -> microbatches, as they were sent
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(lists):
            while places[stage] < len(actions):
                action = actions[places[stage]]
                word, _, way = action.kind.partition("_")
                if word == "send":
                    target = stage + (1 if way == "forward" else -1)
                    streams.setdefault((target, way), []).append(action.microbatch)
                elif word == "receive":
                    arrived = streams.get((stage, way), [])
                    if taken[stage, way] == len(arrived):
                        break
                    # Messages carry no name: what comes next must be what is expected next.
                    assert arrived[taken[stage, way]] == action.microbatch
                    taken[stage, way] += 1
                places[stage] += 1
                moved = True
    return sum(len(actions) - place for actions, place in zip(lists, places, strict=True))


@laws
@given(name=training, num_stages=stages, count=microbatches)
def test_every_stage_runs_every_microbatch_forward_then_backward(name: str, num_stages: int, count: int) -> None:
    for actions in all_actions(name, num_stages, count):
        assert sorted(kinds(actions, "forward")) == list(range(count))
        assert sorted(kinds(actions, "backward")) == list(range(count))
        place = {(action.kind, action.microbatch): index for index, action in enumerate(actions)}
        assert len(place) == len(actions)
        for i in range(count):
            assert place["forward", i] < place["backward", i]


@laws
@given(name=st.sampled_from(sorted(SCHEDULES)), num_stages=stages, count=microbatches)
def test_what_a_stage_sends_its_neighbour_receives_in_that_order(name: str, num_stages: int, count: int) -> None:
    lists = all_actions(name, num_stages, count)
    for before, after in pairwise(lists):
        assert kinds(before, "send_forward") == kinds(after, "receive_forward") == list(range(count))
        assert kinds(after, "send_backward") == kinds(before, "receive_backward")
    assert not kinds(lists[0], "receive_forward")
    assert not kinds(lists[-1], "send_forward")
    assert not kinds(lists[0], "send_backward")
    assert not kinds(lists[-1], "receive_backward")


@laws
@given(name=st.sampled_from(sorted(SCHEDULES)), num_stages=stages, count=microbatches)
def test_no_schedule_deadlocks(name: str, num_stages: int, count: int) -> None:
    assert finished(all_actions(name, num_stages, count)) == 0


@laws
@given(name=training, num_stages=stages, count=microbatches)
def test_a_stage_holds_as_many_microbatches_as_it_says(name: str, num_stages: int, count: int) -> None:
    for stage, actions in enumerate(all_actions(name, num_stages, count)):
        held = most = 0
        for action in actions:
            held += {"forward": 1, "backward": -1}.get(action.kind, 0)
            most = max(most, held)
        assert held == 0
        assert most == SCHEDULES[name].in_flight(stage, num_stages, count)


@laws
@given(num_stages=stages, count=microbatches)
def test_evaluation_is_the_forward_half(num_stages: int, count: int) -> None:
    for stage, actions in enumerate(all_actions("forward", num_stages, count)):
        whole = SCHEDULES["gpipe"].actions(stage, num_stages, count)
        assert list(actions) == [action for action in whole if action.kind.endswith("forward")]


def test_the_pictures_of_the_files() -> None:
    def compute(name: str, stage: int) -> str:
        actions = SCHEDULES[name].actions(stage, 3, 4)
        return " ".join(
            f"{action.kind[0].upper()}{action.microbatch}"
            for action in actions
            if action.kind in ("forward", "backward")
        )

    assert [compute("1f1b", stage) for stage in range(3)] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert compute("gpipe", 1) == "F0 F1 F2 F3 B0 B1 B2 B3"


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_the_simulation_here_does_notice_a_deadlock(name: str) -> None:
    first, second = all_actions(name, 2, 2)
    assert finished([first[::-1], second]) > 0
