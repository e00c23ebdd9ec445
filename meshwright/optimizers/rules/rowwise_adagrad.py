"""Row-wise Adagrad: of each row of a matrix the sum of its mean squared gradients (Mudigere et al. 2022, FBGEMM).

Vectors have a sum for each element, as in Adagrad (Duchi et al. 2011). A row lies along the last dim. Where ranks hold
parts of rows, their means are summed over the ranks; tables and shards, which are cut between rows, send nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from meshwright.core.build import OptimizerState
from meshwright.optimizers.rule import ParameterPiece, UpdateRule

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.core.build import Build
    from meshwright.core.work import Num, ParameterSlot
    from meshwright.optimizers.optimizer_config import OptimizerConfig


class RowwiseAdagrad(UpdateRule):
    kind = "norm"
    states = 1
    weight_decay = 0.0

    @classmethod
    def state_bytes_of(cls, config: OptimizerConfig, slot: ParameterSlot) -> Num:
        width = slot.shape[-1] if len(slot.shape) > 1 else 1
        return super().state_bytes_of(config, slot) // width

    @classmethod
    def takes_rows(cls, config: OptimizerConfig) -> bool:
        return True

    def __init__(self, config: Any, pieces: list[ParameterPiece], build: Build, shapes: Any):
        import torch

        from meshwright.ops.collectives import gather_json
        from meshwright.optimizers.whole_parameters import Sums

        super().__init__(config, pieces, build, shapes)
        self.state["sum"] = [v.new_zeros(v.shape[:-1] if v.ndim > 1 else v.shape) for v in self.values]
        self.cut = [i for i, each in enumerate(pieces) if each.is_matrix and each.box.size[-1] < each.box.shape[-1]]
        mine = [pieces[at] for at in self.cut]
        names = {name for own in gather_json(build.mesh.control, [piece.name for piece in mine]) for name in own}
        rows = [piece.box.without(-1) for piece in mine]
        places = [torch.arange(math.prod(box.shape)).view(box.shape)[box.slices] for box in rows]
        cut_shapes = {name: shape for name, shape in shapes.items() if name in names}
        self.sums = Sums(build.mesh, cut_shapes, mine, lambda shape: math.prod(shape[:-1]), places) if names else None

    def kept(self) -> Iterable[OptimizerState]:
        for piece, value in zip(self.pieces, self.state["sum"], strict=True):
            box = piece.box.without(-1) if piece.is_matrix else piece.box
            yield OptimizerState("sum", piece.name, value, box, not piece.is_matrix or piece.box.offset[-1] == 0)

    def direction_of_rows(self, at: int, rows: Tensor, gradient: Tensor) -> Tensor:
        total = self.state["sum"][at][rows] + gradient.square().mean(-1)
        self.state["sum"][at][rows] = total
        return gradient / total.sqrt().add_(self.config.epsilon).unsqueeze(-1)

    def step(self, lr: float, count: int) -> None:
        done = self.step_rows(lr)
        means: dict[int, Tensor] = {}
        for at, value in enumerate(self.values):
            if at not in done:
                square = value.new_zeros(value.shape) if value.grad is None else value.grad.square()
                means[at] = square.sum(-1) / self.pieces[at].box.shape[-1] if value.ndim > 1 else square
        if self.sums is not None:
            whole = self.sums([means[at] for at in self.cut])
            means |= {at: each.view_as(means[at]).to(means[at]) for at, each in zip(self.cut, whole, strict=True)}
        for at, mean in means.items():
            value, piece, gradient = self.values[at], self.pieces[at], self.values[at].grad
            below = self.state["sum"][at].add_(mean).sqrt().add_(self.config.epsilon)
            rate = lr * piece.lr_scale
            value.mul_(1 - rate * piece.weight_decay)
            if gradient is not None:
                value.addcdiv_(gradient, below.unsqueeze(-1) if value.ndim > 1 else below, value=-rate)
