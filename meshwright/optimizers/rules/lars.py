"""LARS: SGD with momentum, each matrix at a rate of 0.001 of its length over its gradient's (You et al. 2017).

Norms and biases take the plain rate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshwright.optimizers.rule import UpdateRule

if TYPE_CHECKING:
    from meshwright.core.build import Build

TRUST = 0.001
"""How far a matrix may move in a step at rate 1, relative to its own length."""


class Lars(UpdateRule):
    kind = "norm"
    states = 1
    needs_momentum = True

    def __init__(self, config: Any, pieces: Any, build: Build, shapes: Any):
        from meshwright.optimizers.whole_parameters import Norms

        super().__init__(config, pieces, build, shapes)
        if config.momentum:
            self.remember("momentum_buffer")
        self.norms = Norms(build.mesh, shapes, pieces, 2)

    def step(self, lr: float, count: int) -> None:
        import torch

        gradients = self.gradients()
        norms = self.norms(self.values, gradients)
        if not gradients:
            return
        updates = torch._foreach_mul(self.values, [piece.weight_decay for piece in self.pieces])
        torch._foreach_add_(updates, gradients)
        trusts = [
            TRUST * length / (slope + piece.weight_decay * length) if piece.is_matrix and length and slope else 1.0
            for piece, (length, slope) in zip(self.pieces, norms, strict=True)
        ]
        torch._foreach_mul_(updates, [-rate * trust for rate, trust in zip(self.rates(lr), trusts, strict=True)])
        if self.config.momentum:
            moving = self.state["momentum_buffer"]
            torch._foreach_mul_(moving, self.config.momentum)
            torch._foreach_add_(moving, updates)
            updates = moving
        torch._foreach_add_(self.values, updates)
