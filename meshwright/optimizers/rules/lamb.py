"""LAMB: Adam's step of each matrix, as long as the matrix itself (You et al. 2020, algorithm 2).

Norms and biases take Adam's step as it is, as in the authors' code, which leaves them out of decay and scaling alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshwright.optimizers.rule import UpdateRule

if TYPE_CHECKING:
    import torch

    from meshwright.core.build import Build


class Lamb(UpdateRule):
    kind = "norm"
    states = 2
    batch_exponent = 0.5
    batch_source = "square root rule with warm-up, You et al. 2020"
    beta2 = 0.999
    epsilon = 1e-6

    def __init__(self, config: Any, pieces: Any, build: Build, shapes: Any):
        from meshwright.optimizers.whole_parameters import Norms

        super().__init__(config, pieces, build, shapes)
        self.remember("exp_avg", "exp_avg_sq")
        self.norms = Norms(build.mesh, shapes, pieces, 2)

    def step(self, lr: float, count: int) -> None:
        import torch

        config, gradients = self.config, self.gradients()
        updates: list[torch.Tensor] = []
        if gradients:  # m / (sqrt(v) + epsilon) + decay x weight, the averages freed of their bias
            mean, square = self.state["exp_avg"], self.state["exp_avg_sq"]
            torch._foreach_lerp_(mean, gradients, 1 - config.beta1)
            torch._foreach_mul_(square, config.beta2)
            torch._foreach_addcmul_(square, gradients, gradients, 1 - config.beta2)
            below = torch._foreach_sqrt(square)
            torch._foreach_div_(below, (1 - config.beta2**count) ** 0.5)
            torch._foreach_add_(below, config.epsilon)
            updates = list(torch._foreach_div(mean, below))
            torch._foreach_div_(updates, 1 - config.beta1**count)
            decays = [piece.weight_decay for piece in self.pieces]
            torch._foreach_add_(updates, torch._foreach_mul(self.values, decays))
        ratios = [
            weight / update if piece.is_matrix and weight and update else 1.0
            for piece, (weight, update) in zip(self.pieces, self.norms(self.values, updates), strict=True)
        ]
        if updates:
            torch._foreach_mul_(updates, [-rate * ratio for rate, ratio in zip(self.rates(lr), ratios, strict=True)])
            torch._foreach_add_(self.values, updates)
