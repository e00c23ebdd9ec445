"""AdamW and SGD over a rank's pieces, clipping by the exact global norm."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from meshwright.ops.shard import local
from meshwright.runtime.build import Build
from meshwright.runtime.config import OptimizerConfig

__all__ = ["Optimizer", "OptimizerConfig"]


class Optimizer:
    """torch's own fused optimizer, on plain tensors that share their memory with this rank's pieces.

    Plain, because a sharded parameter is a DTensor: its dispatch costs more than the update of a small piece, and not
    every fused kernel has a rule for it.
    """

    def __init__(self, config: OptimizerConfig, build: Build):
        self.config, self.build = config, build
        trained = [(name, parameter) for name, parameter in build.named_parameters() if parameter.requires_grad]
        self.parameters = [parameter for _, parameter in trained]
        self.pieces = [local(parameter.detach()) for parameter in self.parameters]
        self.names = {id(piece): name for (name, _), piece in zip(trained, self.pieces, strict=True)}
        self.is_owned = [build.owns(name) for name, _ in trained]
        groups = [
            {"params": [p for p in self.pieces if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in self.pieces if p.ndim < 2], "weight_decay": 0.0},
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
        for tensor in (*self.parameters, *self.pieces):
            tensor.grad = None

    def take_gradients(self) -> None:
        """After the backward passes: give each piece its part of the gradient."""
        with torch.no_grad():  # taking a piece out of a DTensor is then not itself recorded for autograd
            for parameter, piece in zip(self.parameters, self.pieces, strict=True):
                piece.grad = None if parameter.grad is None else local(parameter.grad)

    def squared_norm(self) -> Tensor:
        """This rank's share of the squared global gradient norm: pieces it answers for."""
        pairs = zip(self.pieces, self.is_owned, strict=True)
        mine = [piece.grad for piece, is_owned in pairs if is_owned and piece.grad is not None and piece.numel()]
        if not mine:
            return torch.zeros((), dtype=torch.float64, device=self.build.mesh.device)
        return torch.stack(torch._foreach_norm(mine)).double().square().sum()

    def update(self, lr: float, norm: float) -> None:
        if self.config.clip and norm > self.config.clip:
            gradients = [piece.grad for piece in self.pieces if piece.grad is not None]
            torch._foreach_mul_(gradients, self.config.clip / norm)
        for group in self.inner.param_groups:
            group["lr"] = lr
        self.inner.step()

    def state(self) -> Iterable[tuple[str, str, Tensor]]:
        """(kind, parameter, this rank's piece) of everything the update remembers, but its step count."""
        for piece, values in self.inner.state.items():
            for kind, value in values.items():
                if kind != "step":
                    yield kind, self.names[id(piece)], value

    def _prime(self) -> None:
        """Make the state exist before the first step: a checkpoint can be read into it, memory is known at once."""
        for piece in self.pieces:
            state = self.inner.state[piece]
            if self.config.name == "adamw":
                state["step"] = torch.zeros((), dtype=torch.float32, device=self.build.mesh.device)
                state["exp_avg"] = torch.zeros_like(piece)
                state["exp_avg_sq"] = torch.zeros_like(piece)
            elif self.config.momentum:
                state["momentum_buffer"] = torch.zeros_like(piece)

    def set_num_steps(self, count: int) -> None:
        for values in self.inner.state.values():
            if "step" in values:
                values["step"].fill_(count)
