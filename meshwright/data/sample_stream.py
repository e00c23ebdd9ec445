"""Which samples come at a cursor: the only place that decides it, for every kind of data.

A cursor is the number of samples consumed so far. It alone says what comes next: cursor -> epoch and place ->
(permutation of that epoch) -> train index -> (split) -> sample. Nothing is shuffled in memory, nothing depends on
the mesh, and resuming costs nothing.

A mixture repeats a schedule of 65536 slots, in which each part has its share, evenly spread:

    slot        0  1  2  3  4  5  6  7 ...      weights 2 : 1 : 1
    part        a  b  a  c  a  b  a  c ...
    own place   0  0  1  0  2  1  3  1 ...      how often this part came before, in this turn of the schedule

so that the part and its own cursor cost one lookup each, wherever the cursor stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from meshwright.data.held_out import Split
from meshwright.data.sample_order import Index, permuted

_NUM_SLOTS = 1 << 16


class Stream(Protocol):
    @property
    def num_train(self) -> int: ...

    @property
    def num_held_out(self) -> int: ...

    @property
    def facts(self) -> list[Any]:
        """What makes this another order than that of the same samples alone."""
        ...

    def train(self, cursor: int, num_samples: int) -> Index:
        """The samples that train at `cursor`, `cursor + 1`, ..."""
        ...

    def held_out(self, index: Index) -> Index:
        """The sample behind each held-out index, in a fixed order."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitStream:
    """Each epoch is a new order of all train samples."""

    split: Split
    seed: int

    @property
    def num_train(self) -> int:
        return self.split.num_train

    @property
    def num_held_out(self) -> int:
        return self.split.num_held_out

    @property
    def facts(self) -> list[Any]:
        return []

    def train(self, cursor: int, num_samples: int) -> Index:
        return self.at(cursor + np.arange(num_samples, dtype=np.int64))

    def at(self, cursors: Index) -> Index:
        epoch, place = np.divmod(cursors, self.num_train)
        return self.split.train(permuted(place, size=self.num_train, seed=self.seed, stream=epoch))

    def held_out(self, index: Index) -> Index:
        return self.split.held_out(index)


@dataclass(frozen=True, kw_only=True)
class MixedStream:
    """Parts with weights; samples are numbered through, part after part. Each part keeps its own epochs."""

    parts: tuple[SplitStream, ...]
    weights: tuple[float, ...]
    seed: int

    @property
    def num_train(self) -> int:
        return sum(part.num_train for part in self.parts)

    @property
    def num_held_out(self) -> int:
        return sum(part.num_held_out for part in self.parts)

    @property
    def facts(self) -> list[Any]:
        return ["mixture", list(self.weights), [part.split.num_samples for part in self.parts]]

    def train(self, cursor: int, num_samples: int) -> Index:
        part_of, own = self._places(cursor + np.arange(num_samples, dtype=np.int64))
        return self._gather(part_of, own, lambda part, index: part.at(index))

    def held_out(self, index: Index) -> Index:
        """In the same proportions. A part that is too small for its share repeats: what is estimated is the mixture."""
        part_of, own = self._places(np.asarray(index))
        return self._gather(part_of, own, lambda part, place: part.held_out(place % part.num_held_out))

    def _places(self, cursors: Index) -> tuple[Index, Index]:
        """The part of each cursor, and how many samples of that part came before."""
        part_of, own, counts = self._schedule
        turn, slot = np.divmod(cursors, _NUM_SLOTS)
        chosen = part_of[slot]
        return chosen, turn * counts[chosen] + own[slot]

    def _gather(self, part_of: Index, own: Index, sample_at: Any) -> Index:
        samples = np.empty(len(part_of), dtype=np.int64)
        first = 0
        for number, part in enumerate(self.parts):
            mine = part_of == number
            samples[mine] = first + sample_at(part, own[mine])
            first += part.split.num_samples
        return samples

    @cached_property
    def _schedule(self) -> tuple[Index, Index, Index]:
        """(part of each slot, its own place, slots of each part)."""
        counts = _slot_counts(np.asarray(self.weights, dtype=np.float64))
        part_of = np.repeat(np.arange(len(counts)), counts)
        own = np.arange(_NUM_SLOTS) - np.repeat(np.cumsum(counts) - counts, counts)
        # Evenly spread, each part from a place of its own that the seed decides.
        phases = np.array([_fraction(f"{self.seed}/{part}") for part in range(len(counts))])
        order = np.argsort((own + phases[part_of]) / counts[part_of], kind="stable")
        return part_of[order], own[order], counts


def part_seed(seed: int, part: int) -> int:
    """Parts of one size must not walk in step."""
    return xxhash.xxh3_64_intdigest(f"{seed}/part {part}".encode())


def _fraction(text: str) -> float:
    return xxhash.xxh3_64_intdigest(text.encode()) / 2.0**64


def _slot_counts(weights: npt.NDArray[np.float64]) -> Index:
    """Whole slots in proportion, at least one each, by largest remainder."""
    assert 1 <= len(weights) <= _NUM_SLOTS
    exact = weights / weights.sum() * _NUM_SLOTS
    counts = np.maximum(1, np.floor(exact)).astype(np.int64)
    for _ in range(int(abs(_NUM_SLOTS - counts.sum()))):
        missing = exact - counts
        if counts.sum() < _NUM_SLOTS:
            counts[np.argmax(missing)] += 1
        else:
            counts[np.argmin(np.where(counts > 1, missing, np.inf))] -= 1
    return counts
