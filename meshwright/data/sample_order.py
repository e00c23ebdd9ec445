"""Which samples come at a cursor: the only place that decides it, for every kind of data.

A cursor is the number of samples consumed so far. It alone says what comes next: cursor -> epoch and place ->
(permutation of that epoch) -> train index -> (split) -> sample. Nothing is shuffled in memory, nothing depends on
the mesh, and resuming costs nothing.

**The permutation** is a Feistel network over 2 x `half_bits` bits, a bijection whatever its round function is; values
that fall outside [0, size) are sent through it again ("cycle walking") until they are inside: still a bijection.

    left, right  ->  right, left ^ F(right, key)        # one round; undone by the same F, hence a bijection

So element i of the order costs O(1) time and memory. It depends on (seed, stream) alone.
Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002.

**The split** holds out whole chunks of neighbouring samples, as neighbours often come from one document. The chunks are
drawn by the same permutation, so the count is exact up to a chunk, the two sides cannot overlap, and both lookups are
O(1).

    samples   | chunk 0 | chunk 1 | chunk 2 | chunk 3 | chunk 4 | tail |
                train     HELD      train     train     HELD      train

**A mixture** repeats a schedule of 65536 slots, in which each part has its share, evenly spread:

    slot        0  1  2  3  4  5  6  7 ...      weights 2 : 1 : 1
    part        a  b  a  c  a  b  a  c ...
    own place   0  0  1  0  2  1  3  1 ...      how often this part came before, in this turn of the schedule

so that the part and its own cursor cost one lookup each, wherever the cursor stands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

Index = npt.NDArray[np.int64]
_Word = npt.NDArray[np.uint64]

# Changing anything below changes the order of every run: raise this, so that fingerprints differ.
ORDER_VERSION = 1
_NUM_ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def permuted(index: npt.ArrayLike, *, size: int, seed: int, stream: npt.ArrayLike = 0) -> Index:
    """Where the order of `size` things puts each `index`. `stream` (one, or one per index) is the epoch."""
    assert size >= 1, "there is nothing to order"
    value = np.array(index, dtype=np.uint64, ndmin=1)
    assert not value.size or int(value.max()) < size, "an index lies outside the order"
    streams = np.broadcast_to(np.asarray(stream, dtype=np.int64), value.shape).astype(np.uint64)
    keys = _mix(_mix(streams + np.uint64(_GOLDEN)) ^ np.uint64(seed & _MASK))
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    value = _feistel(value, keys, half_bits)
    # The domain is at most 4 x size, so at each pass about a quarter of the values or more land inside.
    outside = np.flatnonzero(value >= np.uint64(size))
    while outside.size:
        value[outside] = _feistel(value[outside], keys[outside], half_bits)
        outside = outside[value[outside] >= np.uint64(size)]
    return value.astype(np.int64)


def _feistel(value: _Word, keys: _Word, half_bits: int) -> _Word:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = value >> shift, value & mask
    for turn in range(1, _NUM_ROUNDS + 1):
        turn_keys = keys + np.uint64(turn * _GOLDEN & _MASK)
        left, right = right, left ^ (_mix(_mix(turn_keys) ^ right) & mask)
    return (left << shift) | right


def _mix(word: _Word) -> _Word:
    """The finalizer of splitmix64: every bit of the input reaches every bit of the output."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


# Epochs count from 0, so no epoch ever shares this stream.
_SPLIT_STREAM = -1
MAX_CHUNK_SAMPLES = 16
_MIN_HELD_OUT_CHUNKS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """The last `num_held_out_chunks` of the permuted chunks are held out; the others and the tail train."""

    num_samples: int
    chunk_samples: int
    num_held_out_chunks: int
    seed: int

    @property
    def num_chunks(self) -> int:
        return self.num_samples // self.chunk_samples

    @property
    def num_held_out(self) -> int:
        return self.num_held_out_chunks * self.chunk_samples

    @property
    def num_train(self) -> int:
        return self.num_samples - self.num_held_out

    def train(self, index: Index) -> Index:
        """The sample behind each train index."""
        if not self.num_held_out:
            return index
        chunked = (self.num_chunks - self.num_held_out_chunks) * self.chunk_samples
        in_tail = index >= chunked
        return np.where(in_tail, index + self.num_held_out, self._in_chunks(np.where(in_tail, 0, index)))

    def at(self, cursors: Index) -> Index:
        """The sample that trains at each cursor: each epoch is a new order of all train samples."""
        epoch, place = np.divmod(cursors, self.num_train)
        return self.train(permuted(place, size=self.num_train, seed=self.seed, stream=epoch))

    def held_out(self, index: Index) -> Index:
        """The sample behind each held-out index: drawn from all over the corpus, in a fixed order."""
        return self._in_chunks(index + (self.num_chunks - self.num_held_out_chunks) * self.chunk_samples)

    def _in_chunks(self, index: Index) -> Index:
        chunk, offset = np.divmod(index, self.chunk_samples)
        chunk = permuted(chunk, size=self.num_chunks, seed=self.seed, stream=_SPLIT_STREAM)
        return chunk * self.chunk_samples + offset


