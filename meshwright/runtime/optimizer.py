"""AdamW and SGD over a rank's pieces, clipping by the exact global norm, warm-up and cosine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from meshwright.core.errors import MeshwrightError, Problem
from meshwright.ops.shard import local
from meshwright.runtime.build import Build


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = 3e-4
    weight_decay: float = 0.1
    """Matrices only; norms and biases are left alone."""
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    momentum: float = 0.9
    """SGD only."""
    clip: float = 1.0
    """Largest global gradient norm; 0: no clipping."""
    warmup: int = 0
    """Steps from zero to the full rate."""
    final_fraction: float = 0.1
    """Share of the rate that the cosine ends at."""

    def __post_init__(self) -> None:
        problems = [
            Problem(where=name, what=f"is {getattr(self, name)}.", fix="Use zero or more.")
            for name in ("lr", "weight_decay", "beta1", "beta2", "epsilon", "momentum", "clip", "warmup")
            if getattr(self, name) < 0
        ]
        problems += [
            Problem(where=name, what=f"is {getattr(self, name)}.", fix="Use less than 1.")
            for name in ("beta1", "beta2", "momentum")
            if getattr(self, name) >= 1
        ]
        if problems:
            raise MeshwrightError(problems)

    @property
    def state_bytes(self) -> int:
        """Per parameter element, in float32."""
        return 8 if self.name == "adamw" else 4 if self.momentum else 0

    def lr_at(self, step: int, num_steps: int) -> float:
        """Linear warm-up, then a cosine from `lr` to `lr * final_fraction`."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, num_steps - self.warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return self.lr * (self.final_fraction + (1 - self.final_fraction) * cosine)


class Optimizer:
    """torch's own fused optimizer on this rank's pieces."""

    def __init__(self, config: OptimizerConfig, build: Build):
        self.config, self.build = config, build
        trained = [(name, p) for name, p in build.named_parameters() if p.requires_grad]
        self.names = {id(parameter): name for name, parameter in trained}
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
            self.inner = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=True)
        self._prime()

    def zero_gradients(self) -> None:
        self.inner.zero_grad(set_to_none=True)

    def squared_norm(self) -> Tensor:
        """This rank's share of the squared global gradient norm: pieces it answers for."""
        mine = [g for name, g in self.build.local_gradients() if self.build.owns(name) and g.numel()]
        total = torch.zeros((), dtype=torch.float64, device=self.build.mesh.device)
        for norm in torch._foreach_norm(mine) if mine else ():
            total += norm.double() ** 2
        return total

    def update(self, lr: float, norm: float) -> None:
        if self.config.clip and norm > self.config.clip:
            gradients = [g for _, g in self.build.local_gradients()]
            torch._foreach_mul_(gradients, self.config.clip / norm)
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
