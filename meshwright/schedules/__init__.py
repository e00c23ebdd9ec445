"""Pure generators of who does what when, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np

from meshwright.schedules import asynchronous, gpipe, one_f_one_b, zero_bubble
from meshwright.schedules import v_shaped as vee
from meshwright.schedules.actions import Action, Actions
from meshwright.schedules.asynchronous import Call
from meshwright.schedules.bounds import (
    PipelineTimes,
    first_wait_bound,
    flush_bound,
    one_f_one_b_bound,
    one_held,
    pace_bound,
)
from meshwright.schedules.chunk_placement import BlockSpan, Places
from meshwright.schedules.events import ScheduleEvent, in_order, with_transfers
from meshwright.schedules.greedy import Times, best_of

__all__ = ["GREEDY", "SCHEDULES", "Action", "Actions", "BlockSpan", "PipelineTimes", "Places", "Schedule", "Timetable"]


class Schedule(NamedTuple):
    orders: Callable[[Places, int], tuple[Actions, ...]]
    """(places, num_microbatches) -> what each stage computes, in order."""
    held: Callable[[Any, Any, Any, int], Any]
    """(stage, num_stages, num_microbatches, chunks) -> the most microbatches of all its layers a stage holds at once;
    numbers or arrays."""
    bound: Callable[[PipelineTimes, Places], Any]
    """Seconds of a step that no way to split the blocks into stages beats: one of `schedules.bounds`, or its own. What
    makes the search quick; `flush_bound` holds for every schedule with a flush."""
    chunks: int = 1
    """How many a stage has where nobody says."""
    shape: Literal["loop", "vee"] = "loop"
    splits_backward: bool = False
    overlaps_steps: bool = False
    """Steps follow each other without a flush; `orders` is one step with a flush after it."""
    least_held: Callable[[Any, Any, Any], Any] | None = None
    """Where a stage has several chunks: (stage, num_stages, num_microbatches) -> microbatches of its least held chunk
    that it holds when it holds most, at least."""


SCHEDULES = {
    "gpipe": Schedule(gpipe.gpipe, gpipe.held, flush_bound),
    "1f1b": Schedule(one_f_one_b.one_f_one_b, one_f_one_b.held, one_f_one_b_bound),
    "async": Schedule(one_f_one_b.one_f_one_b, one_f_one_b.held, pace_bound, overlaps_steps=True),
    "interleaved": Schedule(
        one_f_one_b.interleaved, one_f_one_b.held, flush_bound, chunks=2, least_held=one_f_one_b.least_held
    ),
    "looped_bfs": Schedule(gpipe.gpipe, gpipe.held, flush_bound, chunks=2, least_held=one_held),
    "zero_bubble_h1": Schedule(zero_bubble.h1, zero_bubble.held_h1, first_wait_bound, splits_backward=True),
    "zero_bubble_h2": Schedule(zero_bubble.h2, zero_bubble.held_h2, flush_bound, splits_backward=True),
    "zbv": Schedule(
        vee.zbv, vee.held_zbv, flush_bound, chunks=2, shape="vee", splits_backward=True, least_held=one_held
    ),
    "dualpipe_v": Schedule(
        vee.dualpipe_v,
        vee.held_dualpipe_v,
        flush_bound,
        chunks=2,
        shape="vee",
        splits_backward=True,
        least_held=one_held,
    ),
}
GREEDY = "greedy"
"""Made for given times and a given memory, so it has more settings than a name."""


@dataclass(frozen=True, slots=True)
class Timetable:
    """A schedule with its settings: everything that says who does what when."""

    name: str = "1f1b"
    chunks: int = 1
    times: tuple[float, ...] = ()
    """Of `greedy`: forward, input half, weight half; for all stages, or for one after the other."""
    most_held: int = 0
    """Of `greedy`: microbatches that a stage may hold."""

    @property
    def splits_backward(self) -> bool:
        return self.name == GREEDY or SCHEDULES[self.name].splits_backward

    @property
    def overlaps_steps(self) -> bool:
        return self.name != GREEDY and SCHEDULES[self.name].overlaps_steps

    def places(self, num_stages: Any) -> Places:
        shape = "loop" if self.name == GREEDY else SCHEDULES[self.name].shape
        return Places(num_stages, self.chunks, shape)

    def orders(self, num_stages: int, num_microbatches: int) -> tuple[Actions, ...]:
        """What each stage computes."""
        return _orders(self, num_stages, num_microbatches)

    def actions(self, stage: int, num_stages: int, num_microbatches: int) -> Actions:
        """What a stage does, with what it sends and receives."""
        return with_transfers(self.orders(num_stages, num_microbatches)[stage], stage, self.places(num_stages))

    def stream_actions(self, stage: int, num_stages: int, num_microbatches: int, call: Call) -> Actions:
        """The same, of one call where steps overlap."""
        computes = asynchronous.stream(stage, num_stages, num_microbatches, call)
        return with_transfers(computes, stage, self.places(num_stages))

    def forward_actions(self, stage: int, num_stages: int, num_microbatches: int) -> Actions:
        """Evaluation."""
        places = self.places(num_stages)
        return with_transfers(gpipe.forward_only(places, num_microbatches)[stage], stage, places)

    def events(self, num_stages: int, num_microbatches: int) -> tuple[ScheduleEvent, ...]:
        """Every computation of every stage, in an order in which each can run."""
        return _events(self, num_stages, num_microbatches)

    def held(self, stage: Any, num_stages: Any, num_microbatches: Any) -> Any:
        """The most microbatches a stage holds at once; numbers or arrays."""
        if self.name == GREEDY:
            return num_microbatches if not self.most_held else np.minimum(self.most_held, num_microbatches)
        return SCHEDULES[self.name].held(stage, num_stages, num_microbatches, self.chunks)

    def least_held(self, stage: Any, num_stages: Any, num_microbatches: Any) -> Any:
        """Where a stage has several chunks: microbatches that it holds of each of them at the fullest moment, at
        least. Which of them are held most depends on what its blocks keep."""
        rule = SCHEDULES[self.name].least_held if self.name != GREEDY else one_held
        assert rule is not None, f"{self.name} has several chunks and does not say what is held of each at least"
        return rule(stage, num_stages, num_microbatches)

    def step_bound(self, times: PipelineTimes) -> Any:
        """Seconds of a step that no way to split the blocks into stages beats; numbers or arrays."""
        rule = SCHEDULES[self.name].bound if self.name != GREEDY else flush_bound
        return rule(times, self.places(times.stages))

    def by_span(self, num_stages: int) -> Times:
        """The times that `greedy` is made for."""
        given = self.times or (1.0, 1.0, 1.0)
        each = tuple(given[at : at + 3] for at in range(0, len(given), 3))
        return each if len(each) > 1 else each * num_stages  # type: ignore[return-value]


@lru_cache(maxsize=256)
def _orders(timetable: Timetable, num_stages: int, num_microbatches: int) -> tuple[Actions, ...]:
    places = timetable.places(num_stages)
    if timetable.name != GREEDY:
        return SCHEDULES[timetable.name].orders(places, num_microbatches)
    others = [each.orders(places, num_microbatches) for each in SCHEDULES.values() if each.chunks == 1]
    most_held = timetable.most_held or num_microbatches
    return best_of(places, num_microbatches, timetable.by_span(num_stages), most_held, others)


@lru_cache(maxsize=64)
def _events(timetable: Timetable, num_stages: int, num_microbatches: int) -> tuple[ScheduleEvent, ...]:
    orders = timetable.orders(num_stages, num_microbatches)
    events, reached = in_order(orders, timetable.places(num_stages))
    stuck = [stage for stage, at in enumerate(reached) if at < len(orders[stage])]
    assert not stuck, f"{timetable}: stages {stuck} wait for ever ({num_stages} x {num_microbatches})"
    return tuple(events)
