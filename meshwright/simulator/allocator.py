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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from meshwright.core.units import MIB
from meshwright.core.work import Resident
from meshwright.schedules import Timetable
from meshwright.schedules.actions import Action, Actions
from meshwright.simulator.peak_memory import StageMemory

LEAST_BLOCK = 512
SMALL, SMALL_SEGMENT = 1 * MIB, 2 * MIB
LARGE_FROM, LARGE_SEGMENT = 10 * MIB, 20 * MIB
ROUNDED_TO = 2 * MIB

NUM_STEPS = 2
MOST_EVENTS = 200_000
"""Beyond, the instances of a layer are taken for one."""
ADDRESS_BITS = 56
COMPUTES, GATHERS = 0, 1
"""Streams: blocks of one are of no use to the other."""

Pool = tuple[bool, int]
"""Whether of small blocks, and the stream."""


def rounded(size: int, stream: int) -> tuple[int, Pool]:
    """Size and pool of a block."""
    size = -(-size // LEAST_BLOCK) * LEAST_BLOCK or LEAST_BLOCK
    return size, (size <= SMALL, stream)


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


@dataclass(slots=True)
class CachingAllocator:
    limit_bytes: float = float("inf")
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    most_allocated_bytes: int = 0
    most_reserved_bytes: int = 0
    _free: dict[Pool, list[int]] = field(default_factory=dict)
    """Free blocks by size, then by address: the two as one number."""
    _blocks: dict[int, AllocatorBlock] = field(default_factory=dict)
    """Free ones by that number."""
    _next_address: int = 0

    def allocate(self, size: int, stream: int = 0) -> AllocatorBlock:
        return self.take(*rounded(size, stream))

    def take(self, size: int, pool: Pool) -> AllocatorBlock:
        """A block of a size that is rounded up already."""
        free = self._free.get(pool)
        if free is None:
            free = self._free[pool] = []
        at = bisect_left(free, size << ADDRESS_BITS)
        if at < len(free):  # the smallest free block that is large enough
            block = self._blocks.pop(free.pop(at))
            block.is_free = False
        else:
            block = self._new(pool, size)
        left = block.size - size
        if left >= LEAST_BLOCK if pool[0] else left > SMALL:
            after = block.after
            block.size = size
            block.after = rest = AllocatorBlock(pool, block.address + size, left, True, block, after)
            if after is not None:
                after.before = rest
            self._blocks[key := left << ADDRESS_BITS | rest.address] = rest
            insort(free, key)
            self.allocated_bytes += size
        else:
            self.allocated_bytes += block.size
        if self.allocated_bytes > self.most_allocated_bytes:
            self.most_allocated_bytes = self.allocated_bytes
        return block

    def free(self, block: AllocatorBlock) -> None:
        self.allocated_bytes -= block.size
        before, after, free = block.before, block.after, self._free[block.pool]
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
        block.is_free = True
        self._blocks[key := block.size << ADDRESS_BITS | block.address] = block
        insort(free, key)

    def state(self) -> tuple[Any, ...]:
        """What it will do depends on this and on the blocks in use."""
        return self.reserved_bytes, self._next_address, {pool: tuple(free) for pool, free in self._free.items()}

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

    def _take(self, block: AllocatorBlock) -> None:
        key = block.size << ADDRESS_BITS | block.address
        del self._blocks[key]
        free = self._free[block.pool]
        del free[bisect_left(free, key)]


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
    program = _Program(
        states=_tensors(item for item in memory.setup if item.category == "optimizer"),
        setup=_tensors(item for item in memory.setup if item.category != "optimizer"),
        places=tuple(
            _Place(
                int(place.count),
                _tensors(place.kept, "microbatch"),
                _tensors(place.running, "moment", "forward"),
                _tensors(place.running, "moment", "backward"),
                _tensors(place.gradients, "step"),
            )
            for place in memory.places
        ),
        actions=actions,
        chunks=timetable.chunks,
        is_lumped=NUM_STEPS * tensors * len(actions) > MOST_EVENTS,
    )
    return _replayed(program, memory_bytes - int(memory.always["non_torch"]))


_Tensors = tuple[tuple[float, int, int], ...]
"""(bytes, how many, stream) of what is made together."""


def _tensors(items: Iterable[Resident], *lives: str) -> _Tensors:
    result = []
    for item in items:
        if item.bytes * item.repeat >= 1 and (not lives or item.life in lives):
            is_gathered = item.category == "gathered" and item.life != "microbatch"
            result.append((float(item.bytes), int(item.repeat), GATHERS if is_gathered else COMPUTES))
    return tuple(result)


class _Place(NamedTuple):
    """As `LayerInstances`; `forward` and `backward`: while an instance runs."""

    instances: int
    kept: _Tensors
    forward: _Tensors
    backward: _Tensors
    gradients: _Tensors


class _Program(NamedTuple):
    """All that a replay depends on: plans that differ in nothing of it are replayed once."""

    states: _Tensors
    """Of the optimizer."""
    setup: _Tensors
    """What else is always there."""
    places: tuple[_Place, ...]
    actions: Actions
    chunks: int
    is_lumped: bool


@lru_cache(maxsize=512)
def _replayed(program: _Program, room: int) -> Replayed:
    for limit in (room, float("inf")):
        allocator = CachingAllocator(limit_bytes=limit)
        try:
            _Replay(program, allocator).run()
        except OutOfMemory:
            continue
        return Replayed(
            allocated_bytes=allocator.most_allocated_bytes,
            reserved_bytes=allocator.most_reserved_bytes,
            fits=limit == room,
        )
    raise AssertionError("without a limit nothing runs out")


@dataclass
class _Replay:
    program: _Program
    allocator: CachingAllocator
    kept: dict[Any, list[AllocatorBlock]] = field(default_factory=dict)
    """By microbatch, place and instance."""
    made: dict[Any, list[AllocatorBlock]] = field(default_factory=dict)
    """Gradients, by place and instance."""
    sizes: dict[tuple[int, int], list[tuple[int, Pool]]] = field(default_factory=dict)
    """What is allocated for the program's tensors, by their identity and how many times as large."""
    instances: dict[int, list[tuple[tuple[int, int], _Place, int]]] = field(default_factory=dict)
    """By chunk."""

    def run(self) -> None:
        self._hold(self.program.setup)
        # Whether one microbatch ends before the next begins, all of it at once.
        kinds = [action.kind for action in self.program.actions]
        takes_turns = self.program.chunks == 1 and kinds == ["forward", "backward"] * (len(kinds) // 2)
        for step in range(NUM_STEPS):
            state: Any = None
            for action in self.program.actions:
                self._do(action)
                if takes_turns and action.kind == "backward":
                    before, state = state, self.allocator.state()
                    if state == before:  # all further microbatches of the step leave it so
                        break
            if step == 0:  # two tensors of each, as Adam has
                for size, repeat, stream in self.program.states:
                    self._hold([(size / 2, repeat, stream)] * 2)
            for blocks in self.made.values():
                self._free(blocks)
            self.made.clear()

    def _do(self, action: Action) -> None:
        if action.chunk not in self.instances:
            self.instances[action.chunk] = list(self._instances(action.chunk))
        instances = self.instances[action.chunk]
        for key, place, times in instances if action.kind == "forward" else ():
            self.kept[action.microbatch, *key] = self._some(place.kept, times)
            self._free(self._some(place.forward, 1))
        for key, place, times in reversed(instances) if action.kind in ("backward", "backward_input") else ():
            passing = self._some(place.backward, 1)
            if key not in self.made:
                self.made[key] = self._some(place.gradients, times)
            if action.kind == "backward":
                self._free(self.kept.pop((action.microbatch, *key)))
            self._free(passing)
        for key, _, _ in instances if action.kind == "backward_weight" else ():
            self._free(self.kept.pop((action.microbatch, *key)))

    def _instances(self, chunk: int) -> Iterator[tuple[tuple[int, int], _Place, int]]:
        """(its name, place, how many it stands for) of one chunk's layers, dealt out in turn."""
        for index, place in enumerate(self.program.places):
            chunks = self.program.chunks
            mine = range(chunk * place.instances // chunks, (chunk + 1) * place.instances // chunks)
            if self.program.is_lumped:
                mine, times = mine[:1], len(mine)
            else:
                times = 1
            for instance in mine:
                yield (index, instance), place, times

    def _some(self, tensors: _Tensors, times: int) -> list[AllocatorBlock]:
        sizes = self.sizes.get((id(tensors), times))
        if sizes is None:
            sizes = self.sizes[id(tensors), times] = [rounded(int(size * times), stream) for size, _, stream in tensors]
        take = self.allocator.take
        return [take(size, pool) for size, pool in sizes]

    def _hold(self, tensors: Sequence[tuple[float, int, int]]) -> None:
        for size, repeat, stream in tensors:
            for _ in range(repeat if size >= 1 else 0):
                self.allocator.allocate(int(size), stream)

    def _free(self, blocks: Sequence[AllocatorBlock]) -> None:
        for block in blocks:
            self.allocator.free(block)
