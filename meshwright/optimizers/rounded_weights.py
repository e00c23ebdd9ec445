"""16-bit weights without a float32 copy: each is updated in float32 and rounded at random to one of its two neighbours.

To the nearest one, an update smaller than half the distance would never move a weight; at random with the right mean,
it moves one in as many steps as it takes (Gupta et al. 2015). The random numbers are a hash of the parameter's name,
the element's place in the whole parameter and the step: the same on every replica, for every cut, and after a restart.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from meshwright.core.box import Box
from meshwright.core.build import Build
from meshwright.core.errors import first_line
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.optimizers.rule import ParameterPiece, PieceRules, RuleMaker, Shapes, UpdateRule

LOST_BITS = 16
"""Of a float32 that a bfloat16 has not."""
SLICE_ELEMENTS = 1 << 25
"""Rounded at once: rounding takes several times the memory of what is rounded."""


def places_of(box: Box, device: torch.device) -> Tensor:
    """The place of each element of a piece in the whole tensor (int32; beyond its range from the start again)."""
    places = torch.zeros((), dtype=torch.int32, device=device)
    for offset, size, length in zip(box.offset, box.size, box.shape, strict=True):
        along = torch.arange(offset, offset + size, dtype=torch.int32, device=device)
        places = places.unsqueeze(-1) * length + along
    return places


def seed_of(name: str, step: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{name}/{step}".encode(), digest_size=4).digest(), "little", signed=True)


def noise(places: Tensor, seed: int | Tensor) -> Tensor:
    """A uniform random int32 from 0 to 2^16 - 1 for each element."""
    mixed = places * -1640531535 + seed
    for shift, factor in ((16, 2146121005), (15, -2073254261)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return (mixed >> LOST_BITS) & 0xFFFF


def round_at_random(wide: Tensor, drawn: Tensor) -> Tensor:
    """float32 -> bfloat16: up with the probability that keeps the mean; `drawn`: as `noise` gives it."""
    bits = wide.contiguous().view(torch.int32)
    rounded = ((bits + drawn) & ~0xFFFF).view(torch.float32)
    return torch.where(wide.isfinite(), rounded, wide).to(torch.bfloat16)


def _round_rows(wide: Tensor, numbers: Tensor) -> Tensor:
    """Round consecutive elements of a parameter; `numbers`: the place of the first one, and the seed."""
    places = torch.arange(wide.numel(), dtype=torch.int32, device=wide.device).view(wide.shape) + numbers[0]
    return round_at_random(wide, noise(places, numbers[1]))


@cache
@torch.no_grad()
def compiled_rounding(device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """`_round_rows` in one pass over memory, where the device's compiler works and gives the same numbers."""
    wide = torch.linspace(-3, 3, 4096, device=device).view(64, 64)
    numbers = torch.tensor([1 << 20, -12345], dtype=torch.int32, device=device)
    compiled = torch.compile(_round_rows, dynamic=True)
    try:
        if torch.equal(compiled(wide, numbers), _round_rows(wide, numbers)):
            return compiled
        reason = "it gives other numbers"
    except Exception as error:
        reason = first_line(error)
    warnings.warn(f"rounding of weights is not compiled, and takes longer: {reason}", stacklevel=2)
    return _round_rows


def rounded(wide: Tensor, box: Box, seed: int) -> Tensor:
    """In bfloat16; `box`: where it lies in the parameter."""
    if not (wide.is_cuda and wide.dim() == 2 and box.size[1] == box.shape[1]):
        return round_at_random(wide, noise(places_of(box, wide.device), seed))
    first = box.offset[0] * box.shape[1] & 0xFFFFFFFF
    numbers = torch.tensor([first - (first >> 31 << 32), seed], dtype=torch.int32).to(wide.device)
    return compiled_rounding(wide.device)(wide, numbers)


class RoundedWeights(PieceRules):
    """A rule for each piece of 16 bits, on a float32 copy of it that exists while it is updated."""

    def __init__(
        self, make: RuleMaker, config: OptimizerConfig, pieces: list[ParameterPiece], build: Build, shapes: Shapes
    ):
        super().__init__(config, pieces, build, shapes)
        self.wide: list[Tensor] = []
        self.rules: dict[str, UpdateRule] = {}
        for piece in pieces:
            wide = torch.empty_like(piece.value, dtype=torch.float32)
            self.rules[piece.name] = make(config, [replace(piece, value=wide)], build, shapes)
            wide.untyped_storage().resize_(0)  # before the next one is made: all together may not fit
            self.wide.append(wide)
        self.rounds_states = any(rule.rounds_states for rule in self.rules.values())  # type: ignore[misc]

    def step(self, lr: float, count: int) -> None:
        for piece, wide in zip(self.pieces, self.wide, strict=True):
            rule, gradient = self.rules[piece.name], piece.value.grad
            if gradient is None:
                rule.set_num_steps(count)
                continue
            wide.untyped_storage().resize_(wide.numel() * wide.element_size())
            wide.copy_(piece.value)
            wide.grad = gradient.float()
            rule.step(lr, count)
            wide.grad = None
            parts = max(1, min(-(-wide.numel() // SLICE_ELEMENTS), piece.box.size[0] if piece.box.size else 1))
            for index, (target, source) in enumerate(zip(piece.value.chunk(parts), wide.chunk(parts), strict=True)):
                box = piece.box.chunk(0, index, parts)
                target.copy_(rounded(source, box, seed_of(piece.name, count)))
            wide.untyped_storage().resize_(0)
