"""Which blocks of a stage follow which policy: the fastest choice that fits.

A choice is an array (kinds of block, policies) of counts; the rest of a kind follows none. Where there are few, all are
listed. Else what one block of each kind saves and costs by each policy makes the front: sums that no other beats in
both time and bytes. On it, fastest first, the first that fits is found by pricing a few points where enough should be
saved, then those between the last that does not fit and the first that does.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb, prod
from typing import NamedTuple

import numpy as np

from meshwright.planner.rows import (
    BoundedGrid,
    Kinds,
    OrderedCandidate,
    PricedRows,
    SearchInputs,
    StageCell,
    policy_fields,
)

FEW = 100
"""Choices that are all listed: all of three policies for six blocks, or for two and two of two kinds."""
MOST = 4096
"""Points of a front of several kinds that are kept."""
STEPS = (-2, -1, 0, 1, 2, 3, 4, 6, 9, 13, 19, 28, 42, 63, 95, 142, 213, 320, 480, 720, 1080, 1620, 2430)
"""Points of a front that are priced, from where enough should be saved on."""


def num_choices(kinds: Kinds, policies: int) -> int:
    return prod(comb(count + policies, policies) for count in kinds)


def is_listed(kinds: Kinds, policies: int, few: int = FEW) -> bool:
    """Whether all choices are listed."""
    return num_choices(kinds, policies) <= few


@lru_cache(maxsize=4096)
def listed(kinds: Kinds, policies: int) -> np.ndarray:
    """(choices, kinds, policies): all of them."""
    if not kinds or not policies:
        return np.zeros((1, len(kinds), policies), dtype=int)
    each = [_counts(count, policies) for count in kinds]
    return np.array(list(itertools.product(*each)), dtype=int).reshape(-1, len(kinds), policies)


@lru_cache(maxsize=1024)
def _counts(count: int, policies: int) -> list[tuple[int, ...]]:
    """All ways to give up to `count` blocks to policies."""
    ways = itertools.product(range(count + 1), repeat=policies)
    return [way for way in ways if sum(way) <= count]


def unit_choices(kinds: Kinds, policies: int) -> np.ndarray:
    """None, then every policy followed by all blocks of one kind: what `front` is made from."""
    found = [np.zeros((len(kinds), policies), dtype=int)]
    for kind, count in enumerate(kinds):
        for policy in range(policies):
            way = np.zeros((len(kinds), policies), dtype=int)
            way[kind, policy] = count
            found.append(way)
    return np.array(found)


def front(kinds: Kinds, seconds: np.ndarray, num_bytes: np.ndarray, most: int = MOST) -> np.ndarray:
    """Choices that no other beats in both seconds and bytes, fastest first; (kinds, policies) each: `seconds` more and
    `num_bytes` fewer of one block than if it followed none. Exact while no more than `most` are left."""
    policies = seconds.shape[1]
    there = [kind for kind, count in enumerate(kinds) if count]
    if len(there) == 1:
        ways = _of_one(kinds[there[0]], seconds[there[0]], num_bytes[there[0]])
        found = np.zeros((len(ways), len(kinds), policies), dtype=int)
        found[:, there[0]] = ways
        return found
    best: list[tuple[float, float, tuple[tuple[int, ...], ...]]] = [(0.0, 0.0, ())]
    for kind, count in enumerate(kinds):
        own = _thinned(
            [
                (float(np.dot(way, seconds[kind])), -float(np.dot(way, num_bytes[kind])), (way,))
                for way in _counts(count, policies)
            ],
            most,
        )
        best = _thinned([(s + t, a + b, x + y) for s, a, x in best for t, b, y in own], most)
    return np.array([way for _, _, way in best], dtype=int).reshape(-1, len(kinds), policies)


def _of_one(count: int, seconds: np.ndarray, num_bytes: np.ndarray) -> np.ndarray:
    """The same for blocks of one kind."""
    ways = listed((count,), len(seconds))[:, 0]
    spent, saved = ways @ seconds, ways @ num_bytes
    ways = ways[np.lexsort((-saved, spent))]
    saved = ways @ num_bytes
    so_far = np.maximum.accumulate(saved)
    gains = np.diff(so_far) > 1e-9 * np.abs(so_far[:-1])
    return ways[np.concatenate([[True], gains])]


def near(front_saved: np.ndarray, needed: float) -> np.ndarray:
    """Which points of a front to price: closely where enough should be saved, ever wider beyond, and the last."""
    start = int(np.searchsorted(front_saved, needed))
    last = len(front_saved) - 1
    return np.array(sorted({0, last, *(min(max(start + step, 0), last) for step in STEPS)}))


Point = tuple[float, float, tuple[tuple[int, ...], ...]]


def _thinned(points: Sequence[Point], most: int) -> list[Point]:
    """Those that no other beats; of more than `most`, evenly many of them, ends included."""
    kept: list[Point] = []
    least = np.inf
    for point in sorted(points):
        if point[1] < least:
            kept.append(point)
            least = point[1]
    if len(kept) > most:
        kept = [kept[round(i * (len(kept) - 1) / (most - 1))] for i in range(most)]
    return kept


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
        """As in `solve.Table`."""
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


def fronts_of(
    problem: SearchInputs, leaf: BoundedGrid, picks: Sequence[OrderedCandidate], cells: Sequence[StageCell]
) -> list[PolicyFront]:
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


def _all(cell: StageCell, policies: int) -> PolicyFront:
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
    problem: SearchInputs, leaf: BoundedGrid, picks: Sequence[OrderedCandidate], cells: Sequence[StageCell]
) -> tuple[dict[StageCell, Option], np.ndarray]:
    """The best of every cell, and the longest send of every pick."""
    fronts = dict(zip(cells, fronts_of(problem, leaf, picks, cells), strict=True))
    known: dict[StageCell, dict[int, _Known]] = {cell: {} for cell in cells}
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
    leaf: BoundedGrid,
    picks: Sequence[OrderedCandidate],
    fronts: Mapping[StageCell, PolicyFront],
    looks: Mapping[StageCell, np.ndarray],
    known: dict[StageCell, dict[int, _Known]],
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
