"""Cross entropy of every token, with as little memory as it takes.

`HeadLoss` is the head of a decoder and its loss as one operation. Forward makes the logits, each row's loss, and writes
the gradient over the logits: they exist once, in the activations' dtype. In chunks (`chunked_loss`) the gradients of
hidden states and weight are made at once too, and no logits outlive their chunk. The vocabulary may be split between
ranks. `TokenLoss` is the loss alone, for modules whose logits are their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.ops.kernels import is_usable, run_or_fall_back
from meshwright.ops.routing import precise

KERNEL = "cross_entropy"
BLOCK_ELEMENTS = 1 << 20
"""Of logits that the plain form widens at a time."""


class SplitVocabulary(NamedTuple):
    """This rank has the words from `first` on."""

    first: int
    group: dist.ProcessGroup


class HeadLoss(torch.autograd.Function):
    """Sum over tokens of weight x cross entropy of `x @ matrix.T`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        matrix: Tensor,
        targets: Tensor,
        weights: Tensor,
        expected: float,
        num_chunks: int,
        words: SplitVocabulary | None,
        is_trained: bool,
    ) -> Tensor:
        """`expected`: the gradient that backward will bring; any other is made up for. `is_trained`: it will come."""
        hidden, narrow = x.flatten(0, -2), matrix.to(x.dtype)
        targets, weights = targets.flatten(), weights.flatten()
        scales = weights * expected if is_trained else None
        ctx.expected, ctx.num_chunks, ctx.shape = expected, num_chunks, x.shape
        ctx.gradient_dtype = gradient_dtype(matrix)
        if num_chunks == 1:
            logits = hidden @ narrow.t()
            losses, gradient = _losses(logits, targets, scales, words)
            ctx.save_for_backward(gradient, hidden if ctx.needs_input_grad[1] else None, narrow)
            return (losses * weights).sum()
        total = x.new_zeros((), dtype=precise(x))
        into_x = torch.empty_like(hidden) if is_trained and ctx.needs_input_grad[0] else None
        into_matrix: Tensor | None = None
        pieces = zip(*(each.chunk(num_chunks) for each in (hidden, targets, weights)), strict=True)
        at = 0
        for part, target, weight in pieces:
            rows = slice(at, at + part.shape[0])
            at = rows.stop
            logits = part @ narrow.t()
            losses, gradient = _losses(logits, target, None if scales is None else scales[rows], words)
            total = total + (losses * weight).sum()
            if gradient is not None and into_x is not None:
                torch.mm(gradient, narrow, out=into_x[rows])
            if gradient is not None and ctx.needs_input_grad[1]:
                into_matrix = _add_product(into_matrix, gradient.t(), part, precise(x))
            del logits, gradient
        ctx.save_for_backward(into_x, into_matrix)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None, None]:
        into_x = into_matrix = None
        factor = grad / ctx.expected  # exactly one where what was expected has come
        if ctx.num_chunks > 1:
            into_x, into_matrix = ctx.saved_tensors
            into_x = None if into_x is None else into_x * factor.to(into_x.dtype)
            into_matrix = None if into_matrix is None else into_matrix.mul_(factor).to(ctx.gradient_dtype)
        else:
            gradient, hidden, narrow = ctx.saved_tensors
            if ctx.needs_input_grad[0]:
                into_x = (gradient @ narrow).mul_(factor)
            if ctx.needs_input_grad[1]:
                hidden = hidden * factor.to(hidden.dtype)
                into_matrix = _add_product(None, gradient.t(), hidden, ctx.gradient_dtype)
        return None if into_x is None else into_x.view(ctx.shape), into_matrix, None, None, None, None, None, None


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """In which autograd accumulates its gradient."""
    return (parameter.grad_dtype if parameter.is_leaf else None) or parameter.dtype


