"""A check that cannot fail proves nothing: what `mw check` must notice, made to happen on one rank.

Tests of `verify/parity.py`, `verify/reference_model.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.core.plan import Plan
from meshwright.models.presets import PRESETS
from meshwright.run.model import open_config
from meshwright.run.run_file import OptimizerConfig
from meshwright.verify.parity import Session, compare, compare_rounded, open_session, random_samples, write_plain
from meshwright.verify.reference_model import plain_of

CONFIG, OPTIMIZER, BATCH, STEPS = PRESETS["byte-tiny"], OptimizerConfig(lr=1e-2), 6, 4
SAMPLES = random_samples(256, BATCH, 16)


def batch_of(step: int) -> Any:
    given = SAMPLES(step, 0, 1)
    return given.inputs, given.targets, given.weights


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    plain = plain_of(open_config(CONFIG, "tiny", 0), sequence=16, dtype=torch.float64)
    write_plain(folder, plain, batch_of, OPTIMIZER, STEPS, microbatch=BATCH)
    return folder


def session(dtype: str = "float64") -> Session:
    plan = Plan(batch=BATCH, microbatch=2)
    return open_session(plan, open_config(CONFIG, "tiny", 0), OPTIMIZER, dtype=dtype, device=torch.device("cpu"))


def scale_gradient(made: Session, name: str, factor: float) -> None:
    parameter: Any = dict(made.build.named_parameters())[name]
    parameter.register_hook(lambda gradient: gradient * factor)


def test_the_same_model_does_not_depart(reference: Path) -> None:
    worst, found = compare(session(), reference, SAMPLES, STEPS, OPTIMIZER, 1e-9)
    assert found == []
    assert worst < 1e-12


def test_float32_departs_by_its_rounding_only(reference: Path) -> None:
    rounded = compare_rounded(session("float32"), reference, SAMPLES, STEPS, OPTIMIZER)
    assert rounded.departures == []
    distance, norm, _ = rounded.sums
    assert (distance / norm) ** 0.5 < 1e-5


def test_one_wrong_gradient_is_named_with_its_step(reference: Path) -> None:
    made = session()
    scale_gradient(made, "blocks.1.mlp.down.weight", 1 + 1e-6)
    _, found = compare(made, reference, SAMPLES, STEPS, OPTIMIZER, 1e-9)
    first = found[0]
    assert (first.step, first.quantity, first.layer) == (0, "gradient", "blocks.1.mlp.down.weight")


def test_a_gradient_that_is_missing_is_noticed_and_no_crash(reference: Path) -> None:
    made = session()
    inner = made.build.local_gradients
    made.build.local_gradients = lambda: [(n, g) for n, g in inner() if n != "head.norm.weight"]  # type: ignore[method-assign]
    _, found = compare(made, reference, SAMPLES, 1, OPTIMIZER, 1e-9)
    assert [(each.quantity, each.layer) for each in found] == [("gradient", "head.norm.weight")]


def test_moments_lost_after_two_steps_are_noticed(reference: Path) -> None:
    for dtype in ("float64", "float32"):
        made = session(dtype)
        inner = made.loop.optimizer.update

        def update(*given: Any, made: Session = made, inner: Any = inner) -> None:
            if made.loop.optimizer.num_steps >= 2:
                for _, _, value, _ in made.loop.optimizer.state():
                    value.zero_()
            inner(*given)

        made.loop.optimizer.update = update  # type: ignore[method-assign]
        if dtype == "float64":
            found = compare(made, reference, SAMPLES, STEPS, OPTIMIZER, 1e-9)[1]
        else:
            found = compare_rounded(made, reference, SAMPLES, STEPS, OPTIMIZER).departures
        assert (found[0].step, found[0].quantity) in ((2, "parameter"), (2, "update"))


def test_masters_rounded_to_bf16_are_noticed(reference: Path) -> None:
    made = session("float32")
    inner = made.loop.optimizer.update

    def update(*given: Any) -> None:
        inner(*given)
        for _, value in made.build.local_parameters():
            value.copy_(value.bfloat16())

    made.loop.optimizer.update = update  # type: ignore[method-assign]
    found = compare_rounded(made, reference, SAMPLES, STEPS, OPTIMIZER).departures
    assert (found[0].step, found[0].quantity) == (0, "update")


def test_a_sign_that_rounding_decides_is_not_compared(tmp_path: Path) -> None:
    """Lion's step of a key's bias, whose gradient is zero in theory."""
    from dataclasses import replace

    config = replace(CONFIG, qkv_bias=True)
    lion = OptimizerConfig(name="lion", lr=1e-2)
    plain = plain_of(open_config(config, "tiny", 0), sequence=16, dtype=torch.float64)
    write_plain(tmp_path, plain, batch_of, lion, STEPS, microbatch=BATCH)
    made = open_session(
        Plan(batch=BATCH, microbatch=1), open_config(config, "tiny", 0), lion, dtype="float64",
        device=torch.device("cpu"),
    )  # fmt: skip
    assert compare(made, tmp_path, SAMPLES, STEPS, lion, 1e-9)[1] == []
