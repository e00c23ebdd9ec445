"""The seven optimizers once more, whole tensors on one device, from their papers: what the oracle updates with.

Nothing here is imported from `meshwright`: an error in the package's own rules must not be repeated by the reference.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

DEFAULTS: dict[str, dict[str, float]] = {
    "adamw": {"beta2": 0.95, "epsilon": 1e-8},
    "sgd": {"momentum": 0.9},
    "lion": {"beta2": 0.99},
    "lamb": {"beta2": 0.999, "epsilon": 1e-6},
    "lars": {"momentum": 0.9},
    "adafactor": {"epsilon": 1e-30},
    "muon": {"beta2": 0.95, "epsilon": 1e-8, "momentum": 0.95},
}


class PlainOptimizer:
    """One update of every parameter that has a gradient. `is_block`: whether a name is a parameter of a block."""

    def __init__(self, settings: Mapping[str, Any], is_block: Callable[[str], bool]):
        name = settings.get("name", "adamw")
        self.settings = {"weight_decay": 0.1, "beta1": 0.9, "clip": 1.0, **DEFAULTS[name], **settings}
        self.rule = getattr(self, f"_{name}")
        self.is_block = is_block
        self.state: dict[str, dict[str, Tensor]] = {}
        self.count = 0

    @torch.no_grad()
    def step(self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], lr: float) -> None:
        self.count += 1
        for name, gradient in gradients.items():
            weight = parameters[name]
            decay, rate = (self.settings["weight_decay"] if weight.ndim >= 2 else 0.0), lr
            for group in self.settings.get("groups", ()):
                patterns = [group["match"]] if isinstance(group["match"], str) else group["match"]
                if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
                    rate = lr * group.get("lr_scale", 1.0)
                    decay = group["weight_decay"] if group.get("weight_decay") is not None else decay
                    break
            self.rule(name, weight, gradient, rate, decay)

    def _kept(self, name: str, kind: str, like: Tensor) -> Tensor:
        return self.state.setdefault(name, {}).setdefault(kind, torch.zeros_like(like))

    def _adam_direction(self, name: str, weight: Tensor, gradient: Tensor) -> Tensor:
        s = self.settings
        mean, square = self._kept(name, "mean", weight), self._kept(name, "square", weight)
        mean.copy_(s["beta1"] * mean + (1 - s["beta1"]) * gradient)
        square.copy_(s["beta2"] * square + (1 - s["beta2"]) * gradient**2)
        mean, square = mean / (1 - s["beta1"] ** self.count), square / (1 - s["beta2"] ** self.count)
        return mean / (square.sqrt() + s["epsilon"])

    def _adamw(self, name: str, weight: Tensor, gradient: Tensor, lr: float, decay: float) -> None:
        direction = self._adam_direction(name, weight, gradient)
        weight.copy_(weight * (1 - lr * decay) - lr * direction)

    def _sgd(self, name: str, weight: Tensor, gradient: Tensor, lr: float, decay: float) -> None:
        velocity = self._kept(name, "velocity", weight)
        velocity.copy_(self.settings["momentum"] * velocity + gradient + decay * weight)
        weight.sub_(lr * velocity)

    def _lion(self, name: str, weight: Tensor, gradient: Tensor, lr: float, decay: float) -> None:
        s, mean = self.settings, self._kept(name, "mean", weight)
        direction = (s["beta1"] * mean + (1 - s["beta1"]) * gradient).sign()
        weight.copy_(weight * (1 - lr * decay) - lr * direction)
        mean.copy_(s["beta2"] * mean + (1 - s["beta2"]) * gradient)

    def _lamb(self, name: str, weight: Tensor, gradient: Tensor, lr: float, decay: float) -> None:
        direction = self._adam_direction(name, weight, gradient) + decay * weight
        ratio = 1.0
        if weight.ndim >= 2 and weight.norm() > 0 and direction.norm() > 0:
            ratio = float(weight.norm() / direction.norm())
        weight.sub_(lr * ratio * direction)

    def _lars(self, name: str, weight: Tensor, gradient: Tensor, lr: float, decay: float) -> None:
        trust = 1.0
        if weight.ndim >= 2 and weight.norm() > 0 and gradient.norm() > 0:
            trust = float(0.001 * weight.norm() / (gradient.norm() + decay * weight.norm()))
        velocity = self._kept(name, "velocity", weight)
        velocity.copy_(self.settings["momentum"] * velocity + lr * trust * (gradient + decay * weight))
        weight.sub_(velocity)

    def _adafactor(self, name: str, weight: Tensor, gradient: Tensor, lr: float, decay: float) -> None:
        beta, square = 1 - self.count**-0.8, gradient**2 + self.settings["epsilon"]
        if weight.ndim >= 2:
            row, column = self._kept(name, "row", square.mean(-1)), self._kept(name, "column", square.mean(-2))
            row.copy_(beta * row + (1 - beta) * square.mean(-1))
            column.copy_(beta * column + (1 - beta) * square.mean(-2))
            second = row.unsqueeze(-1) * column.unsqueeze(-2) / row.mean(-1)[..., None, None]
        else:
            second = self._kept(name, "square", weight)
            second.copy_(beta * second + (1 - beta) * square)
        direction = gradient / second.sqrt()
        direction = direction / max(1.0, float(direction.square().mean().sqrt()))
        size = max(1e-3, float(weight.square().mean().sqrt()))
        weight.copy_(weight * (1 - lr * decay) - lr * size * direction)

    def _muon(self, name: str, weight: Tensor, gradient: Tensor, lr: float, decay: float) -> None:
        if not (weight.ndim in (2, 3) and self.is_block(name)):
            self._adamw(name, weight, gradient, lr, decay)
            return
        momentum, velocity = self.settings["momentum"], self._kept(name, "velocity", weight)
        velocity.copy_(momentum * velocity + (1 - momentum) * gradient)
        ahead = momentum * velocity + (1 - momentum) * gradient
        matrices = ahead if ahead.ndim == 3 else ahead.unsqueeze(0)
        direction = torch.stack([_newton_schulz(each) for each in matrices]).view_as(weight)
        weight.copy_(weight * (1 - lr * decay) - lr * 0.2 * max(weight.shape[-2:]) ** 0.5 * direction)


def _newton_schulz(matrix: Tensor) -> Tensor:
    x = matrix / max(float(matrix.norm()), 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    return x
