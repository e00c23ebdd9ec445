"""Muon: the momentum of each matrix, orthogonalised (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

Steps have the size of AdamW's, 0.2 sqrt(max(rows, columns)) of an orthogonal matrix (Liu et al. 2025, "Muon is scalable
for LLM training", section 2.2), so that one rate serves both: the matrices of the blocks are Muon's, and stacks of
them (experts) one by one; embedding, head, norms and biases are AdamW's. Ranks that cut a matrix share out the work
(`whole_parameters.py`); replicas each do all of theirs.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING

from meshwright.core.build import OptimizerState
from meshwright.core.work import Collective
from meshwright.optimizers.rule import ParameterPiece, Shapes, UpdateRule
from meshwright.optimizers.rules.adamw import AdamW

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.core.build import Build
    from meshwright.core.profile import Param
    from meshwright.core.work import Num, ParameterSlot, Work
    from meshwright.optimizers.optimizer_config import OptimizerConfig

QUINTIC = (3.4445, -4.7750, 2.0315)
"""a x + b x^3 + c x^5 takes singular values of 0 to 1 close to 1 in a few turns, fastest for small ones."""
TURNS = 5
LEAST_NORM = 1e-7


class Muon(UpdateRule):
    kind = "whole_matrix"
    states = 2
    momentum = 0.95

    @staticmethod
    def updates(shape: tuple[Num, ...], is_block: bool) -> bool:
        """Whether it updates a parameter itself: matrices of blocks, alone or (experts) stacked; AdamW the others."""
        return is_block and len(shape) in (2, 3)

    @classmethod
    def state_bytes_of(cls, config: OptimizerConfig, slot: ParameterSlot) -> Num:
        states = 1 if cls.updates(slot.shape, slot.is_block) else cls.states
        return slot.stored(slot.shards) * states * slot.state_width

    @classmethod
    def collectives(cls, work: Work) -> tuple[Collective, ...]:
        """Matrices of one sort are dealt to the ranks of an axis, padded to equally many each and equal pieces: there
        as they were cut, first along the rows of the shards and then along the cut inside of layers, and back."""
        params = {(layer.name, param.name): param for layer in work.profile.layers for param in layer.params}
        sorts: dict[Param, tuple[Num, ParameterSlot]] = {}
        """How many of each sort a stage has; equal parameters of different blocks are one sort."""
        for slot in work.slots:
            if cls.updates(slot.shape, slot.is_block) and not (slot.frozen or slot.copy_of):
                param = params[slot.layer, slot.name]
                sorts[param] = (sorts.get(param, (0, slot))[0] + slot.repeat, slot)
        sizes: dict[str, Num] = {axis: 0 for slot in work.slots for axis in (slot.shard_axis,) if axis}
        for count, slot in sorts.values():
            piece = slot.stored(slot.shards) * slot.element_bytes
            if len(slot.shape) == 2 and slot.shard_axis:  # a stack of experts is sharded between its matrices
                ways = work.size(slot.shard_axis)
                sizes[slot.shard_axis] = sizes[slot.shard_axis] + _padded(count, ways) * piece
                count, piece = -(-count // ways), slot.elements * slot.element_bytes
            if slot.cut_axis and slot.cut is not None and slot.cut >= len(slot.shape) - 2:
                padded = _padded(count, work.size(slot.cut_axis))
                sizes[slot.cut_axis] = sizes.get(slot.cut_axis, 0) + padded * piece
        return tuple(
            Collective(
                layer="",
                kind="all_to_all",
                axis=axis,
                phase="step",
                repeat=2 * ((size > 0) & (work.size(axis) > 1)),
                bytes=size,
                origin="optimizer",
                per_step=True,
            )
            for axis, size in sizes.items()
        )

    def __init__(self, config: OptimizerConfig, pieces: list[ParameterPiece], build: Build, shapes: Shapes):
        from meshwright.optimizers.whole_parameters import Matrix, plan_rounds

        blocks = tuple(build.model.public_name(f"{part.name}.") for part in build.model.parts() if part.is_block)
        mine = [piece for piece in pieces if self.updates(piece.box.shape, piece.name.startswith(blocks))]
        super().__init__(config, mine, build, shapes)
        self.remember("momentum_buffer")
        names = {piece.name for piece in mine}
        self.others = AdamW(config, [piece for piece in pieces if piece.name not in names], build, shapes)
        sorts = dict(build.named_params())
        matrices = [Matrix(name=piece.name, box=piece.box, sort=sorts[piece.name]) for piece in mine]
        self.rounds = plan_rounds(build, matrices, shapes)

    def step(self, lr: float, count: int) -> None:
        import torch

        self.others.step(lr, count)
        gradients, moving = self.gradients(), self.state["momentum_buffer"]
        if not gradients:
            return
        torch._foreach_lerp_(moving, gradients, 1 - self.config.momentum)
        ahead = torch._foreach_lerp(gradients, moving, self.config.momentum)  # Nesterov
        held = {piece.name: value for piece, value in zip(self.pieces, ahead, strict=True)}
        for turn in self.rounds:
            held = turn.there(held)
        held = {name: orthogonal(value) for name, value in held.items()}
        for turn in reversed(self.rounds):
            held = turn.back(held)
        updates = [held[piece.name] for piece in self.pieces]
        scales = [
            -rate * 0.2 * max(piece.box.shape[-2:]) ** 0.5
            for piece, rate in zip(self.pieces, self.rates(lr), strict=True)
        ]
        torch._foreach_mul_(updates, scales)
        self.decay(lr)
        torch._foreach_add_(self.values, updates)

    def kept(self) -> Iterable[OptimizerState]:
        return chain(super().kept(), self.others.kept())

    def set_num_steps(self, count: int) -> None:
        self.others.set_num_steps(count)


def _padded(count: Num, ways: Num) -> Num:
    """`count` things dealt to `ways` ranks, as many to each as the first gets."""
    return -(-count // ways) * ways


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearest orthogonal matrix to each of the last two dims, roughly, by Newton-Schulz.

    In the matrix's own precision on a CPU, where bf16 products are far slower than float32's; in bf16 on a GPU.
    """
    import torch

    a, b, c = QUINTIC
    dtype = torch.bfloat16 if matrix.is_cuda and matrix.dtype == torch.float32 else matrix.dtype
    multiply = torch.addmm if matrix.ndim == 2 else torch.baddbmm  # a stack of one is a third slower on a CPU
    x = matrix / torch.linalg.matrix_norm(matrix, keepdim=True).clamp(min=LEAST_NORM)
    is_tall = x.shape[-2] > x.shape[-1]
    x = (x.mT if is_tall else x).to(dtype)
    for _ in range(TURNS):
        gram = x @ x.mT
        x = multiply(x, multiply(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).to(matrix.dtype)
