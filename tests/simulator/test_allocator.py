"""The model of the caching allocator, on cases worked out by hand from its rules."""

from __future__ import annotations

import itertools
import random

import pytest

from meshwright.simulator.allocator import MIB, CachingAllocator, OutOfMemory


def test_small_blocks_share_segments_of_two_mib() -> None:
    pool = CachingAllocator()
    pool.allocate(100)
    assert (pool.allocated_bytes, pool.reserved_bytes) == (512, 2 * MIB)
    pool.allocate(513)
    assert (pool.allocated_bytes, pool.reserved_bytes) == (512 + 1024, 2 * MIB)
    pool.allocate(MIB)  # still small
    assert pool.reserved_bytes == 2 * MIB
    pool.allocate(MIB)
    assert pool.reserved_bytes == 4 * MIB


def test_large_blocks_come_from_twenty_mib_or_segments_of_their_own() -> None:
    pool = CachingAllocator()
    pool.allocate(MIB + 1)
    assert pool.reserved_bytes == 20 * MIB
    pool.allocate(10 * MIB - 512)
    assert pool.reserved_bytes == 20 * MIB
    pool.allocate(10 * MIB)  # 9 MiB are left of the first: not enough, and 10 MiB are a segment of their own
    assert pool.reserved_bytes == 30 * MIB
    pool.allocate(33 * MIB + 1)
    assert pool.reserved_bytes == 64 * MIB


def test_a_block_is_cut_only_if_more_than_one_mib_is_left() -> None:
    pool = CachingAllocator()
    pool.allocate(11 * MIB)
    assert pool.allocated_bytes == 12 * MIB  # the whole segment: torch counts it so
    pool = CachingAllocator()
    pool.allocate(11 * MIB - 512)
    assert pool.allocated_bytes == 11 * MIB - 512


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    pool = CachingAllocator()
    for block in [pool.allocate(size * MIB) for size in (30, 14, 22)]:
        pool.free(block)
    pool.allocate(12 * MIB)  # of the 14
    pool.allocate(22 * MIB)
    pool.allocate(30 * MIB)
    assert pool.reserved_bytes == 66 * MIB


def test_neighbours_that_are_free_become_one() -> None:
    pool = CachingAllocator()
    first, second, third, fourth = (pool.allocate(5 * MIB) for _ in range(4))
    assert pool.reserved_bytes == 20 * MIB
    pool.free(first)
    pool.free(third)
    pool.allocate(9 * MIB)  # 5 + 5 MiB are free, but apart
    assert pool.reserved_bytes == 40 * MIB
    pool.free(second)
    pool.allocate(12 * MIB)
    assert pool.reserved_bytes == 40 * MIB
    pool.free(fourth)


def test_a_stream_does_not_take_what_another_freed() -> None:
    pool = CachingAllocator()
    pool.free(pool.allocate(50 * MIB, stream=1))
    pool.allocate(50 * MIB, stream=0)
    assert pool.reserved_bytes == 100 * MIB
    pool.allocate(50 * MIB, stream=1)
    assert pool.reserved_bytes == 100 * MIB


def test_what_is_cached_is_given_back_before_it_fails() -> None:
    pool = CachingAllocator(limit_bytes=40 * MIB)
    pool.free(pool.allocate(30 * MIB))
    pool.allocate(38 * MIB)
    assert (pool.reserved_bytes, pool.most_reserved_bytes) == (38 * MIB, 38 * MIB)
    # A segment of which a part is in use stays: 12 of 24 MiB are free, and 20 more find no room.
    pool = CachingAllocator(limit_bytes=40 * MIB)
    pool.free(pool.allocate(24 * MIB))
    pool.allocate(12 * MIB)
    with pytest.raises(OutOfMemory):
        pool.allocate(20 * MIB)
    assert pool.reserved_bytes == 24 * MIB


def test_nothing_is_lost_over_a_thousand_random_tensors() -> None:
    drawn = random.Random(0)
    pool = CachingAllocator()
    held = []
    for _ in range(2000):
        if held and drawn.random() < 0.5:
            pool.free(held.pop(drawn.randrange(len(held))))
        else:
            held.append(pool.allocate(int(10 ** drawn.uniform(2, 8)), stream=drawn.randrange(2)))
        assert pool.allocated_bytes == sum(block.size for block in held)
        assert pool.allocated_bytes <= pool.reserved_bytes <= pool.most_reserved_bytes
        spans = sorted((block.address, block.size) for block in held)
        assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))
    for block in held:
        pool.free(block)
    assert pool.allocated_bytes == 0
    pool._give_back()
    assert pool.reserved_bytes == 0
