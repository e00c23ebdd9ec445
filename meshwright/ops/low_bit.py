"""Optimizer states in 8 or 4 bits an element, and AdamW on such states.

Consecutive elements form a block that shares one float32 scale, the largest magnitude in it; a code stands for a
magnitude relative to that scale. Codes are denser near the scale and reach far below it: decade e below the scale,
(10^-(e+1), 10^-e], has 2^(depth-e) levels at equal distances, the last of them 10^-e itself. Numbered from below,
level k (1..n) of a decade with n = 2^(depth-e) levels is code n - 1 + k, and code 0 is zero: so `depth` 7 (or 6 with a
sign) fills 8 bits and spans 8 (7) decades, and `depth` 3 (2) fills 4 bits.

Of the second moment its square root is coded, which is what an update divides by, and no positive value becomes zero:
it would be divided by (Li et al. 2023). Rounding is to a neighbour at random with the right mean, by a hash of the
element's place and the step: to the nearest one an average that changes by less than half a level in a step would
never change. The scale is itself a level, so that what was decoded is coded again without any change.

References: Dettmers et al. 2022 (8 bits), Li et al. 2023 (4 bits).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from meshwright.ops.kernels import run_or_fall_back

TINY = 1e-30
"""Blocks whose largest magnitude is below become zeros."""
LOG2_OF_10, LOG10_OF_2 = 3.321928094887362, 0.3010299956639812


@dataclass(frozen=True)
class BlockCode:
    """How a block is coded."""

    bits: int
    block: int
    """Elements that share a scale."""
    is_signed: bool

    @property
    def depth(self) -> int:
        return self.bits - 1 - self.is_signed

    @property
    def sign(self) -> int:
        """Added to the codes of negative numbers."""
        return 1 << (self.bits - 1) if self.is_signed else 0

    def table(self, device: torch.device) -> Tensor:
        """Code -> magnitude relative to the scale, with its sign."""
        return _table(self.depth, self.is_signed, device)

    def positions(self, relative: Tensor, noise: Tensor | float) -> Tensor:
        """Magnitudes in 0..1 -> codes without sign, as floats. `noise`: 0.5 rounds to the nearest level, numbers drawn
        from 0..1 at random."""
        # The end of a decade is the beginning of the next: it does not matter which one a rounding error chooses.
        decade = torch.floor(torch.log2(relative.clamp(min=TINY)) * -LOG10_OF_2).clamp(0.0, self.depth)
        count = torch.exp2(self.depth - decade)
        scaled = relative * torch.exp2(decade * LOG2_OF_10)
        level = torch.floor((scaled - 0.1) * (count * (1 / 0.9)) + noise)
        return torch.round(count - 1 + torch.minimum(level.clamp(min=0.0), count))


@cache
def _table(depth: int, is_signed: bool, device: torch.device) -> Tensor:
    levels = [0.0]
    for decade in range(depth, -1, -1):
        count = 1 << (depth - decade)
        levels += [(0.1 + 0.9 * level / count) * 10.0**-decade for level in range(1, count + 1)]
    table = torch.tensor(levels, dtype=torch.float64).float()
    return (torch.cat([table, -table]) if is_signed else table).to(device)


class CodedTensor:
    """A tensor of any shape as codes and scales; zeros at first."""

    def __init__(self, shape: torch.Size, code: BlockCode, device: torch.device):
        self.shape, self.code = shape, code
        num_blocks = -(-shape.numel() // code.block)
        self.codes = torch.zeros(num_blocks, code.block * code.bits // 8, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(num_blocks, dtype=torch.float32, device=device)

    def blocks(self) -> Tensor:
        """Decoded, a block in each row, what lies beyond the end as zeros."""
        codes = self.codes
        if self.code.bits == 4:  # a byte has an element of the first half of the block, and one of the second above it
            codes = torch.cat([codes & 15, codes >> 4], dim=1)
        return self.code.table(codes.device)[codes.long()] * self.scales[:, None]

    def write(self, blocks: Tensor, noise: Tensor | float = 0.5) -> None:
        """Code what `blocks` gives."""
        scales = blocks.abs().amax(dim=1)
        scales = torch.where(scales > TINY, scales, 0.0)
        inverse = torch.where(scales > 0, 1.0 / scales, 0.0)[:, None]
        positions = self.code.positions(blocks.abs() * inverse, noise)
        if self.code.is_signed:
            positions = positions + torch.where((blocks < 0) & (positions > 0), float(self.code.sign), 0.0)
        else:
            positions = torch.where((blocks > 0) & (inverse > 0), positions.clamp(min=1.0), positions)
        codes = positions.to(torch.uint8)
        if self.code.bits == 4:
            first, second = codes.chunk(2, dim=1)
            codes = first | (second << 4)
        self.codes.copy_(codes)
        self.scales.copy_(scales)

    def decoded(self) -> Tensor:
        return self.blocks().flatten()[: self.shape.numel()].view(self.shape)

    def encode(self, value: Tensor) -> None:
        """Each element as the nearest code."""
        self.write(in_blocks(value.float(), self.code.block))


def in_blocks(value: Tensor, block: int) -> Tensor:
    flat = value.flatten()
    return torch.nn.functional.pad(flat, (0, -flat.numel() % block)).view(-1, block)


class LowBitMoments:
    """What AdamW remembers of one tensor: its first moment, and the square root of the second."""

    def __init__(self, value: Tensor, bits: int, block: int):
        self.mean = CodedTensor(value.shape, BlockCode(bits, block, is_signed=True), value.device)
        self.root = CodedTensor(value.shape, BlockCode(bits, block, is_signed=False), value.device)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.mean.codes, self.mean.scales, self.root.codes, self.root.scales


@dataclass(frozen=True, kw_only=True)
class AdamWStep:
    """The numbers of one step of AdamW on one tensor."""

    lr: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    count: int
    """1 in the first step."""

    @property
    def kept(self) -> float:
        """What decay leaves of a weight."""
        return 1 - self.lr * self.weight_decay

    @property
    def rate(self) -> float:
        """The rate, the first moment's bias taken out."""
        return self.lr / (1 - self.beta1**self.count)

    @property
    def unbias(self) -> float:
        """Times this, the second moment's root is free of its bias."""
        return float((1 - self.beta2**self.count) ** -0.5)


