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
        rows = rows if self.dtype is None else rows.to(self.dtype)  # all but one rank add zeros: rounding first is exact
        return self.region.exit(rows * mine.unsqueeze(-1).to(rows.dtype))


class VocabLoss(torch.autograd.Function):
    """Cross entropy of every token over a vocabulary split between ranks: two small all_reduces, no gathered logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        logits = logits if logits.dtype == torch.float64 else logits.float()
        largest = logits.amax(dim=-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        exponent = (logits - largest.unsqueeze(-1)).exp_()
        local = targets - first
        mine = (local >= 0) & (local < logits.shape[-1])
        index = torch.where(mine, local, 0).unsqueeze(-1)
        target = torch.where(mine, logits.gather(-1, index).squeeze(-1) - largest, 0.0)
        sums = torch.stack((exponent.sum(dim=-1), target))
        dist.all_reduce(sums, group=group)
        total, target = sums.unbind()
        ctx.save_for_backward(exponent.div_(total.unsqueeze(-1)), index, mine)
        return total.log() - target

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        probability, index, mine = ctx.saved_tensors
        out = probability * grad.unsqueeze(-1)
        out.scatter_add_(-1, index, (-grad * mine).unsqueeze(-1))
        return out, None, None, None
