"""A step of a pipeline, at least: for every way to deal blocks out, from one that is about even (docs/search.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meshwright.core.work import Num
from meshwright.schedules import Timetable


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
        shares = Shares(
            larger=np.where(there, larger, np.inf).min(axis=1),
            least_forward=forward.min(axis=1),
            most_forward=np.where(there, forward, 0.0).max(axis=1),
            least_way=np.where(there, (self.each - self.apart) / each, np.inf).min(axis=1),
            later=(counts * self.apart).sum(axis=1),
        )
        pace = self._pace(through)
        bound = any_split(self.timetable, self.microbatches, self.stages, through, pace, shares, self.send)
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


def any_split(
    timetable: Timetable,
    microbatches: np.ndarray,
    stages: np.ndarray,
    through: np.ndarray,
    pace: np.ndarray,
    shares: Shares,
    send: np.ndarray,
) -> np.ndarray:
    """A step of every split whose slowest stage takes `pace` or longer for a microbatch; `through`: what a microbatch
    takes in all stages."""
    m = microbatches
    bound = m * pace
    if timetable.overlaps_steps:
        return bound
    # At the turn of a V nothing is sent.
    turns = timetable.chunks - 1 if timetable.places(1).shape == "vee" else 0
    bound = np.maximum(bound, through - shares.later + 2 * (stages * timetable.chunks - 1 - turns) * send)
    if timetable.chunks > 1:
        return bound
    if timetable.name == "zero_bubble_h1":
        return np.maximum(bound, m * pace + _first_wait(through, pace, stages, shares))
    if timetable.name != "1f1b":
        return bound
    return np.maximum(bound, whole_bound(through, pace, m, stages, shares.larger))


def _first_wait(through: np.ndarray, pace: np.ndarray, stages: np.ndarray, shares: Shares) -> np.ndarray:
    """Before a stage's first backward: what comes before it, and the rest of the way to the end and back."""
    others = through - pace
    short = (stages - 1) * pace - others
    low, high, way = shares.least_forward, shares.most_forward, shares.least_way
    rises = way > high
    kink = np.where(rises, low * (others - high * short / np.where(rises, way - high, 1.0)), 0.0)
    return np.maximum(0.0, np.minimum(kink, way * others - high * (short + others)))


def whole_bound(through: Num, pace: Num, microbatches: Num, stages: Num, larger: Num) -> Num:
    """Of 1F1B, for every split whose slowest stage takes `pace` or longer; `larger`: of a stage's time the larger share
    of forward and backward, at least."""
    m = microbatches
    wide = 2 * through + (m - stages - 1) * pace
    crossing = through / np.maximum(stages - m + 1 + (m - 1) * larger, 1e-30)
    narrow = through + (m - 1) * larger * np.maximum(pace, crossing)
    return np.where(m > stages, wide, narrow) * (1 - 1e-9)


class Shares(NamedTuple):
    """Of stages' times."""

    larger: np.ndarray
    """Of forward and backward the larger one's, at least."""
    least_forward: np.ndarray
    most_forward: np.ndarray
    least_way: np.ndarray
    """Without the weights' half, at least."""
    later: np.ndarray
    """Seconds of weights' halves that are apart, of all stages."""
