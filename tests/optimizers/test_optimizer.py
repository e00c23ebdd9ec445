"""Rates, clipping and updates are the formulas, to the last digit that float64 keeps.

Tests of `optimizers/update.py`.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.codec import decode, encode
from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.models.presets import DecoderConfig
from meshwright.optimizers.rule import rules
from meshwright.optimizers.update import OptimizerConfig
from meshwright.run.model import open_config
from meshwright.verify import parity

CONFIG = DecoderConfig(**tiny.GPT)


def session_of(optimizer: OptimizerConfig) -> tuple[parity.Session, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """After one step with rate 0.5: (session, weights before, gradients before clipping)."""
    plan = Plan(batch=4, microbatch=4)
    device = torch.device("cpu")
    session = parity.open_session(plan, open_config(CONFIG, "tiny", 0), optimizer, dtype="float64", device=device)
    before = {name: value.clone() for name, value in session.build.local_parameters()}
    caught: dict[str, torch.Tensor] = {}
    norm = session.loop.optimizer.squared_norm

    def watched() -> torch.Tensor:
        caught.update({name: value.clone() for name, value in session.build.local_gradients()})
        return norm()

    session.loop.optimizer.squared_norm = watched  # type: ignore[method-assign]
    session.loop.step(parity.random_samples(CONFIG.vocab_size, 4, tiny.SEQUENCE)(0, 0, 1), lr=0.5)
    assert set(caught) == set(before)
    return session, before, caught


def norm_of(values: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(value.norm()) ** 2 for value in values.values()))


@pytest.mark.parametrize("clip", [0.0, 1e-3, 0.5, 1e6])
def test_gradients_are_scaled_to_the_clip_exactly_and_only_when_longer(clip: float) -> None:
    optimizer = OptimizerConfig(name="sgd", momentum=0.0, weight_decay=0.0, clip=clip)
    session, before, gradients = session_of(optimizer)
    length = norm_of(gradients)
    assert 0.5 < length < 1e6
    scale = clip / length if 0 < clip < length else 1.0
    for name, value in session.build.local_parameters():
        torch.testing.assert_close(value, before[name] - 0.5 * scale * gradients[name], rtol=1e-12, atol=1e-15)
    moved = {name: (before[name] - value) / 0.5 for name, value in session.build.local_parameters()}
    assert norm_of(moved) == pytest.approx(min(clip or math.inf, length), rel=1e-10)


def test_adamw_is_its_formula_and_decays_matrices_only() -> None:
    optimizer = OptimizerConfig(weight_decay=0.3, clip=0.0, beta1=0.8, beta2=0.9, epsilon=1e-3)
    session, before, gradients = session_of(optimizer)
    decayed = 0
    for name, value in session.build.local_parameters():
        gradient, weight = gradients[name], before[name]
        if weight.ndim >= 2:
            weight = weight * (1 - 0.5 * 0.3)
            decayed += 1
        # After one step the averages, freed of their bias, are the gradient and its square.
        wanted = weight - 0.5 * gradient / (gradient.abs() + 1e-3)
        torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-13)
    assert 0 < decayed < len(before)


def test_the_state_is_there_before_the_first_step() -> None:
    for optimizer, kinds in (
        (OptimizerConfig(), {"exp_avg", "exp_avg_sq"}),
        (OptimizerConfig(name="sgd"), {"momentum_buffer"}),
        (OptimizerConfig(name="sgd", momentum=0.0), set()),
    ):
        plan = Plan(batch=4, microbatch=4)
        device = torch.device("cpu")
        session = parity.open_session(plan, open_config(CONFIG, "tiny", 0), optimizer, dtype="float32", device=device)
        state = list(session.loop.optimizer.state())
        assert {kind for kind, *_ in state} == kinds
        assert list(session.loop.optimizer.owned_state()) == state
        size = sum(value.numel() * value.element_size() for _, _, value, _ in state)
        elements = sum(value.numel() for _, value in session.build.local_parameters())
        assert size == elements * optimizer.state_bytes


rates = st.builds(
    OptimizerConfig,
    lr=st.floats(1e-6, 1.0),
    warmup=st.integers(0, 50),
    final_fraction=st.floats(0, 1),
    schedule=st.sampled_from(["cosine", "linear", "wsd"]),
    decay_fraction=st.floats(0.01, 1),
)


@settings(max_examples=60, deadline=None)
@given(optimizer=rates, rest=st.integers(1, 200))
def test_the_rate_rises_over_the_warmup_then_falls_to_its_final_fraction(optimizer: OptimizerConfig, rest: int) -> None:
    num_steps = optimizer.warmup + rest
    values = [optimizer.lr_at(step, num_steps) for step in range(num_steps + 1)]
    warm, falling = values[: optimizer.warmup], values[optimizer.warmup :]
    assert all(low < high for low, high in pairwise(warm))
    assert all(high >= low * (1 - 1e-12) for high, low in pairwise(falling))
    assert max(values) == pytest.approx(optimizer.lr)
    assert falling[0] == pytest.approx(optimizer.lr)
    assert values[-1] == pytest.approx(optimizer.lr * optimizer.final_fraction, rel=1e-9, abs=1e-15)
    assert optimizer.lr_at(num_steps + 100, num_steps) == pytest.approx(values[-1], abs=1e-15)
    assert min(values[:-1]) > 0


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        ("cosine", [0.25, 0.5, 1, 1, 0.55, 0.1]),
        ("linear", [0.25, 0.5, 1, 1, 0.55, 0.1]),
        ("wsd", [0.25, 0.5, 1, 1, 1, 0.1]),
        ("constant", [0.25, 0.5, 1, 1, 1, 1]),
    ],
)
def test_the_rate_of_a_known_schedule(schedule: Any, wanted: list[float]) -> None:
    optimizer = OptimizerConfig(lr=1.0, warmup=4, final_fraction=0.1, schedule=schedule, decay_fraction=0.25)
    assert [optimizer.lr_at(step, 12) for step in (0, 1, 3, 4, 8, 12)] == pytest.approx(wanted)
    if schedule == "wsd":  # the last quarter of 12 steps
        assert [optimizer.lr_at(step, 12) for step in (9, 10, 11)] == pytest.approx([1, 0.7, 0.4])


@pytest.mark.parametrize(
    ("told", "places"),
    [
        ({"lr": -1.0, "beta2": 1.0, "clip": -0.5}, {"lr", "beta2", "clip"}),
        ({"name": "adam"}, {"name"}),
        ({"schedule": "cosin"}, {"schedule"}),
        ({"decay_fraction": 1.5, "final_fraction": -0.1}, {"decay_fraction", "final_fraction"}),
        ({"groups": [{"match": "a"}, {"match": "", "lr_scale": -1.0}]}, {"groups[1].match", "groups[1].lr_scale"}),
        ({"groups": [{"match": [], "decay": 1.0}]}, {"groups[0].decay"}),
        ({"groups": [{"weight_decay": -0.1, "match": []}]}, {"groups[0].weight_decay", "groups[0].match"}),
        ({"groups": {"match": "a"}}, {"groups"}),
    ],
)
def test_wrong_settings_are_refused_together(told: dict[str, Any], places: set[str]) -> None:
    with pytest.raises(MeshwrightError) as caught:
        decode(OptimizerConfig, told, "optimizer")
    assert {problem.where for problem in caught.value.problems} == {f"optimizer.{place}" for place in places}


def test_a_config_reads_back_as_itself_with_the_optimizers_own_values_written_out() -> None:
    for name in rules():
        config = decode(OptimizerConfig, {"name": name, "groups": [{"match": ["a", "b"]}]}, "optimizer")
        assert decode(OptimizerConfig, encode(config), "optimizer") == config
    assert decode(OptimizerConfig, {"name": "lion"}, "").beta2 == 0.99
    assert decode(OptimizerConfig, {"name": "lion", "beta2": 0.5}, "").beta2 == 0.5
    assert (OptimizerConfig().beta2, OptimizerConfig().epsilon, OptimizerConfig(name="sgd").momentum) == (
        0.95,
        1e-8,
        0.9,
    )
