"""Which blocks of a stage follow which policy: the choices worth pricing.

A choice is an array (kinds of block, policies) of counts; the rest of a kind follows none. Where there are few, all are
listed. Else what one block of each kind saves and costs by each policy makes the front: sums that no other beats in
both time and bytes. The fastest that fits is near where the front has saved enough, and found there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from math import comb, prod

import numpy as np

FEW = 36
"""Choices that are all listed: all of two policies for seven blocks, or two and two of two kinds."""
MOST = 4096
"""Points of a front of several kinds that are kept."""
STEPS = (-2, -1, 0, 1, 2, 3, 4, 6, 9, 13, 19, 28, 42, 63, 95, 142, 213, 320, 480, 720, 1080, 1620, 2430)
"""Points of a front that are priced, from where enough should be saved on."""

Kinds = tuple[int, ...]
"""Blocks of each kind in a stage."""


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


@lru_cache(maxsize=1024)
def _count_table(count: int, policies: int) -> np.ndarray:
    return np.array(_counts(count, policies), dtype=int).reshape(-1, policies)


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
    ways = _count_table(count, len(seconds))
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
    return np.unique([0, last, *(min(max(start + step, 0), last) for step in STEPS)])


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
