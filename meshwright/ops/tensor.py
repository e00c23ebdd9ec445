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

from meshwright.ops.model import Inside


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

    def __init__(self, group: dist.ProcessGroup, sequence: bool, dtype: torch.dtype | None = None):
        """`dtype`: what is summed at exits, where it is not what was computed."""
        self.group, self.sequence, self.dtype = group, sequence, dtype

    def enter(self, x: Tensor) -> Tensor:
        return _Enter.apply(x, self.group, self.sequence)

    def exit(self, x: Tensor) -> Tensor:
        return _Exit.apply(x if self.dtype is None else x.to(self.dtype), self.group, self.sequence)

    def wrap(self, inside: Inside) -> None:
        """The input enters, and exits after `row`, whose bias is added once, to the sum."""
        row, before = inside.row, inside.row.forward
        entered: dict[str, Tensor] = {}

        def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            if len(inside.entries) == 1:
                return (self.enter(args[0]), *args[1:])
            if entered.get("given") is not args[0]:  # query, key and value read one tensor: one sum of its gradients
                entered.update(given=args[0], whole=self.enter(args[0]))
            return (entered["whole"], *args[1:])

        for module in inside.entries:
            module.register_forward_pre_hook(enter)

        def forward(x: Tensor) -> Tensor:
            if entered:  # compiled checkpoints refuse even an idle change of it
                entered.clear()
            bias = getattr(row, "bias", None)
            if bias is None:
                return self.exit(before(x))
            weight = row.weight.to(x.dtype)
            # A linear whose weight lies the other way round (transformers' Conv1D) is no nn.Linear.
            out = self.exit(F.linear(x, weight) if isinstance(row, nn.Linear) else x @ weight)
            return out + bias.to(out.dtype)

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
