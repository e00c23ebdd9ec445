"""A list schedule under a cap on memory: each stage does the most useful thing that is ready.

A gradient that an earlier stage waits for comes first, then a forward if it may be held, then a weight half; a stage
with nothing ready waits for the first thing that will be. What a stage holds counts from forward to weight half.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

from meshwright.schedules.actions import Action, Actions
from meshwright.schedules.chunk_placement import Places
from meshwright.schedules.events import halves, in_order, peak_held, sweep

Times = tuple[tuple[float, float, float], ...]
"""By span: seconds of forward, of the input half of backward, of the weight half. Only their ratios matter."""


@dataclass(frozen=True, slots=True)
class ListRule:
    """What the variants of the list schedule differ in."""

    forward_first: bool = False
    """A forward that is ready goes before a backward that is ready."""
    fills: bool = True
    """A weight half may be begun while nothing else is ready yet but something will be before it ends."""


@dataclass(slots=True)
class _ListStage:
    clock: float = 0.0
    held: int = 0
    owed: deque[tuple[int, int]] = field(default_factory=deque)
    """(microbatch, chunk) whose weight half is still to do."""
    actions: list[Action] = field(default_factory=list)


class _Board:
    """What is done and when, for all stages."""

    def __init__(self, places: Places, num_microbatches: int, times: Times, most_held: int, rule: ListRule):
        self.places, self.times, self.most_held, self.rule = places, times, most_held, rule
        self.num_microbatches = num_microbatches
        self.stages = [_ListStage() for _ in range(places.num_stages)]
        self.forward = [[-1.0] * num_microbatches for _ in range(places.num_spans)]
        self.backward = [[-1.0] * num_microbatches for _ in range(places.num_spans)]
        self.next_forward, self.next_backward = [0] * places.num_spans, [0] * places.num_spans

    def ready_forward(self, span: int) -> float | None:
        i = self.next_forward[span]
        if i >= self.num_microbatches:
            return None
        when = 0.0 if span == 0 else self.forward[span - 1][i]
        return when if when >= 0 else None

    def ready_backward(self, span: int) -> float | None:
        i = self.next_backward[span]
        if i >= self.num_microbatches or self.forward[span][i] < 0:
            return None
        if span == self.places.num_spans - 1:
            return self.forward[span][i]
        when = self.backward[span + 1][i]
        return when if when >= 0 else None

    def may_hold(self, stage: int, chunk: int) -> bool:
        """Room must stay for the later chunks of what is under way, or it could never finish."""
        room = self.most_held - self.stages[stage].held
        return room > self.places.chunks - 1 - chunk

    def choices(self, stage: int) -> list[tuple[float, int, str, int]]:
        """(when it can begin, rank of preference, kind, chunk) of everything this stage could do next."""
        mine, found = self.stages[stage], []
        for chunk in range(self.places.chunks):
            span = self.places.span(stage, chunk)
            when = self.ready_backward(span)
            if when is not None:
                found.append((max(when, mine.clock), 1, "backward_input", chunk))
            when = self.ready_forward(span)
            if when is not None and self.may_hold(stage, chunk):
                further = self.places.chunks - 1 - chunk  # nearer to the loss first
                preference = further - self.places.chunks if self.rule.forward_first else 2 + further
                found.append((max(when, mine.clock), preference, "forward", chunk))
        if mine.owed:
            found.append((mine.clock, 0, "backward_weight", mine.owed[0][1]))
        return found

    def choose(self, stage: int) -> tuple[float, str, int] | None:
        found = self.choices(stage)
        if not found:
            return None
        clock = self.stages[stage].clock
        now = [each for each in found if each[0] <= clock]
        weights = [each for each in now if each[2] == "backward_weight"]
        others = [each for each in now if each[2] != "backward_weight"]
        coming = [each for each in found if each[0] > clock]
        if others:
            chosen = min(others, key=lambda each: each[1])
        elif weights and (self.rule.fills or not coming or self._fits(stage, min(coming)[0])):
            chosen = weights[0]
        else:
            chosen = min(coming)
        return chosen[0], chosen[2], chosen[3]

    def _fits(self, stage: int, until: float) -> bool:
        mine = self.stages[stage]
        return mine.clock + self.times[self.places.span(stage, mine.owed[0][1])][2] <= until

    def do(self, stage: int, start: float, kind: str, chunk: int) -> None:
        mine, span = self.stages[stage], self.places.span(stage, chunk)
        if kind == "forward":
            i = self.next_forward[span]
            self.next_forward[span] += 1
            mine.held += 1
            mine.clock = self.forward[span][i] = start + self.times[span][0]
        elif kind == "backward_input":
            i = self.next_backward[span]
            self.next_backward[span] += 1
            mine.owed.append((i, chunk))
            mine.clock = self.backward[span][i] = start + self.times[span][1]
        else:
            i, chunk = mine.owed.popleft()
            mine.held -= 1
            mine.clock = start + self.times[span][2]
        mine.actions.append(Action(kind, i, chunk))  # type: ignore[arg-type]


def list_schedule(
    places: Places, num_microbatches: int, times: Times, most_held: int, rule: ListRule
) -> tuple[Actions, ...] | None:
    """None where this rule leads to a state in which nobody can go on."""
    board = _Board(places, num_microbatches, times, max(most_held, places.chunks), rule)
    options = {stage: board.choose(stage) for stage in range(places.num_stages)}
    while ready := [(chosen, stage) for stage, chosen in options.items() if chosen is not None]:
        (start, kind, chunk), stage = min(ready, key=lambda option: (option[0][0], option[1]))
        board.do(stage, start, kind, chunk)
        span = places.span(stage, chunk)
        near = [other for other in (span - 1, span + 1) if 0 <= other < places.num_spans]
        for changed in {stage, *map(places.stage, near)}:
            options[changed] = board.choose(changed)
    is_whole = all(count == num_microbatches for count in board.next_backward)
    return tuple(tuple(stage.actions) for stage in board.stages) if is_whole else None


def span_seconds(orders: Sequence[Actions], places: Places, times: Times) -> float:
    """From the start to the end of the last action of any stage."""
    events, _ = in_order(orders, places)
    forward, weight = [each[0] for each in times], [each[2] for each in times]
    _, ends = sweep(events, halves(forward, [i + w for _, i, w in times], weight), 0.0)
    return float(max(ends))


def best_of(
    places: Places,
    num_microbatches: int,
    times: Times,
    most_held: int,
    others: Sequence[tuple[Actions, ...]] = (),
) -> tuple[Actions, ...]:
    """The fastest of all variants and of those `others` that hold no more than they may."""
    sizes = [1.0] * places.chunks
    found = [orders for orders in others if max(peak_held(mine, sizes) for mine in orders) <= most_held]
    for flags in product((False, True), repeat=2):
        made = list_schedule(places, num_microbatches, times, most_held, ListRule(*flags))
        if made is not None:
            found.append(made)
    assert found, "the first rule always ends"
    return min(found, key=lambda orders: span_seconds(orders, places, times))
