"""A forecast above every published run of its kind is said to be so."""

from __future__ import annotations

from dataclasses import replace

import pytest

import meshwright as mw
from meshwright.ask.explain import SCALES, beaten_run, generation_of, published_runs
from meshwright.machine.named_clusters import cluster
from meshwright.models.presets import profile
from meshwright.planner.search import ScoredPlan


@pytest.fixture(scope="module")
def answer() -> mw.Answer:
    return mw.plan("llama3.2-1b", "8xa100", batch=64, top=1)


def with_mfu(answer: mw.Answer, mfu: float, **more: object) -> ScoredPlan:
    assert answer.best is not None
    return answer.best._replace(forecast=replace(answer.best.forecast, mfu=mfu, **more))


def test_every_published_run_has_its_source_and_may_be_fitted_to() -> None:
    runs = published_runs()
    kinds = [(run.family, run.generation, run.scale, run.dtype) for run in runs]
    assert len(set(kinds)) == len(runs) > 10
    for run in runs:
        assert 0.1 < run.mfu < 0.8
        assert run.source
        assert run.row
        assert run.devices <= run.scale
        assert run.scale in SCALES


@pytest.mark.parametrize(
    ("name", "generation"),
    [
        *[("8xa100", "a100"), ("a100-pcie-40", "a100"), ("64x8xh100", "h100"), ("8xh200", "h100"), ("8xh800", "h100")],
        *[("gh200", "h100"), ("4x8xb200", "b200"), ("gb200", "b200"), ("8xh20", ""), ("mi300x", ""), ("a10", "")],
        *[("8xh100+8xa100", ""), ("laptop", "")],
    ],
)
def test_generations_are_known_by_name(name: str, generation: str) -> None:
    assert generation_of(cluster(name)) == generation
    probed = replace(cluster("h200"), name="this", sources={"device": "NVIDIA H200"})
    assert generation_of(probed) == "h100"


def test_a_forecast_above_all_published_runs_says_so(answer: mw.Answer) -> None:
    dense, machines = profile("llama3.2-1b"), cluster("8xa100")
    best = max(
        run.mfu for run in published_runs() if (run.generation, run.family, run.dtype) == ("a100", "dense", "bf16")
    )
    assert beaten_run(dense, machines, with_mfu(answer, best - 0.001)) is None
    run = beaten_run(dense, machines, with_mfu(answer, best + 0.001))
    assert run is not None
    assert run.mfu == best  # on more devices, which is harder
    result = replace(answer.result, best=with_mfu(answer, 0.9))
    told = replace(answer, result=result)
    line = f"MFU 90 %: above the best published run of this kind ({100 * best:.0f} %: {run.model}"
    assert any(each.startswith(line) and each.endswith("treat with care") for each in told.explanation)
    from meshwright.report.answer_json import answer_as_json

    assert answer_as_json(told)["explain"]["beaten_run"]["row"] == run.row


def test_other_kinds_are_compared_with_their_own(answer: mw.Answer) -> None:
    dense = profile("llama3.2-1b")
    assert beaten_run(dense, cluster("8xmi300x"), with_mfu(answer, 0.9)) is None
    assert beaten_run(dense, cluster("8xh100"), with_mfu(answer, 0.55)) is not None
    assert beaten_run(dense, cluster("8xh100"), with_mfu(answer, 0.35, dtype="fp8")) is None
    assert beaten_run(dense, cluster("8xh100"), with_mfu(answer, 0.9, dtype="fp32")) is None
    experts = beaten_run(profile("mixtral-8x7b"), cluster("8xb200"), with_mfu(answer, 0.5))
    assert experts is not None
    assert experts.family == "experts"
    assert beaten_run(profile("vit-b16"), cluster("8xh100"), with_mfu(answer, 0.9)) is None
