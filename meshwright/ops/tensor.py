"""What a layer split over ranks says to itself: at the entry of a region, at its exit, in the embedding, in the loss.

    without `sequence`              forward       backward
      enter (input is whole)        nothing       all_reduce
      exit  (output is partial)     all_reduce    nothing
    with `sequence` (outside a region each rank holds a part of the sequence, dim 1)
      enter                         all_gather    reduce_scatter
      exit                          reduce_scatter all_gather

Plain tensors and our own autograd functions rather than DTensor: no dispatch cost per op, every message known.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(batch, part, ...) of every rank -> (batch, sequence, ...)."""
    count = group.size()
    x = x.contiguous()
    out = torch.empty((count * x.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device)
    dist.all_gather_into_tensor(out, x, group=group)
    return out.unflatten(0, (count, x.shape[0])).transpose(0, 1).flatten(1, 2)


def _scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(batch, sequence, ...), partial on every rank -> the sum's own (batch, part, ...)."""
    count = group.size()
    stacked = x.unflatten(1, (count, -1)).transpose(0, 1).contiguous().flatten(0, 1)
    out = torch.empty((stacked.shape[0] // count, *stacked.shape[1:]), dtype=x.dtype, device=x.device)
    dist.reduce_scatter_tensor(out, stacked, group=group)
    return out


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, sequence: bool) -> Tensor:
        ctx.group, ctx.sequence = group, sequence
        return _gather(x, group) if sequence else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (_scatter if ctx.sequence else _sum)(grad, ctx.group), None, None


class _Exit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, sequence: bool) -> Tensor:
        ctx.group, ctx.sequence = group, sequence
        return (_scatter if sequence else _sum)(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gather(grad, ctx.group) if ctx.sequence else grad, None, None


class Region:
    """The two borders of a split region, as functions of a tensor."""

    def __init__(self, group: dist.ProcessGroup, sequence: bool):
        self.group, self.sequence = group, sequence

    def enter(self, x: Tensor) -> Tensor:
        return _Enter.apply(x, self.group, self.sequence)

    def exit(self, x: Tensor) -> Tensor:
        return _Exit.apply(x, self.group, self.sequence)

    def wrap(self, module: nn.Module, row: nn.Linear) -> None:
        """`module` enters with its input and exits after `row`, whose bias is added once, to the sum."""
        module.register_forward_pre_hook(lambda _, args: (self.enter(args[0]), *args[1:]))

        def forward(x: Tensor) -> Tensor:
            out = self.exit(F.linear(x, row.weight.to(x.dtype)))
            return out if row.bias is None else out + row.bias.to(out.dtype)

        row.forward = forward


class VocabLookup:
    """An embedding whose rows are split: each rank looks up its own tokens, the sum is the lookup."""

    def __init__(self, table: nn.Embedding, first: int, region: Region, dtype: torch.dtype | None):
        self.table, self.first, self.region, self.dtype = table, first, region, dtype

    def __call__(self, tokens: Tensor) -> Tensor:
        weight = self.table.weight
        local = tokens - self.first
        mine = (local >= 0) & (local < weight.shape[0])
        rows = F.embedding(torch.where(mine, local, 0), weight)
        if self.dtype is not None:
            rows = rows.to(self.dtype)  # every rank but one adds zeros, so rounding before the sum is exact
        return self.region.exit(rows * mine.unsqueeze(-1).to(rows.dtype))
