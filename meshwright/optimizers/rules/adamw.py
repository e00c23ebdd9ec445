"""AdamW (Loshchilov & Hutter 2019), by a kernel of ours on GPUs that have Triton, else by torch's fused one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from meshwright.optimizers.rule import ParameterPiece, UpdateRule, widen_gradients

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from meshwright.ops.kernels.adamw import AdamWKernel
    from meshwright.optimizers.optimizer_config import OptimizerConfig


class AdamW(UpdateRule):
    states = 2
    batch_exponent = 0.5
    batch_source = "square root rule, Malladi et al. 2022"
    has_low_bit_form = True
    decides_on_device = True
    flat_states = ("exp_avg", "exp_avg_sq")

    @classmethod
    def flat_numbers(
        cls, config: OptimizerConfig, lr: float, decay: float, count: int, factor: float
    ) -> tuple[float, ...]:
        beta1, beta2 = config.beta1, config.beta2
        corrected = lr / (1 - beta1**count), math.sqrt(1 - beta2**count)
        return factor, 1 - lr * decay, 1 - beta1, beta2, 1 - beta2, *corrected, config.epsilon

    @staticmethod
    def flat_update(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], numbers: Tensor) -> tuple[Tensor, ...]:
        factor, kept, into_mean, beta2, into_square, rate, root, epsilon = numbers.unbind()
        mean, square = states
        gradient = gradient.to(weight.dtype) * factor
        mean = mean + (gradient - mean) * into_mean
        square = square * beta2 + gradient * gradient * into_square
        return weight * kept - rate * (mean / (square.sqrt() / root + epsilon)), mean, square

    def __init__(self, *given: Any):
        import torch

        from meshwright.ops.kernels import is_usable

        super().__init__(*given)
        self.remember("exp_avg", "exp_avg_sq")
        config = self.config
        self.inner = torch.optim.AdamW(
            torch_groups(self.pieces), lr=1.0, betas=(config.beta1, config.beta2), eps=config.epsilon, fused=True
        )
        for index, value in enumerate(self.values):
            count = torch.zeros((), dtype=torch.float32, device=value.device)
            self.inner.state[value] = {"step": count, **{kind: kept[index] for kind, kept in self.state.items()}}
        self.kernel: AdamWKernel | None = None
        if len(self.values) > 1 and is_usable("adamw", self.values[0]):
            from meshwright.ops.kernels.adamw import AdamWKernel

            self.kernel = AdamWKernel(self.pieces, *self.state.values())
            self.takes_copies = True

    def step(self, lr: float, count: int) -> None:
        from meshwright.ops.kernels import run_or_fall_back

        def leave() -> None:
            self.kernel, self.takes_copies = None, False
            self.set_num_steps(count - 1)
            widen_gradients(self.pieces)

        if self.kernel is not None:
            gradients = [value.grad for value in self.values if value.grad is not None]
            # A parameter that took no part in a step counts its own steps from then on, as torch does.
            if len(gradients) == len(self.values) and self.kernel.takes(gradients):
                given = (gradients, self.config, lr, count, self.divisor, self.refused)
                run_or_fall_back("adamw", self.values[0], partial(self.kernel, *given), leave)
            else:
                leave()
        if self.kernel is None:
            torch_step(self, self.inner, lr)

    def set_num_steps(self, count: int) -> None:
        for values in self.inner.state.values():
            values["step"].fill_(count)


def torch_groups(pieces: list[ParameterPiece]) -> list[dict[str, Any]]:
    """Pieces with the same rate and decay, as torch's optimizers take them."""
    groups: dict[tuple[float, float], list[torch.Tensor]] = {}
    for piece in pieces:
        groups.setdefault((piece.lr_scale, piece.weight_decay), []).append(piece.value)
    result = [{"params": values, "lr_scale": key[0], "weight_decay": key[1]} for key, values in groups.items()]
    return result or [{"params": [], "lr_scale": 1.0}]


def torch_step(rule: UpdateRule, inner: torch.optim.Optimizer, lr: float) -> None:
    # Torch's fused kernels look for these two by name.
    inner.grad_scale, inner.found_inf = rule.divisor, rule.refused
    for group in inner.param_groups:
        group["lr"] = lr * group["lr_scale"]
    inner.step()
