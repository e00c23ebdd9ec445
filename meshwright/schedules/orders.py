"""What stages compute, in order, for every schedule that does not depend on times.

F: forward of a microbatch, B: backward, I and W: its input half and its weight half, which nobody waits for.

GPipe: all microbatches forward, then all backward. With several chunks: looped, breadth first.

stage 0   F0 F1 F2 F3             B0 B1 B2 B3
stage 1      F0 F1 F2 F3       B0 B1 B2 B3
stage 2         F0 F1 F2 F3 B0 B1 B2 B3

1F1B: a stage starts backward as soon as it can, so it holds at most `num_stages - stage` microbatches.

stage 0   F0 F1 F2          B0 F3    B1    B2    B3
stage 1      F0 F1       B0 F2 B1 F3    B2    B3
stage 2         F0 B0 F1 B1 F2 B2 F3 B3

With several chunks (interleaved; Narayanan et al. 2021): microbatches go round the stages in groups of `num_stages`,
once for each chunk, and the bubble is shorter by as many times as there are chunks.

Zero bubble (Qi et al. 2023): weight halves fill the gaps.

stage 0   F0 F1 F2       I0 W0 F3 I1 W1    I2 W2    I3 W3
stage 1      F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
stage 2         F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

A stage puts its weight halves off by as many microbatches as stages come before it (H1: what 1F1B's first stage holds,
everywhere), or by twice as many with a way in twice as long (H2: twice the memory, no gap but the way in).

Two chunks a stage, laid out as a V: the first stage has the first layers and the last, so every stage can begin
backward early and all hold equally much.

    spans    stage 0: 0 5    stage 1: 1 4    stage 2: 2 3

zbv (Qi et al. 2024): a list schedule over halves of backward under 1F1B's memory, no gap but the way in for
F = I = W. dualpipe_v (DeepSeek 2024, cut in half): forwards of one chunk alternate with backwards of the other, so that
one's messages may overlap with the other's compute.

async (PipeDream-2BW; Narayanan et al. 2021): no flush; the next step's microbatches follow the last one's at once.

Two stages, three microbatches a step; U: exchange and update, ': of the step after, |: between two calls:

stage 0   F0 F1 B0 F2 B1 | F0' B2  U   F1' B0' F2' B1' | F0" B2' U' ...
stage 1   F0 B0 F1 B1 F2 B2 U | F0' B0' F1' B1' F2' B2' U' | ...

A stage is `num_stages - 1 - stage` backwards behind its forwards, so that many cross from one call into the next, where
their numbers are below 0. A flush does those that are left, and is all there is between the calls before and after it.

The promise, whatever the timing: every microbatch of batch t, on every stage, forward and backward, uses the weights
after t - 1 updates (after f, where the last flush came after f updates and f is more), and

    W[t + 1] = update(W[t], gradient of batch t at its promised weights).

So a stage holds two versions of its weights (`ops/weight_versions.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, Literal

import numpy as np

from meshwright.schedules.actions import Action, Actions, Kind, Places
from meshwright.schedules.events import is_endless
from meshwright.schedules.greedy import list_schedule

Call = Literal["first", "next", "flush"]
"""The first step after a flush (or of all), a step that follows another, what a flush does."""

_KINDS: dict[str, Kind] = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}


@cache
def _parsed(word: str) -> tuple[Kind, int]:
    return _KINDS[word[0]], int(word[1:] or 0)


def _numbered(words: Iterable[str]) -> Actions:
    """Words such as `F1`, a forward through chunk 1, with their microbatches: those of a chunk come in order, weight
    halves in the order of input halves, and all that are left at the end."""
    actions: list[Action] = []
    counts: dict[tuple[bool, int], int] = {}
    owed: deque[tuple[int, int]] = deque()
    for word in words:
        kind, chunk = _parsed(word)
        if kind == "backward_weight":
            actions.append(Action(kind, *owed.popleft()))
            continue
        i = counts.get((kind == "forward", chunk), 0)
        counts[kind == "forward", chunk] = i + 1
        actions.append(Action(kind, i, chunk))
        if kind == "backward_input":
            owed.append((i, chunk))
    return (*actions, *(Action("backward_weight", *each) for each in owed))


def gpipe(places: Places, num_microbatches: int) -> tuple[Actions, ...]:
    backward = [f"B{chunk}" for chunk in reversed(range(places.chunks)) for _ in range(num_microbatches)]
    return tuple((*forward, *_numbered(backward)) for forward in forward_only(places, num_microbatches))


def forward_only(places: Places, num_microbatches: int) -> tuple[Actions, ...]:
    """Evaluation: the forward half."""
    forward = _numbered(f"F{chunk}" for chunk in range(places.chunks) for _ in range(num_microbatches))
    return (forward,) * places.num_stages


def one_f_one_b(places: Places, num_microbatches: int, extra: int = 0) -> tuple[Actions, ...]:
    """`extra`: so many more forwards on the way in."""
    stages, chunks = places.num_stages, range(places.chunks)
    groups = [min(stages, num_microbatches - start) for start in range(0, num_microbatches, stages)]
    forward = [f"F{chunk}" for size in groups for chunk in chunks for _ in range(size)]
    backward = [f"B{chunk}" for size in groups for chunk in reversed(chunks) for _ in range(size)]

    def order(stage: int) -> Actions:
        warmup = stages - stage
        if places.chunks > 1:
            warmup = 2 * (stages - stage - 1) + (places.chunks - 1) * stages + 1 + extra
        words = forward[:warmup]
        for turn, back in enumerate(backward, warmup):
            words += [back, *forward[turn : turn + 1]]
        return _numbered(words)

    return tuple(map(order, range(stages)))


def interleaved(places: Places, num_microbatches: int) -> tuple[Actions, ...]:
    """A last group smaller than the stages may need a longer way in than whole groups do: as much as it takes."""
    for extra in range(places.num_spans * num_microbatches + 1):
        orders = one_f_one_b(places, num_microbatches, extra)
        if not is_endless(orders, places):
            return orders
    raise AssertionError("all forwards first never waits for ever")


def h1(places: Places, num_microbatches: int) -> tuple[Actions, ...]:
    p = places.num_stages
    return tuple(_zero_bubble(p - stage, stage, num_microbatches) for stage in range(p))


def h2(places: Places, num_microbatches: int) -> tuple[Actions, ...]:
    p = places.num_stages
    return tuple(_zero_bubble(2 * (p - stage) - 1, 2 * stage, num_microbatches) for stage in range(p))


def _zero_bubble(warmup: int, lag: int, num_microbatches: int) -> Actions:
    warmup = min(warmup, num_microbatches)
    words = ["F"] * warmup
    for i in range(num_microbatches):
        words += ["I"] + ["W"] * (i >= lag) + ["F"] * (warmup + i < num_microbatches)
    return _numbered(words)


def zbv(places: Places, num_microbatches: int) -> tuple[Actions, ...]:
    equal = ((1.0, 1.0, 1.0),) * places.num_spans
    orders = list_schedule(places, num_microbatches, equal, 2 * places.num_stages)
    assert orders is not None, "this rule never gets stuck"
    return orders


def goes_as_zbv(num_stages: Any, num_microbatches: Any) -> Any:
    return num_microbatches < 2 * num_stages


def dualpipe_v(places: Places, num_microbatches: int) -> tuple[Actions, ...]:
    """Fewer than two microbatches a stage are too few for its pattern: they go as in zbv."""
    p = places.num_stages
    if goes_as_zbv(p, num_microbatches):
        return zbv(places, num_microbatches)

    def order(stage: int) -> Actions:
        after, upto = p - stage - 1, stage + 1
        words = ["F0"] * (2 * after) + ["F0", "F1"] * upto
        words += ["I1", "W", "F1"] * after  # backward begins, its weight half at once to fill the wait for the next
        words += ["F0", "B1", "F1", "B0"] * (num_microbatches - 2 * p + upto)  # both directions, one of each in turn
        words += ["B1", "F1", "B0"] * after
        whole = 2 * (upto // 2) + (stage % 2 == 0)  # the way out: weight halves are put off from its middle on
        words += [("B" if place < whole else "I") + "10"[place % 2] for place in range(2 * upto)]
        return _numbered(words + ["W", "I0"] * after)

    return tuple(map(order, range(p)))


def stream(stage: int, num_stages: int, num_microbatches: int, call: Call) -> Actions:
    """What a stage computes. Needs as many microbatches as stages: a step is updated within the next call."""
    assert num_microbatches >= num_stages
    lag = num_stages - 1 - stage
    if call == "flush":
        return tuple(action for i in range(-lag, 0) for action in _backward(i, num_microbatches))
    actions: list[Action] = []
    for i in range(num_microbatches):
        actions.append(Action("forward", i))
        if i >= lag or call == "next":
            actions += _backward(i - lag, num_microbatches)
    return tuple(actions)


def _backward(i: int, num_microbatches: int) -> Iterator[Action]:
    """With the step's beginning before its first backward and its end after the last."""
    if i in (0, -num_microbatches):
        yield Action("begin", i)
    yield Action("backward", i)
    if i in (-1, num_microbatches - 1):
        yield Action("exchange", i)
        yield Action("update", i)


