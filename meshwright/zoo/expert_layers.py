"""A mixture of experts in place of a block's MLP: a router sends each token to a few of many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshwright.models.presets import DecoderConfig
from meshwright.ops.model_interface import every_token
from meshwright.ops.routing import (
    PreciseLinear,
    Sends,
    attach_loss,
    balancing_loss,
    through_experts,
    within_capacity,
)
from meshwright.zoo.layers import SwiGLU


@dataclass
class LossScale:
    """What the loss at the end is multiplied by, for losses that arise inside of layers."""

    value: float = 1.0
    ways: int = 1
    """Ranks that hold a piece of the layer each, and whose gradients will be added."""


class Router(nn.Module):
    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.kind, self.k, self.routed_scale = config.router, config.experts_per_token, config.routed_scale
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The experts of each token, what share each has, and every expert's score."""
        scores = PreciseLinear.apply(x, self.weight)
        if self.kind == "sigmoid":
            scores = scores.sigmoid()
        best, chosen = scores.topk(self.k, dim=-1)
        share = best.softmax(-1) if self.kind == "softmax" else best / best.sum(-1, keepdim=True)
        return chosen, share * self.routed_scale, scores

    def chances(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1) if self.kind == "softmax" else scores / scores.sum(-1, keepdim=True)


class Experts(Sends):
    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.num_experts = config.num_experts
        experts, d, f = config.num_experts, config.hidden_size, config.expert_ffn_size
        self.gate = nn.Parameter(torch.empty(experts, f, d))
        self.up = nn.Parameter(torch.empty(experts, f, d))
        self.down = nn.Parameter(torch.empty(experts, d, f))

    def forward(self, x: Tensor, chosen: Tensor, share: Tensor, kept: Tensor | None) -> Tensor:
        flat = None if kept is None else kept.flatten(0, 1)
        out = through_experts(
            x.flatten(0, 1),
            chosen.flatten(0, 1),
            share.flatten(0, 1),
            flat,
            (self.gate, self.up, self.down),
            self.num_experts,
            self.send,
        )
        return out.view_as(x)


class MoE(nn.Module):
    def __init__(self, config: DecoderConfig, scale: LossScale):
        super().__init__()
        self.capacity_factor, self.balance, self.scale = config.capacity_factor, config.balance, scale
        self.router = Router(config)
        self.experts = Experts(config)
        size = config.num_shared_experts * config.expert_ffn_size
        self.shared = SwiGLU(config.hidden_size, size) if size else None
        self.exit = nn.Identity()
        self.own_tokens: Callable[[Tensor, int], Tensor] = every_token
        self.all_choices: Callable[[Tensor], Tensor] = lambda chosen: chosen
        """Of the whole sequences: capacity and balance are a sequence's, of which this rank may have a part only."""

    @property
    def row(self) -> nn.Module:
        """Where the pieces of a split add up: experts and shared experts together."""
        return self.exit

    def forward(self, x: Tensor) -> Tensor:
        chosen, share, scores = self.router(x)
        adds_loss = bool(self.balance) and torch.is_grad_enabled()
        all_chosen = self.all_choices(chosen) if self.capacity_factor or adds_loss else chosen
        kept = None
        if self.capacity_factor:
            kept = self.own_tokens(within_capacity(all_chosen, scores.shape[-1], self.capacity_factor), 1)
        out = self.experts(x, chosen, share, kept)
        if self.shared is not None:
            out = out + self.shared(x)
        if adds_loss:
            loss = self.balance * balancing_loss(all_chosen, self.router.chances(scores))
            out = attach_loss(out, loss, self.scale)
        return self.exit(out)
