"""A model of PyTorch's caching allocator: what it reserves of a device for what a program allocates; and a stage's
tensors replayed through it.

Sizes are rounded up to 512 bytes. What is at most 1 MiB comes from segments of 2 MiB; what is below 10 MiB from
segments of 20 MiB; the rest from segments of its own size, rounded up to 2 MiB. A free block is taken if it is the
smallest that is large enough, of the same pool and stream, and cut where enough is left over. Neighbours that are free
become one. When the device has no room for a segment, segments that are free as a whole are given back, and only then
does it fail.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.core.units import MIB
from meshwright.core.work import Resident
from meshwright.schedules import Timetable
from meshwright.schedules.actions import Action, Actions
from meshwright.simulator.peak_memory import LayerInstances, StageMemory

LEAST_BLOCK = 512
SMALL, SMALL_SEGMENT = 1 * MIB, 2 * MIB
LARGE_FROM, LARGE_SEGMENT = 10 * MIB, 20 * MIB
ROUNDED_TO = 2 * MIB

NUM_STEPS = 2
MOST_EVENTS = 200_000
"""Beyond, the instances of a layer are taken for one."""
COMPUTES, GATHERS = 0, 1
"""Streams: blocks of one are of no use to the other."""

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


@dataclass
class CachingAllocator:
    limit_bytes: float = float("inf")
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    most_allocated_bytes: int = 0
    most_reserved_bytes: int = 0
    _free: dict[Pool, list[tuple[int, int]]] = field(default_factory=dict)
    """(size, address) of free blocks, in order."""
    _blocks: dict[int, AllocatorBlock] = field(default_factory=dict)
    """Free ones by address."""
    _next_address: int = 0

    def allocate(self, size: int, stream: int = 0) -> AllocatorBlock:
        size = -(-size // LEAST_BLOCK) * LEAST_BLOCK or LEAST_BLOCK
        pool = (size <= SMALL, stream)
        free = self._free.setdefault(pool, [])
        at = bisect_left(free, (size, -1))
        if at < len(free):  # the smallest free block that is large enough
            block = self._blocks.pop(free.pop(at)[1])
            block.is_free = False
        else:
            block = self._new(pool, size)
        left = block.size - size
        if left >= LEAST_BLOCK if pool[0] else left > SMALL:
            rest = AllocatorBlock(pool, block.address + size, left, before=block, after=block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.size, block.after = size, rest
            self._put(rest)
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.most_allocated_bytes:
            self.most_allocated_bytes = self.allocated_bytes
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
            block.size, block.after = block.size + after.size, after.after
            if block.after is not None:
                block.after.before = block
        self._put(block)

    def _new(self, pool: Pool, size: int) -> AllocatorBlock:
        if size <= SMALL:
            length = SMALL_SEGMENT
        else:
            length = LARGE_SEGMENT if size < LARGE_FROM else -(-size // ROUNDED_TO) * ROUNDED_TO
        if self.reserved_bytes + length > self.limit_bytes:
            self._give_back()
        if self.reserved_bytes + length > self.limit_bytes:
            raise OutOfMemory
        self.reserved_bytes += length
        self.most_reserved_bytes = max(self.most_reserved_bytes, self.reserved_bytes)
        block = AllocatorBlock(pool, self._next_address, length)
        self._next_address += length
        return block

    def _give_back(self) -> None:
        """Segments that are free as a whole."""
        for block in list(self._blocks.values()):
            if block.before is None and block.after is None:
                self._take(block)
                self.reserved_bytes -= block.size

    def _put(self, block: AllocatorBlock) -> None:
        block.is_free = True
        self._blocks[block.address] = block
        insort(self._free[block.pool], (block.size, block.address))

    def _take(self, block: AllocatorBlock) -> None:
        block.is_free = False
        del self._blocks[block.address]
        free = self._free[block.pool]
        del free[bisect_left(free, (block.size, block.address))]


@dataclass(frozen=True, kw_only=True)
class Replayed:
    allocated_bytes: int
    reserved_bytes: int
    fits: bool


def replay(memory: StageMemory, timetable: Timetable, stage: int, num_stages: int, *, memory_bytes: int) -> Replayed:
    """A stage's memory tensor by tensor over two steps.

    The first makes the optimizer's state at its end, as programs do; the second finds the memory in pieces. Tensors
    of every layer instance come and go in the order in which the schedule runs them; what is made together is taken for
    one tensor.

    Within what a device has beside `non_torch`; where that is too little, as if there were enough.
    """
    # As many microbatches as it takes to hold the most of them, and two more.
    count = min(int(memory.num_microbatches), int(float(memory.in_flight)) + 2)
    if num_stages == 1:
        actions: Actions = tuple(Action(kind, i) for i in range(count) for kind in ("forward", "backward"))
    else:
        actions = timetable.orders(num_stages, max(count, min(int(memory.num_microbatches), num_stages)))[stage]
    tensors = sum(int(place.count) * (len(place.kept) + len(place.running)) for place in memory.places)
    is_lumped = NUM_STEPS * tensors * len(actions) > MOST_EVENTS
    room = memory_bytes - int(memory.always["non_torch"])
    for limit in (room, float("inf")):
        allocator = CachingAllocator(limit_bytes=limit)
        try:
            _Program(memory, timetable.chunks, is_lumped, allocator).run(actions)
        except OutOfMemory:
            continue
        return Replayed(
            allocated_bytes=allocator.most_allocated_bytes,
            reserved_bytes=allocator.most_reserved_bytes,
            fits=limit == room,
        )
    raise AssertionError("without a limit nothing runs out")


@dataclass
class _Program:
    memory: StageMemory
    chunks: int
    is_lumped: bool
    allocator: CachingAllocator
    kept: dict[Any, list[AllocatorBlock]] = field(default_factory=dict)
    """By microbatch, place and instance."""
    made: dict[Any, list[AllocatorBlock]] = field(default_factory=dict)
    """Gradients, by place and instance."""
    sizes: dict[Any, list[tuple[int, int]]] = field(default_factory=dict)
    """(bytes, stream) of what is made together."""

    def run(self, actions: Actions) -> None:
        states = [item for item in self.memory.setup if item.category == "optimizer"]
        self._hold([item for item in self.memory.setup if item.category != "optimizer"])
        for step in range(NUM_STEPS):
            for action in actions:
                self._do(action)
            if step == 0:  # two tensors of each, as Adam has
                self._hold([half for item in states for half in (replace(item, bytes=item.bytes / 2),) * 2])
            for blocks in self.made.values():
                self._free(blocks)
            self.made.clear()

    def _do(self, action: Action) -> None:
        instances = list(self._instances(action.chunk))
        for key, place, times in instances if action.kind == "forward" else ():
            self.kept[action.microbatch, *key] = self._some(place.kept, ("microbatch",), times)
            self._free(self._some(place.running, ("moment", "forward"), 1))
        for key, place, times in reversed(instances) if action.kind in ("backward", "backward_input") else ():
            passing = self._some(place.running, ("moment", "backward"), 1)
            if key not in self.made:
                self.made[key] = self._some(place.gradients, ("step",), times)
            if action.kind == "backward":
                self._free(self.kept.pop((action.microbatch, *key)))
            self._free(passing)
        for key, _, _ in instances if action.kind == "backward_weight" else ():
            self._free(self.kept.pop((action.microbatch, *key)))

    def _instances(self, chunk: int) -> Iterator[tuple[tuple[int, int], LayerInstances, int]]:
        """(its name, place, how many it stands for) of one chunk's layers, dealt out in turn."""
        for index, place in enumerate(self.memory.places):
            count = int(place.count)
            mine = range(chunk * count // self.chunks, (chunk + 1) * count // self.chunks)
            if self.is_lumped:
                mine, times = mine[:1], len(mine)
            else:
                times = 1
            for instance in mine:
                yield (index, instance), place, times

    def _some(self, items: Sequence[Resident], lives: tuple[str, ...], times: int) -> list[AllocatorBlock]:
        key = id(items), lives, times
        if key not in self.sizes:
            some = (item for item in items if item.life in lives and item.bytes * item.repeat >= 1)
            self.sizes[key] = [(int(item.bytes * times), _stream(item)) for item in some]
        return [self.allocator.allocate(*each) for each in self.sizes[key]]

    def _hold(self, items: Sequence[Resident]) -> None:
        for item in items:
            for _ in range(int(item.repeat) if item.bytes >= 1 else 0):
                self.allocator.allocate(int(item.bytes), _stream(item))

    def _free(self, blocks: Sequence[AllocatorBlock]) -> None:
        for block in blocks:
            self.allocator.free(block)


def _stream(item: Resident) -> int:
    return GATHERS if item.category == "gathered" and item.life != "microbatch" else COMPUTES
