"""Stages that are alike are simulated once.

Inner stages with equally many blocks of each kind do the same work, so a stage list folds into runs; the first stage
(where samples enter) and the last (where the loss is) stay alone. The first of a run stands for it: it holds the most
microbatches.

    blocks (4, 4, 4, 4, 3)  ->  [0] [1 2 3] [4]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.core.profile import Profile


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    start: int
    """The stage that stands for the run."""
    count: int
    first_block: int
    blocks: int


def runs_of(profile: Profile, blocks: Sequence[int]) -> tuple[Run, ...]:
    runs: list[Run] = []
    first = 0
    alike: tuple[int, ...] = ()
    for stage, count in enumerate(blocks):
        is_end = stage in (0, 1, len(blocks) - 1)
        kinds = profile.blocks_within(first, count)
        if not is_end and kinds == alike:
            runs[-1] = replace(runs[-1], count=runs[-1].count + 1)
        else:
            runs.append(Run(start=stage, count=1, first_block=first, blocks=count))
        first, alike = first + count, kinds
    return tuple(runs)
