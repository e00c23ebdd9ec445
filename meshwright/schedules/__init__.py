"""Pure generators of who does what when, by name.

A plugin (`core/plugins.py`) adds schedules by a dictionary `SCHEDULES` of names and `Schedule` values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np

from meshwright.core.errors import error_at, nearest
from meshwright.core.plugins import added
from meshwright.schedules import bounds, orders
from meshwright.schedules.actions import Action as Action
from meshwright.schedules.actions import Actions, Places, as_step
from meshwright.schedules.bounds import PipelineTimes
from meshwright.schedules.events import ScheduleEvent, in_order, longest_path, with_transfers
from meshwright.schedules.greedy import Times, best_of
from meshwright.schedules.orders import Call


class Schedule(NamedTuple):
    orders: Callable[..., tuple[Actions, ...]]
    """(places, num_microbatches) -> what each stage computes, in order. With `takes_times` also (times, most_held)."""
    held: Callable[[Any, Any, Any, int], Any]
    """(stage, num_stages, num_microbatches, chunks) -> the most microbatches of all its layers a stage holds at once;
    numbers or arrays."""
    bound: Callable[[PipelineTimes, Places], Any]
    """Seconds of a step that no way to split the blocks into stages beats: one of `schedules.bounds`, or its own. What
    makes the search quick; `flush_bound` holds for every schedule with a flush."""
    chunks: int = 1
    """How many a stage has where nobody says."""
    any_chunks: bool = False
    """Another number of them, from 2 on, will do."""
    shape: Literal["loop", "vee"] = "loop"
    splits_backward: bool = False
    takes_times: bool = False
    """Made for given times of actions and a given memory."""
    stream: Callable[[int, int, int, Call], Actions] | None = None
    """(stage, num_stages, num_microbatches, call) -> what a stage computes, with the beginning and end of steps, where
    they follow each other without a flush; `orders` is then one step with a flush after it."""
    least_held: Callable[[Any, Any, Any, int], Sequence[Any]] | None = None
    """Where a stage has several chunks: (stage, num_stages, num_microbatches, chunks) -> microbatches that it holds of
    each of them at one moment, at least."""
    twin: tuple[str, Callable[[Any, Any], Any]] | None = None
    """Another schedule, priced alike, and (num_stages, num_microbatches) -> whether a step goes as in that one."""

    @property
    def overlaps_steps(self) -> bool:
        return self.stream is not None


def _greedy(places: Places, num_microbatches: int, times: Times, most_held: int) -> tuple[Actions, ...]:
    simple = [each for each in SCHEDULES.values() if each.chunks == 1 and not each.takes_times]
    others = [each.orders(places, num_microbatches) for each in simple]
    return best_of(places, num_microbatches, times, most_held, others)


_LOOPED: dict[str, Any] = {"chunks": 2, "any_chunks": True}
_VEE: dict[str, Any] = {"chunks": 2, "shape": "vee", "splits_backward": True, "least_held": orders.least_held_vee}
SCHEDULES: Mapping[str, Schedule] = {
    "gpipe": Schedule(orders.gpipe, orders.held_all, bounds.gpipe_bound),
    "1f1b": Schedule(orders.one_f_one_b, orders.held_by_1f1b, bounds.one_f_one_b_bound),
    "async": Schedule(orders.one_f_one_b, orders.held_by_1f1b, bounds.pace_bound, stream=orders.stream),
    "interleaved": Schedule(
        orders.interleaved, orders.held_by_1f1b, bounds.flush_bound, least_held=orders.least_held_interleaved, **_LOOPED
    ),
    "looped_bfs": Schedule(
        orders.gpipe, orders.held_all, bounds.flush_bound, least_held=orders.least_held_all, **_LOOPED
    ),
    "zero_bubble_h1": Schedule(orders.h1, orders.held_as_stages, bounds.first_wait_bound, splits_backward=True),
    "zero_bubble_h2": Schedule(orders.h2, orders.held_by_h2, bounds.way_in_bound, splits_backward=True),
    "zbv": Schedule(orders.zbv, orders.held_as_stages, bounds.zbv_bound, **_VEE),
    "dualpipe_v": Schedule(
        orders.dualpipe_v, orders.held_by_dualpipe_v, bounds.flush_bound, twin=("zbv", orders.goes_as_zbv), **_VEE
    ),
    "greedy": Schedule(_greedy, orders.held_all, bounds.way_in_bound, splits_backward=True, takes_times=True),
}


_DURATIONS = ((10, 10, 10, 0), (10, 12, 8, 1), (10, 20, 0, 0), (10, 16, 9, 4), (10, 25, 5, 1), (10, 12, 4, 20))
"""Of forward, input half, weight half and message: longest paths through a step are found for these."""


def _added() -> dict[str, Schedule]:
    return added("schedule", SCHEDULES, lambda module: getattr(module, "SCHEDULES", {}).items())


def schedule_names() -> tuple[str, ...]:
    return (*SCHEDULES, *_added())


def schedule_named(name: str) -> Schedule:
    result = SCHEDULES.get(name) or _added().get(name)
    if result is None:
        raise error_at("schedule", f'no schedule is called "{name}".', nearest(name, schedule_names()))
    return result


@dataclass(frozen=True, slots=True)
class Timetable:
    """A schedule with its settings: everything that says who does what when."""

    name: str = "1f1b"
    chunks: int = 1
    times: tuple[float, ...] = ()
    """That it is made for: forward, input half, weight half; for all stages, or for one after the other."""
    most_held: int = 0
    """Microbatches that a stage may hold, where it is made for given times."""
    cut_spans: tuple[int, ...] = ()
    """Spans of layers that hand no gradient back, rising: the span before waits for none. With one chunk a stage, the
    stages from one of them to the next go as if they were all there are."""

    @property
    def schedule(self) -> Schedule:
        return schedule_named(self.name)

    @property
    def splits_backward(self) -> bool:
        return self.schedule.splits_backward

    @property
    def overlaps_steps(self) -> bool:
        return self.schedule.overlaps_steps

    @property
    def priced_as(self) -> tuple[int, str, bool, bool]:
        """All that prices of a stage depend on, but for the microbatches that it holds."""
        return self.chunks, self.schedule.shape, self.splits_backward, self.overlaps_steps

    def places(self, num_stages: Any) -> Places:
        return Places(num_stages, self.chunks, self.schedule.shape)

    # Cached by value: timetables are few and small, and live as long as the process anyway.
    @lru_cache(maxsize=256)  # noqa: B019
    def orders(self, num_stages: int, num_microbatches: int) -> tuple[Actions, ...]:
        """What each stage computes."""
        places = self.places(num_stages)
        if self.cut_spans and self.chunks == 1:
            each, found = self.by_span(num_stages), list[Actions]()
            for first, end in itertools.pairwise((0, *self.cut_spans, num_stages)):
                times = tuple(itertools.chain(*each[first:end]))
                found += replace(self, cut_spans=(), times=times).orders(end - first, num_microbatches)
            return tuple(found)
        if not self.schedule.takes_times:
            return self.schedule.orders(places, num_microbatches)
        most_held = self.most_held or num_microbatches
        return self.schedule.orders(places, num_microbatches, self.by_span(num_stages), most_held)

    @lru_cache(maxsize=64)  # noqa: B019
    def actions(self, stage: int, num_stages: int, num_microbatches: int, call: Call = "first") -> Actions:
        """What a stage does in a call of the loop: a step, or where steps overlap what the call does of two of them.
        With what it sends and receives."""
        stream = self.schedule.stream
        if stream is not None:
            computes = stream(stage, num_stages, num_microbatches, call)
        else:  # a step ends within its call, and there is nothing to flush
            order = self.orders(num_stages, num_microbatches)[stage]
            computes = () if call == "flush" else as_step(order, num_microbatches)
        return with_transfers(computes, stage, self.places(num_stages), self.cut_spans)

    def forward_actions(self, stage: int, num_stages: int, num_microbatches: int) -> Actions:
        """Evaluation."""
        places = self.places(num_stages)
        return with_transfers(orders.forward_only(places, num_microbatches)[stage], stage, places)

    @lru_cache(maxsize=64)  # noqa: B019
    def events(self, num_stages: int, num_microbatches: int) -> tuple[ScheduleEvent, ...]:
        """Every computation of every stage, in an order in which each can run."""
        lists = self.orders(num_stages, num_microbatches)
        events, reached = in_order(lists, self.places(num_stages), self.cut_spans)
        stuck = [stage for stage, at in enumerate(reached) if at < len(lists[stage])]
        assert not stuck, f"{self}: stages {stuck} wait for ever ({num_stages} x {num_microbatches})"
        return tuple(events)

    @lru_cache(maxsize=1024)  # noqa: B019
    def paths(self, num_stages: int, num_microbatches: int, blocks: tuple[int, ...]) -> np.ndarray:
        """(paths, 4): blocks that go forward, back (input halves) and through weight halves, and messages, one after
        the other. No step is faster than any of them; for some durations one is the longest. `blocks` of each span."""
        events, rows = self.events(num_stages, num_microbatches), []
        for forward, backward, weight, send in _DURATIONS:
            seconds = {"forward": forward, "backward": backward + weight}
            seconds |= {"backward_input": backward, "backward_weight": weight}
            counts = longest_path(events, seconds, send, blocks)
            halves = [counts["backward"] + counts[half] for half in ("backward_input", "backward_weight")]
            rows.append((counts["forward"], *halves, counts["send"]))
        return np.array(rows)

    def held(self, stage: Any, num_stages: Any, num_microbatches: Any) -> Any:
        """The most microbatches a stage holds at once; numbers or arrays."""
        if self.cut_spans and self.chunks == 1:
            at = np.searchsorted(self.cut_spans, stage, side="right")
            first = np.array((0, *self.cut_spans))[at]
            stage, num_stages = stage - first, np.array((*self.cut_spans, num_stages))[at] - first
        most = self.schedule.held(stage, num_stages, num_microbatches, self.chunks)
        return np.minimum(self.most_held, most) if self.most_held else most

    def least_held(self, stage: Any, num_stages: Any, num_microbatches: Any) -> Sequence[Any]:
        """Where a stage has several chunks: microbatches that it holds of each of them at one moment, at least. Which
        moment is the fullest depends on what its blocks keep."""
        rule = self.schedule.least_held
        assert rule is not None, f"{self.name} has several chunks and does not say what is held of each at least"
        return rule(stage, num_stages, num_microbatches, self.chunks)

    def step_bound(self, times: PipelineTimes) -> Any:
        """Seconds of a step that no way to split the blocks into stages beats; numbers or arrays."""
        return self.schedule.bound(times, self.places(times.stages))

    def goes_as(self, names: Collection[str], num_stages: Any, num_microbatches: Any) -> Any:
        """Whether a step goes as in another of these schedules; numbers or arrays."""
        twin = self.schedule.twin
        return twin[1](num_stages, num_microbatches) if twin is not None and twin[0] in names else False

    def by_span(self, num_stages: int) -> Times:
        """The times that it is made for."""
        given = self.times or (1.0, 1.0, 1.0)
        each = tuple(given[at : at + 3] for at in range(0, len(given), 3))
        return each if len(each) > 1 else each * num_stages  # type: ignore[return-value]
