"""Schedules that take backward apart. I: input half, W: weight half, which nobody waits for and which fills the gaps.

Zero bubble (Qi et al. 2023):

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
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from meshwright.schedules.actions import Action, Actions
from meshwright.schedules.chunk_placement import Places
from meshwright.schedules.greedy import ListRule, list_schedule


def h1(places: Places, num_microbatches: int) -> tuple[Actions, ...]:
    p = places.num_stages
    return tuple(_order(p - stage, stage, num_microbatches) for stage in range(p))


def h2(places: Places, num_microbatches: int) -> tuple[Actions, ...]:
    p = places.num_stages
    return tuple(_order(2 * (p - stage) - 1, 2 * stage, num_microbatches) for stage in range(p))


def _order(warmup: int, lag: int, num_microbatches: int) -> Actions:
    warmup = min(warmup, num_microbatches)
    actions = [Action("forward", i) for i in range(warmup)]
    for i in range(num_microbatches):
        actions.append(Action("backward_input", i))
        if i >= lag:
            actions.append(Action("backward_weight", i - lag))
        if warmup + i < num_microbatches:
            actions.append(Action("forward", warmup + i))
    actions += [Action("backward_weight", i) for i in range(max(0, num_microbatches - lag), num_microbatches)]
    return tuple(actions)


def held_h1(stage: Any, num_stages: Any, num_microbatches: Any, chunks: int) -> Any:
    return np.minimum(num_stages, num_microbatches)


def held_h2(stage: Any, num_stages: Any, num_microbatches: Any, chunks: int) -> Any:
    return np.minimum(2 * num_stages - 1, num_microbatches)


def zbv(places: Places, num_microbatches: int) -> tuple[Actions, ...]:
    equal = ((1.0, 1.0, 1.0),) * places.num_spans
    orders = list_schedule(places, num_microbatches, equal, 2 * places.num_stages, ListRule())
    assert orders is not None, "this rule never gets stuck"
    return orders


def held_zbv(stage: Any, num_stages: Any, num_microbatches: Any, chunks: int) -> Any:
    return np.minimum(num_stages, num_microbatches)


class _StageWriter:
    """Writes down one stage's actions; microbatches of each chunk come in order."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.forwards, self.backwards = [0, 0], [0, 0]
        self.owed: deque[tuple[int, int]] = deque()

    def forward(self, chunk: int) -> None:
        self.actions.append(Action("forward", self.forwards[chunk], chunk))
        self.forwards[chunk] += 1

    def backward(self, chunk: int, *, is_split: bool = False) -> None:
        i = self.backwards[chunk]
        self.backwards[chunk] += 1
        self.actions.append(Action("backward_input" if is_split else "backward", i, chunk))
        if is_split:
            self.owed.append((i, chunk))

    def weight(self) -> None:
        self.actions.append(Action("backward_weight", *self.owed.popleft()))


def dualpipe_v(places: Places, num_microbatches: int) -> tuple[Actions, ...]:
    """Fewer than two microbatches a stage are too few for its pattern: they go as in zbv."""
    p = places.num_stages
    if num_microbatches < 2 * p:
        return zbv(places, num_microbatches)
    return tuple(_dualpipe_v(stage, p, num_microbatches) for stage in range(p))


def _dualpipe_v(stage: int, p: int, num_microbatches: int) -> Actions:
    after, upto = p - stage - 1, stage + 1
    made = _StageWriter()
    for _ in range(2 * after):
        made.forward(0)
    for _ in range(upto):
        made.forward(0)
        made.forward(1)
    for _ in range(after):  # backward begins, its weight half at once to fill the wait for the next
        made.backward(1, is_split=True)
        made.weight()
        made.forward(1)
    for _ in range(num_microbatches - 2 * p + upto):  # both directions, one of each in turn
        made.forward(0)
        made.backward(1)
        made.forward(1)
        made.backward(0)
    for _ in range(after):
        made.backward(1)
        made.forward(1)
        made.backward(0)
    is_split = False
    for turn in range(upto):  # the way out: weight halves are put off from its middle on
        is_split = is_split or (turn == upto // 2 and stage % 2 == 1)
        made.backward(1, is_split=is_split)
        is_split = is_split or (turn == upto // 2 and stage % 2 == 0)
        made.backward(0, is_split=is_split)
    for _ in range(after):
        made.weight()
        made.backward(0, is_split=True)
    while made.owed:
        made.weight()
    return tuple(made.actions)


def held_dualpipe_v(stage: Any, num_stages: Any, num_microbatches: Any, chunks: int) -> Any:
    return np.minimum(num_stages + 0.5, num_microbatches)
