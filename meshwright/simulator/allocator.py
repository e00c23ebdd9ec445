"""A model of PyTorch's caching allocator: what it reserves of a device for what a program allocates.

Sizes are rounded up to 512 bytes. What is at most 1 MiB comes from segments of 2 MiB; what is below 10 MiB from
segments of 20 MiB; the rest from segments of its own size, rounded up to 2 MiB. A free block is taken if it is the
smallest that is large enough, of the same pool and stream, and cut where enough is left over. Neighbours that are free
become one. When the device has no room for a segment, segments that are free as a whole are given back, and only then
does it fail. With expandable segments each pool of a stream is one segment that grows at its end.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from meshwright.core.units import MIB

LEAST_BLOCK = 512
SMALL, SMALL_SEGMENT = 1 * MIB, 2 * MIB
LARGE_FROM, LARGE_SEGMENT = 10 * MIB, 20 * MIB
ROUNDED_TO = 2 * MIB

Pool = tuple[bool, int]
"""Whether of small blocks, and the stream."""


class OutOfMemory(Exception):
    """Not even after giving back what was cached."""


@dataclass(eq=False, slots=True)
class AllocatorBlock:
    pool: Pool
    address: int
    size: int
    is_free: bool = False
    before: AllocatorBlock | None = None
    after: AllocatorBlock | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.size, self.address


@dataclass
class CachingAllocator:
    limit_bytes: float = float("inf")
    expandable: bool = False
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    most_allocated_bytes: int = 0
    most_reserved_bytes: int = 0
    _free: dict[Pool, list[tuple[int, int]]] = field(default_factory=dict)
    """(size, address) of free blocks, in order."""
    _blocks: dict[int, AllocatorBlock] = field(default_factory=dict)
    """Free ones by address."""
    _ends: dict[Pool, AllocatorBlock] = field(default_factory=dict)
    """The last block of each expandable segment."""
    _next_address: int = 0

    def allocate(self, size: int, stream: int = 0) -> AllocatorBlock:
        size = max(LEAST_BLOCK, -(-size // LEAST_BLOCK) * LEAST_BLOCK)
        pool = (size <= SMALL, stream)
        block = self._best(pool, size) or self._new(pool, size)
        left = block.size - size
        if left >= LEAST_BLOCK if pool[0] or self.expandable else left > SMALL:
            self._cut(block, size)
        self.allocated_bytes += block.size
        self.most_allocated_bytes = max(self.most_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: AllocatorBlock) -> None:
        self.allocated_bytes -= block.size
        before, after = block.before, block.after
        if before is not None and before.is_free:
            self._take(before)
            block.address, block.size, block.before = before.address, before.size + block.size, before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and after.is_free:
            self._take(after)
            self._join_after(block, after)
        self._put(block)

    def _join_after(self, block: AllocatorBlock, after: AllocatorBlock) -> None:
        block.size, block.after = block.size + after.size, after.after
        if block.after is not None:
            block.after.before = block
        if self._ends.get(block.pool) is after:
            self._ends[block.pool] = block

    def _best(self, pool: Pool, size: int) -> AllocatorBlock | None:
        """The smallest free block that is large enough."""
        free = self._free.get(pool, [])
        at = bisect_left(free, (size, -1))
        if at == len(free):
            return None
        block = self._blocks[free[at][1]]
        self._take(block)
        return block

    def _new(self, pool: Pool, size: int) -> AllocatorBlock:
        if self.expandable:
            return self._grown(pool, size)
        if size <= SMALL:
            length = SMALL_SEGMENT
        else:
            length = LARGE_SEGMENT if size < LARGE_FROM else -(-size // ROUNDED_TO) * ROUNDED_TO
        self._reserve(length)
        block = AllocatorBlock(pool, self._next_address, length)
        self._next_address += length
        return block

    def _grown(self, pool: Pool, size: int) -> AllocatorBlock:
        """The end of the pool's segment, with as much mapped behind it as is missing."""
        end = self._ends.get(pool)
        has = end.size if end is not None and end.is_free else 0
        page = SMALL_SEGMENT if pool[0] else LARGE_SEGMENT
        length = -(-(size - has) // page) * page
        self._reserve(length)
        if end is not None and end.is_free:
            self._take(end)
            end.size += length
            return end
        # Far from everything else, so that no other segment's addresses are met.
        start = len(self._ends) << 60 if end is None else end.address + end.size
        block = AllocatorBlock(pool, start, length, before=end)
        if end is not None:
            end.after = block
        self._ends[pool] = block
        return block

    def _reserve(self, length: int) -> None:
        if self.reserved_bytes + length > self.limit_bytes:
            self._give_back()
        if self.reserved_bytes + length > self.limit_bytes:
            raise OutOfMemory
        self.reserved_bytes += length
        self.most_reserved_bytes = max(self.most_reserved_bytes, self.reserved_bytes)

    def _give_back(self) -> None:
        """Segments that are free as a whole; of those that grow, what is free at their end."""
        for block in list(self._blocks.values()):
            if block.after is not None or (block.before is not None and not self.expandable):
                continue
            self._take(block)
            self.reserved_bytes -= block.size
            if block.before is not None:
                block.before.after = None
                self._ends[block.pool] = block.before
            else:
                self._ends.pop(block.pool, None)

    def _cut(self, block: AllocatorBlock, size: int) -> None:
        rest = AllocatorBlock(block.pool, block.address + size, block.size - size, before=block, after=block.after)
        if rest.after is not None:
            rest.after.before = rest
        if self._ends.get(block.pool) is block:
            self._ends[block.pool] = rest
        block.size, block.after = size, rest
        self._put(rest)

    def _put(self, block: AllocatorBlock) -> None:
        block.is_free = True
        self._blocks[block.address] = block
        insort(self._free.setdefault(block.pool, []), block.key)

    def _take(self, block: AllocatorBlock) -> None:
        block.is_free = False
        del self._blocks[block.address]
        free = self._free[block.pool]
        del free[bisect_left(free, block.key)]
