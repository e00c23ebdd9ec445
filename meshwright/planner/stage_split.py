"""How many blocks each stage gets: the best split there is, by what each stage would cost with so many.

Few splits are all simulated. Of many, the one whose slowest stage's bound is least is found exactly, stage by stage
from the last (`least_bound`): no split of any kind is faster than that bound, and splits that reach it are simulated.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import comb

import numpy as np

from meshwright.schedules import Timetable
from meshwright.simulator.makespan import makespan, stage_bound

FEW = 200
"""Splits that are all simulated."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Seconds by (stage, first block, blocks - 1); infinite where the stage cannot be so, or does not fit."""

    forward: np.ndarray
    backward: np.ndarray
    """Whole."""
    weight: np.ndarray
    tail: np.ndarray
    least_forward: np.ndarray
    """The same of a stage whose blocks follow no policy, and so whether it fits or not."""
    least_backward: np.ndarray
    """Without the weights' half where that is apart: nobody waits for it."""
    lower: np.ndarray
    """Seconds of forward and backward that no policy of it beats and fits."""
    send_seconds: float
    num_microbatches: int

    @property
    def num_stages(self) -> int:
        return self.forward.shape[0]

    @property
    def num_blocks(self) -> int:
        return self.forward.shape[1]

    @property
    def widest(self) -> int:
        return self.forward.shape[2]


def num_splits(table: Table) -> int:
    return comb(table.num_blocks - 1, table.num_stages - 1)


def is_small(table: Table) -> bool:
    """Whether all splits are simulated."""
    room = table.num_blocks - table.num_stages + 1
    return table.widest >= room and num_splits(table) <= FEW


def all_splits(table: Table) -> list[tuple[int, ...]]:
    ends = itertools.combinations(range(1, table.num_blocks), table.num_stages - 1)
    return [tuple(np.diff((0, *cut, table.num_blocks)).tolist()) for cut in ends]


def step_seconds(table: Table, timetable: Timetable, splits: list[tuple[int, ...]]) -> np.ndarray:
    """Of every split; infinite where a stage of it cannot be."""
    sizes = np.array(splits)
    firsts = np.cumsum(sizes, axis=1) - sizes
    found = np.full(len(splits), np.inf)
    inside = np.all(sizes <= table.widest, axis=1)
    stage = np.arange(table.num_stages)
    at = (stage[None, :], firsts, np.minimum(sizes, table.widest) - 1)
    columns = [values[at] for values in (table.forward, table.backward, table.weight, table.tail)]
    runs = inside & np.all(np.isfinite(columns[1]), axis=1)
    if not runs.any():
        return found
    forward, backward, weight, tail = (values[runs] for values in columns)
    forward, backward, weight = (list(values.T) for values in (forward, backward, weight))
    busy = makespan(timetable, forward, backward, weight, table.send_seconds, table.num_microbatches)
    found[runs] = busy + tail.max(axis=1)
    return found


def least_bound(table: Table, timetable: Timetable) -> tuple[float, list[tuple[int, ...]]]:
    """No split is faster than this; and splits that reach it, the first stages as small or as large as they may be."""
    p, blocks = table.num_stages, table.num_blocks
    bound = _bounds(table, timetable)
    best = np.full((p + 1, blocks + 1), np.inf)
    best[p, blocks] = 0.0
    for stage in range(p - 1, -1, -1):
        for width in range(1, table.widest + 1):
            first = np.arange(blocks - width + 1)
            reached = np.maximum(bound[stage, first, width - 1], best[stage + 1, first + width])
            best[stage, first] = np.minimum(best[stage, first], reached)
    least = float(best[0, 0])
    if not np.isfinite(least):
        return least, []
    return least, [_walk(table, bound, best, least, widths) for widths in (1, -1)]


def _walk(table: Table, bound: np.ndarray, best: np.ndarray, limit: float, step: int) -> tuple[int, ...]:
    at, found = 0, []
    for stage in range(table.num_stages):
        for width in range(1, table.widest + 1)[::step]:
            after = at + width
            if after <= table.num_blocks and max(bound[stage, at, width - 1], best[stage + 1, after]) <= limit:
                found.append(width)
                at = after
                break
    return tuple(found)


def _bounds(table: Table, timetable: Timetable) -> np.ndarray:
    """Of a step, for every (stage, first block, blocks - 1) by itself: what is before and after it takes at least what
    so many blocks take in the widest stages there are."""
    p, blocks, widest = table.forward.shape
    stage = np.arange(p)[:, None, None]
    first = np.arange(blocks)[None, :, None]
    after = np.minimum(first + np.arange(1, widest + 1)[None, None, :], blocks)
    ways = []
    for values in (table.least_forward, table.least_backward):
        each, at_start, at_end = _least_by_block(values)
        total = np.concatenate([[0.0], np.cumsum(each)])
        before = total[first] + (stage > 0) * at_start
        rest = total[blocks] - total[after] + (stage < p - 1) * at_end
        ways.append((before, rest))
    (before_forward, after_forward), (before_backward, after_backward) = ways
    hops = table.send_seconds
    can_be = np.isfinite(table.lower)
    forward, lower, weight = (np.where(can_be, each, 0.0) for each in (table.forward, table.lower, table.weight))
    apart = weight if timetable.splits_backward else np.zeros_like(weight)
    bound = stage_bound(
        timetable,
        stage=stage,
        num_stages=p,
        num_microbatches=table.num_microbatches,
        forward=forward,
        backward=lower - forward - apart,
        apart=apart,
        before=(before_forward + stage * hops, before_backward + stage * hops),
        after=after_forward + after_backward + 2 * (p - 1 - stage) * hops,
    )
    return np.where(can_be, bound, np.inf)


def _least_by_block(values: np.ndarray) -> tuple[np.ndarray, float, float]:
    """At least what each block adds to its stage, and what the first and the last stage have beside that (which may be
    less than nothing)."""
    p, blocks, widest = values.shape
    middle = values[1:-1].min(axis=0) if p > 2 else np.minimum(values[0], values[-1])
    each = np.full(blocks, np.inf)
    for width in range(1, widest + 1):
        share = middle[:, width - 1] / width
        for offset in range(width):
            reach = blocks - offset
            each[offset:] = np.minimum(each[offset:], share[:reach])
    each = np.where(np.isfinite(each), each, 0.0)
    total = np.concatenate([[0.0], np.cumsum(each)])
    widths = np.arange(1, widest + 1)
    at_start = values[0, 0, :] - total[np.minimum(widths, blocks)]
    starts = np.maximum(blocks - widths, 0)
    at_end = values[-1, starts, widths - 1] - (total[blocks] - total[starts])
    return each, _least(at_start), _least(at_end)


def _least(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.min()) if len(finite) else 0.0
