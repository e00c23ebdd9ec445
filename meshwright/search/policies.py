"""Which blocks of a stage follow which policy: the choices worth pricing.

A choice is an array (kinds of block, policies) of counts; the rest of a kind follows none. Where there are few, all are
listed. Of one kind of block, those on the path from none to all of the last policy, then block by block to the one
before it, and so on: policies are listed with those that keep least first, so the path goes down in bytes and up in
time. Of several kinds, the sums that no other beats in both time and bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from math import comb, prod

import numpy as np

FEW = 256
"""Choices that are all listed."""
MOST = 64
"""Points of a front that are priced."""

Kinds = tuple[int, ...]
"""Blocks of each kind in a stage."""


def num_choices(kinds: Kinds, policies: int) -> int:
    return prod(comb(count + policies, policies) for count in kinds)


def is_listed(kinds: Kinds, policies: int, few: int = FEW) -> bool:
    """Whether all choices are listed."""
    return num_choices(kinds, policies) <= few


@lru_cache(maxsize=4096)
def listed(kinds: Kinds, policies: int, few: int = FEW) -> np.ndarray:
    """(choices, kinds, policies): all of them, or those on the path of the one kind there is."""
    if is_listed(kinds, policies, few):
        each = [_counts(count, policies) for count in kinds]
        return np.array(list(itertools.product(*each)), dtype=int).reshape(-1, len(kinds), policies)
    at = [kind for kind, count in enumerate(kinds) if count]
    assert len(at) == 1, "of several kinds, `front` knows"
    found = np.zeros((policies * kinds[at[0]] + 1, len(kinds), policies), dtype=int)
    found[:, at[0], :] = _path(kinds[at[0]], policies)
    return found


def _counts(count: int, policies: int) -> list[tuple[int, ...]]:
    """All ways to give up to `count` blocks to policies."""
    ways = itertools.product(range(count + 1), repeat=policies)
    return [way for way in ways if sum(way) <= count]


def _path(count: int, policies: int) -> list[list[int]]:
    found = [[0] * policies]
    for policy in range(policies - 1, -1, -1):
        for moved in range(1, count + 1):
            way = [0] * policies
            way[policy] = moved
            if policy + 1 < policies:
                way[policy + 1] = count - moved
            found.append(way)
    return found


def unit_choices(kinds: Kinds, policies: int) -> np.ndarray:
    """None, then every policy followed by all blocks of one kind: what `front` is made from."""
    found = [np.zeros((len(kinds), policies), dtype=int)]
    for kind, count in enumerate(kinds):
        for policy in range(policies):
            way = np.zeros((len(kinds), policies), dtype=int)
            way[kind, policy] = count
            found.append(way)
    return np.array(found)


def front(kinds: Kinds, seconds: np.ndarray, num_bytes: np.ndarray, most: int = 4096) -> list[np.ndarray]:
    """Choices that no other beats in both seconds and bytes, fastest first; (kinds, policies) each: `seconds` more and
    `num_bytes` fewer of one block than if it followed none. Exact while no more than `most` are left."""
    policies = seconds.shape[1]
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
    return [np.array(way, dtype=int).reshape(len(kinds), policies) for _, _, way in best]


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
