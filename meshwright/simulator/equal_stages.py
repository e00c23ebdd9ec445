"""Stages that are alike are simulated once.

Inner stages with equally many blocks of each kind do the same work, so a stage list folds into runs; the first stage
(where samples enter) and the last (where the loss is) stay alone. The first of a run stands for it: it holds the most
microbatches.

    blocks (4, 4, 4, 4, 3)  ->  [0] [1 2 3] [4]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.core.profile import Profile
from meshwright.core.technique import Spans, Technique


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRun:
    start: int
    """The stage that stands for the run."""
    count: int
    first_block: int
    blocks: int


def straight(blocks: Sequence[int]) -> tuple[Spans, ...]:
    """Stages of so many blocks each, one after the other."""
    ends = [sum(blocks[: stage + 1]) for stage in range(len(blocks))]
    return tuple(((end - count, end),) for end, count in zip(ends, blocks, strict=True))


def runs_of(profile: Profile, stages: Sequence[Spans], techniques: Sequence[Technique] = ()) -> tuple[StageRun, ...]:
    """`techniques` may treat blocks of one kind differently."""
    runs: list[StageRun] = []
    alike: tuple[Any, ...] = ()
    for stage, spans in enumerate(stages):
        is_end = stage in (0, 1, len(stages) - 1)
        kinds: tuple[Any, ...] = tuple(profile.blocks_within(first, last - first) for first, last in spans)
        for technique in techniques:
            if technique.policies:
                each = [technique.counts_in(profile, spans, chunk) for chunk in range(len(spans))]
                kinds += tuple(tuple(counts.values()) for counts in each)
        if not is_end and kinds == alike:
            runs[-1] = replace(runs[-1], count=runs[-1].count + 1)
        else:
            blocks = sum(last - first for first, last in spans)
            runs.append(StageRun(start=stage, count=1, first_block=spans[0][0], blocks=blocks))
        alike = kinds
    return tuple(runs)
