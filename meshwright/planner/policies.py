"""Which blocks of a stage follow which policy: the fastest choice that fits.

A choice is an array (kinds of block, policies) of counts; the rest of a kind follows none. Where there are few, all are
listed. Else what one block of each kind saves and costs by each policy makes the front: sums that no other beats in
both time and bytes. On it, fastest first, the first that fits is found by pricing a few points where enough should be
saved, then those between the last that does not fit and the first that does.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import comb, prod
from typing import NamedTuple

import numpy as np

from meshwright.core.technique import technique_named
from meshwright.planner.rows import BoundedGrid, OrderedCandidate, Priced, PricedRows, StageCell
from meshwright.planner.wishes import Kinds

FEW = 165
"""Choices that are all listed: all of three policies for eight blocks, or for two and two of two kinds."""
MOST = 4096
"""Points of a front that are kept."""
STEPS = (-2, -1, 0, 1, 2, 3, 4, 6, 9, 13, 19, 28, 42, 63, 95, 142, 213, 320, 480, 720, 1080, 1620, 2430)
"""Points of a front that are priced, from where enough should be saved on."""
REFINED = 2
"""Times that points between are priced."""
BETWEEN = 12
"""How many of them."""
_BINS = 1024
"""Intervals of seconds by which points that others beat are found before all are sorted."""


def is_listed(kinds: Kinds, policies: int) -> bool:
    """Whether all choices are listed."""
    return prod(comb(count + policies, policies) for count in kinds) <= FEW


@lru_cache(maxsize=4096)
def listed(kinds: Kinds, policies: int) -> np.ndarray:
    """(choices, kinds, policies): all of them."""
    each = []
    for count in kinds:
        ways = itertools.product(range(count + 1), repeat=policies)
        each.append([way for way in ways if sum(way) <= count])
    return np.array(list(itertools.product(*each)), dtype=int).reshape(prod(map(len, each)), len(kinds), policies)


def unit_choices(kinds: Kinds, policies: int) -> np.ndarray:
    """None, then every policy followed by all blocks of one kind: what `front` is made from."""
    result = np.zeros((1 + len(kinds) * policies, len(kinds), policies), dtype=int)
    for row, (kind, policy) in enumerate(np.ndindex(len(kinds), policies), start=1):
        result[row, kind, policy] = kinds[kind]
    return result


def front(kinds: Kinds, seconds: np.ndarray, num_bytes: np.ndarray) -> np.ndarray:
    """Choices that no other beats in both seconds and bytes, fastest first; (kinds, policies) each: `seconds` more and
    `num_bytes` fewer of one block than if it followed none. Exact while no more than `MOST` are left.

    Remembered by their proportions, which stages have in common."""
    parts = [each.ravel() / (np.abs(each).max() or 1.0) for each in (seconds, num_bytes)]
    key = tuple(f"{number:.12g}" for each in parts for number in each)
    return _front(kinds, _Amounts(key=key, seconds=seconds, num_bytes=num_bytes))


@dataclass(frozen=True, kw_only=True)
class _Amounts:
    """Of one block by kind and policy; equal where the proportions are."""

    key: tuple[str, ...]
    seconds: np.ndarray = field(compare=False)
    num_bytes: np.ndarray = field(compare=False)


@lru_cache(maxsize=1024)
def _front(kinds: Kinds, amounts: _Amounts) -> np.ndarray:
    seconds, num_bytes = amounts.seconds, amounts.num_bytes
    choices = np.zeros((1, 0, seconds.shape[1]), dtype=int)
    spent = saved = np.zeros(1)
    for kind, count in enumerate(kinds):
        own = listed((count,), seconds.shape[1])
        mine = own[:, 0] @ seconds[kind], own[:, 0] @ num_bytes[kind]
        kept = _unbeaten(*mine)
        more, gained = (each[kept] for each in mine)
        spent, saved = np.add.outer(spent, more).ravel(), np.add.outer(saved, gained).ravel()
        points = _unbeaten(spent, saved)
        before, after = np.divmod(points, len(kept))
        choices = np.concatenate([choices[before], own[kept[after]]], axis=1)
        spent, saved = spent[points], saved[points]
    return choices


def _unbeaten(spent: np.ndarray, saved: np.ndarray) -> np.ndarray:
    """Points that no other beats, the least spent first; of more than `MOST`, evenly many of them, ends included."""
    points, least, most = np.arange(len(spent)), spent.min(), spent.max()
    if len(spent) > _BINS and 0 < most - least < np.inf:
        # Without those that a point of fewer seconds beats: sorting what is left takes a tenth.
        bins, best = ((spent - least) * ((_BINS - 1) / (most - least))).astype(int), np.full(_BINS, -np.inf)
        np.maximum.at(best, bins, saved)
        points = np.flatnonzero(saved > np.concatenate([[-np.inf], np.maximum.accumulate(best)[:-1]])[bins])
    order = points[np.lexsort((-saved[points], spent[points]))]
    so_far = np.maximum.accumulate(saved[order])
    gains = np.diff(so_far) > 1e-9 * np.abs(so_far[:-1])
    kept = order[np.concatenate([[True], gains])]
    return kept if len(kept) <= MOST else kept[np.round(np.linspace(0, len(kept) - 1, MOST)).astype(int)]


def near(front_saved: np.ndarray, needed: float) -> np.ndarray:
    """Which points of a front to price: closely where enough should be saved, ever wider beyond, and the last."""
    start = int(np.searchsorted(front_saved, needed))
    last = len(front_saved) - 1
    return np.array(sorted({0, last, *(min(max(start + step, 0), last) for step in STEPS)}))


class Option(NamedTuple):
    """The fastest way a stage can follow policies and fit, as in `solve.Table`; infinite where none fits."""

    forward: float
    backward: float
    weight: float
    tail: float
    least_forward: float
    least_backward: float
    lower: float
    choice: np.ndarray
    """(kinds, policies): blocks that follow each."""


class PolicyFront(NamedTuple):
    """Choices, fastest first."""

    choices: np.ndarray
    saved_bytes: np.ndarray | None = None
    """By choice; None: there are no others, and all are priced."""
    late_bytes: float = 0.0
    """Of none of them."""

    @property
    def is_all(self) -> bool:
        return self.saved_bytes is None

    def first_look(self, memory_bytes: float) -> np.ndarray:
        """Those that are priced first."""
        if self.saved_bytes is None:
            return np.arange(len(self.choices))
        return near(self.saved_bytes, self.late_bytes - memory_bytes)


Memo = dict[StageCell, tuple[PolicyFront, dict[int, Priced]]]
"""What is known of cells, whatever memory their picks may have: the front, and the prices of some choices."""


def fronts_of(leaf: BoundedGrid, picks: Sequence[OrderedCandidate], cells: Sequence[StageCell]) -> list[PolicyFront]:
    """What each stage's blocks may follow; where not all is listed, found with the help of a first pricing."""
    policies = len(leaf.policies)
    hard = [cell for cell in cells if not is_listed(cell.kinds, policies)]
    if hard:
        units = [unit_choices(cell.kinds, policies) for cell in hard]
        priced = PricedRows(leaf, picks, hard, units).columns()
    copies = [technique_named(name).uses_tiers for name, _ in leaf.policies]
    must = [at for at, (name, _) in enumerate(leaf.policies) if name in leaf.required]
    result, row = [], 0
    for cell in cells:
        saved, late = None, 0.0
        if is_listed(cell.kinds, policies):
            choices = listed(cell.kinds, policies)
        else:
            rows = slice(row + 1, row + 1 + len(cell.kinds) * policies)
            counts = np.maximum(np.repeat(cell.kinds, policies), 1).reshape(-1, policies)
            # Copies show on the way forward too.
            forward = (priced.forward[rows] - priced.forward[row]).reshape(counts.shape) * copies
            seconds = ((priced.backward[rows] - priced.backward[row]).reshape(counts.shape) + forward) / counts
            saved = (priced.kept_bytes[row] - priced.kept_bytes[rows]).reshape(counts.shape) / counts
            choices, late = front(cell.kinds, seconds, saved), float(priced.late_bytes[row])
            row = rows.stop
        if must:  # some block follows one of the policies that must be followed
            choices = choices[choices[:, :, must].sum(axis=(1, 2)) > 0]
            if not len(choices):  # a front without any: it saves nothing
                choices = np.zeros((1, len(cell.kinds), policies), dtype=int)
                choices[0, :, must[0]] = cell.kinds
        result.append(PolicyFront(choices, None if saved is None else (choices * saved).sum(axis=(1, 2)), late))
    return result


