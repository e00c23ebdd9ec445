"""What a user would write by hand: the same model with the same weights, torch's optimizer, a loop. The other side."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from meshwright.core.box import Box
from meshwright.models.presets import DecoderConfig
from meshwright.ops.initial_weights import seeded
from meshwright.run.run_file import OptimizerConfig
from meshwright.zoo.decoder import Decoder

Parts = list[tuple[Tensor, Tensor, Tensor]]
"""Inputs, targets and weights of every microbatch."""


def decoder(config: DecoderConfig, seed: int) -> Decoder:
    """A decoder built the usual way, with the weights our side starts from."""
    model = Decoder(config)
    source = seeded(model.init_value, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(source(name, Box.whole(tuple(parameter.shape)), parameter.dtype))
    return model


def adamw(parameters: Iterable[nn.Parameter], rates: OptimizerConfig) -> torch.optim.AdamW:
    trained = list(parameters)
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": rates.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (rates.beta1, rates.beta2)
    return torch.optim.AdamW(groups, lr=rates.lr, betas=betas, eps=rates.epsilon, fused=True)


def accumulate(model: nn.Module, parts: Parts, num_tokens: float) -> Tensor:
    """Forward and backward of every microbatch; the mean loss."""
    total = torch.zeros(())
    for inputs, targets, weights in parts:
        loss = model(inputs, targets, weights) / num_tokens
        loss.backward()
        total += loss.detach()
    return total


def update(optimizer: torch.optim.Optimizer, model: nn.Module, rates: OptimizerConfig, lr: float) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), rates.clip)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
