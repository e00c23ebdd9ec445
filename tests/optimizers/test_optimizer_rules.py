"""Each optimizer is its paper's formula, written again here for one parameter at a time and in the plainest way.

Tests of `optimizers/optimizer_config.py`, `optimizers/rule.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor

from meshwright.core.box import Box
from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.core.work import ParameterSlot
from meshwright.models.presets import DecoderConfig
from meshwright.ops.device_mesh import Mesh
from meshwright.optimizers.optimizer_config import OptimizerConfig, ParameterGroup
from meshwright.optimizers.rule import ParameterPiece, rules
from meshwright.optimizers.rules.adafactor import Adafactor
from meshwright.optimizers.rules.muon import orthogonal
from meshwright.optimizers.update import Optimizer
from meshwright.run.model import open_config
from meshwright.simulator.pricing import price_sizes
from meshwright.verify import parity

CONFIG = DecoderConfig(**tiny.GPT | {"num_layers": 2})
LR, DECAY = 0.05, 0.3
Tensors = dict[str, Tensor]


def opened(optimizer: OptimizerConfig) -> parity.Session:
    plan = Plan(batch=4, microbatch=4)
    device = torch.device("cpu")
    return parity.open_session(plan, open_config(CONFIG, "tiny", 0), optimizer, dtype="float64", device=device)


def stepped(session: parity.Session, steps: int = 3) -> tuple[Tensors, list[Tensors]]:
    """(weights before, gradients of every step)"""
    before = {name: value.clone() for name, value in session.build.local_parameters()}
    samples = parity.random_samples(CONFIG.vocab_size, 4, tiny.SEQUENCE)
    told = []
    for step in range(steps):
        session.loop.step(samples(step, 0, 1), LR)
        told.append({name: value.clone() for name, value in session.build.local_gradients()})
    return before, told


def lion(w: Tensor, g: Tensor, kept: Tensors, t: int, decay: float) -> Tensor:
    m = kept.get("m", torch.zeros_like(w))
    kept["m"] = 0.99 * m + 0.01 * g
    return w - LR * (torch.sign(0.9 * m + 0.1 * g) + decay * w)


def lamb(w: Tensor, g: Tensor, kept: Tensors, t: int, decay: float) -> Tensor:
    kept["m"] = 0.9 * kept.get("m", 0 * w) + 0.1 * g
    kept["v"] = 0.999 * kept.get("v", 0 * w) + 0.001 * g**2
    r = (kept["m"] / (1 - 0.9**t)) / ((kept["v"] / (1 - 0.999**t)).sqrt() + 1e-6) + decay * w
    return w - LR * (w.norm() / r.norm() if w.ndim > 1 else 1.0) * r


def lars(w: Tensor, g: Tensor, kept: Tensors, t: int, decay: float) -> Tensor:
    trust = 0.001 * w.norm() / (g.norm() + decay * w.norm()) if w.ndim > 1 else 1.0
    kept["v"] = 0.9 * kept.get("v", 0 * w) + LR * trust * (g + decay * w)
    return w - kept["v"]


def adafactor(w: Tensor, g: Tensor, kept: Tensors, t: int, decay: float) -> Tensor:
    beta, size = 1 - t**-0.8, max(1e-3, float(w.square().mean().sqrt()))
    if w.ndim < 2:
        kept["v"] = beta * kept.get("v", 0 * w) + (1 - beta) * (g**2 + 1e-30)
        u = g / kept["v"].sqrt()
    else:
        kept["r"] = beta * kept.get("r", 0.0) + (1 - beta) * (g**2 + 1e-30).mean(1, keepdim=True)
        kept["c"] = beta * kept.get("c", 0.0) + (1 - beta) * (g**2 + 1e-30).mean(0, keepdim=True)
        u = g / (kept["r"] @ kept["c"] / kept["r"].mean()).sqrt()
    u = u / max(1.0, float(u.square().mean().sqrt()))
    return w - LR * decay * w - LR * size * u


def muon(w: Tensor, g: Tensor, kept: Tensors, t: int, decay: float) -> Tensor:
    kept["m"] = 0.95 * kept.get("m", 0 * w) + 0.05 * g
    x = 0.05 * g + 0.95 * kept["m"]
    x = x / x.norm()
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
    return w - LR * decay * w - LR * 0.2 * max(w.shape) ** 0.5 * x


def adamw(w: Tensor, g: Tensor, kept: Tensors, t: int, decay: float) -> Tensor:
    kept["m"] = 0.9 * kept.get("m", 0 * w) + 0.1 * g
    kept["v"] = 0.95 * kept.get("v", 0 * w) + 0.05 * g**2
    return w - LR * decay * w - LR * (kept["m"] / (1 - 0.9**t)) / ((kept["v"] / (1 - 0.95**t)).sqrt() + 1e-8)


def sgd(w: Tensor, g: Tensor, kept: Tensors, t: int, decay: float) -> Tensor:
    kept["v"] = 0.9 * kept.get("v", 0 * w) + g + decay * w
    return w - LR * kept["v"]


def rowwise_adagrad(w: Tensor, g: Tensor, kept: Tensors, t: int, decay: float) -> Tensor:
    kept["s"] = kept.get("s", 0.0) + ((g**2).mean(1, keepdim=True) if w.ndim > 1 else g**2)
    return w - LR * decay * w - LR * g / (kept["s"].sqrt() + 1e-8)


FORMULAS: dict[str, Callable[..., Tensor]] = {
    each.__name__: each for each in (adamw, sgd, lion, lamb, lars, adafactor, muon, rowwise_adagrad)
}


@pytest.mark.parametrize("name", rules())
def test_three_steps_are_the_formula(name: Any) -> None:
    session = opened(OptimizerConfig(name=name, weight_decay=DECAY, clip=0.0))
    weights, told = stepped(session)
    start = {key: value.clone() for key, value in weights.items()}
    kept: dict[str, Tensors] = {key: {} for key in weights}
    formula = dict.fromkeys(weights, FORMULAS[name])
    if name == "muon":
        formula |= {key: adamw for key, value in weights.items() if value.ndim < 2 or not key.startswith("blocks.")}
    for t, gradients in enumerate(told, start=1):
        for key, w in weights.items():
            weights[key] = formula[key](w, gradients[key], kept[key], t, DECAY if w.ndim > 1 else 0.0)
    for key, value in session.build.local_parameters():
        torch.testing.assert_close(
            value, weights[key], rtol=1e-9, atol=1e-11, msg=lambda said, key=key: f"{key} {said}"
        )
        assert not torch.equal(value, start[key])


def test_groups_scale_rates_and_set_decay_and_the_first_match_counts() -> None:
    groups = (
        ParameterGroup(match="head.*", weight_decay=0.5, lr_scale=3.0),
        ParameterGroup(match=("*.mlp.*", "head.norm.weight"), lr_scale=0.0),
    )
    session = opened(OptimizerConfig(name="sgd", momentum=0.0, weight_decay=DECAY, clip=0.0, groups=groups))
    before, (gradients,) = stepped(session, steps=1)
    touched = set()
    for name, value in session.build.local_parameters():
        scale, decay = 1.0, DECAY if value.ndim > 1 else 0.0
        if name.startswith("head."):
            scale, decay = 3.0, 0.5
        elif ".mlp." in name:
            scale = 0.0
        touched.add(scale)
        torch.testing.assert_close(value, before[name] - LR * scale * (gradients[name] + decay * before[name]))
    assert touched == {0.0, 1.0, 3.0}


def test_groups_that_match_nothing_are_told_together() -> None:
    groups = (
        ParameterGroup(match="embed.*"),
        ParameterGroup(match=("blocks.*", "block.*")),
        ParameterGroup(match="haed.*"),
    )
    with pytest.raises(MeshwrightError) as caught:
        opened(OptimizerConfig(groups=groups))
    places = [problem.where for problem in caught.value.problems]
    assert places == ["optimizer.groups[1].match", "optimizer.groups[2].match"]
    assert "'haed.*' matches none of the" in caught.value.problems[1].what


@pytest.mark.parametrize("name", rules())
def test_what_is_frozen_neither_moves_nor_is_remembered(name: Any) -> None:
    session = opened(OptimizerConfig(name=name))
    for parameter, value in session.build.named_parameters():
        value.requires_grad_(not parameter.startswith(("embed.", "blocks.0.")))
    session.loop.optimizer = Optimizer(OptimizerConfig(name=name), session.build)
    before, _ = stepped(session, steps=2)
    still = {
        parameter for parameter, value in session.build.local_parameters() if torch.equal(value, before[parameter])
    }
    assert still == {parameter for parameter in before if parameter.startswith(("embed.", "blocks.0."))}
    assert {kept for _, kept, _, _ in session.loop.optimizer.state()} == set(before) - still


def test_adafactor_is_that_of_transformers_also_for_stacks_of_matrices() -> None:
    theirs = pytest.importorskip("transformers").optimization.Adafactor
    random = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in ((3, 5, 7), (4, 6), (5,), (2, 9))]
    ours, others = [value.clone() for value in start], [torch.nn.Parameter(value.clone()) for value in start]
    shapes = {str(index): tuple(value.shape) for index, value in enumerate(start)}
    pieces = [
        ParameterPiece(
            name=str(i), value=w, box=Box.whole(shapes[str(i)]), is_owned=True, lr_scale=1.0, weight_decay=0.0
        )
        for i, w in enumerate(ours)
    ]
    one_device: Any = SimpleNamespace(mesh=Mesh(sizes={}, device=torch.device("cpu")))
    rule = Adafactor(OptimizerConfig(name="adafactor"), pieces, one_device, shapes)
    reference = theirs(others, lr=LR, scale_parameter=True, relative_step=False, warmup_init=False)
    for count in range(1, 5):
        for mine, other in zip(ours, others, strict=True):
            mine.grad = torch.randn(mine.shape, generator=random, dtype=torch.float64)
            other.grad = mine.grad.clone()
        rule.step(LR, count)
        reference.step()
    for mine, other, first in zip(ours, others, start, strict=True):
        torch.testing.assert_close(mine, other.detach(), rtol=1e-9, atol=1e-12)
        assert (mine - first).abs().max() > 0.01


@pytest.mark.parametrize("shape", [(30, 70), (70, 30), (3, 40, 20)])
def test_orthogonal_matrices_have_singular_values_near_one_and_the_same_directions(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = orthogonal(matrix * 1e-3)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    values = left.mT @ found @ right.mT
    diagonal = values.diagonal(dim1=-2, dim2=-1)
    assert diagonal.min() > 0.65
    assert diagonal.max() < 1.25
    assert (values - torch.diag_embed(diagonal)).abs().max() < 1e-9
    if len(shape) == 3:  # a stack is its matrices, one by one
        torch.testing.assert_close(found[0], orthogonal(matrix[0]))


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_many_plans_are_priced_as_one_by_one(name: Any) -> None:
    profile, optimizer = open_config(CONFIG, "tiny", 0).profile, OptimizerConfig(name=name)
    techniques = (tiny.TENSOR, tiny.SHARD3)
    common = {"batch": 8, "sequence": 16, "microbatch": 1, "num_microbatches": 8, "stage": 0, "num_stages": 1}
    common |= {"first_block": 0, "blocks": profile.num_blocks}
    axes = {"fsdp": np.array([1, 2, 3, 1, 5]), "tp": np.array([1, 1, 2, 4, 4])}

    def told(sizes: dict[str, Any]) -> list[Any]:
        work = price_sizes(profile, techniques, common | sizes, optimizer=optimizer)
        sent = [(task.repeat, task.bytes) for task in work.collectives if task.origin == "optimizer"]
        return [*sent, [item.bytes for item in work.residents if item.category == "optimizer"]]

    many = told(axes)
    for index in range(5):
        alone = told({axis: int(sizes[index]) for axis, sizes in axes.items()})
        for one, all_of_them in zip(alone, many, strict=True):
            assert list(one) == [np.broadcast_to(each, 5)[index] for each in all_of_them]
    dealt = [bool(np.any(np.asarray(repeat) > 0)) for repeat, _ in many[:-1]]
    assert dealt == ([True, True] if name == "muon" else [])


@pytest.mark.parametrize("name", rules())
def test_state_on_one_device_is_what_is_priced(name: Any) -> None:
    config = OptimizerConfig(name=name)
    session = opened(config)
    held = sum(value.numel() * value.element_size() for _, _, value, _ in session.loop.optimizer.state())
    slots = [
        ParameterSlot(
            layer="",
            name=parameter,
            repeat=1,
            shape=tuple(value.shape),
            cut=None,
            element_bytes=8,
            state_width=8,
            is_block=parameter.startswith("blocks."),
            unit="",
        )
        for parameter, value in session.build.local_parameters()
    ]
    assert held == sum(config.state_bytes_of(slot) for slot in slots) > 0
