"""Steps and evaluations: the mean over tokens, agreed by all ranks; a plan that cannot run is not built.

Tests of `runtime/build.py`.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import tiny
import torch

from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.launch.rank_pool import RankPool
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.presets import DecoderConfig
from meshwright.ops.device_mesh import Mesh
from meshwright.ops.initial_weights import seeded
from meshwright.optimizers.update import OptimizerConfig
from meshwright.run.model import open_config
from meshwright.runtime.build import build
from meshwright.verify import parity
from meshwright.zoo.decoder import Decoder

CPU = torch.device("cpu")


def one_device(config: DecoderConfig, optimizer: OptimizerConfig, microbatch: int = 4) -> parity.Session:
    plan = Plan(batch=tiny.BATCH, microbatch=microbatch)
    return parity.open_session(plan, open_config(config, "tiny", 0), optimizer, dtype="float64", device=CPU)


def mean_loss(model: Decoder, batches: list[Any]) -> tuple[float, float]:
    """(sum over tokens, tokens) written out: -log p of each target that counts."""
    total = tokens = 0.0
    for batch in batches:
        log_p = model(batch.inputs).log_softmax(-1)
        each = -log_p.gather(-1, batch.targets.unsqueeze(-1)).squeeze(-1)
        total += float((each * batch.weights).sum().detach())
        tokens += float(batch.weights.sum())
    return total, tokens


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_evaluation_and_step_report_the_mean_over_tokens_that_count(family: str) -> None:
    config = DecoderConfig(**tiny.FAMILIES[family])
    session = one_device(config, OptimizerConfig(lr=0.1))
    samples = parity.random_samples(config.vocab_size, tiny.BATCH, tiny.SEQUENCE)
    batches = [samples(step, 0, 1) for step in range(3)]
    wanted = mean_loss(session.build.model, batches)
    assert wanted[1] < 3 * tiny.BATCH * tiny.SEQUENCE, "no token is masked"
    assert session.loop.evaluate(batches)[:2] == pytest.approx(wanted, rel=1e-12)
    total, tokens = mean_loss(session.build.model, batches[:1])
    assert session.loop.step(batches[0], lr=0.1).loss == pytest.approx(total / tokens, rel=1e-12)
    assert session.loop.step(batches[0], lr=0.1).loss < total / tokens, "a step down the gradient does not help"


@pytest.mark.parametrize("techniques", [(), (tiny.SHARD3,), *tiny.CUBES[:2]], ids=tiny.joined)
def test_all_ranks_agree_on_evaluation_and_on_stopping(techniques: tuple[Any, ...], pool: RankPool) -> None:
    plan = tiny.plan_of(*techniques, microbatch=2)
    question = {"config": tiny.QWEN, "optimizer": tiny.ADAMW, "sequence": tiny.SEQUENCE}
    arguments = question | {"plan": json.loads(plan.to_json())}
    answers = pool.run("rank_jobs:evaluate_job", arguments, num_ranks=plan.num_ranks)
    config = DecoderConfig(**tiny.QWEN)
    samples = parity.random_samples(config.vocab_size, tiny.BATCH, tiny.SEQUENCE)
    model = one_device(config, OptimizerConfig(**tiny.ADAMW)).build.model
    total, tokens = mean_loss(model, [samples(step, 0, 1) for step in (5, 6)])
    first, first_tokens = mean_loss(model, [samples(0, 0, 1)])
    assert len(answers) == plan.num_ranks
    for answer in answers:
        assert answer["total"] == pytest.approx(total, rel=1e-12)
        assert answer["tokens"] == tokens
        assert answer["untouched"], "evaluation changed a weight"
        assert answer["loss"] == pytest.approx(first / first_tokens, rel=1e-12)
        assert answer["must_stop"] == [False, True]


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        (tiny.plan_of(tiny.t("tensor", size=3)), "cannot be cut 3 ways"),
        (tiny.plan_of(tiny.t("pipeline", size=5)), "5 stages for 4 blocks"),
        (tiny.plan_of(tiny.t("pipeline", size=2, stages=(1, 2))), "add up to 4 blocks"),
        (tiny.plan_of(tiny.t("recompute", layers="first 9")), 'layers is "first 9"'),
        (tiny.plan_of(tiny.t("chunked_loss", chunks=0)), "chunks is 0"),
        (tiny.plan_of(tiny.REPLICATE, batch=9), "9 samples cannot be shared by 2 replicas"),
    ],
    ids=lambda value: str(value) if isinstance(value, Plan) else "",
)
def test_a_plan_with_problems_is_not_built(plan: Plan, problem: str) -> None:
    config = DecoderConfig(**tiny.LLAMA)
    with torch.device("meta"):
        model = Decoder(config)
    profile, source = decoder_profile(config, "tiny"), seeded(model.init_value, 0)
    assert problem in "\n".join(map(str, plan.check(profile)))
    with pytest.raises(MeshwrightError, match=problem):
        build(plan, model, profile, Mesh.make({}, CPU), source)
    assert all(parameter.is_meta for parameter in model.parameters()), "something was built"


def test_all_problems_of_a_plan_are_said_at_once() -> None:
    techniques = (tiny.t("tensor", size=3), tiny.t("pipeline", size=5), tiny.t("recompute", layers="first 9"))
    problems = tiny.plan_of(*techniques).check(decoder_profile(DecoderConfig(**tiny.LLAMA), "tiny"))
    assert {problem.where for problem in problems} == {"tensor", "pipeline", "recompute"}
