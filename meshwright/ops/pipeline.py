"""The wire between stages: ordered, asynchronous, one communicator for each direction.

Two communicators because a pair of ranks that both send first would wait for each other for ever on a backend that
runs one communicator's messages in order (NCCL). On the CPU the next receive is posted as soon as the last one has
arrived, so a message travels while the stage computes; on a GPU a posted receive is a kernel that waits there and would
hold up any device synchronisation, so it is posted when it is needed: sends are asynchronous either way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.ops.mesh import Mesh


class Wire:
    def __init__(self, mesh: Mesh, axis: str):
        stage, last = mesh.index(axis), mesh.size(axis) - 1
        self.axis, self.device = axis, mesh.device
        self.groups = {way: mesh.new_group(axis, mesh.along(axis)) for way in ("forward", "backward")}
        before = mesh.neighbour(axis, stage - 1) if stage > 0 else -1
        after = mesh.neighbour(axis, stage + 1) if stage < last else -1
        self.source = {"forward": before, "backward": after}
        self.target = {"forward": after, "backward": before}
        self.waiting = {"forward": 0, "backward": 0}
        self.posted: dict[str, tuple[Tensor, dist.Work]] = {}
        self.sent: deque[tuple[Tensor, dist.Work]] = deque()
        self.posts_early = mesh.device.type == "cpu"
        if not self.posts_early:
            self._introduce(stage, last)

    def _introduce(self, stage: int, last: int) -> None:
        """NCCL makes a pair's communicator at its first message and waits for the other side: one pair after the other,
        in the same order everywhere, before a schedule makes both wait for different pairs."""
        hello = torch.zeros(1, device=self.device)
        for boundary in range(last):
            for way, sender in (("forward", boundary), ("backward", boundary + 1)):
                if stage == sender:
                    dist.send(hello, self.target[way], group=self.groups[way])
                elif stage in (boundary, boundary + 1):
                    dist.recv(hello, self.source[way], group=self.groups[way])

    def start(self, kinds: Iterable[str], shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        """Before a step: how many messages of what shape will come from each side."""
        kinds = list(kinds)
        self.shapes, self.dtype = shapes, dtype
        for way in ("forward", "backward"):
            self.waiting[way] = kinds.count(f"receive_{way}")
            if self.posts_early:
                self._post(way)

    def _post(self, way: str) -> None:
        if self.waiting[way]:
            self.waiting[way] -= 1
            buffer = torch.empty(self.shapes[way], dtype=self.dtype, device=self.device)
            work = dist.irecv(buffer, self.source[way], group=self.groups[way])
            self.posted[way] = (buffer, work)

    def receive(self, way: str) -> Tensor:
        if not self.posts_early:
            self._post(way)
        buffer, work = self.posted.pop(way)
        work.wait()
        if self.posts_early:
            self._post(way)
        return buffer

    def send(self, way: str, tensor: Tensor) -> None:
        tensor = tensor.contiguous()
        self.sent.append((tensor, dist.isend(tensor, self.target[way], group=self.groups[way])))
        while self.sent and self.sent[0][1].is_completed():
            self.sent.popleft()

    def finish(self) -> None:
        while self.sent:
            self.sent.popleft()[1].wait()
