"""Which blocks each stage gets: the splits whose slowest stage is as fast as can be.

What a stage costs (seconds, flops, a bound of the step) is given by (stage, first block, blocks - 1), so stages may lie
on different devices; what is infinite cannot be. The least cost of the slowest stage is found exactly, stage by stage
from the last. Many splits reach it; a rule says which of the stages that may be are taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import comb

import numpy as np

from meshwright.core.profile import Layer, Profile

Split = tuple[int, ...]
"""Blocks of each stage."""
Rule = Callable[[np.ndarray], np.ndarray]
"""Of the stages that may be, (stage, first block, blocks - 1), those that are taken where several may be."""

_TOLERANCE = 1e-12
"""Share by which equal sums may differ."""


REACH = 3
"""Blocks more or fewer than an even share that a stage may have; with few blocks, any number."""
FEW_BLOCKS, FEW_SPLITS = 12, 64


@lru_cache(maxsize=256)
def widths(blocks: int, sizes: Split) -> tuple[Split, int]:
    """The fewest blocks that each stage may have, and the most that any may, given about how many each has."""
    room = blocks - len(sizes) + 1
    if blocks <= FEW_BLOCKS or comb(blocks - 1, len(sizes) - 1) <= FEW_SPLITS:
        return (1,) * len(sizes), room
    return tuple(max(1, size - REACH) for size in sizes), min(room, max(sizes) + REACH)


def all_splits(num_blocks: int, num_stages: int) -> list[Split]:
    ends = itertools.combinations(range(1, num_blocks), num_stages - 1)
    return [tuple(np.diff((0, *cut, num_blocks)).tolist()) for cut in ends]


def fastest_splits(cost: np.ndarray, *rules: Rule) -> tuple[float, list[Split]]:
    """The least cost of the slowest stage over all splits; and a split that reaches it by each rule, none where it is
    infinite. `cost`: by (stage, first block, blocks - 1)."""
    num_stages, blocks, widest = cost.shape
    ends = np.arange(blocks)[:, None] + np.arange(1, widest + 1)
    cost = np.where(ends <= blocks, cost, np.inf)
    ends = np.minimum(ends, blocks)
    best = np.full((num_stages + 1, blocks + 1), np.inf)
    best[num_stages, blocks] = 0.0
    for stage in reversed(range(num_stages)):
        best[stage, :blocks] = np.maximum(cost[stage], best[stage + 1, ends]).min(axis=1)
    least = float(best[0, 0])
    if not np.isfinite(least):
        return least, []
    may_be = np.maximum(cost, best[1:, ends]) <= least * (1 + _TOLERANCE)
    return least, [_followed(rule(may_be)) for rule in rules]


def _followed(taken: np.ndarray) -> Split:
    """From the first stage on, each with the fewest blocks of those taken."""
    first, split = 0, []
    for stage in taken:
        split.append(int(np.argmax(stage[first])) + 1)
        first += split[-1]
    return tuple(split)


def smallest_first(may_be: np.ndarray) -> np.ndarray:
    """The first stages as small as they may be."""
    return may_be


def largest_first(may_be: np.ndarray) -> np.ndarray:
    """The first stages as large as they may be."""
    widest = may_be.shape[2] - 1 - np.argmax(may_be[:, :, ::-1], axis=2)
    return may_be & (np.arange(may_be.shape[2]) == widest[:, :, None])


def most_even(may_be: np.ndarray) -> np.ndarray:
    """Memory follows blocks: their squares are least in sum. Of equals the later inner stages have more, since the
    earlier a stage the more microbatches it holds; then the last one, which has the loss."""
    num_stages, blocks, widest = may_be.shape
    widths = np.arange(1, widest + 1)
    ends = np.minimum(np.arange(blocks)[:, None] + widths, blocks)
    reluctance = np.array([num_stages - 1, *range(num_stages - 2, 0, -1), num_stages - 1.5][:num_stages])
    total = np.full((num_stages + 1, blocks + 1), np.inf)
    total[num_stages, blocks] = 0.0
    taken = np.zeros_like(may_be)
    for stage in reversed(range(num_stages)):
        own = widths**2 + reluctance[stage] / (num_stages * blocks) * widths
        every = np.where(may_be[stage], own + total[stage + 1, ends], np.inf)
        total[stage, :blocks] = every.min(axis=1)
        taken[stage] = every <= total[stage, :blocks, None] * (1 + _TOLERANCE)
    return taken & may_be


def run_sums(weights: Sequence[float]) -> np.ndarray:
    """The sum of so many weights from a place on, by (first, count - 1); what is beyond the end adds nothing."""
    edges, first = np.concatenate([[0.0], np.cumsum(weights)]), np.arange(len(weights))[:, None]
    return edges[np.minimum(first + first.T + 1, len(weights))] - edges[first]


def layer_flops(layer: Layer, sequence: int) -> float:
    """Flops of one sample, forward and backward."""
    return float(sum(op.flops(1, sequence) + op.backward_flops(1, sequence) for op in layer.ops))


def balanced_stages(profile: Profile, num_stages: int, sequence: int) -> Split:
    """Blocks of each stage, at least one each, by their flops."""
    block = max(layer_flops(layer, sequence) for layer in profile.block_layers) or 1.0
    first, last = (
        0.0 if layer.is_block else layer_flops(layer, sequence) / block
        for layer in (profile.layers[0], profile.layers[-1])
    )
    costs = tuple(layer_flops(layer, sequence) / block for layer in profile.block_layers for _ in range(layer.repeat))
    return _balanced(costs, num_stages, first, last)


@lru_cache(maxsize=512)
def _balanced(costs: tuple[float, ...], num_stages: int, first: float, last: float) -> Split:
    """`first` and `last`: what the ends have beside their blocks."""
    cost = np.repeat(run_sums(costs)[None], num_stages, axis=0)
    cost[0] += first
    cost[-1] += last
    _, (split,) = fastest_splits(cost, most_even)
    return split
