"""The fastest policies that fit, for every stage with every number of blocks it may have.

On the front of choices, fastest first, the first that fits is found by pricing a few points where enough should be
saved, then those between the last that does not fit and the first that does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meshwright.planner.bounds import Leaf
from meshwright.planner.policies import front, is_listed, listed, near, unit_choices
from meshwright.planner.priced_rows import Cell, Pick, PricedRows, SearchInputs, policy_fields

REFINED = 2
"""Times that points between are priced."""
BETWEEN = 12
"""How many of them."""


class Option(NamedTuple):
    """The fastest way a stage can follow policies and fit; seconds are infinite where none fits."""

    forward: float
    backward: float
    weight: float
    tail: float
    lower: float
    """Seconds of forward and backward that no choice beats and fits."""
    choice: np.ndarray
    """(kinds, policies): blocks that follow each."""
    fast: tuple[float, float]
    """Forward and backward, without the weights' half, where no policy is followed."""

    @property
    def columns(self) -> tuple[float, ...]:
        """As in `stages.Table`."""
        return self.forward, self.backward, self.weight, self.tail, *self.fast, self.lower


@dataclass(frozen=True, kw_only=True)
class PolicyFront:
    """Choices, fastest first."""

    choices: np.ndarray
    saved_bytes: np.ndarray
    needed_bytes: float
    is_all: bool
    """There are no others, and all are priced."""

    def first_look(self) -> np.ndarray:
        return np.arange(len(self.choices)) if self.is_all else near(self.saved_bytes, self.needed_bytes)


class _Known(NamedTuple):
    forward: float
    backward: float
    weight: float
    tail: float
    peak_bytes: float


def fronts_of(problem: SearchInputs, leaf: Leaf, picks: Sequence[Pick], cells: Sequence[Cell]) -> list[PolicyFront]:
    """What each stage's blocks may follow; where not all is listed, found with the help of a first pricing."""
    fields = policy_fields(leaf)
    policies = len(fields)
    hard = [i for i, cell in enumerate(cells) if not is_listed(cell.kinds, policies)]
    units = [unit_choices(cells[i].kinds, policies) for i in hard]
    found: dict[int, PolicyFront] = {}
    if hard:
        priced = PricedRows(problem, leaf, picks, [cells[i] for i in hard], units).columns()
        row = 0
        for i, each in zip(hard, units, strict=True):
            cell, rows = cells[i], slice(row, row + len(each))
            counts = np.maximum(np.repeat(cell.kinds, policies), 1).reshape(-1, policies)
            seconds = (priced.backward[rows][1:] - priced.backward[row]).reshape(counts.shape) / counts
            saved = (priced.kept_bytes[row] - priced.kept_bytes[rows][1:]).reshape(counts.shape) / counts
            choices = front(cell.kinds, seconds, saved)
            found[i] = PolicyFront(
                choices=choices,
                saved_bytes=(choices * saved).sum(axis=(1, 2)),
                needed_bytes=float(priced.late_bytes[row] - picks[cell.at].memory_bytes),
                is_all=False,
            )
            row += len(each)
    must = [at for at, (name, _) in enumerate(fields) if name in leaf.required]
    return [_keeping(found[i] if i in found else _all(cell, policies), must) for i, cell in enumerate(cells)]


def _all(cell: Cell, policies: int) -> PolicyFront:
    choices = listed(cell.kinds, policies)
    return PolicyFront(choices=choices, saved_bytes=np.zeros(len(choices)), needed_bytes=0.0, is_all=True)


def _keeping(whole: PolicyFront, must: list[int]) -> PolicyFront:
    """Only choices in which some block follows one of the policies that must be followed."""
    if not must:
        return whole
    kept = whole.choices[:, :, must].sum(axis=(1, 2)) > 0
    return PolicyFront(
        choices=whole.choices[kept],
        saved_bytes=whole.saved_bytes[kept],
        needed_bytes=whole.needed_bytes,
        is_all=whole.is_all,
    )


def options_of(
    problem: SearchInputs, leaf: Leaf, picks: Sequence[Pick], cells: Sequence[Cell]
) -> tuple[dict[Cell, Option], np.ndarray]:
    """The best of every cell, and the longest send of every pick."""
    fronts = dict(zip(cells, fronts_of(problem, leaf, picks, cells), strict=True))
    known: dict[Cell, dict[int, _Known]] = {cell: {} for cell in cells}
    sends = np.zeros(len(picks))
    looks = {cell: each.first_look() for cell, each in fronts.items()}
    for _ in range(1 + REFINED):
        _price(problem, leaf, picks, fronts, looks, known, sends)
        looks = {
            cell: between
            for cell, each in fronts.items()
            if not each.is_all and len(between := _between(known[cell], picks[cell.at].memory_bytes))
        }
        if not looks:
            break
    m = leaf.grid.columns["num_microbatches"]
    return {
        cell: _best(each, known[cell], picks[cell.at].memory_bytes, int(m[picks[cell.at].candidate]))
        for cell, each in fronts.items()
    }, sends


def _price(
    problem: SearchInputs,
    leaf: Leaf,
    picks: Sequence[Pick],
    fronts: Mapping[Cell, PolicyFront],
    looks: Mapping[Cell, np.ndarray],
    known: dict[Cell, dict[int, _Known]],
    sends: np.ndarray,
) -> None:
    chosen = [(cell, which) for cell, which in looks.items() if len(which)]
    if not chosen:
        return
    rows = PricedRows(problem, leaf, picks, [cell for cell, _ in chosen], [fronts[c].choices[w] for c, w in chosen])
    priced = rows.columns()
    columns = (priced.forward, priced.backward, priced.weight, priced.tail, priced.peak_bytes)
    table = np.stack(columns, axis=1).tolist()
    row = 0
    for cell, which in chosen:
        for index in which.tolist():
            known[cell][index] = _Known(*table[row])
            row += 1
        sends[cell.at] = max(sends[cell.at], float(priced.send[row - 1]))


def _between(known: Mapping[int, _Known], memory_bytes: float) -> np.ndarray:
    """Points not yet priced between the first that fits and the last before it that does not."""
    fitting = [index for index, each in known.items() if each.peak_bytes <= memory_bytes]
    if not fitting:
        return np.zeros(0, dtype=int)
    first = min(fitting)
    before = max((index for index in known if index < first), default=first)
    if first - before < 2:
        return np.zeros(0, dtype=int)
    return np.unique(np.linspace(before + 1, first - 1, min(BETWEEN, first - before - 1)).astype(int))


def _best(whole: PolicyFront, known: Mapping[int, _Known], memory_bytes: float, microbatches: int) -> Option:
    fast = min(known)
    way_there = (known[fast].forward, known[fast].backward - known[fast].weight)
    follows = whole.choices.sum(axis=(1, 2))

    def rank(index: int) -> tuple[float, int, int]:
        each = known[index]
        # Of equally fast ones the one that follows least.
        return microbatches * (each.forward + each.backward) + each.tail, int(follows[index]), index

    order = sorted(known, key=rank)
    at = next((i for i, index in enumerate(order) if known[index].peak_bytes <= memory_bytes), None)
    if at is None:
        never = np.inf
        return Option(never, never, never, never, never, whole.choices[0], way_there)
    best = known[order[at]]
    seconds = lower = best.forward + best.backward
    if not whole.is_all and at:  # between this one and the one before it there may be others
        before = known[order[at - 1]]
        lower = min(seconds, before.forward + before.backward)
    return Option(best.forward, best.backward, best.weight, best.tail, lower, whole.choices[order[at]], way_there)
