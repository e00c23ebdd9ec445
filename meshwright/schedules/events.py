"""When everything happens: the longest path through the actions of all stages.

Sends are asynchronous: what another stage made arrives a `send` after it was made. The order of events depends only on
the actions and is found once; one sweep then serves any durations, single numbers or arrays over candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from meshwright.schedules.actions import COMPUTES, Action, Actions, Places

BACKWARDS = ("backward", "backward_input")
"""What hands a gradient to the span before."""


class ScheduleEvent(NamedTuple):
    stage: int
    kind: str
    span: int
    microbatch: int
    waits_for: tuple[int, ...]
    """Events of other stages whose results must have arrived."""


def in_order(
    orders: Sequence[Actions], places: Places, cut_spans: Collection[int] = ()
) -> tuple[list[ScheduleEvent], list[int]]:
    """Events in an order in which each can run, and how far each stage gets. `cut_spans` hand nothing back."""
    done: dict[tuple[str, int, int], int] = {}
    position = [0] * len(orders)
    events: list[ScheduleEvent] = []
    progress = True
    while progress:
        progress = False
        for stage, mine in enumerate(orders):
            while position[stage] < len(mine):
                action = mine[position[stage]]
                if action.kind in COMPUTES or action.kind == "update":
                    sources = _sources(action, places.span(stage, action.chunk), places, done, cut_spans)
                    if sources is None:
                        break
                    span = places.span(stage, action.chunk)
                    waits = tuple(each for each in sources if events[each].stage != stage)
                    half = "backward" if action.kind in BACKWARDS else action.kind
                    done[half, span, action.microbatch] = len(events)
                    events.append(ScheduleEvent(stage, action.kind, span, action.microbatch, waits))
                position[stage] += 1
                progress = True
    return events, position


def _sources(
    action: Action, span: int, places: Places, done: Mapping[tuple[str, int, int], int], cut_spans: Collection[int]
) -> tuple[int, ...] | None:
    """Events this one needs; None: one of them has not happened."""
    i = action.microbatch
    needed: list[tuple[str, int, int]]
    if action.kind == "update":
        needed = []  # it follows its stage's own backward
    elif action.kind == "forward":
        needed = [("forward", span - 1, i)] if span else []
    elif action.kind == "backward_weight":
        needed = [("backward", span, i)]
    else:
        needed = [("forward", span, i)]
        needed += [("backward", span + 1, i)] if span < places.num_spans - 1 and span + 1 not in cut_spans else []
    sources = [done.get(each, -1) for each in needed]
    return None if -1 in sources else tuple(sources)


def is_endless(orders: Sequence[Actions], places: Places) -> bool:
    """Whether some stage waits for ever."""
    _, reached = in_order(orders, places)
    return any(at < len(mine) for at, mine in zip(reached, orders, strict=True))


def sweep(
    events: Sequence[ScheduleEvent], seconds: Mapping[str, Sequence[Any]], send: Any
) -> tuple[list[Any], list[Any]]:
    """End of each event, and of each stage, in seconds from the start.

    `seconds`: kind of action -> by span; `send`: of a message, or a list with those over each boundary between spans.
    """
    by_boundary = send if isinstance(send, list) else None
    is_array = any(isinstance(x, np.ndarray) for each in seconds.values() for x in (*each, send))
    latest: Callable[[Any, Any], Any] = np.maximum if is_array else max
    clock: list[Any] = [0.0] * (1 + max(event.stage for event in events))
    ends: list[Any] = []
    for stage, kind, span, _, waits_for in events:
        start = clock[stage]
        for source in waits_for:
            if by_boundary is not None:
                send = by_boundary[min(span, events[source].span)]
            start = latest(start, ends[source] + send)
        end = start + seconds[kind][span]
        clock[stage] = end
        ends.append(end)
    return ends, clock


def longest_path(
    events: Sequence[ScheduleEvent], seconds: Mapping[str, int], send: int, blocks: Sequence[int]
) -> dict[str, int]:
    """How many blocks go through each kind of action, and how many messages ("send") there are, one after the other on
    the longest path; `blocks` of each span, which each take so many `seconds`."""
    ends, _ = sweep(events, {kind: [count * each for count in blocks] for kind, each in seconds.items()}, send)
    before, last = [], dict[int, int]()
    for number, event in enumerate(events):
        before.append(last.get(event.stage))
        last[event.stage] = number
    at: int | None = max(range(len(ends)), key=ends.__getitem__)
    counts = dict.fromkeys((*seconds, "send"), 0)
    while at is not None:
        event = events[at]
        counts[event.kind] += blocks[event.span]
        start = ends[at] - seconds[event.kind] * blocks[event.span]
        sources = [each for each in event.waits_for if ends[each] + send == start]
        counts["send"] += bool(sources)
        at = sources[0] if sources else before[at]
    return counts


def halves(forward: Sequence[Any], backward: Sequence[Any], weight: Sequence[Any]) -> dict[str, Sequence[Any]]:
    """Seconds of every kind of action, given those of a whole backward and of its second half."""
    return {
        "forward": forward,
        "backward": backward,
        "backward_input": [whole - half for whole, half in zip(backward, weight, strict=True)],
        "backward_weight": weight,
    }


def peak_held(actions: Actions, sizes: Sequence[Any]) -> Any:
    """The most that a stage keeps for backward at once; `sizes`: what a microbatch keeps in each chunk."""
    splits = any(action.kind == "backward_weight" for action in actions)
    last = "backward_weight" if splits else "backward"
    total = most = 0.0
    for action in actions:
        if action.kind == "forward":
            total = total + sizes[action.chunk]
            most = np.maximum(most, total)
        elif action.kind in (last, "backward"):
            total = total - sizes[action.chunk]
    return most


def with_transfers(actions: Actions, stage: int, places: Places, cut_spans: Collection[int] = ()) -> Actions:
    """Compute actions of one stage, with the receives before and the sends after that they imply. `cut_spans` hand
    nothing back."""
    full: list[Action] = []
    for action in actions:
        span = places.span(stage, action.chunk)
        before = span > 0 and places.stage(span - 1) != stage
        after = span < places.num_spans - 1 and places.stage(span + 1) != stage
        place = action.microbatch, action.chunk
        if action.kind == "forward":
            full += [Action("receive_forward", *place)] * before + [action] + [Action("send_forward", *place)] * after
        elif action.kind in BACKWARDS:
            after, before = after and span + 1 not in cut_spans, before and span not in cut_spans
            full += [Action("receive_backward", *place)] * after + [action] + [Action("send_backward", *place)] * before
        else:
            full.append(action)
    return tuple(full)
