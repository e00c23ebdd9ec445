"""Gradient buckets, one per layer, summed over the replicas while backward goes on.

Each parameter's `.grad` is a view into its layer's flat bucket, so nothing is copied; a bucket leaves as soon as its
last gradient of the last microbatch has arrived.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Bucket:
    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup, chunk: int):
        self.group, self.chunk = group, chunk
        self.parameters = parameters
        total = sum(p.numel() for p in parameters)
        self.flat = torch.zeros(total, dtype=parameters[0].dtype, device=parameters[0].device)
        self.views: list[Tensor] = []
        offset = 0
        for parameter in parameters:
            self.views.append(self.flat[offset : offset + parameter.numel()].view_as(parameter))
            offset += parameter.numel()
        self.is_last = False
        self.missing = 0
        self.work: dist.Work | None = None
        # Weakly: autograd's hooks are out of the garbage collector's sight, and a bucket would keep its group for ever.
        arrived = weakref.WeakMethod(self._arrived)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(lambda grad: (arrived() or _gone)(grad))

    def start_step(self) -> None:
        self.flat.zero_()
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view

    def start_backward(self, is_last: bool, chunk: int) -> None:
        """Gradients are whole after the last backward of the chunk where the bucket's layers begin."""
        self.is_last, self.missing = is_last and chunk == self.chunk, len(self.parameters)

    def _arrived(self, _: Tensor) -> None:
        self.missing -= 1
        if self.is_last and self.missing == 0:
            self.work = dist.all_reduce(self.flat, group=self.group, async_op=True)

    def finish(self) -> None:
        if self.work is None:  # a parameter that took no part in this step's backward
            self.work = dist.all_reduce(self.flat, group=self.group, async_op=True)
        self.work.wait()
        self.work = None


def _gone(_: Tensor) -> None:
    raise AssertionError("a gradient arrived after its bucket was given up")


def buckets_of(units: Iterable[Any], group: dist.ProcessGroup) -> list[Bucket]:
    """A bucket for the trained parameters of every unit that has any."""
    found = []
    for unit in units:
        trained = [parameter for parameter in unit.parameters if parameter.requires_grad]
        found += [Bucket(trained, group, unit.chunk)] if trained else []
    return found
