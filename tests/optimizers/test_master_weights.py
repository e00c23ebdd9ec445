"""bf16 copies of float32 master weights: bit for bit the numbers of weights that are cast where they are used.

Tests of `precision.weights = "master"`, `Build.wide` and `ParameterPiece.copy`.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.core.errors import MeshwrightError

CAST = {"name": "precision"}
MASTER = {"name": "precision", "weights": "master"}
RECOMPUTE = {"name": "recompute"}
LOW_BIT = {"name": "lowbit_optimizer", "smallest": 64}
IN_BACKWARD = {"name": "update_in_backward"}


def plan_of(*techniques: dict[str, Any], microbatch: int = 4) -> mw.Plan:
    value = {"version": 2, "batch": 4, "microbatch": microbatch, "techniques": list(techniques)}
    return mw.Plan.from_json(json.dumps(value))


def trained(model: str, *techniques: dict[str, Any], **optimizer: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of three steps, and the parameters as a checkpoint has them."""
    description = mw.model(model, sequence=16)
    built = mw.build(
        plan_of(*techniques), description, device="cpu", optimizer=mw.OptimizerConfig(lr=1e-2, **optimizer)
    )
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(3):
        if model == "byte-tiny":
            inputs = torch.randint(0, 200, (4, 16), generator=generator)
            targets = torch.randint(0, 200, (4, 16), generator=generator)
        else:
            image = description.profile.input_shape if hasattr(description.profile, "input_shape") else (1, 8, 8)
            inputs = torch.randn((4, *image), generator=generator)
            targets = torch.randint(0, 10, (4,), generator=generator)
        losses.append(built.step(inputs, targets).loss)
    if any(each["name"] == "precision" and each.get("weights") == "master" for each in techniques):
        narrow = [p for p in built.model.parameters() if p.dtype == torch.bfloat16]
        assert narrow, "nothing has a copy"
        assert len(narrow) == len(built.build.wide)
    return losses, dict(built.build.local_parameters())


@pytest.mark.parametrize(
    "others",
    [(), (RECOMPUTE,), (LOW_BIT,)],
    ids=["alone", "recompute", "lowbit"],
)
@pytest.mark.parametrize("name", ["adamw", "sgd", "lion"])
def test_numbers_are_those_of_casts(name: str, others: tuple[dict[str, Any], ...]) -> None:
    if others == (LOW_BIT,) and name != "adamw":
        pytest.skip("has no form in a few bits")
    wide = trained("byte-tiny", CAST, *others, name=name)
    narrow = trained("byte-tiny", MASTER, *others, name=name)
    assert wide[0] == narrow[0]
    assert wide[1].keys() == narrow[1].keys()
    for key, value in wide[1].items():
        assert value.dtype == narrow[1][key].dtype == torch.float32
        assert torch.equal(value, narrow[1][key]), key


def test_updates_inside_of_backward() -> None:
    wide = trained("byte-tiny", CAST, IN_BACKWARD, clip=0.0)
    narrow = trained("byte-tiny", MASTER, IN_BACKWARD, clip=0.0)
    assert wide[0] == narrow[0]
    assert all(torch.equal(value, narrow[1][key]) for key, value in wide[1].items())


@pytest.mark.parametrize("model", ["vit-digits", "resnet-tiny"])
def test_image_models_under_autocast(model: str) -> None:
    wide, narrow = trained(model, CAST), trained(model, MASTER)
    assert wide[0] == narrow[0]
    assert all(torch.equal(value, narrow[1][key]) for key, value in wide[1].items())


def test_what_cannot_be_is_refused() -> None:
    profile = mw.model("byte-tiny", sequence=16).profile
    cases = {
        "one microbatch": plan_of(MASTER, microbatch=2),
        "one device": plan_of(MASTER, {"name": "replicate", "size": 2}, microbatch=2),
        'weights = "fp32"': plan_of({**MASTER, "dtype": "fp16"}),
        "spares nothing": plan_of({**MASTER, "matmul": "fp8_tensorwise", "edge_blocks": 0}),
    }
    for words, plan in cases.items():
        assert any(words in f"{problem.what} {problem.fix}" for problem in plan.check(profile)), words
    with pytest.raises(MeshwrightError):
        mw.build(plan_of(MASTER, microbatch=2), mw.model("byte-tiny", sequence=16), device="cpu")


def test_search_chooses_it_on_one_gpu_only() -> None:
    answers = [
        mw.plan(mw.model("llama3.2-1b", sequence=4096), mw.cluster(cluster), batch=4, sequence=4096)
        for cluster in ("1xh100", "2xh100")
    ]
    chosen = [technique for answer in answers for technique in answer.best.plan.techniques]
    assert ["master" in str(technique) for technique in chosen if technique.name == "precision"] == [True, False]
