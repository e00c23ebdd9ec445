"""Tokens to their experts and back, here or on other ranks, and the losses that arise on the way.

Rows are sorted by expert, each expert multiplies its own slice, and the results are added where they came from: no
token is padded, none is dropped unless a capacity says so. Where other ranks hold some of the experts:

    4 experts on 2 ranks; a1 is what rank a has for expert 1

      rank a   a0 a1 | a2 a3      all_to_all      a0 a1 | b0 b1      by expert      a0 b0 | a1 b1
      rank b   b0 b1 | b2 b3     ----------->     a2 a3 | b2 b3     --------->      a2 b2 | a3 b3

Each rank first says how many rows it has for every expert, so messages are as long as they must be: no padding, and a
rank that nobody chose gets nothing. The way back is the mirror image, and gradients take the opposite ways.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from meshwright.ops.collectives import swap

Back = Callable[[Tensor], Tensor]
Send = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Back]]
"""(rows sorted by expert, how many each expert is sent) -> the rows of the experts here, sorted by expert, how many
each of those has, and the way back for what becomes of the rows."""


def stay(rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Back]:
    """All experts are here."""
    return rows, counts, lambda out: out


class ExpertHolder(nn.Module):
    """Holds experts. Where others hold some of them, `send` is what reaches those."""

    send: Send = staticmethod(stay)


class PreciseLinear(torch.autograd.Function):
    """x W^T in float32 at least, keeping x as it came: a router must not confuse two experts by rounding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.dtype = x.dtype
        dtype = precise(x)
        return F.linear(x.to(dtype), weight.to(dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        into_x = into_weight = None
        if ctx.needs_input_grad[0]:
            into_x = (grad @ weight.to(grad.dtype)).to(ctx.dtype)
        if x is not None:
            into_weight = (grad.flatten(0, -2).t() @ x.to(grad.dtype).flatten(0, -2)).to(weight.dtype)
        return into_x, into_weight


class GroupedLinear(torch.autograd.Function):
    """Rows a..b of expert e times its matrix: x (rows, k), weight (experts, n, k), counts of rows of each expert.

    One node for all experts: as slices, autograd would fill and add a gradient of the whole stack for each of them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, counts)  # experts may be frozen
        return fresh(_rows_times(x, weight.transpose(1, 2), counts))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, counts = ctx.saved_tensors
        grad = grad.contiguous()
        into_x = _rows_times(grad, weight, counts) if ctx.needs_input_grad[0] else None
        return into_x, None if x is None else _outer(grad, x, counts), None


def _grouped_kernel(*operands: Tensor) -> Any:
    """torch's one kernel for all groups, where it takes these: bf16 on CUDA, rows of whole 16 bytes."""
    kernel = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    fits = all(each.is_cuda and each.dtype == torch.bfloat16 and each.shape[-1] % 8 == 0 for each in operands)
    return kernel if fits and all(each.shape[-2] % 8 == 0 for each in operands if each.dim() == 3) else None


def _rows_times(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """(rows, k) x (experts, k, n) -> (rows, n)."""
    kernel = _grouped_kernel(x, weight)
    if kernel is not None:
        return kernel(x, weight, offs=counts.cumsum(0).to(torch.int32))
    out = x.new_empty(x.shape[0], weight.shape[2])
    for matrix, rows in zip(weight, _runs(counts), strict=False):
        torch.mm(x[rows], matrix, out=out[rows])
    return out


def _outer(grad: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    """(rows, n) and (rows, k) -> (experts, n, k)."""
    kernel = _grouped_kernel(grad, x)
    if kernel is not None:
        return kernel(grad.t(), x, offs=counts.cumsum(0).to(torch.int32))
    out = x.new_empty(counts.shape[0], grad.shape[1], x.shape[1])
    for matrix, rows in zip(out, _runs(counts), strict=False):
        torch.mm(grad[rows].t(), x[rows], out=matrix)
    return out


def _runs(counts: Tensor) -> list[slice]:
    """The rows of each expert. None where there are no values: only shapes are asked for then."""
    ends = [] if isinstance(counts, FakeTensor) else list(accumulate(counts.tolist()))
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


class Gated(torch.autograd.Function):
    """silu(gate) x up, keeping the two and not silu(gate)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return fresh(F.silu(gate).mul_(up))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        into_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return into_gate, F.silu(gate).mul_(grad)


class Combine(torch.autograd.Function):
    """Rows times their shares, added up by token. (torch's index_add would keep what it adds: one tensor more.)"""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, share: Tensor, token: Tensor, num_tokens: int) -> Tensor:
        ctx.save_for_backward(rows, share, token)
        return fresh(rows.new_zeros(num_tokens, rows.shape[1]).index_add_(0, token, rows * share.unsqueeze(1)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, share, token = ctx.saved_tensors
        each = grad.index_select(0, token)
        into_share = (each * rows).sum(1)
        return each.mul_(share.unsqueeze(1)), into_share, None, None


class AttachLoss(torch.autograd.Function):
    """x as it is; going backward, `loss` gets the gradient it would get as a part of the loss at the end."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Any) -> Tensor:
        ctx.scale, ctx.dtype = scale, loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        each = ctx.scale.value / ctx.scale.ways
        return grad, torch.full((), each, dtype=ctx.dtype, device=grad.device), None


@torch.compiler.disable  # the scale changes from step to step, and must not be compiled in
def attach_loss(x: Tensor, loss: Tensor, scale: Any) -> Tensor:
    return AttachLoss.apply(x, loss, scale)


def within_capacity(chosen: Tensor, num_experts: int, factor: float) -> Tensor:
    """Which of the choices (batch, sequence, k) find room, first come first served along each sequence."""
    samples, sequence, k = chosen.shape
    capacity = math.ceil(sequence * k / num_experts * factor)
    asked = torch.zeros(samples, sequence, num_experts, dtype=torch.int32, device=chosen.device)
    asked.scatter_(2, chosen, 1)  # a token asks an expert once at most
    return asked.cumsum(1, dtype=torch.int32).gather(2, chosen) <= capacity


def balancing_loss(chosen: Tensor, chances: Tensor) -> Tensor:
    """Over sequences, length x E x sum over experts of (share of the choices) x (mean chance); 1 x length if even.

    `chances` of some of the tokens only: their part of it.
    """
    samples, sequence, k = chosen.shape
    experts = chances.shape[-1]
    flat = chosen.flatten(1)
    counts = chances.new_zeros(samples, experts).scatter_add_(1, flat, torch.ones_like(flat, dtype=chances.dtype))
    return (counts / (sequence * k) * chances.sum(1)).sum() * experts


@torch.compiler.disable
def through_experts(
    x: Tensor,
    chosen: Tensor,
    share: Tensor,
    kept: Tensor | None,
    weights: tuple[Tensor, Tensor, Tensor],
    num_experts: int,
    send: Send = stay,
) -> Tensor:
    """Sum over a token's experts of share x expert(token). x (tokens, d); chosen and share (tokens, k).

    `weights`: gate, up and down of the experts that `send` leaves here.
    """
    k = chosen.shape[1]
    experts, order = chosen.flatten().sort(stable=True)
    if kept is not None:
        result = kept.flatten()[order]
        experts, order = experts[result], order[result]
    token = order // k
    rows, counts, back = send(x.index_select(0, token), torch.bincount(experts, minlength=num_experts))
    dtype = x.dtype
    gate, up, down = (weight.to(dtype) for weight in weights)
    inner = Gated.apply(GroupedLinear.apply(rows, gate, counts), GroupedLinear.apply(rows, up, counts))
    out = back(GroupedLinear.apply(inner, down, counts))
    return Combine.apply(out, share.flatten().index_select(0, order).to(dtype), token, x.shape[0])


def fresh(x: Tensor) -> Tensor:
    """What a compiled autograd function may return: a tensor that nothing has written into in place.

    With torch 2.11 the gradients of a function whose compiled forward returns a tensor that it changed in place are
    zero, without a word. Compilers remove the copy; uncompiled, there is none.
    """
    return x.clone() if torch.compiler.is_compiling() else x


def precise(x: Tensor) -> torch.dtype:
    """The dtype of sums that must not be rounded: float32 at least."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _transposed(rows: Tensor, lengths: list[list[int]]) -> Tensor:
    """Runs of rows that lie in the order of a table of lengths, in the order of its columns instead."""
    if len(lengths) == 1 or len(lengths[0]) == 1:
        return rows
    runs = rows.split([length for row in lengths for length in row])
    width = len(lengths[0])
    return torch.cat([run for column in range(width) for run in runs[column::width]])


class Travel(torch.autograd.Function):
    """Rows go one way, their gradients the other."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, go: Back, go_back: Back) -> Tensor:
        ctx.go_back = go_back
        return fresh(go(rows))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.go_back(grad), None, None


def sending_over(group: dist.ProcessGroup) -> Send:
    """For experts dealt to the ranks of `group`, equally many to each, in their order."""

    def send(rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Back]:
        peers = torch.empty_like(counts)
        dist.all_to_all_single(peers, counts, group=group)
        ways = group.size()
        # One copy to the host for both tables: rows of this rank for each rank and expert, of each rank for those here.
        sent, received = torch.stack((counts, peers)).view(2, ways, -1).tolist()
        to_each, from_each = ([sum(row) for row in table] for table in (sent, received))
        by_expert = [list(column) for column in zip(*received, strict=True)]

        def there(rows: Tensor) -> Tensor:
            return _transposed(swap(rows, to_each, from_each, group), received)

        def home(rows: Tensor) -> Tensor:
            return swap(_transposed(rows, by_expert), from_each, to_each, group)

        arrived = Travel.apply(rows, there, home)
        return arrived, peers.view(ways, -1).sum(0), lambda out: Travel.apply(out, home, there)

    return send
