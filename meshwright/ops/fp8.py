"""A linear layer whose three products (its output and both gradients) multiply 8-bit operands.

Each operand is scaled so that its largest element is the largest 8-bit number (dynamic scaling), for the whole tensor
("tensorwise") or for each row of a product's operands ("rowwise"), and rounded to e4m3; gradients, whose sizes differ
most, to e5m2 where one scale serves a whole tensor. Products are summed in float32 and written in the activations'
dtype.

Plain torch operations, so that a compiler joins scaling and rounding to the kernels around them.

Scales of weights for the whole tensor are powers of two. A weight that was rounded once is therefore rounded again to
what it is, and FSDP may gather 8 bits of it (`gather_narrow`): each rank rounds its rows with a scale of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.core.work import FP8_MULTIPLE

Scaling = Literal["tensorwise", "rowwise"]
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_LEAST = 1e-30
"""A largest element below this counts as this: zeros stay zeros."""


def scale_of(x: Tensor, dtype: torch.dtype, dim: int | None = None) -> Tensor:
    """What x is divided by so that its largest element, of each row along `dim` or of all, is the dtype's largest."""
    largest = x.abs().amax() if dim is None else x.abs().amax(dim=dim, keepdim=True)
    return largest.float().clamp(min=_LEAST) / torch.finfo(dtype).max


def scale_of_weight(weight: Tensor) -> Tensor:
    """The next power of two of what the whole weight is divided by."""
    return scale_of(weight, _E4M3).log2().ceil().exp2()


def rounded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x / scale in 8 bits. What is not finite stays so: its scale then is not finite either."""
    largest = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-largest, largest).to(dtype)


def _product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """8-bit a (m, k) times the transpose of 8-bit b (n, k). `fast`: the tensor cores' own sums are not widened."""
    return torch._scaled_mm(
        a.contiguous(),
        b.contiguous().t(),
        scale_a=scale_a,
        scale_b=scale_b.t() if scale_b.dim() else scale_b,
        out_dtype=dtype,
        use_fast_accum=fast,
    )


def _product_by_rows(a: Tensor, b: Tensor, *, fast: bool) -> Tensor:
    """a (m, k) times the transpose of b (n, k), each row of both with a scale of its own."""
    scale_a, scale_b = (scale_of(each, _E4M3, dim=-1) for each in (a, b))
    return _product(rounded(a, scale_a, _E4M3), rounded(b, scale_b, _E4M3), scale_a, scale_b, a.dtype, fast=fast)


class TensorwiseLinear(torch.autograd.Function):
    """x (..., k) times the transpose of weight (n, k), both of one dtype of 16 bits, with one scale for each tensor.

    Eager, what is kept is what any linear keeps: an 8-bit copy would be one for each linear that reads the input. A
    compiler keeps the 8-bit input once, or makes it anew from what others keep.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale_x, scale_weight = scale_of(x, _E4M3), scale_of_weight(weight)
        narrow = rounded(x, scale_x, _E4M3)
        ctx.save_for_backward(narrow if torch.compiler.is_compiling() else x, weight, scale_x, scale_weight)
        narrow_weight = rounded(weight, scale_weight, _E4M3)
        out = _product(narrow.flatten(0, -2), narrow_weight, scale_x, scale_weight, x.dtype, fast=True)
        return out.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight, scale_x, scale_weight = ctx.saved_tensors
        scale = scale_of(grad, _E5M2)
        narrow = rounded(grad, scale, _E5M2).flatten(0, -2)
        into_x = into_weight = None
        if ctx.needs_input_grad[0]:
            narrow_weight = rounded(weight, scale_weight, _E4M3)
            into_x = _product(narrow, narrow_weight.t(), scale, scale_weight, grad.dtype, fast=True)
            into_x = into_x.unflatten(0, x.shape[:-1])
        if ctx.needs_input_grad[1]:
            given = (x if x.dtype == _E4M3 else rounded(x, scale_x, _E4M3)).flatten(0, -2)
            if given.shape[0] % FP8_MULTIPLE == 0:
                into_weight = _product(narrow.t(), given.t(), scale, scale_x, grad.dtype, fast=True)
            else:  # a sum over so many tokens is no 8-bit product
                into_weight = grad.flatten(0, -2).t() @ (given.float() * scale_x).to(grad.dtype)
        return into_x, into_weight


class RowwiseLinear(torch.autograd.Function):
    """The same with a scale for each row of the operands of each product: along the dim that is summed over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product_by_rows(x.flatten(0, -2), weight, fast=True).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows, given = grad.flatten(0, -2), x.flatten(0, -2)
        into_x = into_weight = None
        if ctx.needs_input_grad[0]:
            into_x = _product_by_rows(rows, weight.t(), fast=False).unflatten(0, x.shape[:-1])
        if ctx.needs_input_grad[1]:
            is_narrow = rows.shape[0] % FP8_MULTIPLE == 0
            into_weight = _product_by_rows(rows.t(), given.t(), fast=False) if is_narrow else rows.t() @ given
        return into_x, into_weight


def linear_fp8(scaling: Scaling) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """`F.linear` with 8-bit products; matrices of other sizes than multiples of 16 are multiplied as they are."""
    function = RowwiseLinear if scaling == "rowwise" else TensorwiseLinear

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if any(size % FP8_MULTIPLE for size in weight.shape):
            return F.linear(x, weight, bias)
        out = function.apply(x, weight)
        return out if bias is None else out + bias

    if scaling == "tensorwise":
        product.gather_narrow = gather_narrow  # type: ignore[attr-defined]
    return product


def _narrowed(shard: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """In the dtype of the products first, as where nothing is gathered."""
    shard = shard.to(dtype)
    scale = scale_of_weight(shard)
    return rounded(shard, scale, _E4M3), scale.reshape(1)


def _widen(narrow: Tensor, scales: Tensor, out: Tensor) -> None:
    out.view(len(scales), -1).copy_(narrow.view(len(scales), -1).float() * scales.unsqueeze(1))


@functools.cache
def _on(device: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """One pass over memory where there is a compiler for it."""
    return torch.compile(run, dynamic=True) if device == "cuda" else run


def gather_narrow(weight: Any, ranks: int) -> None:
    """Have FSDP gather 8 bits an element of this weight, if `ranks` share its rows evenly and products read 8 bits.

    What is gathered is widened to the dtype that FSDP would gather: nothing that reads the weight has to know.
    """
    if weight.shape[0] % ranks or any(size % FP8_MULTIPLE for size in weight.shape):
        return
    shard = weight._local_tensor

    @torch.no_grad()
    def before(mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> tuple[tuple[Tensor, Tensor], None]:
        return _on(shard.device.type, _narrowed)(shard, policy.param_dtype or shard.dtype), None

    @torch.no_grad()
    def after(
        outputs: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        narrow, scales = outputs
        whole = torch.empty_like(narrow, dtype=dtype) if out is None else out
        with torch.autograd._unsafe_preserve_version_counter(whole):  # it is what forward read
            _on(shard.device.type, _widen)(narrow, scales, whole)
        narrow.untyped_storage().resize_(0)  # FSDP allocates it again
        return whole, (whole,)

    shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = before, after