def _add_product(total: Tensor | None, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """total + left @ right in `dtype`; on a GPU without a copy of the product in the factors' dtype."""
    if left.dtype == dtype or not left.is_cuda:
        product = (left @ right).to(dtype)
        return product if total is None else total.add_(product)
    if total is None:
        return torch.mm(left, right, out_dtype=dtype)
    return torch.addmm(total, left, right, out_dtype=dtype, out=total)


def _losses(
    logits: Tensor, targets: Tensor, scales: Tensor | None, words: SplitVocabulary | None
) -> tuple[Tensor, Tensor | None]:
    """Each row's loss and, with `scales`, the gradient of scale x loss in the memory of the logits."""

    def by_kernel() -> tuple[Tensor, Tensor | None]:
        from meshwright.ops.kernels import cross_entropy as kernels

        if words is None:
            log_sum, score = kernels.log_sums(logits, targets, scales=scales)
        else:
            log_sum, score = _whole(*kernels.log_sums(logits, targets, words.first), words.group)
            if scales is not None:
                kernels.write_gradient(logits, logits, targets, words.first, scales, log_sum)
        return log_sum - score, None if scales is None else logits

    def plain() -> tuple[Tensor, Tensor | None]:
        return _plain_losses(logits, targets, scales, words)

    return plain() if logits.dtype == torch.float64 else run_or_fall_back(KERNEL, logits, by_kernel, plain)


def _whole(log_sum: Tensor, score: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Log-sums and target scores over the whole vocabulary from this rank's part of it, by two small all_reduces."""
    largest = log_sum.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    sums = torch.stack(((log_sum - largest).exp_(), score))
    dist.all_reduce(sums, group=group)
    return sums[0].log() + largest, sums[1]


def _plain_losses(
    logits: Tensor, targets: Tensor, scales: Tensor | None, words: SplitVocabulary | None
) -> tuple[Tensor, Tensor | None]:
    """A block of rows at a time, so that what is float32 at least stays small beside the logits."""
    wide = precise(logits)
    if words is None:
        losses = torch.empty(len(logits), dtype=wide, device=logits.device)
        for rows in _blocks(logits):
            chances = torch.log_softmax(logits[rows], dim=-1, dtype=wide)
            index = targets[rows].unsqueeze(-1)
            losses[rows] = -chances.gather(-1, index).squeeze(-1)
            if scales is not None:
                logits[rows] = _gradient(chances.exp_(), index, scales[rows], scales[rows])
        return losses, None if scales is None else logits
    local = targets - words.first
    mine = (local >= 0) & (local < logits.shape[-1])
    index = torch.where(mine, local, 0).unsqueeze(-1)
    score = torch.where(mine, logits.gather(-1, index).squeeze(-1).to(wide), 0.0)
    log_sum, score = _whole(_log_sums(logits), score, words.group)
    if scales is not None:
        for rows in _blocks(logits):
            chances = (logits[rows].to(wide) - log_sum[rows].unsqueeze(-1)).exp_()
            logits[rows] = _gradient(chances, index[rows], scales[rows], scales[rows] * mine[rows])
    return log_sum - score, None if scales is None else logits


def _log_sums(logits: Tensor) -> Tensor:
    wide = precise(logits)
    each = [torch.logsumexp(logits[rows].to(wide), dim=-1) for rows in _blocks(logits)]
    return torch.cat(each) if each else logits.new_empty(0, dtype=wide)


def _blocks(logits: Tensor) -> Iterator[slice]:
    step = max(1, BLOCK_ELEMENTS // max(1, logits.shape[-1]))
    return (slice(at, at + step) for at in range(0, len(logits), step))


def _gradient(chances: Tensor, index: Tensor, scales: Tensor, at_target: Tensor) -> Tensor:
    out = chances.mul_(scales.unsqueeze(-1))
    return out.scatter_add_(-1, index, -at_target.to(out.dtype).unsqueeze(-1))


class TokenLoss(torch.autograd.Function):
    """-log softmax(logits)[target], in float32 at least; the logits are somebody else's and stay as they are."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        rows, index = logits.flatten(0, -2).contiguous(), targets.flatten()

        def plain() -> tuple[Tensor, Tensor]:
            score = rows.gather(-1, index.unsqueeze(-1)).squeeze(-1)
            return _log_sums(rows), score.to(precise(rows))

        def by_kernel() -> tuple[Tensor, Tensor]:
            from meshwright.ops.kernels.cross_entropy import log_sums

            return log_sums(rows, index)

        is_wide = rows.dtype == torch.float64
        log_sum, score = plain() if is_wide else run_or_fall_back(KERNEL, rows, by_kernel, plain)
        ctx.save_for_backward(logits, log_sum, targets)
        return (log_sum - score).view(targets.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, log_sum, targets = ctx.saved_tensors
        rows, scales, index = logits.flatten(0, -2).contiguous(), grad.flatten(), targets.flatten()
        out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        if is_usable(KERNEL, rows) and rows.dtype != torch.float64:
            from meshwright.ops.kernels.cross_entropy import write_gradient

            write_gradient(rows, out, index, 0, scales.contiguous(), log_sum)
        else:
            for block in _blocks(rows):
                chances = (rows[block].to(log_sum.dtype) - log_sum[block].unsqueeze(-1)).exp_()
                out[block] = _gradient(chances, index[block].unsqueeze(-1), scales[block], scales[block])
        return out.view(logits.shape), None


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return TokenLoss.apply(logits, targets)
