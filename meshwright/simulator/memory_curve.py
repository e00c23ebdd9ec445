"""A stage's memory tensor by tensor over two steps, replayed through a model of the caching allocator.

The first step makes the optimizer's state at its end, as programs do; the second finds the memory in pieces. Tensors of
every layer instance come and go in the order in which the schedule runs them. What is made together is taken for one
tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.core.work import Resident
from meshwright.schedules import Timetable
from meshwright.schedules.actions import Action, Actions
from meshwright.simulator.allocator import AllocatorBlock, CachingAllocator, OutOfMemory
from meshwright.simulator.peak_memory import LayerInstances, StageMemory

NUM_STEPS = 2
MOST_EVENTS = 200_000
"""Beyond, the instances of a layer are taken for one."""
COMPUTES, GATHERS = 0, 1
"""Streams: blocks of one are of no use to the other."""


@dataclass(frozen=True, kw_only=True)
class Replayed:
    allocated_bytes: int
    reserved_bytes: int
    fits: bool


def replay(
    memory: StageMemory,
    timetable: Timetable,
    stage: int,
    num_stages: int,
    *,
    memory_bytes: int,
    expandable: bool = False,
) -> Replayed:
    """Within what a device has beside `non_torch`. Where that is too little, as if there were enough."""
    actions = _actions(memory, timetable, stage, num_stages)
    room = memory_bytes - int(memory.always["non_torch"])
    for limit in (room, float("inf")):
        allocator = CachingAllocator(limit_bytes=limit, expandable=expandable)
        try:
            _Program(memory, timetable.chunks, _is_too_long(memory, actions), allocator).run(actions)
        except OutOfMemory:
            continue
        return Replayed(
            allocated_bytes=allocator.most_allocated_bytes,
            reserved_bytes=allocator.most_reserved_bytes,
            fits=limit == room,
        )
    raise AssertionError("without a limit nothing runs out")


def _actions(memory: StageMemory, timetable: Timetable, stage: int, num_stages: int) -> Actions:
    """As many microbatches as it takes to hold the most of them, and two more."""
    count = min(int(memory.num_microbatches), int(float(memory.in_flight)) + 2)
    if num_stages == 1:
        each = ((Action("forward", i), Action("backward", i)) for i in range(count))
        return tuple(action for pair in each for action in pair)
    return timetable.orders(num_stages, max(count, min(int(memory.num_microbatches), num_stages)))[stage]


def _is_too_long(memory: StageMemory, actions: Actions) -> bool:
    tensors = sum(int(place.count) * (len(place.kept) + len(place.running)) for place in memory.places)
    return NUM_STEPS * tensors * len(actions) > MOST_EVENTS


@dataclass
class _Program:
    memory: StageMemory
    chunks: int
    is_lumped: bool
    allocator: CachingAllocator
    kept: dict[Any, list[AllocatorBlock]] = field(default_factory=dict)
    """By microbatch, place and instance."""
    of_loss: dict[Any, list[AllocatorBlock]] = field(default_factory=dict)
    """The same, of logits."""
    made: dict[Any, list[AllocatorBlock]] = field(default_factory=dict)
    """Gradients, by place and instance."""

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
        if action.kind == "forward":
            for key, place, times in self._instances(action.chunk):
                self._forward((action.microbatch, *key), place, times)
        elif action.kind == "backward_weight":
            for key, _, _ in self._instances(action.chunk):
                self._free(self.kept.pop((action.microbatch, *key)))
        elif action.kind in ("backward", "backward_input"):
            for key, place, times in reversed(list(self._instances(action.chunk))):
                self._backward(key, place, times, action)

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

    def _forward(self, key: Any, place: LayerInstances, times: int) -> None:
        """What is kept, then what is needed for it; but a loss is made from logits that are there before."""
        logits = self._some(_logits(place.running), ("moment", "forward"), 1)
        self.of_loss[key] = self._some(_logits(place.kept), ("microbatch",), times)
        self.kept[key] = self._some(_others(place.kept), ("microbatch",), times)
        self._free(self._some(_others(place.running), ("moment", "forward"), 1))
        self._free(logits)

    def _backward(self, key: tuple[int, int], place: LayerInstances, times: int, action: Action) -> None:
        logits = self._some(_logits(place.running), ("moment", "backward"), 1)
        self._free(self.of_loss.pop((action.microbatch, *key)))  # their gradient is all that is left of the loss
        passing = self._some(_others(place.running), ("moment", "backward"), 1)
        if key not in self.made:
            self.made[key] = self._some(place.gradients, ("step",), times)
        if action.kind == "backward":
            self._free(self.kept.pop((action.microbatch, *key)))
        self._free([*passing, *logits])

    def _some(self, items: Sequence[Resident], lives: tuple[str, ...], times: int) -> list[AllocatorBlock]:
        return [self._one(item, times) for item in items if item.life in lives and item.bytes * item.repeat >= 1]

    def _hold(self, items: Sequence[Resident]) -> None:
        for item in items:
            for _ in range(int(item.repeat) if item.bytes >= 1 else 0):
                self._one(item, 1)

    def _one(self, item: Resident, times: int) -> AllocatorBlock:
        is_gathered = item.category == "gathered" and item.life != "microbatch"
        return self.allocator.allocate(int(item.bytes * times), GATHERS if is_gathered else COMPUTES)

    def _free(self, blocks: Sequence[AllocatorBlock]) -> None:
        for block in blocks:
            self.allocator.free(block)


def _logits(items: Sequence[Resident]) -> list[Resident]:
    return [item for item in items if item.category == "logits"]


def _others(items: Sequence[Resident]) -> list[Resident]:
    return [item for item in items if item.category != "logits"]