def options_of(
    leaf: BoundedGrid, picks: Sequence[OrderedCandidate], cells: Sequence[StageCell], memo: Memo | None = None
) -> tuple[dict[StageCell, Option], np.ndarray]:
    """The best of every cell, and the longest send of every pick. `memo`: from the same picks with other memory."""
    memo = {} if memo is None else memo
    new = [cell for cell in cells if cell not in memo]
    memo.update((cell, (each, {})) for cell, each in zip(new, fronts_of(leaf, picks, new), strict=True))
    points = {cell: memo[cell][0].first_look(picks[cell.at].memory_bytes) for cell in cells}
    for _ in range(1 + REFINED):
        looks = {cell: [at for at in which.tolist() if at not in memo[cell][1]] for cell, which in points.items()}
        looks = {cell: which for cell, which in looks.items() if which}
        if looks:
            rows = PricedRows(leaf, picks, list(looks), [memo[cell][0].choices[which] for cell, which in looks.items()])
            priced = map(Priced._make, np.stack(rows.columns(), axis=1).tolist())
            for cell, which in looks.items():
                memo[cell][1].update((at, next(priced)) for at in which)
        points = {
            cell: _between(memo[cell][1], picks[cell.at].memory_bytes) for cell in cells if not memo[cell][0].is_all
        }
    m, sends = leaf.grid.columns["num_microbatches"], np.zeros(len(picks))
    for cell in cells:
        sends[cell.at] = max(sends[cell.at], next(reversed(memo[cell][1].values())).send)
    return {
        cell: _best(*memo[cell], picks[cell.at].memory_bytes, int(m[picks[cell.at].candidate])) for cell in cells
    }, sends


