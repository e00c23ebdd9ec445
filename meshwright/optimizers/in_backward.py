"""Each parameter updated as soon as backward has made its gradient, which then is let go of."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from meshwright.core.build import Build
from meshwright.ops.fsdp import local
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.optimizers.rule import ParameterPiece, PieceRules, RuleMaker, Shapes, squares


class InBackwardRule(PieceRules):
    """One rule for each parameter, called by a hook of autograd (or of FSDP, which calls them once a shard is summed).

    A gradient with a number that is not finite updates nothing, nor does any gradient of a loss that is not finite: so
    no such number enters weights or states. Parameters whose gradients came before it have been updated, since nobody
    has seen the others; the run stops all the same, and says so.
    """

    def __init__(
        self, make: RuleMaker, config: OptimizerConfig, pieces: list[ParameterPiece], build: Build, shapes: Shapes
    ):
        super().__init__(config, pieces, build, shapes)
        self.device = build.mesh.device
        self.rules = {piece.name: make(config, [piece], build, shapes) for piece in pieces}
        self.rounds_states = any(rule.rounds_states for rule in self.rules.values())  # type: ignore[misc]
        self.lr, self.count = 0.0, 0
        self.begin(0.0, 0)
        parameters = dict(build.named_parameters())
        arrived = weakref.WeakMethod(self._arrived)  # autograd's hooks are out of the garbage collector's sight
        for piece in pieces:
            parameters[piece.name].register_post_accumulate_grad_hook(_hook(arrived, piece))

    def begin(self, lr: float, count: int) -> None:
        self.lr, self.count = lr, count
        self.updated.clear()
        self.square = torch.zeros((), dtype=torch.float64, device=self.device)
        self.is_finite = torch.ones((), dtype=torch.bool, device=self.device)

    def before_backward(self, loss: Tensor) -> None:
        self.is_finite = torch.isfinite(loss)

    @torch.no_grad()
    def _arrived(self, parameter: Tensor, piece: ParameterPiece) -> None:
        assert parameter.grad is not None
        gradient = local(parameter.grad)
        for look in self.on_gradient:
            look(piece.name, gradient)
        square = squares([gradient], self.device).sum()
        if piece.is_owned:
            self.square += square
        if bool(self.is_finite & torch.isfinite(square)):
            piece.value.grad = gradient.to(piece.value.dtype)
            self.rules[piece.name].step(self.lr, self.count)
        self.updated.add(piece.name)
        piece.value.grad = parameter.grad = None

    def step(self, lr: float, count: int) -> None:
        """Backward has done it."""

    def squared_norm(self) -> Tensor:
        return self.square


def _hook(arrived: weakref.WeakMethod[Any], piece: ParameterPiece) -> Any:
    def call(parameter: Tensor) -> None:
        method = arrived()
        assert method is not None, "a gradient arrived after its optimizer was given up"
        method(parameter, piece)

    return call