def low_bit_adamw(value: Tensor, gradient: Tensor, moments: LowBitMoments, step: AdamWStep, factor: Tensor) -> None:
    """Update a weight and its moments in place by `factor` times the gradient.

    Nothing changes if `factor`, a tensor of one element, is not a number. On CUDA it is one kernel that decodes,
    updates and codes again; elsewhere, or where there is no Triton, the same in plain torch.
    """

    def kernel() -> None:
        from meshwright.ops.kernels.low_bit_adamw import launch

        launch(value, gradient.contiguous(), moments, step, factor)

    run_or_fall_back("low_bit_adamw", value, kernel, partial(plain_adamw, value, gradient, moments, step, factor))


def plain_adamw(value: Tensor, gradient: Tensor, moments: LowBitMoments, step: AdamWStep, factor: Tensor) -> None:
    if not bool(torch.isfinite(factor)):
        return
    block = moments.mean.code.block
    given = in_blocks(gradient.float() * factor, block)
    mean = step.beta1 * moments.mean.blocks() + (1 - step.beta1) * given
    root = moments.root.blocks()
    root = torch.sqrt(step.beta2 * root * root + (1 - step.beta2) * given * given)
    change = (step.rate * mean / (root * step.unbias + step.epsilon)).flatten()[: value.numel()].view(value.shape)
    value.copy_(value * step.kept - change)
    noise = uniform(torch.arange(given.numel(), device=value.device), step.count)
    first, second = noise[0].view_as(given), noise[1].view_as(given)
    moments.mean.write(mean, first)
    moments.root.write(root, second)


def uniform(index: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Two numbers from 0 to 1 for each index: the halves of an integer hash."""
    word = (index * 0x9E3779B1 + seed * 0x85EBCA77) & 0xFFFFFFFF
    for factor, shift in ((0x7FEB352D, 16), (0x846CA68B, 15)):
        word = ((word ^ (word >> shift)) * factor) & 0xFFFFFFFF
    word = word ^ (word >> 16)
    return (word & 0xFFFF).float() * 2.0**-16, (word >> 16).float() * 2.0**-16