def _between(known: Mapping[int, Priced], memory_bytes: float) -> np.ndarray:
    """Points not yet priced between the first that fits and the last before it that does not."""
    first = min((index for index, each in known.items() if each.peak_bytes <= memory_bytes), default=0)
    before = max((index for index in known if index < first), default=first)
    return np.linspace(before + 1, first - 1, max(0, min(BETWEEN, first - before - 1))).astype(int)


def _best(whole: PolicyFront, known: Mapping[int, Priced], memory_bytes: float, microbatches: int) -> Option:
    fast = known[min(known)]
    least = fast.forward, fast.backward - fast.weight
    follows = whole.choices.sum(axis=(1, 2))

    def rank(index: int) -> tuple[float, int, int]:
        each = known[index]
        # Of equally fast ones the one that follows least.
        return microbatches * (each.forward + each.backward) + each.tail, int(follows[index]), index

    order = sorted(known, key=rank)
    at = next((i for i, index in enumerate(order) if known[index].peak_bytes <= memory_bytes), None)
    if at is None:
        never = np.inf
        return Option(never, never, never, never, *least, never, whole.choices[0])
    best = known[order[at]]
    lower = best.forward + best.backward
    if not whole.is_all and at:  # between this one and the one before it there may be others
        before = known[order[at - 1]]
        lower = min(lower, before.forward + before.backward)
    return Option(*best[:4], *least, lower, whole.choices[order[at]])
