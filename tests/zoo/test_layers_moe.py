"""Experts by sorting and slices equal experts by masks, and nothing of one sequence reaches another."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from model_families import DEEPSEEK, MIXTRAL

from meshwright.models.presets import DecoderConfig
from meshwright.zoo.layers import LossScale, MoE

OPTIONS = {
    "softmax": MIXTRAL,
    "one of many": replace(MIXTRAL, num_experts=16, experts_per_token=1),
    "balanced": replace(MIXTRAL, balance=0.3),
    "tight": replace(MIXTRAL, capacity_factor=0.6, balance=0.2),
    "roomy": replace(MIXTRAL, capacity_factor=1.5),
    "sigmoid, shared": DEEPSEEK,
    "sigmoid, tight": replace(DEEPSEEK, capacity_factor=0.8, num_shared_experts=0),
}


def experts_of(config: DecoderConfig) -> MoE:
    torch.manual_seed(1)
    module = MoE(config, LossScale(value=0.25)).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.3)
    return module


def by_masks(module: MoE, config: DecoderConfig, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence at a time, every expert on every token: the output, and the balancing loss."""
    outputs, losses = [], []
    for sequence in x:
        logits = sequence @ module.router.weight.T
        scores = logits.softmax(-1) if config.router == "softmax" else logits.sigmoid()
        chances = scores / scores.sum(-1, keepdim=True)
        chosen = scores.topk(config.experts_per_token).indices
        mask = torch.zeros_like(scores).scatter(1, chosen, 1.0)
        share = scores * mask / (scores * mask).sum(-1, keepdim=True) * config.routed_scale
        length = len(sequence)
        losses.append(config.num_experts * (mask.sum(0) / mask.sum() * chances.mean(0)).sum() * length)
        if config.capacity_factor:
            even = length * config.experts_per_token / config.num_experts
            share = share * (mask.cumsum(0) <= math.ceil(even * config.capacity_factor))
        out = torch.zeros_like(sequence)
        for expert in range(config.num_experts):
            gate, up, down = (getattr(module.experts, name)[expert] for name in ("gate", "up", "down"))
            out = out + share[:, expert : expert + 1] * ((F.silu(sequence @ gate.T) * (sequence @ up.T)) @ down.T)
        if module.shared is not None:
            s = module.shared
            inner = F.silu(sequence @ s.gate.weight.T) * (sequence @ s.up.weight.T)
            out = out + inner @ s.down.weight.T
        outputs.append(out)
    return torch.stack(outputs), torch.stack(losses).sum()


def gradients(module: MoE, x: torch.Tensor, total: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(total, [x, *module.parameters()]))


@pytest.mark.parametrize("option", OPTIONS)
def test_experts_equal_a_loop_over_all_of_them(option: str) -> None:
    config = OPTIONS[option]
    module = experts_of(config)
    x = torch.randn(3, 14, config.hidden_size, dtype=torch.float64, requires_grad=True)
    direction = torch.randn_like(x)
    found = module(x)
    expected, loss = by_masks(module, config, x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    total = (expected * direction).sum() + config.balance * loss * 0.25
    wanted = gradients(module, x, total)
    largest = max(float(each.abs().max()) for each in wanted)
    for mine, theirs in zip(gradients(module, x, (found * direction).sum()), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12 * largest)


@pytest.mark.parametrize("option", OPTIONS)
def test_a_batch_is_its_sequences_one_by_one(option: str) -> None:
    config = OPTIONS[option]
    module = experts_of(config)
    x = torch.randn(3, 14, config.hidden_size, dtype=torch.float64, requires_grad=True)
    together = gradients(module, x, module(x).square().sum())
    alone = [gradients(module, x, module(x[i : i + 1]).square().sum()) for i in range(3)]
    torch.testing.assert_close(module(x), torch.cat([module(x[i : i + 1]) for i in range(3)]), rtol=1e-12, atol=1e-12)
    for whole, *each in zip(together, *alone, strict=True):
        torch.testing.assert_close(whole, sum(each), rtol=1e-11, atol=1e-11 * float(whole.abs().max()))


def test_a_tight_capacity_drops_and_the_last_to_come_first() -> None:
    config = replace(MIXTRAL, num_experts=2, experts_per_token=1, capacity_factor=0.5)
    module = experts_of(config)
    x = torch.randn(1, 1, config.hidden_size, dtype=torch.float64).expand(1, 8, -1)  # all want the same expert
    kept = module(x).abs().sum(-1)[0] > 0
    assert kept.tolist() == [True] * 2 + [False] * 6


def test_the_pieces_of_a_split_add_up_to_the_whole() -> None:
    """Each rank holds half of every expert's columns; outputs and gradients of what is whole add up."""
    config = replace(DEEPSEEK, balance=0.4)
    whole = experts_of(config)
    x = torch.randn(2, 10, config.hidden_size, dtype=torch.float64, requires_grad=True)
    expected = whole(x)
    direction = torch.randn_like(expected)
    outputs, into_x, into_router = [], [], []
    for piece in range(2):
        part = experts_of(config)
        part.scale.ways = 2
        for holder, name, dim in (
            (part.experts, "gate", 1),
            (part.experts, "up", 1),
            (part.experts, "down", 2),
            (part.shared.gate, "weight", 0),
            (part.shared.up, "weight", 0),
            (part.shared.down, "weight", 1),
        ):
            setattr(holder, name, torch.nn.Parameter(getattr(holder, name).detach().chunk(2, dim)[piece].clone()))
        outputs.append(part(x))
        grads = torch.autograd.grad((outputs[-1] * direction).sum(), [x, part.router.weight])
        into_x.append(grads[0])
        into_router.append(grads[1])
    torch.testing.assert_close(sum(outputs), expected, rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad((expected * direction).sum(), [x, whole.router.weight])
    torch.testing.assert_close(sum(into_x), grads[0], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(sum(into_router), grads[1], rtol=1e-11, atol=1e-11)
