"""AdamW over many tensors in one launch: weights, gradients and moments are read once, and nothing else is written but
16-bit copies of weights that have one, whose gradients are of 16 bits too.

A table has the addresses of all tensors, another the tensor and the first element of every program. (On an H200 torch's
fused kernel moves 2.7 TB/s, and writes clipped gradients back.)
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE, TILES, WARPS = 1024, 8, 4
"""Elements of a tile, and tiles of a program."""
ALIGNMENT = 16
"""Bytes that addresses are multiples of."""


@triton.jit
def _tile(
    value_ptr, gradient, mean_ptr, square_ptr, copy, index, mask, factor, rate, kept, beta1, beta2, unbias, epsilon,
    COPIED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    inside = mask if MASKED else None
    value = tl.load(value_ptr + index, mask=inside)
    if COPIED:
        gradient_ptr = tl.multiple_of(gradient.to(tl.pointer_type(tl.bfloat16)), 16)
    else:
        gradient_ptr = tl.multiple_of(gradient.to(tl.pointer_type(tl.float32)), 16)
    gradient = tl.load(gradient_ptr + index, mask=inside).to(tl.float32) * factor
    mean = tl.load(mean_ptr + index, mask=inside)
    square = tl.load(square_ptr + index, mask=inside)
    mean += (1 - beta1) * (gradient - mean)
    square = beta2 * square + (1 - beta2) * gradient * gradient
    value = value * kept - rate * mean / (tl.sqrt_rn(square) * unbias + epsilon)
    tl.store(value_ptr + index, value, mask=inside)
    if COPIED:
        copy_ptr = tl.multiple_of(copy.to(tl.pointer_type(tl.bfloat16)), 16)
        tl.store(copy_ptr + index, value.to(tl.bfloat16), mask=inside)
    tl.store(mean_ptr + index, mean, mask=inside)
    tl.store(square_ptr + index, square, mask=inside)


@triton.jit(do_not_specialize=["num_tensors"])
def _kernel(
    addresses, lengths, scales, decays, tensors, starts, divisor_ptr, refused_ptr,
    num_tensors, lr, unbias_mean, beta1, beta2, unbias, epsilon,
    TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    if tl.load(refused_ptr) == 1.0:
        return
    program = tl.program_id(0)
    tensor = tl.load(tensors + program)
    start = tl.load(starts + program).to(tl.int64)
    value_ptr = tl.multiple_of(tl.load(addresses + tensor).to(tl.pointer_type(tl.float32)), 16)
    gradient = tl.load(addresses + num_tensors + tensor)
    mean_ptr = tl.multiple_of(tl.load(addresses + 2 * num_tensors + tensor).to(tl.pointer_type(tl.float32)), 16)
    square_ptr = tl.multiple_of(tl.load(addresses + 3 * num_tensors + tensor).to(tl.pointer_type(tl.float32)), 16)
    copy = tl.load(addresses + 4 * num_tensors + tensor)  # 0: there is none
    length = tl.load(lengths + tensor)
    factor = 1.0 / tl.load(divisor_ptr)
    own = lr * tl.load(scales + tensor)
    rate, kept = own * unbias_mean, 1.0 - own * tl.load(decays + tensor)
    start = tl.multiple_of(start, TILE)
    for tile in range(TILES):
        index = start + tile * TILE + tl.arange(0, TILE)
        is_whole = start + (tile + 1) * TILE <= length
        if copy != 0:
            if is_whole:
                _tile(value_ptr, gradient, mean_ptr, square_ptr, copy, index, index < length,
                      factor, rate, kept, beta1, beta2, unbias, epsilon, True, False)  # fmt: skip
            else:
                _tile(value_ptr, gradient, mean_ptr, square_ptr, copy, index, index < length,
                      factor, rate, kept, beta1, beta2, unbias, epsilon, True, True)  # fmt: skip
        else:
            if is_whole:
                _tile(value_ptr, gradient, mean_ptr, square_ptr, copy, index, index < length,
                      factor, rate, kept, beta1, beta2, unbias, epsilon, False, False)  # fmt: skip
            else:
                _tile(value_ptr, gradient, mean_ptr, square_ptr, copy, index, index < length,
                      factor, rate, kept, beta1, beta2, unbias, epsilon, False, True)  # fmt: skip


class AdamWKernel:
    """The update of some pieces by their gradients and moments, all float32 (gradients of pieces with a copy: bfloat16,
    as the copy) and contiguous."""

    def __init__(self, pieces, means, squares):
        self.values, self.means, self.squares = [piece.value for piece in pieces], means, squares
        self.copies = [piece.copy for piece in pieces]
        device = self.values[0].device
        each = TILE * TILES
        counts = [-(-value.numel() // each) for value in self.values]
        self.tensors = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(device, torch.int32)
        self.starts = torch.cat([torch.arange(count) * each for count in counts]).to(device, torch.int32)
        self.lengths = torch.tensor([value.numel() for value in self.values], device=device)
        self.scales = torch.tensor([piece.lr_scale for piece in pieces], device=device)
        self.decays = torch.tensor([piece.weight_decay for piece in pieces], device=device)
        self.one, self.zero = torch.ones((), device=device), torch.zeros((), device=device)
        self.placed: list[int] = []
        self.addresses = torch.zeros(0)

    def takes(self, gradients) -> bool:
        """Whether all tensors lie as the kernel reads them."""
        copied = [each for pair in zip(gradients, self.copies, strict=True) if pair[1] is not None for each in pair]
        plain = [each for each, copy in zip(gradients, self.copies, strict=True) if copy is None]
        wide = (*self.values, *plain, *self.means, *self.squares)
        return (
            all(each.is_contiguous() and each.data_ptr() % ALIGNMENT == 0 for each in (*wide, *copied))
            and all(tensor.dtype == torch.float32 for tensor in wide)
            and all(tensor.dtype == torch.bfloat16 for tensor in copied)
            and all(value.numel() < 2**31 for value in self.values)
        )

    def __call__(self, gradients, config, lr, count, divisor, refused) -> None:
        """`divisor` and `refused`: as in `UpdateRule`; None: 1 and 0."""
        every = (*self.values, *gradients, *self.means, *self.squares, *self.copies)
        placed = [0 if tensor is None else tensor.data_ptr() for tensor in every]
        if placed != self.placed:
            table, device = torch.tensor(placed), self.one.device
            self.placed = placed
            self.addresses = table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
        _kernel[(len(self.tensors),)](
            self.addresses, self.lengths, self.scales, self.decays, self.tensors, self.starts,
            self.one if divisor is None else divisor, self.zero if refused is None else refused,
            len(self.values), lr, 1 / (1 - config.beta1**count), config.beta1, config.beta2,
            (1 - config.beta2**count) ** -0.5, config.epsilon,
            TILE=TILE, TILES=TILES, num_warps=WARPS,
        )  # fmt: skip
