"""1F1B: a stage starts backward as soon as it can, so it holds at most `num_stages - stage` microbatches.

stage 0   F0 F1 F2          B0 F3    B1    B2    B3
stage 1      F0 F1       B0 F2 B1 F3    B2    B3
stage 2         F0 B0 F1 B1 F2 B2 F3 B3

With several chunks (interleaved; Narayanan et al. 2021): microbatches go round the stages in groups of `num_stages`,
once for each chunk, and the bubble is shorter by as many times as there are chunks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwright.schedules.actions import Action, Actions
from meshwright.schedules.chunk_placement import Places
from meshwright.schedules.events import is_endless


def one_f_one_b(places: Places, num_microbatches: int) -> tuple[Actions, ...]:
    return tuple(_order(places, stage, num_microbatches, 0) for stage in range(places.num_stages))


def interleaved(places: Places, num_microbatches: int) -> tuple[Actions, ...]:
    """A last group smaller than the stages may need a longer way in than whole groups do: as much as it takes."""
    for extra in range(places.num_spans * num_microbatches + 1):
        orders = tuple(_order(places, stage, num_microbatches, extra) for stage in range(places.num_stages))
        if not is_endless(orders, places):
            return orders
    raise AssertionError("all forwards first never waits for ever")


def _order(places: Places, stage: int, num_microbatches: int, extra: int) -> Actions:
    forward = _in_groups(places, num_microbatches, range(places.chunks))
    backward = _in_groups(places, num_microbatches, range(places.chunks - 1, -1, -1))
    warmup = places.num_stages - stage
    if places.chunks > 1:
        warmup = 2 * (places.num_stages - stage - 1) + (places.chunks - 1) * places.num_stages + 1 + extra
    warmup = min(warmup, len(forward))
    actions = [Action("forward", *each) for each in forward[:warmup]]
    for turn, each in enumerate(backward):
        actions.append(Action("backward", *each))
        if warmup + turn < len(forward):
            actions.append(Action("forward", *forward[warmup + turn]))
    return tuple(actions)


def _in_groups(places: Places, num_microbatches: int, chunks: range) -> list[tuple[int, int]]:
    """(microbatch, chunk): a group of microbatches through one chunk after the other."""
    size = places.num_stages
    starts = range(0, num_microbatches, size)
    return [(i, chunk) for start in starts for chunk in chunks for i in range(num_microbatches)[start : start + size]]


def held(stage: Any, num_stages: Any, num_microbatches: Any, chunks: int) -> Any:
    if chunks == 1:
        return np.minimum(num_stages - stage, num_microbatches)
    most = ((chunks - 1) * num_stages + 2 * (num_stages - stage - 1) + 1) / chunks
    return np.minimum(most, num_microbatches)


def least_held(stage: Any, num_stages: Any, num_microbatches: Any) -> Any:
    """Of the last chunk, when the first backward begins."""
    return np.minimum(np.minimum(2 * (num_stages - stage - 1) + 1, num_stages), num_microbatches)
