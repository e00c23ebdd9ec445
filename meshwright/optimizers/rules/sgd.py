"""SGD with momentum, by torch's fused kernel; decay is added to the gradient."""

from __future__ import annotations

from typing import Any

from meshwright.optimizers.rule import UpdateRule
from meshwright.optimizers.rules.adamw import torch_groups, torch_step


class SGD(UpdateRule):
    states = 1
    batch_exponent = 1.0
    batch_source = "linear rule with warm-up, Goyal et al. 2017"
    needs_momentum = True
    decides_on_device = True

    @classmethod
    def takes_rows(cls, config: Any) -> bool:
        return not config.momentum

    def __init__(self, *given: Any):
        import torch

        super().__init__(*given)
        self.inner = torch.optim.SGD(torch_groups(self.pieces), lr=1.0, momentum=self.config.momentum, fused=True)
        if self.config.momentum:
            self.remember("momentum_buffer")
            for value, kept in zip(self.values, self.state["momentum_buffer"], strict=True):
                self.inner.state[value] = {"momentum_buffer": kept}

    def direction_of_rows(self, at: int, rows: Any, gradient: Any) -> Any:
        return gradient

    def step(self, lr: float, count: int) -> None:
        self.step_rows(lr)
        torch_step(self, self.inner, lr)
