"""The independent reference is itself right: torch's own optimizers, and documents as sequences of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from meshwright.models.presets import DecoderConfig
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.optimizers.rule import rules
from meshwright.run.model import open_config
from meshwright.verify import reference
from meshwright.verify.reference_model import plain_of

LR, DECAY = 0.05, 0.3
TORCH: dict[str, Callable[[Tensor], torch.optim.Optimizer]] = {
    "adamw": lambda w: torch.optim.AdamW([w], lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=DECAY),
    "sgd": lambda w: torch.optim.SGD([w], lr=LR, momentum=0.9, weight_decay=DECAY),
    "adafactor": lambda w: torch.optim.Adafactor(
        [w], lr=LR, beta2_decay=-0.8, eps=(1e-30, 1e-3), d=1.0, weight_decay=DECAY
    ),
}


@pytest.mark.parametrize("name", TORCH)
def test_the_rules_are_torchs_own_where_torch_has_them(name: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    theirs = torch.randn(6, 4, dtype=torch.float64, generator=generator).requires_grad_()
    ours, state, optimizer = theirs.detach().clone(), {}, TORCH[name](theirs)
    config = OptimizerConfig(name=name, weight_decay=DECAY)
    for t in range(1, 5):
        gradient = torch.randn(6, 4, dtype=torch.float64, generator=generator)
        theirs.grad = gradient.clone()
        optimizer.step()
        ours = reference.update(config, "w", ours, gradient, state, t, LR)
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-7, atol=1e-9)


def test_there_is_a_rule_for_every_optimizer() -> None:
    assert set(reference.RULES) == set(rules())


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_rates_are_those_of_the_run(schedule: Any) -> None:
    for warmup in (0, 3):
        config = OptimizerConfig(lr=0.1, warmup=warmup, schedule=schedule)
        for steps in (1, 4, 25):
            for step in range(steps):
                assert reference.learning_rate(config, step, steps) == pytest.approx(config.lr_at(step, steps))


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_transformers_and_our_layers_agree_on_packed_documents(family: str) -> None:
    """Documents run one by one here; our decoder masks them. Weights of 0 leave targets out."""
    config = DecoderConfig(**tiny.FAMILIES[family] | {"num_layers": 2})
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (2, 9), generator=generator)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1, 1, 1]], dtype=torch.int32)
    weights = (torch.rand(2, 8, generator=generator) > 0.3).double()
    batch = ((tokens[:, :-1], documents), tokens[:, 1:].contiguous(), weights)
    found = []
    for foreign in (True, False):
        plain = plain_of(open_config(config, "tiny", 0), sequence=8, dtype=torch.float64, foreign=foreign)
        plain.packs_documents = foreign
        found.append(reference.gradient(plain, batch, 1))
    (loss, gradients), (other, others) = found
    assert loss == pytest.approx(other, rel=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, others[name], rtol=1e-9, atol=1e-12)