def held_all(stage: Any, num_stages: Any, num_microbatches: Any, chunks: int) -> Any:
    return num_microbatches


def held_by_1f1b(stage: Any, num_stages: Any, num_microbatches: Any, chunks: int) -> Any:
    if chunks == 1:
        return np.minimum(num_stages - stage, num_microbatches)
    most = ((chunks - 1) * num_stages + 2 * (num_stages - stage - 1) + 1) / chunks
    return np.minimum(most, num_microbatches)


def held_as_stages(stage: Any, num_stages: Any, num_microbatches: Any, chunks: int) -> Any:
    """As many as 1F1B's first stage, everywhere."""
    return np.minimum(num_stages, num_microbatches)


def held_by_h2(stage: Any, num_stages: Any, num_microbatches: Any, chunks: int) -> Any:
    return np.minimum(2 * num_stages - 1, num_microbatches)


def held_by_dualpipe_v(stage: Any, num_stages: Any, num_microbatches: Any, chunks: int) -> Any:
    return np.minimum(num_stages + 0.5, num_microbatches)


def least_held_interleaved(stage: Any, num_stages: Any, num_microbatches: Any, chunks: int) -> tuple[Any, ...]:
    """When the first backward begins: chunks take turns of as many microbatches as there are stages."""
    last = 2 * (num_stages - stage - 1) + 1
    turn, more = np.minimum(num_stages, num_microbatches), np.maximum(last - num_stages, 0)
    return np.minimum(num_stages + more, num_microbatches), *(turn,) * (chunks - 2), np.minimum(last, turn)


def least_held_vee(stage: Any, num_stages: Any, num_microbatches: Any, chunks: int) -> tuple[Any, Any]:
    """Of a V: its first chunk waits for the way to the end and back, its second for the way back alone."""
    first = np.minimum(2 * num_stages - 1 - stage, num_microbatches)
    return first, np.minimum(stage + 1, num_microbatches)


def least_held_all(stage: Any, num_stages: Any, num_microbatches: Any, chunks: int) -> tuple[Any, ...]:
    """All forwards come before all backwards."""
    return (num_microbatches,) * chunks


def one_of_each(stage: Any, num_stages: Any, num_microbatches: Any, chunks: int) -> tuple[Any, ...]:
    """One microbatch held per chunk, the one that runs: valid for every schedule."""
    return (1,) * chunks
