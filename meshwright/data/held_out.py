"""Which samples train and which are held out.

    samples   | chunk 0 | chunk 1 | chunk 2 | chunk 3 | chunk 4 | tail |
                train     HELD      train     train     HELD      train

Whole chunks of neighbouring samples are held out, as neighbours often come from one document. The chunks are
drawn by the same stored-nowhere permutation as the order of an epoch, so the count is exact up to a chunk,
the two sides cannot overlap, and both lookups are O(1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.data.sample_order import Index, permuted

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
