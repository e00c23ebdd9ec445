"""Muon: the momentum of each matrix, orthogonalised (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

Steps have the size of AdamW's, 0.2 sqrt(max(rows, columns)) of an orthogonal matrix (Liu et al. 2025, "Muon is scalable
for LLM training", section 2.2), so that one rate serves both: the matrices of the blocks are Muon's, and stacks of
them (experts) one by one; embedding, head, norms and biases are AdamW's. Ranks that cut a matrix share out the work
(`exchange.py`); replicas along `dp` each do all of theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

import torch
from torch import Tensor

from meshwright.core.build import Build
from meshwright.optimizers.adamw import AdamW
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.optimizers.rule import OptimizerState, ParameterPiece, UpdateRule
from meshwright.optimizers.whole_matrix import Matrix, plan_rounds

QUINTIC = (3.4445, -4.7750, 2.0315)
"""a x + b x^3 + c x^5 takes singular values of 0 to 1 close to 1 in a few turns, fastest for small ones."""
TURNS = 5
LEAST_NORM = 1e-7


class Muon(UpdateRule):
    def __init__(
        self, config: OptimizerConfig, pieces: list[ParameterPiece], build: Build, shapes: Mapping[str, tuple[int, ...]]
    ):
        blocks = tuple(build.model.public_name(f"{part.name}.") for part in build.model.parts() if part.is_block)
        mine = [piece for piece in pieces if config.is_muons(piece.box.shape, piece.name.startswith(blocks))]
        super().__init__(config, mine, build, shapes)
        self.remember("momentum_buffer")
        names = {piece.name for piece in mine}
        self.others = AdamW(config, [piece for piece in pieces if piece.name not in names], build, shapes)
        sorts = dict(build.named_params())
        matrices = [Matrix(name=piece.name, box=piece.box, sort=sorts[piece.name]) for piece in mine]
        self.rounds = plan_rounds(build, matrices, shapes)

    def step(self, lr: float, count: int) -> None:
        self.others.step(lr, count)
        updates = self._directions()
        if not updates:
            return
        scales = [
            -rate * 0.2 * max(piece.box.shape[-2:]) ** 0.5
            for piece, rate in zip(self.pieces, self.rates(lr), strict=True)
        ]
        torch._foreach_mul_(updates, scales)
        self.decay(lr)
        torch._foreach_add_(self.values, updates)

    def _directions(self) -> list[Tensor]:
        """This rank's piece of every orthogonalised matrix."""
        gradients, moving = self.gradients(), self.state["momentum_buffer"]
        if not gradients:
            return []
        torch._foreach_lerp_(moving, gradients, 1 - self.config.momentum)
        ahead = torch._foreach_lerp(gradients, moving, self.config.momentum)  # Nesterov
        held = {piece.name: value for piece, value in zip(self.pieces, ahead, strict=True)}
        for turn in self.rounds:
            held = turn.there(held)
        held = {name: orthogonal(value) for name, value in held.items()}
        for turn in reversed(self.rounds):
            held = turn.back(held)
        return [held[piece.name] for piece in self.pieces]

    def kept(self) -> Iterable[OptimizerState]:
        return chain(super().kept(), self.others.kept())

    def set_num_steps(self, count: int) -> None:
        self.others.set_num_steps(count)


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearest orthogonal matrix to each of the last two dims, roughly, by Newton-Schulz.

    In the matrix's own precision on a CPU, where bf16 products are far slower than float32's; in bf16 on a GPU.
    """
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
