"""A pseudo-random order of any number of samples, without storing it.

A Feistel network over 2 x `half_bits` bits is a bijection whatever its round function is; values that fall
outside [0, size) are sent through it again ("cycle walking") until they are inside: still a bijection.

    left, right  ->  right, left ^ F(right, key)        # one round; undone by the same F, hence a bijection

So element i of the order costs O(1) time and memory: a run resumes from one integer and no rank holds a
shuffled list. The order depends on (seed, stream) alone, never on the mesh.
Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

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
