"""A list schedule under a cap on memory: each stage does the most useful thing that is ready.

A gradient that an earlier stage waits for comes first, then a forward if it may be held, then a weight half; a stage
with nothing ready waits for the first thing that will be. What a stage holds counts from forward to weight half.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

from meshwright.schedules.actions import Action, Actions, Places
from meshwright.schedules.events import halves, in_order, peak_held, sweep

Times = tuple[tuple[float, float, float], ...]
"""By span: seconds of forward, of the input half of backward, of the weight half. Only their ratios matter."""


_HALVES = ("forward", "backward_input", "backward_weight")


@dataclass(slots=True)
class _ListStage:
    clock: float = 0.0
    held: int = 0
    owed: deque[tuple[int, int]] = field(default_factory=deque)
    """(microbatch, chunk) whose weight half is still to do."""
    actions: list[Action] = field(default_factory=list)


@dataclass(slots=True)
class _Board:
    """What is done and when, for all stages."""

    places: Places
    times: Times
    most_held: int
    forward_first: bool
    fills: bool
    stages: list[_ListStage]
    ends: dict[tuple[str, int, int], float]
    """(kind, span, microbatch) -> when it ended."""
    counts: dict[str, list[int]]
    """How many of a kind were begun, by span."""

    def ready(self, kind: str, span: int) -> float | None:
        """When what the span's next forward or backward needs is there; None: not yet."""
        i = self.counts[kind][span]
        if kind == "forward":
            return self.ends.get((kind, span - 1, i))
        is_last = span == self.places.num_spans - 1
        return self.ends.get(("forward", span, i) if is_last else (kind, span + 1, i))

    def choices(self, stage: int) -> list[tuple[float, int, str, int]]:
        """(when it can begin, rank of preference, kind, chunk) of everything this stage could do next."""
        mine, found, chunks = self.stages[stage], [], self.places.chunks
        for chunk in range(chunks):
            span, further = self.places.span(stage, chunk), chunks - 1 - chunk
            when = self.ready("backward_input", span)
            if when is not None:
                found.append((max(when, mine.clock), 1, "backward_input", chunk))
            when = self.ready("forward", span)
            # Room must stay for the later chunks of what is under way, or it could never finish.
            if when is not None and self.most_held - mine.held > further:
                preference = further - chunks if self.forward_first else 2 + further  # nearer to the loss first
                found.append((max(when, mine.clock), preference, "forward", chunk))
        if mine.owed:
            found.append((mine.clock, 0, "backward_weight", mine.owed[0][1]))
        return found

    def choose(self, stage: int) -> tuple[float, str, int] | None:
        found, mine = self.choices(stage), self.stages[stage]
        if not found:
            return None
        now = [each for each in found if each[0] <= mine.clock]
        weights = [each for each in now if each[2] == "backward_weight"]
        others = [each for each in now if each[2] != "backward_weight"]
        coming = [each for each in found if each[0] > mine.clock]
        seconds = self.times[self.places.span(stage, mine.owed[0][1])][2] if mine.owed else 0.0
        if others:
            chosen = min(others, key=lambda each: each[1])
        elif weights and (self.fills or not coming or mine.clock + seconds <= min(coming)[0]):
            chosen = weights[0]
        else:
            chosen = min(coming)
        return chosen[0], chosen[2], chosen[3]

    def do(self, stage: int, start: float, kind: str, chunk: int) -> None:
        mine, span = self.stages[stage], self.places.span(stage, chunk)
        i = self.counts[kind][span]
        self.counts[kind][span] += 1
        if kind == "forward":
            mine.held += 1
        elif kind == "backward_input":
            mine.owed.append((i, chunk))
        else:
            mine.owed.popleft()
            mine.held -= 1
        mine.clock = self.ends[kind, span, i] = start + self.times[span][_HALVES.index(kind)]
        mine.actions.append(Action(kind, i, chunk))  # type: ignore[arg-type]


def list_schedule(
    places: Places,
    num_microbatches: int,
    times: Times,
    most_held: int,
    forward_first: bool = False,
    fills: bool = True,
) -> tuple[Actions, ...] | None:
    """None where this rule leads to a state in which nobody can go on.

    `forward_first`: a forward that is ready goes before a backward that is ready. `fills`: a weight half may be begun
    while nothing else is ready yet but something will be before it ends.
    """
    stages = [_ListStage() for _ in range(places.num_stages)]
    samples = {("forward", -1, i): 0.0 for i in range(num_microbatches)}
    counts = {kind: [0] * places.num_spans for kind in _HALVES}
    board = _Board(places, times, max(most_held, places.chunks), forward_first, fills, stages, samples, counts)
    options = {stage: board.choose(stage) for stage in range(places.num_stages)}
    while ready := [(chosen, stage) for stage, chosen in options.items() if chosen is not None]:
        (start, kind, chunk), stage = min(ready, key=lambda option: (option[0][0], option[1]))
        board.do(stage, start, kind, chunk)
        span = places.span(stage, chunk)
        near = [other for other in (span - 1, span + 1) if 0 <= other < places.num_spans]
        for changed in {stage, *map(places.stage, near)}:
            options[changed] = board.choose(changed)
    is_whole = all(count == num_microbatches for count in board.counts["backward_input"])
    return tuple(tuple(stage.actions) for stage in stages) if is_whole else None


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
        made = list_schedule(places, num_microbatches, times, most_held, *flags)
        if made is not None:
            found.append(made)
    assert found, "the first rule always ends"
    return min(found, key=lambda orders: span_seconds(orders, places, times))
