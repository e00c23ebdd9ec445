"""Weights of 8 or 4 bits decoded in one pass: bytes are read once, elements written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.core.profile import BLOCK_OF_WEIGHTS

_TILE = 16
"""Blocks of one program."""


@triton.jit
def _decode_kernel(
    packed, pairs, out, num_blocks, WIDTH: tl.constexpr, IS_PAIR: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (block < num_blocks)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    scale = tl.load((packed + (block + 1) * WIDTH - 4).to(tl.pointer_type(tl.float32)), mask=block < num_blocks)
    start = packed + block[:, None] * WIDTH
    if IS_PAIR:
        byte = tl.load(start + column // 2, mask=inside, other=0).to(tl.int32)
        value = tl.load(pairs + 2 * byte + column % 2)
    else:
        value = tl.load(start + column, mask=inside, other=0).to(tl.int8, bitcast=True).to(tl.float32)
    value = (value * scale[:, None]).to(out.dtype.element_ty)
    tl.store(out + block[:, None] * BLOCK + column, value, mask=inside)


def launch(packed: Tensor, dtype: torch.dtype, pairs: Tensor) -> Tensor:
    """`pairs`: the two levels that each byte of two codes stands for."""
    rows, per_row, width = packed.shape
    out = torch.empty(rows, per_row * BLOCK_OF_WEIGHTS, dtype=dtype, device=packed.device)
    blocks, is_pair = rows * per_row, width < BLOCK_OF_WEIGHTS
    _decode_kernel[(triton.cdiv(blocks, _TILE),)](
        packed, pairs, out, blocks, WIDTH=width, IS_PAIR=is_pair, TILE=_TILE, BLOCK=BLOCK_OF_WEIGHTS
    )
    return out
