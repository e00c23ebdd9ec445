"""A linear layer whose three products (its output and both gradients) multiply 8-bit operands.

Each operand is scaled so that its largest element is the largest 8-bit number (dynamic scaling), for the whole tensor
("tensorwise") or for each row of a product's operands ("rowwise"), and rounded to e4m3; gradients, whose sizes differ
most, to e5m2 where one scale serves a whole tensor. Products are summed in float32 and written in the activations'
dtype. What is kept for backward is what a linear keeps, the input and the weight, which are rounded once more there: a
kept 8-bit copy would be one for each linear that reads the input.

Plain torch operations, so that a compiler joins scaling and rounding to the kernels around them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Scaling = Literal["tensorwise", "rowwise"]
MULTIPLE = 16
"""Of which both sizes of an 8-bit matrix must be multiples."""
_LEAST = 1e-30
"""A largest element below this counts as this: zeros stay zeros."""


def round_to_8_bits(x: Tensor, dtype: torch.dtype, dim: int | None = None) -> tuple[Tensor, Tensor]:
    """x / scale in 8 bits, and the scale (float32): of each row along `dim`, or of the whole tensor.

    What is not finite stays so: the scale then is not finite either.
    """
    low, high = torch.aminmax(x) if dim is None else torch.aminmax(x, dim=dim, keepdim=True)
    largest = torch.finfo(dtype).max
    scale = torch.maximum(-low, high).float().clamp(min=_LEAST) / largest
    return (x.float() / scale).clamp(-largest, largest).to(dtype), scale


def _product(a: Tensor, b: Tensor, of_a: torch.dtype, of_b: torch.dtype, by_row: bool, *, fast: bool) -> Tensor:
    """a (m, k) times the transpose of b (n, k). `fast`: with fewer bits in sums of sums."""
    dim = -1 if by_row else None
    (left, left_scale), (right, right_scale) = round_to_8_bits(a, of_a, dim), round_to_8_bits(b, of_b, dim)
    return torch._scaled_mm(
        left.contiguous(),
        right.contiguous().t(),
        scale_a=left_scale,
        scale_b=right_scale.t() if by_row else right_scale,
        out_dtype=a.dtype,
        use_fast_accum=fast,
    )


class LinearFp8(torch.autograd.Function):
    """x (..., k) times the transpose of weight (n, k), of one dtype of 16 bits or more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, by_row: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.by_row = by_row
        e4m3 = torch.float8_e4m3fn
        return _product(x.flatten(0, -2), weight, e4m3, e4m3, by_row, fast=True).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        by_row, e4m3 = ctx.by_row, torch.float8_e4m3fn
        rows, given = grad.flatten(0, -2), x.flatten(0, -2)
        of_grad = e4m3 if by_row else torch.float8_e5m2
        into_x = into_weight = None
        if ctx.needs_input_grad[0]:
            into_x = _product(rows, weight.t(), of_grad, e4m3, by_row, fast=False).unflatten(0, x.shape[:-1])
        if ctx.needs_input_grad[1]:
            if rows.shape[0] % MULTIPLE == 0:
                into_weight = _product(rows.t(), given.t(), of_grad, e4m3, by_row, fast=False)
            else:  # a sum over so many tokens is no 8-bit product
                into_weight = rows.t() @ given
        return into_x, into_weight, None


def linear_fp8(scaling: Scaling) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """`F.linear` with 8-bit products; matrices of other sizes than multiples of 16 are multiplied as they are."""
    by_row = scaling == "rowwise"

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if any(size % MULTIPLE for size in weight.shape):
            return F.linear(x, weight, bias)
        out = LinearFp8.apply(x, weight, by_row)
        return out if bias is None else out + bias

    return product
