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


def list_schedule(
    places: Places, num_microbatches: int, times: Times, most_held: int, forward_first: bool = False, fills: bool = True
) -> tuple[Actions, ...] | None:
    """None where this rule leads to a state in which nobody can go on.

    `forward_first`: a forward that is ready goes before a backward that is ready. `fills`: a weight half may be begun
    while nothing else is ready yet but something will be before it ends.
    """
    chunks, last_span, most_held = places.chunks, places.num_spans - 1, max(most_held, places.chunks)
    stages = [_ListStage() for _ in range(places.num_stages)]
    ends = {("forward", -1, i): 0.0 for i in range(num_microbatches)}  # of samples, and of what was done
    counts = {kind: [0] * places.num_spans for kind in _HALVES}  # how many were begun, by span

    def ready(kind: str, span: int) -> float | None:
        """When what the span's next forward or backward needs is there; None: not yet."""
        i = counts[kind][span]
        if kind == "forward":
            return ends.get((kind, span - 1, i))
        return ends.get(("forward", span, i) if span == last_span else (kind, span + 1, i))

    def choices(stage: int) -> list[tuple[float, int, str, int]]:
        """(when it can begin, rank of preference, kind, chunk) of everything this stage could do next."""
        mine, result = stages[stage], []
        for chunk in range(chunks):
            span, further = places.span(stage, chunk), chunks - 1 - chunk
            when = ready("backward_input", span)
            if when is not None:
                result.append((max(when, mine.clock), 1, "backward_input", chunk))
            when = ready("forward", span)
            # Room must stay for the later chunks of what is under way, or it could never finish.
            if when is not None and most_held - mine.held > further:
                preference = further - chunks if forward_first else 2 + further  # nearer to the loss first
                result.append((max(when, mine.clock), preference, "forward", chunk))
        if mine.owed:
            result.append((mine.clock, 0, "backward_weight", mine.owed[0][1]))
        return result

    def choose(stage: int) -> tuple[float, int, str, int] | None:
        result, mine = choices(stage), stages[stage]
        now = [each for each in result if each[0] <= mine.clock]
        weights = [each for each in now if each[2] == "backward_weight"]
        others = [each for each in now if each[2] != "backward_weight"]
        coming = [each for each in result if each[0] > mine.clock]
        if others:
            return min(others, key=lambda each: each[1])
        seconds = times[places.span(stage, mine.owed[0][1])][2] if weights else 0.0
        if weights and (fills or not coming or mine.clock + seconds <= min(coming)[0]):
            return weights[0]
        return min(coming, default=None)

    options = {stage: choose(stage) for stage in range(places.num_stages)}
    while ready_now := [(chosen, stage) for stage, chosen in options.items() if chosen is not None]:
        (start, _, kind, chunk), stage = min(ready_now, key=lambda option: (option[0][0], option[1]))
        mine, span = stages[stage], places.span(stage, chunk)
        i = counts[kind][span]
        counts[kind][span] += 1
        if kind == "backward_input":
            mine.owed.append((i, chunk))
        elif kind == "backward_weight":
            mine.owed.popleft()
        mine.held += {"forward": 1, "backward_weight": -1}.get(kind, 0)
        mine.clock = ends[kind, span, i] = start + times[span][_HALVES.index(kind)]
        mine.actions.append(Action(kind, i, chunk))  # type: ignore[arg-type]
        near = [other for other in (span - 1, span + 1) if 0 <= other <= last_span]
        for changed in {stage, *map(places.stage, near)}:
            options[changed] = choose(changed)
    is_whole = all(count == num_microbatches for count in counts["backward_input"])
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
    result = [orders for orders in others if max(peak_held(mine, sizes) for mine in orders) <= most_held]
    for flags in product((False, True), repeat=2):
        made = list_schedule(places, num_microbatches, times, most_held, *flags)
        if made is not None:
            result.append(made)
    assert result, "the first rule always ends"
    return min(result, key=lambda orders: span_seconds(orders, places, times))
