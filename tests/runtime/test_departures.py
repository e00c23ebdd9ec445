"""A check that cannot fail proves nothing: what `mw check` must notice, made to happen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.core.plan import Plan
from meshwright.models.config import PRESETS
from meshwright.runtime.config import OptimizerConfig
from meshwright.runtime.model import open_config
from meshwright.runtime.parity import (
    Session,
    compare,
    compare_rounded,
    open_session,
    random_samples,
    write_reference,
)

CONFIG, OPTIMIZER, BATCH = PRESETS["byte-tiny"], OptimizerConfig(lr=1e-2), 4
SAMPLES = random_samples(256, BATCH, 16)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    write_reference(folder, open_config(CONFIG, "tiny", 0), OPTIMIZER, SAMPLES, 2, batch=BATCH)
    return folder


def session() -> Session:
    plan = Plan(batch=BATCH, microbatch=2)
    return open_session(plan, open_config(CONFIG, "tiny", 0), OPTIMIZER, dtype="float64", device=torch.device("cpu"))


def scale_gradient(made: Session, name: str, factor: float) -> None:
    parameter: Any = dict(made.build.named_parameters())[name]
    parameter.register_hook(lambda gradient: gradient * factor)


def test_the_same_model_does_not_depart(reference: Path) -> None:
    worst, found = compare(session(), reference, SAMPLES, 2, OPTIMIZER, 1e-9)
    assert found == []
    assert worst < 1e-12
    assert compare_rounded(session(), reference, SAMPLES, OPTIMIZER, 1e-9)[1] == []


def test_one_wrong_gradient_is_named_with_its_step(reference: Path) -> None:
    made = session()
    scale_gradient(made, "blocks.1.mlp.down.weight", 1 + 1e-6)
    _, found = compare(made, reference, SAMPLES, 2, OPTIMIZER, 1e-9)
    first = found[0]
    assert (first.step, first.quantity, first.layer) == (0, "gradient", "blocks.1.mlp.down.weight")


def test_a_lost_gradient_is_noticed_even_where_rounding_is_allowed(reference: Path) -> None:
    made = session()
    for name in ("embed.tokens.weight", "head.output.weight", "blocks.0.mlp.down.weight"):
        scale_gradient(made, name, 0.0)
    worst, found = compare_rounded(made, reference, SAMPLES, OPTIMIZER, 5e-2)
    assert worst > 5e-2
    assert found[0].quantity == "gradient"
