"""Cross entropy of every token, with as little memory as it takes: whole, over a split vocabulary, or in chunks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from meshwright.ops.routing import precise


class TokenLoss(torch.autograd.Function):
    """-log softmax(logits)[target], in float32 at least.

    One float tensor of the logits' size is kept, and backward turns it into the gradient in place (torch's own keeps
    that and makes two more).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        chances = torch.log_softmax(logits, dim=-1, dtype=precise(logits))
        index = targets.unsqueeze(-1)
        ctx.save_for_backward(chances, index)
        ctx.dtype = logits.dtype
        return -chances.gather(-1, index).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        chances, index = ctx.saved_tensors
        # In place: a second backward through the same forward is refused by autograd, not computed wrong.
        out = chances.exp_().mul_(grad.unsqueeze(-1))
        out.scatter_add_(-1, index, -grad.unsqueeze(-1))
        return out.to(ctx.dtype), None


class SplitTokenLoss(torch.autograd.Function):
    """The same over a vocabulary split between ranks: each has the words from `first` on.

    Two small all_reduces; logits are never gathered.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        work = logits.to(precise(logits), copy=True)
        largest = work.amax(dim=-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        work.sub_(largest.unsqueeze(-1))
        local = targets - first
        mine = (local >= 0) & (local < work.shape[-1])
        index = torch.where(mine, local, 0).unsqueeze(-1)
        target = torch.where(mine, work.gather(-1, index).squeeze(-1), 0.0)
        sums = torch.stack((work.exp_().sum(dim=-1), target))
        dist.all_reduce(sums, group=group)
        total, target = sums.unbind()
        ctx.save_for_backward(work.div_(total.unsqueeze(-1)), index, mine)
        ctx.dtype = logits.dtype
        return total.log() - target

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        probability, index, mine = ctx.saved_tensors
        out = probability.mul_(grad.unsqueeze(-1))
        out.scatter_add_(-1, index, (-grad * mine).unsqueeze(-1))
        return out.to(ctx.dtype), None, None, None


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return TokenLoss.apply(logits, targets)


def chunked_score(score: Any, num_chunks: int) -> Any:
    """`score` over pieces of each sequence; backward computes each piece's logits again."""

    def chunked(head: Any, x: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        pieces = zip(
            x.chunk(num_chunks, dim=1), targets.chunk(num_chunks, dim=1), weights.chunk(num_chunks, dim=1), strict=True
        )
        total = x.new_zeros((), dtype=precise(x))
        for hidden, target, weight in pieces:
            total = total + checkpoint(score, head, hidden, target, weight, use_reentrant=False)
        return total

    return chunked
