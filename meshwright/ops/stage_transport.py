"""The wire between stages: ordered, asynchronous, a communicator for each way through each chunk of layers.

Apart because a pair of ranks that both send first would wait for each other for ever on a backend that runs one
communicator's messages in order (NCCL), and because a schedule may take messages of two chunks in another order than
they were sent in. On the CPU the next receive is posted as soon as the last one has arrived, so a message travels while
the stage computes; on a GPU a posted receive is a kernel that waits there and would hold up any device synchronisation,
so it is posted when it is needed: sends are asynchronous either way.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.ops.device_mesh import Mesh
from meshwright.schedules import Actions, Places

WAYS = ("forward", "backward")
Channel = tuple[str, int]
"""(way, chunk of this stage that sends or receives)."""


class _End(NamedTuple):
    peer: int
    """Global rank."""
    group: dist.ProcessGroup


class Wire:
    def __init__(self, mesh: Mesh, axis: str, places: Places):
        self.axis, self.device = axis, mesh.device
        self.mesh, self.places, self.stage = mesh, places, mesh.index(axis)
        self.groups: dict[tuple[str, int, bool], dist.ProcessGroup] = {}
        for boundary in self._boundaries():
            for way in WAYS:
                self._group(way, boundary)
        self.sources, self.targets = self._ends()
        self.waiting: Counter[Channel] = Counter()
        self.posted: dict[Channel, tuple[Tensor, dist.Work]] = {}
        self.sent: deque[tuple[Tensor, dist.Work]] = deque()
        self.posts_early = mesh.device.type == "cpu"
        if not self.posts_early:
            self._introduce()

    def _group(self, way: str, boundary: int) -> dist.ProcessGroup:
        """Of messages between spans `boundary` and `boundary + 1`; all ranks ask for all of them in one order."""
        goes_round = self.places.stage(boundary) > self.places.stage(boundary + 1)
        key = (way, self.places.chunk(boundary), goes_round)
        if key not in self.groups:
            group = self.mesh.new_group(self.axis, self.mesh.along(self.axis))
            assert group is not None
            self.groups[key] = group
        return self.groups[key]

    def _ends(self) -> tuple[dict[Channel, _End], dict[Channel, _End]]:
        """Where this stage's channels come from and lead to."""
        sources, targets = {}, {}
        for boundary in self._boundaries():
            low, high = boundary, boundary + 1
            for way, giver, taker in (("forward", low, high), ("backward", high, low)):
                group = self._group(way, boundary)
                if self.places.stage(giver) == self.stage:
                    peer = self.mesh.neighbour(self.axis, self.places.stage(taker))
                    targets[way, self.places.chunk(giver)] = _End(peer, group)
                if self.places.stage(taker) == self.stage:
                    peer = self.mesh.neighbour(self.axis, self.places.stage(giver))
                    sources[way, self.places.chunk(taker)] = _End(peer, group)
        return sources, targets

    def _boundaries(self) -> Iterable[int]:
        """Those between two stages: a stage hands over to itself without a wire."""
        spans = range(self.places.num_spans - 1)
        return (at for at in spans if self.places.stage(at) != self.places.stage(at + 1))

    def _introduce(self) -> None:
        """NCCL makes a pair's communicator at its first message and waits for the other side: one pair after the other,
        in the same order everywhere, before a schedule makes both wait for different pairs."""
        hello = torch.zeros(1, device=self.device)
        for boundary in self._boundaries():
            for way, giver, taker in (("forward", boundary, boundary + 1), ("backward", boundary + 1, boundary)):
                if self.places.stage(giver) == self.stage:
                    end = self.targets[way, self.places.chunk(giver)]
                    dist.send(hello, end.peer, group=end.group)
                elif self.places.stage(taker) == self.stage:
                    end = self.sources[way, self.places.chunk(taker)]
                    dist.recv(hello, end.peer, group=end.group)

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
            source = self.sources[channel]
            self.posted[channel] = (buffer, dist.irecv(buffer, source.peer, group=source.group))

    def receive(self, way: str, chunk: int) -> Tensor:
        if not self.posts_early:
            self._post((way, chunk))
        buffer, work = self.posted.pop((way, chunk))
        work.wait()
        if self.posts_early:
            self._post((way, chunk))
        return buffer

    def send(self, way: str, chunk: int, tensor: Tensor) -> None:
        tensor, target = tensor.contiguous(), self.targets[way, chunk]
        self.sent.append((tensor, dist.isend(tensor, target.peer, group=target.group)))
        while self.sent and self.sent[0][1].is_completed():
            self.sent.popleft()

    def finish(self) -> None:
        while self.sent:
            self.sent.popleft()[1].wait()
