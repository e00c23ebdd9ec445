"""Adafactor: Adam without its first average, the second kept as sums over rows and columns (Shazeer & Stern 2018).

For a matrix (the last two dims) V is estimated as R C / mean(R); the step u = g / sqrt(V) is cut to a root mean square
of 1 and taken relative to the parameter's own: rate x max(0.001, RMS(w)) x u. Decay is decoupled, by the plain rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.core.box import Box
from meshwright.core.build import OptimizerState
from meshwright.optimizers.rule import ParameterPiece, UpdateRule

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.core.build import Build
    from meshwright.core.work import Num, ParameterSlot
    from meshwright.optimizers.optimizer_config import OptimizerConfig

GROWTH = 0.8
"""beta2 of step t is 1 - t^-0.8 (section 7.2)."""
LEAST_SIZE = 1e-3
LARGEST_STEP = 1.0


@dataclass(kw_only=True)
class Factored:
    """Means over the whole rows and columns that this rank's piece lies in."""

    piece: ParameterPiece
    row: Tensor
    column: Tensor

    @classmethod
    def of(cls, piece: ParameterPiece) -> Factored:
        value = piece.value
        return cls(piece=piece, row=value.new_zeros(_without(value.shape, -1)),
                   column=value.new_zeros(_without(value.shape, -2)))  # fmt: skip

    @property
    def is_first_in_row(self) -> bool:
        return self.piece.box.offset[-1] == 0

    def kept(self) -> Iterable[OptimizerState]:
        box, name = self.piece.box, self.piece.name
        yield OptimizerState("row", name, self.row, box.without(-1), self.is_first_in_row)
        yield OptimizerState("column", name, self.column, box.without(-2), box.offset[-2] == 0)

    def shares(self, gradient: Tensor) -> list[Tensor]:
        """This piece's part of the sums over rows, columns and all; and of the row means as they were."""
        square = gradient.square()
        row, before = square.sum(-1), self.row.sum(-1)
        return [row, square.sum(-2), row.sum(-1), before if self.is_first_in_row else before.new_zeros(before.shape)]

    def update(self, gradient: Tensor, sums: Tensor, beta: float, epsilon: float) -> Tensor:
        """Fold the sums over the whole matrix into the means; g / sqrt(V)."""
        num_rows, num_columns = self.piece.box.shape[-2:]
        stack = self.row.shape[:-1]
        parts = sums.split([self.row.numel(), self.column.numel(), math.prod(stack), math.prod(stack)])
        row, column = parts[0].view(self.row.shape), parts[1].view(self.column.shape)
        self.row.lerp_((row / num_columns + epsilon).to(self.row.dtype), 1 - beta)
        self.column.lerp_((column / num_rows + epsilon).to(self.row.dtype), 1 - beta)
        mean = beta * parts[3] / num_rows + (1 - beta) * (parts[2] / (num_rows * num_columns) + epsilon)
        relative = self.row / mean.view(*stack, 1).to(self.row.dtype)
        return gradient * relative.rsqrt().unsqueeze(-1) * self.column.rsqrt().unsqueeze(-2)


class Adafactor(UpdateRule):
    kind = "norm"
    states = 1
    epsilon = 1e-30

    @classmethod
    def state_bytes_of(cls, config: OptimizerConfig, slot: ParameterSlot) -> Num:
        if len(slot.shape) < 2:
            return super().state_bytes_of(config, slot)
        first = -(-slot.shape[0] // slot.shards)
        *stack, rows, columns = (first, *slot.shape[1:])
        return math.prod(stack) * (rows + columns) * slot.state_width

    def __init__(self, config: Any, pieces: list[ParameterPiece], build: Build, shapes: Any):
        import torch

        from meshwright.optimizers.whole_parameters import Norms, Sums

        super().__init__(config, pieces, build, shapes)
        self.factored = {index: Factored.of(piece) for index, piece in enumerate(pieces) if piece.is_matrix}
        self.square = {i: torch.zeros_like(value) for i, value in enumerate(self.values) if i not in self.factored}
        matrices = [factored.piece for factored in self.factored.values()]
        self.sums = Sums(build.mesh, shapes, matrices, _num_sums, [_places(piece.box) for piece in matrices])
        self.norms = Norms(build.mesh, shapes, pieces, 2)

    def kept(self) -> Iterable[OptimizerState]:
        for factored in self.factored.values():
            yield from factored.kept()
        for index, value in self.square.items():
            yield OptimizerState("square", self.pieces[index].name, value, self.pieces[index].box)

    def step(self, lr: float, count: int) -> None:
        import torch

        beta, epsilon, gradients = 1 - count**-GROWTH, self.config.epsilon, self.gradients()
        parts = [factored.shares(gradients[index]) for index, factored in self.factored.items()]
        shares = [torch.cat([tensor.flatten() for tensor in each]) for each in parts]
        sums = dict(zip(self.factored, self.sums(shares), strict=True))
        updates = []
        for index, gradient in enumerate(gradients):
            if index in self.factored:
                updates.append(self.factored[index].update(gradient, sums[index], beta, epsilon))
            else:
                square = self.square[index].lerp_(gradient.square() + epsilon, 1 - beta)
                updates.append(gradient * square.rsqrt())
        norms = self.norms(self.values, updates)
        if not updates:
            return
        scales = []
        for piece, rate, (weight, update) in zip(self.pieces, self.rates(lr), norms, strict=True):
            root = max(1, math.prod(piece.box.shape)) ** 0.5
            scales.append(-rate * max(LEAST_SIZE, weight / root) / max(1.0, update / root / LARGEST_STEP))
        torch._foreach_mul_(updates, scales)
        self.decay(lr)
        torch._foreach_add_(self.values, updates)


def _without(sizes: Iterable[int], dim: int) -> tuple[int, ...]:
    kept = list(sizes)
    del kept[dim]
    return tuple(kept)


def _num_sums(shape: tuple[int, ...]) -> int:
    if len(shape) < 2:
        return 0
    *stack, rows, columns = shape
    return math.prod(stack) * (rows + columns + 2)


def _places(box: Box) -> Tensor:
    """Where a piece's sums (rows, columns, all, before) lie among those of its parameter."""
    import torch

    places, start = [], 0
    stack = Box(box.shape[:-2], box.offset[:-2], box.size[:-2])
    for part in (box.without(-1), box.without(-2), stack, stack):
        count = math.prod(part.shape)
        places.append(start + torch.arange(count).view(part.shape)[part.slices].flatten())
        start += count
    return torch.cat(places)
