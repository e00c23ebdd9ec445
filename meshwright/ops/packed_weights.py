"""Frozen weights in 8 or 4 bits, and the product with one that has a low-rank adapter.

A row is stored in blocks of 64 elements: codes, then the block's scale, a float32. int8: code x scale, the scale the
largest magnitude / 127. nf4: two codes a byte, the first above, that stand for 16 quantiles of a normal distribution
relative to the largest magnitude (Dettmers et al. 2023), as in bitsandbytes. A matrix is one tensor of bytes (rows,
blocks, bytes of a block), which can be cut along rows and blocks as any other parameter.

A decoded weight exists only while it is multiplied with. Going backward it is decoded again; a compiler is kept from
sharing one decoded weight between the two by an argument that tells them apart.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.core.box import Box
from meshwright.core.profile import BLOCK_OF_WEIGHTS
from meshwright.ops.initial_weights import Source
from meshwright.ops.kernels import run_or_fall_back
from meshwright.ops.routing import fresh

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)


@cache
def _pairs(device: torch.device) -> Tensor:
    """A byte of two codes -> the two levels."""
    levels = torch.tensor(NF4, dtype=torch.float32, device=device)
    codes = torch.arange(256, device=device)
    return torch.stack([levels[codes >> 4], levels[codes & 15]], dim=1)


def encode(weight: Tensor, width: int) -> Tensor:
    """Rows as bytes (rows, blocks, width): each element as its nearest code."""
    blocks = weight.float().unflatten(1, (-1, BLOCK_OF_WEIGHTS))
    scale = blocks.abs().amax(-1, keepdim=True)
    if width > BLOCK_OF_WEIGHTS:
        scale = scale / 127
        codes = (blocks / scale.clamp(min=1e-38)).round().to(torch.int8).view(torch.uint8)
    else:
        levels = torch.tensor(NF4, device=weight.device)
        nearest = torch.bucketize(blocks / scale.clamp(min=1e-38), (levels[1:] + levels[:-1]) / 2, out_int32=True)
        first, second = nearest.to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
        codes = (first << 4) | second
    return torch.cat([codes, scale.view(torch.uint8)], dim=-1)


def plain_decode(packed: Tensor, dtype: torch.dtype) -> Tensor:
    codes, scale = packed[..., :-4], packed[..., -4:].contiguous().view(torch.float32)
    is_pair = codes.shape[-1] < BLOCK_OF_WEIGHTS
    values = F.embedding(codes.int(), _pairs(packed.device)).flatten(-2) if is_pair else codes.view(torch.int8)
    return (values * scale).to(dtype).flatten(1)


@torch.library.custom_op("meshwright_weights::decode", mutates_args=())
def decode(packed: Tensor, dtype: torch.dtype, is_backward: bool = False) -> Tensor:
    """The weight (rows, columns), rounded from float32 to `dtype`."""

    def kernel() -> Tensor:
        from meshwright.ops.kernels.packed_weights import launch

        return launch(packed.contiguous(), dtype, _pairs(packed.device))

    return run_or_fall_back("packed_weights", packed, kernel, lambda: plain_decode(packed, dtype))


@decode.register_fake
def _(packed: Tensor, dtype: torch.dtype, is_backward: bool = False) -> Tensor:
    return packed.new_empty((packed.shape[0], packed.shape[1] * BLOCK_OF_WEIGHTS), dtype=dtype)


class AdaptedProduct(torch.autograd.Function):
    """x W' + bias + scale x A' B' with W and bias frozen; A and B may be None. Keeps x and x A', and no copy of W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Any, first: Any, second: Any, scale: float) -> Tensor:
        plain = weight.to(x.dtype) if weight.is_floating_point() else decode(weight, x.dtype)
        out = F.linear(x, plain, bias)
        ctx.scale, low = scale, None
        if first is not None:
            low = F.linear(x, first).mul_(scale)
            out.view(-1, out.shape[-1]).addmm_(low.view(-1, low.shape[-1]), second.t())
        ctx.save_for_backward(x if first is not None else None, weight, first, second, low)
        return fresh(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, Tensor | None, Tensor | None, None]:
        x, weight, first, second, low = ctx.saved_tensors
        shape, grad = grad.shape, grad.flatten(0, -2)
        into_x = into_first = into_second = None
        if ctx.needs_input_grad[0]:
            plain = weight.to(grad.dtype) if weight.is_floating_point() else decode(weight, grad.dtype, True)
            into_x = grad @ plain
        if first is not None:
            through = (grad @ second).mul_(ctx.scale)
            into_first = through.t() @ x.flatten(0, -2)
            into_second = grad.t() @ low.flatten(0, -2)
            if into_x is not None:
                into_x.addmm_(through, first)
        into_x = None if into_x is None else into_x.view(*shape[:-1], -1)
        return into_x, None, None, into_first, into_second, None


def source_of_adapted(weights: Source, adapters: Source) -> Source:
    """Low-rank matrices from `adapters`, all else from `weights`; where bytes are asked for, packed."""

    def read(name: str, box: Box, dtype: torch.dtype) -> Tensor:
        if ".lora_" in name:
            return adapters(name, box, dtype)
        if len(box.shape) != 3:
            return weights(name, box, dtype)
        shape, offset, size = ((n, k * BLOCK_OF_WEIGHTS) for n, k, _ in (box.shape, box.offset, box.size))
        if box.is_empty:
            return torch.empty(box.size, dtype=torch.uint8)
        return encode(weights(name, Box(shape, offset, size), torch.float32), box.shape[2])

    return read