def split_samples(
    num_samples: int, *, held_out_fraction: float, seed: int, max_chunk_samples: int = MAX_CHUNK_SAMPLES
) -> Split:
    """At least one sample on each side, if anything is to be held out and there are two samples.

    `max_chunk_samples` is 1 where neighbours have nothing to do with each other.
    """
    assert 0 <= held_out_fraction < 1
    if held_out_fraction == 0 or num_samples < 2:
        return Split(num_samples=num_samples, chunk_samples=1, num_held_out_chunks=0, seed=seed)
    # Small corpora get small chunks: rounding to whole chunks must stay small beside the wanted fraction.
    smaller_side = num_samples * min(held_out_fraction, 1 - held_out_fraction)
    chunk_samples = min(max_chunk_samples, max(1, int(smaller_side) // _MIN_HELD_OUT_CHUNKS))
    wanted = round(num_samples * held_out_fraction / chunk_samples)
    held = min(max(1, wanted), num_samples // chunk_samples - 1)
    return Split(num_samples=num_samples, chunk_samples=chunk_samples, num_held_out_chunks=held, seed=seed)


_NUM_SLOTS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Stream:
    """The order of one part's samples, or of several with weights, numbered through, part after part.

    Each part keeps its own epochs.
    """

    parts: tuple[Split, ...]
    weights: tuple[float, ...] = ()
    """Empty where there is no mixture but one part."""
    seed: int = 0

    @property
    def num_train(self) -> int:
        return sum(part.num_train for part in self.parts)

    @property
    def num_held_out(self) -> int:
        return sum(part.num_held_out for part in self.parts)

    @property
    def facts(self) -> list[Any]:
        """What makes this another order than that of the same samples alone."""
        return ["mixture", list(self.weights), [part.num_samples for part in self.parts]] if self.weights else []

    def train(self, cursor: int, num_samples: int) -> Index:
        """The samples that train at `cursor`, `cursor + 1`, ..."""
        return self._samples(cursor + np.arange(num_samples, dtype=np.int64), Split.at)

    def held_out(self, index: Index) -> Index:
        """The sample behind each held-out index, in a fixed order.

        In the proportions of training: a part that is too small for its share repeats.
        """
        return self._samples(np.asarray(index), lambda part, own: part.held_out(own % part.num_held_out))

    def _samples(self, cursors: Index, sample_at: Callable[[Split, Index], Index]) -> Index:
        if not self.weights:
            return sample_at(self.parts[0], cursors)
        part_of, own, counts = self.schedule
        turn, slot = np.divmod(cursors, _NUM_SLOTS)
        chosen = part_of[slot]
        place = turn * counts[chosen] + own[slot]  # how many samples of that part came before
        samples, first = np.empty(len(cursors), dtype=np.int64), 0
        for number, part in enumerate(self.parts):
            mine = chosen == number
            samples[mine] = first + sample_at(part, place[mine])
            first += part.num_samples
        return samples

    @cached_property
    def schedule(self) -> tuple[Index, Index, Index]:
        """(part of each slot, its own place, slots of each part)."""
        weights = np.asarray(self.weights, dtype=np.float64)
        assert len(weights) <= _NUM_SLOTS
        exact = weights / weights.sum() * _NUM_SLOTS
        # Whole slots in proportion, at least one each, by largest remainder.
        counts = np.maximum(1, np.floor(exact)).astype(np.int64)
        for _ in range(int(abs(_NUM_SLOTS - counts.sum()))):
            missing = exact - counts
            if counts.sum() < _NUM_SLOTS:
                counts[np.argmax(missing)] += 1
            else:
                counts[np.argmin(np.where(counts > 1, missing, np.inf))] -= 1
        part_of = np.repeat(np.arange(len(counts)), counts)
        own = np.arange(_NUM_SLOTS) - np.repeat(np.cumsum(counts) - counts, counts)
        # Evenly spread, each part from a place of its own that the seed decides.
        places = [xxhash.xxh3_64_intdigest(f"{self.seed}/{part}".encode()) for part in range(len(counts))]
        phases = np.array([place / 2.0**64 for place in places])
        order = np.argsort((own + phases[part_of]) / counts[part_of], kind="stable")
        return part_of[order], own[order], counts


def part_seed(seed: int, part: int) -> int:
    """Parts of one size must not walk in step."""
    return xxhash.xxh3_64_intdigest(f"{seed}/part {part}".encode())
