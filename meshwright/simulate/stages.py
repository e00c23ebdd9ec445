"""Stages that are alike are simulated once.

Inner stages with equally many blocks do the same work, so a stage list folds into runs; the first stage (where
samples enter) and the last (where the loss is) stay alone. The first of a run stands for it: it holds the most
microbatches.

    blocks (4, 4, 4, 4, 3)  ->  [0] [1 2 3] [4]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    start: int
    """The stage that stands for the run."""
    count: int
    blocks: int


def runs_of(blocks: Sequence[int]) -> tuple[Run, ...]:
    runs: list[Run] = []
    for stage, count in enumerate(blocks):
        is_end = stage in (0, 1, len(blocks) - 1)
        if not is_end and runs[-1].blocks == count:
            runs[-1] = Run(start=runs[-1].start, count=runs[-1].count + 1, blocks=count)
        else:
            runs.append(Run(start=stage, count=1, blocks=count))
    return tuple(runs)
