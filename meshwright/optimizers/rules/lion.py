"""Lion: the sign of an average of gradients (Chen et al. 2023).

Where a gradient is zero in theory (a key bias under a softmax, say) its sign is that of a rounding error, and differs
from one order of sums to another.
"""

from __future__ import annotations

from typing import Any

from meshwright.optimizers.rule import UpdateRule


class Lion(UpdateRule):
    states = 1
    beta2 = 0.99

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.remember("exp_avg")

    def step(self, lr: float, count: int) -> None:
        import torch

        gradients, averages = self.gradients(), self.state["exp_avg"]
        if not gradients:
            return
        updates = torch._foreach_lerp(averages, gradients, 1 - self.config.beta1)
        torch._foreach_sign_(updates)
        torch._foreach_mul_(updates, [-rate for rate in self.rates(lr)])
        self.decay(lr)
        torch._foreach_add_(self.values, updates)
        torch._foreach_lerp_(averages, gradients, 1 - self.config.beta2)
