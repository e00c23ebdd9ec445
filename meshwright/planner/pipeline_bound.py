"""A step of a pipeline, at least: for every way to deal blocks out, from one that is about even (docs/search.md)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.schedules import PipelineTimes, Timetable


@dataclass(frozen=True, kw_only=True)
class PipelineBound:
    """A bound for every way to deal blocks out, from one that is about even (docs/search.md derives it)."""

    blocks: int
    is_one_kind: bool
    runs: tuple[np.ndarray, ...]
    stages: np.ndarray
    microbatches: np.ndarray
    forward: np.ndarray
    """(candidates, runs), as the two after it."""
    each: np.ndarray
    """All of a microbatch's seconds."""
    least: np.ndarray
    """Of these, what a stage has in every split."""
    apart: np.ndarray
    """What backward leaves for later."""
    send: np.ndarray
    timetable: Timetable

    def least_seconds(self) -> np.ndarray:
        counts = self.runs[1]
        through = (counts * self.least).sum(axis=1)
        there, each = counts > 0, np.maximum(self.each, 1e-30)
        forward = np.where(there, self.forward / each, np.inf)
        larger = np.maximum(self.forward, self.each - self.forward) / each
        times = PipelineTimes(
            microbatches=self.microbatches,
            stages=self.stages,
            through=through,
            pace=self._pace(through),
            send=self.send,
            larger=np.where(there, larger, np.inf).min(axis=1),
            least_forward=forward.min(axis=1),
            most_forward=np.where(there, forward, 0.0).max(axis=1),
            least_way=np.where(there, (self.each - self.apart) / each, np.inf).min(axis=1),
            later=(counts * self.apart).sum(axis=1),
        )
        bound = self.timetable.step_bound(times)
        return np.maximum(bound, self._after_the_way()) if self.timetable.chunks > 1 else bound

    def _pace(self, through: np.ndarray) -> np.ndarray:
        """The slowest stage's seconds for a microbatch, at least: of an even share of it all; and of as many blocks as
        some stage must have, where they are alike."""
        _, counts, _, blocks = self.runs
        if self.timetable.chunks > 1:  # dealt out evenly, as they are
            return np.where(counts > 0, self.each, 0.0).max(axis=1)
        least = through / self.stages
        if not self.is_one_kind or counts.shape[1] < 3:
            return least
        most = -(-self.blocks // self.stages)
        # An inner stage: without ends, and what it has beside its blocks only makes fewer cost more each.
        is_inner = (self.stages > 2) & (blocks[:, 1] >= most)
        inner = self.each[:, 1] * most / np.maximum(blocks[:, 1], 1)
        return np.maximum(least, np.where(is_inner, inner, 0.0))

    def _after_the_way(self) -> np.ndarray:
        """A stage waits for the first chunks of those before it, going forward; and they for it, going back, unless it
        has work left for then."""
        starts, counts, _, blocks = self.runs
        m = self.microbatches[:, None]
        chunk = (self.blocks // (self.stages * self.timetable.chunks))[:, None] / np.maximum(blocks, 1)
        before = np.maximum(starts + counts - 1, 0)
        is_there = counts > 0
        back = self.each - self.forward - self.apart
        way_in = before * np.where(is_there, self.forward * chunk, np.inf).min(axis=1, keepdims=True)
        way_out = before * np.where(is_there, back * chunk, np.inf).min(axis=1, keepdims=True)
        bound = way_in + np.maximum(m * self.each, m * (self.each - self.apart) + way_out)
        return np.where(is_there, bound, 0.0).max(axis=1)
