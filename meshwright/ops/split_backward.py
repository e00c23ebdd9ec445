"""The two halves of a linear layer's backward, apart: the gradient of its input at once, that of its weight when asked.

Nobody waits for a weight's gradient, so a schedule may put it where a stage would idle. Everything else (norms, biases,
attention, embeddings) stays whole in the first half: it is cheap, or has no weight.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Later:
    """What weight gradients are still to be made of."""

    def __init__(self) -> None:
        self.waiting: dict[Hashable, list[tuple[nn.Parameter, Tensor, Tensor]]] = {}
        self.key: Hashable = None

    @contextmanager
    def collect(self, key: Hashable) -> Iterator[None]:
        """Within it, backward leaves weights' gradients for `pay(key)`."""
        self.key = key
        self.waiting[key] = []
        try:
            yield
        finally:
            self.key = None

    def put(self, weight: nn.Parameter, x: Tensor, grad: Tensor) -> bool:
        """Whether the gradient may wait."""
        if self.key is None:
            return False
        self.waiting[self.key].append((weight, x, grad))
        return True

    @torch.no_grad()
    def pay(self, key: Hashable) -> list[nn.Parameter]:
        """The weights whose gradients were made."""
        paid = self.waiting.pop(key)
        for weight, x, grad in paid:
            made = _weight_gradient(weight, x, grad)
            if weight.grad is None:
                weight.grad = made
            else:
                weight.grad.add_(made)
        return [weight for weight, _, _ in paid]


def _weight_gradient(weight: Tensor, x: Tensor, grad: Tensor) -> Tensor:
    return (grad.flatten(0, -2).t() @ x.flatten(0, -2).to(grad.dtype)).to(weight.dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, later: Later) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None)
        ctx.dtype, ctx.weight, ctx.bias_dtype, ctx.later = x.dtype, weight, None if bias is None else bias.dtype, later
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (x,) = ctx.saved_tensors
        into_x = (grad @ ctx.weight.to(grad.dtype)).to(ctx.dtype) if ctx.needs_input_grad[0] else None
        into_weight = into_bias = None
        if ctx.needs_input_grad[1] and not ctx.later.put(ctx.weight, x, grad):
            into_weight = _weight_gradient(ctx.weight, x, grad)
        if ctx.needs_input_grad[2]:
            into_bias = grad.flatten(0, -2).sum(0).to(ctx.bias_dtype)
        return into_x, into_weight, into_bias, None


def _forward(module: nn.Linear, later: Later, x: Tensor) -> Tensor:
    return _Linear.apply(x, module.weight, module.bias, later)


def split_backward(blocks: Iterable[nn.Module]) -> Later:
    """Linear layers in `blocks` from now on have a backward of two halves."""
    later = Later()
    for block in blocks:
        for module in block.modules():
            if isinstance(module, nn.Linear):
                module.forward = functools.partial(_forward, module, later)
    return later
