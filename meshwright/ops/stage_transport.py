"""The wire between stages: ordered, asynchronous, a communicator for each way through each chunk of layers.

Apart because a pair of ranks that both send first would wait for each other for ever on a backend that runs one
communicator's messages in order (NCCL), and because a schedule may take messages of two chunks in another order than
they were sent in. On the CPU the next receive is posted as soon as the last one has arrived, so a message travels while
the stage computes; on a GPU a posted receive is a kernel that waits there and would hold up any device synchronisation,
so it is posted when it is needed: sends are asynchronous either way.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.ops.device_mesh import Mesh
from meshwright.schedules import Actions, Places

WAYS = ("forward", "backward")
Channel = tuple[str, int]
"""(way, chunk of this stage that sends or receives)."""
End = tuple[int, dist.ProcessGroup]
"""A peer's global rank, and the group in which to reach it."""


class Wire:
    def __init__(self, mesh: Mesh, axis: str, places: Places):
        self.axis, self.device, self.stage = axis, mesh.device, mesh.index(axis)
        self.sources: dict[Channel, End] = {}
        self.targets: dict[Channel, End] = {}
        """Where this stage's channels come from and lead to."""
        self.waiting: Counter[Channel] = Counter()
        self.posted: dict[Channel, tuple[Tensor, dist.Work]] = {}
        self.sent: deque[tuple[Tensor, dist.Work]] = deque()
        self.posts_early = mesh.device.type == "cpu"
        groups: dict[tuple[str, int, bool], dist.ProcessGroup] = {}
        crossings = [
            (way, giver, taker)
            for low in range(places.num_spans - 1)
            if places.stage(low) != places.stage(low + 1)  # a stage hands over to itself without a wire
            for way, giver, taker in (("forward", low, low + 1), ("backward", low + 1, low))
        ]
        for way, giver, taker in crossings:
            low = min(giver, taker)
            key = (way, places.chunk(low), places.stage(low) > places.stage(low + 1))
            if key not in groups:  # all ranks ask for all of them in one order
                made = mesh.new_group(axis, mesh.along(axis))
                assert made is not None
                groups[key] = made
            if places.stage(giver) == self.stage:
                self.targets[way, places.chunk(giver)] = mesh.neighbour(axis, places.stage(taker)), groups[key]
            if places.stage(taker) == self.stage:
                self.sources[way, places.chunk(taker)] = mesh.neighbour(axis, places.stage(giver)), groups[key]
        # NCCL makes a pair's communicator at its first message and waits for the other side: one pair after the other,
        # in the same order everywhere, before a schedule makes both wait for different pairs.
        hello = torch.zeros(1, device=self.device)
        for way, giver, taker in () if self.posts_early else crossings:
            if places.stage(giver) == self.stage:
                peer, group = self.targets[way, places.chunk(giver)]
                dist.send(hello, peer, group=group)
            elif places.stage(taker) == self.stage:
                peer, group = self.sources[way, places.chunk(taker)]
                dist.recv(hello, peer, group=group)

    def start(self, actions: Actions, shapes: Mapping[Channel, tuple[int, ...]], dtype: torch.dtype) -> None:
        """Before a step: which messages of what shape will come."""
        self.shapes, self.dtype = shapes, dtype
        for way in WAYS:
            kind = f"receive_{way}"
            self.waiting.update((way, action.chunk) for action in actions if action.kind == kind)
        if self.posts_early:
            for channel in list(self.waiting):
                if channel not in self.posted:
                    self._post(channel)

    def _post(self, channel: Channel) -> None:
        if self.waiting[channel]:
            self.waiting[channel] -= 1
            buffer = torch.empty(self.shapes[channel], dtype=self.dtype, device=self.device)
            peer, group = self.sources[channel]
            self.posted[channel] = (buffer, dist.irecv(buffer, peer, group=group))

    def receive(self, way: str, chunk: int) -> Tensor:
        if not self.posts_early:
            self._post((way, chunk))
        buffer, work = self.posted.pop((way, chunk))
        work.wait()
        if self.posts_early:
            self._post((way, chunk))
        return buffer

    def send(self, way: str, chunk: int, tensor: Tensor) -> None:
        tensor, (peer, group) = tensor.contiguous(), self.targets[way, chunk]
        self.sent.append((tensor, dist.isend(tensor, peer, group=group)))
        while self.sent and self.sent[0][1].is_completed():
            self.sent.popleft()

    def finish(self) -> None:
        while self.sent:
            self.sent.popleft()[1].wait()
