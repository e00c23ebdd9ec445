"""AdamW and SGD over a rank's pieces, clipping by the exact global norm."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from meshwright.ops.shard import local
from meshwright.runtime.build import Build
from meshwright.runtime.config import OptimizerConfig

__all__ = ["Optimizer", "OptimizerConfig"]


class Optimizer:
    """torch's own fused optimizer on this rank's pieces."""

    def __init__(self, config: OptimizerConfig, build: Build):
        self.config, self.build = config, build
        trained = [(name, p) for name, p in build.named_parameters() if p.requires_grad]
        self.names = {id(parameter): name for name, parameter in trained}
        self.trained = [parameter for _, parameter in trained]
        self.owned = [parameter for name, parameter in trained if build.owns(name)]
        groups = [
            {"params": [p for _, p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for _, p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        if config.name == "adamw":
            betas = (config.beta1, config.beta2)
            self.inner: torch.optim.Optimizer = torch.optim.AdamW(
                groups, lr=config.lr, betas=betas, eps=config.epsilon, fused=True
            )
        else:
            # Not fused: DTensor, which holds sharded pieces, has no rule for the fused kernel.
            self.inner = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, foreach=True)
        self._prime()

    def zero_gradients(self) -> None:
        self.inner.zero_grad(set_to_none=True)

    def squared_norm(self) -> Tensor:
        """This rank's share of the squared global gradient norm: pieces it answers for."""
        mine = [gradient for gradient in _gradients(self.owned) if gradient.numel()]
        if not mine:
            return torch.zeros((), dtype=torch.float64, device=self.build.mesh.device)
        return torch.stack(torch._foreach_norm(mine)).double().square().sum()

    def update(self, lr: float, norm: float) -> None:
        if self.config.clip and norm > self.config.clip:
            torch._foreach_mul_(_gradients(self.trained), self.config.clip / norm)
        for group in self.inner.param_groups:
            group["lr"] = lr
        self.inner.step()

    def state(self) -> Iterable[tuple[str, str, Tensor]]:
        """(kind, parameter, this rank's piece) of everything the update remembers, but its step count."""
        for parameter, values in self.inner.state.items():
            for kind, value in values.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    yield kind, self.names[id(parameter)], local(value)

    def _prime(self) -> None:
        """Make the state exist before the first step: a checkpoint can be read into it, memory is known at once."""
        for group in self.inner.param_groups:
            for parameter in group["params"]:
                state = self.inner.state[parameter]
                if self.config.name == "adamw":
                    state["step"] = torch.zeros((), dtype=torch.float32, device=self.build.mesh.device)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                elif self.config.momentum:
                    state["momentum_buffer"] = torch.zeros_like(parameter)

    def set_num_steps(self, count: int) -> None:
        for values in self.inner.state.values():
            if "step" in values:
                values["step"].fill_(count)


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's pieces of them."""
    with torch.no_grad():  # taking a piece out of a DTensor is then not itself recorded for autograd
        return [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
