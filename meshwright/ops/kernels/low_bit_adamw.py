"""AdamW on block-wise coded moments in one pass: decode, update, code again (`ops/low_bit.py` says how codes work)."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

ELEMENTS, WARPS = 1024, 4
"""Of a program."""


@triton.jit
def _moments(
    value_ptr, gradient_ptr, index, mask, old_mean, old_root, factor, kept, rate, beta1, beta2, unbias, epsilon
):
    """Update a tile of weights; its new first moment and root of the second."""
    gradient = tl.load(gradient_ptr + index, mask=mask, other=0.0).to(tl.float32) * factor
    value = tl.load(value_ptr + index, mask=mask, other=0.0).to(tl.float32)
    mean = beta1 * old_mean + (1 - beta1) * gradient
    root = tl.sqrt(beta2 * old_root * old_root + (1 - beta2) * gradient * gradient)
    tl.store(value_ptr + index, value * kept - rate * mean / (root * unbias + epsilon), mask=mask)
    return mean, root


@triton.jit
def _positions(relative, noise, DEPTH: tl.constexpr):
    decade = tl.floor(tl.log2(tl.maximum(relative, 1e-30)) * -0.3010299956639812)
    decade = tl.minimum(tl.maximum(decade, 0.0), 1.0 * DEPTH)
    count = tl.exp2(DEPTH - decade)
    scaled = relative * tl.exp2(decade * 3.321928094887362)
    level = tl.floor((scaled - 0.1) * (count * (1 / 0.9)) + noise)
    return tl.floor(count - 0.5 + tl.minimum(tl.maximum(level, 0.0), count))  # exp2 need not be exact


@triton.jit
def _signed(mean, inverse, noise, BITS: tl.constexpr):
    positions = _positions(tl.abs(mean) * inverse, noise, BITS - 2)
    return (positions + tl.where((mean < 0) & (positions > 0), 1.0 * (1 << (BITS - 1)), 0.0)).to(tl.int32)


@triton.jit
def _unsigned(root, inverse, noise, BITS: tl.constexpr):
    positions = _positions(root * inverse, noise, BITS - 1)
    return tl.where((root > 0) & (inverse > 0), tl.maximum(positions, 1.0), positions).to(tl.int32)


@triton.jit
def _uniform(index, seed):
    word = index.to(tl.uint32) * 0x9E3779B1 + seed.to(tl.uint32) * 0x85EBCA77
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    word = word ^ (word >> 16)
    return (word & 0xFFFF).to(tl.float32) * 0.0000152587890625, (word >> 16).to(tl.float32) * 0.0000152587890625


@triton.jit
def _scales(largest, scales_ptr, rows, mask):
    """Store the scales of blocks with these largest magnitudes; what relative magnitudes are multiplied by."""
    scales = tl.where(largest > 1e-30, largest, 0.0)
    tl.store(scales_ptr + rows, scales, mask=mask)
    return tl.where(scales > 0, 1.0 / scales, 0.0)[:, None]


@triton.jit(do_not_specialize=["num_elements", "seed"])
def _kernel(
    value_ptr, gradient_ptr, means_ptr, mean_scales_ptr, roots_ptr, root_scales_ptr, mean_table, root_table, factor_ptr,
    num_elements, seed, kept, rate, beta1, beta2, unbias, epsilon,
    BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    factor = tl.load(factor_ptr).to(tl.float32)
    num_elements = tl.where((factor - factor) == 0, num_elements, 0)  # nothing to do if it is not finite
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = rows * BLOCK < num_elements
    mean_scales = tl.load(mean_scales_ptr + rows, mask=is_row, other=0.0)[:, None]
    root_scales = tl.load(root_scales_ptr + rows, mask=is_row, other=0.0)[:, None]
    WIDTH: tl.constexpr = BLOCK * BITS // 8
    columns = tl.arange(0, WIDTH)[None, :]
    coded = rows[:, None] * WIDTH + columns
    is_coded = is_row[:, None] & (columns < WIDTH)
    means = tl.load(means_ptr + coded, mask=is_coded, other=0).to(tl.int32)
    roots = tl.load(roots_ptr + coded, mask=is_coded, other=0).to(tl.int32)
    LOW: tl.constexpr = (1 << BITS) - 1
    index = rows[:, None] * BLOCK + columns
    mask = is_coded & (index < num_elements)
    mean, root = _moments(
        value_ptr, gradient_ptr, index, mask, tl.load(mean_table + (means & LOW)) * mean_scales,
        tl.load(root_table + (roots & LOW)) * root_scales, factor, kept, rate, beta1, beta2, unbias, epsilon,
    )  # fmt: skip
    largest_mean, largest_root = tl.max(tl.abs(mean), axis=1), tl.max(root, axis=1)
    first, second = _uniform(index, seed)
    if BITS == 8:
        inverse = _scales(largest_mean, mean_scales_ptr, rows, is_row)
        tl.store(means_ptr + coded, _signed(mean, inverse, first, BITS).to(tl.uint8), mask=is_coded)
        inverse = _scales(largest_root, root_scales_ptr, rows, is_row)
        tl.store(roots_ptr + coded, _unsigned(root, inverse, second, BITS).to(tl.uint8), mask=is_coded)
    else:  # a byte has an element of the first half of the block, and one of the second above it
        index += WIDTH
        mask = is_coded & (index < num_elements)
        high_mean, high_root = _moments(
            value_ptr, gradient_ptr, index, mask, tl.load(mean_table + (means >> 4)) * mean_scales,
            tl.load(root_table + (roots >> 4)) * root_scales, factor, kept, rate, beta1, beta2, unbias, epsilon,
        )  # fmt: skip
        third, fourth = _uniform(index, seed)
        largest = tl.maximum(largest_mean, tl.max(tl.abs(high_mean), axis=1))
        inverse = _scales(largest, mean_scales_ptr, rows, is_row)
        codes = _signed(mean, inverse, first, BITS) | (_signed(high_mean, inverse, third, BITS) << 4)
        tl.store(means_ptr + coded, codes.to(tl.uint8), mask=is_coded)
        inverse = _scales(tl.maximum(largest_root, tl.max(high_root, axis=1)), root_scales_ptr, rows, is_row)
        codes = _unsigned(root, inverse, second, BITS) | (_unsigned(high_root, inverse, fourth, BITS) << 4)
        tl.store(roots_ptr + coded, codes.to(tl.uint8), mask=is_coded)


def launch(value, gradient, moments, step, factor) -> None:
    """As `ops.low_bit.plain_adamw`; `gradient` and `value` are contiguous."""
    code = moments.mean.code
    rows = ELEMENTS // code.block
    mean, mean_scales, root, root_scales = moments.tensors()
    _kernel[(-(-mean_scales.numel() // rows),)](
        value, gradient, mean, mean_scales, root, root_scales,
        moments.mean.code.table(value.device), moments.root.code.table(value.device), factor,
        value.numel(), step.count, step.kept, step.rate, step.beta1, step.beta2, step.unbias, step.epsilon,
        BITS=code.bits, BLOCK=code.block, ROWS=rows, num_warps=WARPS,
    )  # fmt: skip
