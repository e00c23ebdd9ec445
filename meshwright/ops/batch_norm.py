"""Batch norm whose statistics are those of the whole batch, however many ranks share it.

Each rank has as many samples as the others, so the mean of means is the mean, and the variance is the mean of the
variances plus the variance of the means (Chan et al. 1979). A mean of squares would lose all digits of a variance that
is small beside the mean. One message of two numbers a channel from every rank forward (mean, variance), one backward
(sums of the gradient); without groups there is none.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.ops.collectives import all_gather_single
from meshwright.ops.routing import precise

Groups = tuple[dist.ProcessGroup, ...]


def _all_but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _normal(x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """Computed in the dtype of the mean."""
    wide, weight, bias = (each.to(mean.dtype) for each in (x, weight, bias))
    return F.batch_norm(wide, mean, variance, weight, bias, False, 0.0, epsilon).to(x.dtype)


class Normalize(torch.autograd.Function):
    """(x - mean) / deviation x weight + bias, with what mean and deviation owe to x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        variance: Tensor,
        epsilon: float,
        groups: Groups,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, (variance + epsilon).rsqrt())
        ctx.groups, ctx.bias_dtype = groups, bias.dtype
        return _normal(x, mean, variance, weight, bias, epsilon)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        shape = (1, -1) + (1,) * (x.dim() - 2)
        grad = grad.to(mean.dtype)
        normal = (x.to(mean.dtype) - mean.view(shape)) * inverse.view(shape)
        over = _all_but_channels(x)
        into_bias, into_weight = grad.sum(over), (grad * normal).sum(over)
        count = x.numel() // x.shape[1]
        means = torch.stack((into_bias, into_weight)) / count
        for group in ctx.groups:
            dist.all_reduce(means, group=group)
            means = means / group.size()
        normal.mul_(means[1].view(shape)).add_(means[0].view(shape))
        into_x = (grad - normal).mul_((inverse * weight.to(mean.dtype)).view(shape))
        return into_x.to(x.dtype), into_weight.to(weight.dtype), into_bias.to(ctx.bias_dtype), None, None, None, None


class BatchNorm(nn.Module):
    def __init__(self, size: int, epsilon: float = 1e-5, momentum: float = 0.1):
        super().__init__()
        self.epsilon, self.momentum = epsilon, momentum
        self.groups: Groups = ()
        """Ranks that hold other samples of the batch, as many each."""
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size))
        self.register_buffer("running_mean", torch.zeros(size))
        self.register_buffer("running_var", torch.ones(size))
        self.running_mean: Tensor
        self.running_var: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            dtype = precise(x)
            mean, variance = self.running_mean.to(dtype), self.running_var.to(dtype)
            return _normal(x, mean, variance, self.weight, self.bias, self.epsilon)
        if not self.groups:  # torch's own kernels, which know no other ranks
            out, mean, inverse = torch.native_batch_norm(x, self.weight, self.bias, None, None, True, 0.0, self.epsilon)
            self.remember(mean.detach(), inverse.detach().pow(-2) - self.epsilon, x.numel() // x.shape[1])
            return out
        with torch.no_grad():
            variance, mean = torch.var_mean(x.to(precise(x)), dim=_all_but_channels(x), correction=0)
            for group in self.groups:
                mine = torch.stack((mean, variance))
                both = mine.new_empty(group.size() * 2, mean.shape[0])
                all_gather_single(both, mine, group=group)
                means, variances = both.view(-1, *mine.shape).unbind(1)
                mean = means.mean(0)
                variance = variances.mean(0) + (means - mean).square().mean(0)
            self.remember(mean, variance, x.numel() // x.shape[1])
        return Normalize.apply(x, self.weight, self.bias, mean, variance, self.epsilon, self.groups)

    def remember(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """For evaluation."""
        for group in self.groups:
            count *= group.size()
        unbiased = variance * (count / max(count - 1, 1))
        dtype = self.running_mean.dtype
        _remember(self.running_mean, self.running_var, mean.to(dtype), unbiased.to(dtype), self.momentum)


@torch.library.custom_op("meshwright::remember_statistics", mutates_args=("running_mean", "running_var"))
def _remember(running_mean: Tensor, running_var: Tensor, mean: Tensor, variance: Tensor, momentum: float) -> None:
    """Not while backward runs: that is a forward computed again, already remembered. An op of its own, since a compiled
    graph cannot ask."""
    if torch._C._current_graph_task_id() == -1:
        torch._foreach_lerp_([running_mean, running_var], [mean, variance], momentum)


@_remember.register_fake
def _(running_mean: Tensor, running_var: Tensor, mean: Tensor, variance: Tensor, momentum: float) -> None:
    return None
