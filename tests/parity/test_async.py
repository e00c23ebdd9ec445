"""Overlapping steps do what they promise: W[t + 1] = update(W[t], gradient of batch t one update earlier).

One device trains by other numbers, so the reference is a replay of the promise in one process (`async_jobs`).

Tests of `ops/weight_versions.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
import tiny
from tiny import LLAMA, SEQUENCE, plan_of, t

from meshwright.core.codec import encode
from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.core.technique import Technique
from meshwright.launch.rank_pool import RankPool
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.presets import DecoderConfig
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.planner.wishes import read_wishes

Replay = Callable[..., str]
Run = Callable[..., list[dict[str, Any]]]

GROUPS = [4, 1, 2]
"""Batches between flushes."""
ADAMW = {"name": "adamw", "lr": 1e-2, "clip": 0.0}
SGD = {"name": "sgd", "lr": 1e-1, "clip": 0.0, "momentum": 0.9, "schedule": "constant"}
TWO = t("pipeline", size=2, schedule="async")
MODEL = LLAMA


@pytest.fixture(scope="module")
def replays(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Replay:
    root = tmp_path_factory.mktemp("replays")

    def replay(**question: Any) -> str:
        folder = root / hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()[:16]
        if not folder.exists():
            pool.run("async_jobs:replay_job", question | {"folder": str(folder)}, num_ranks=1)
        return str(folder)

    return replay


@pytest.fixture(scope="module")
def streamed(pool: RankPool, replays: Replay) -> Run:
    def run(
        *techniques: Technique, config: dict[str, Any] = MODEL, optimizer: dict[str, Any] = ADAMW, batch: int = 8,
        microbatch: int = 1, dtype: str = "float64", like: tuple[Technique, ...] = (),
    ) -> list[dict[str, Any]]:  # fmt: skip
        plan = plan_of(*techniques, batch=batch, microbatch=microbatch)
        common = {"config": config, "optimizer": optimizer, "sequence": SEQUENCE, "groups": GROUPS, "dtype": dtype}
        folder = replays(**common, batch=batch, techniques=[encode(each) for each in like])
        arguments = {**common, "plan": json.loads(plan.to_json()), "folder": folder}
        answers = pool.run("async_jobs:stream_job", arguments, plan.num_ranks, timeout_seconds=300)
        for answer in answers:
            # Every forward and backward of every batch, and what is left after each flush.
            assert answer["seen"] == 2 * plan.num_microbatches * sum(GROUPS) + len(GROUPS)
        return answers

    return run


def kept(answers: list[dict[str, Any]], bounds: dict[str, float] | None = None) -> None:
    bounds = bounds or dict.fromkeys(("in_use", "at_rest", "loss", "norm"), tiny.EXACT)
    for rank, answer in enumerate(answers):
        # By the triangle inequality no other version is as near to what was in use as the promised one.
        assert answer["in_use"] < answer["moved"] / 2, f"rank {rank}: another version may have been in use"
        assert answer["second_version_bytes"] == answer["priced_bytes"]
        for what, bound in bounds.items():
            assert answer[what] <= bound, f"rank {rank}: {what} departs by {answer[what]:.1e}"


@pytest.mark.parametrize("optimizer", [ADAMW, SGD], ids=["adamw", "sgd"])
@pytest.mark.parametrize(("num_stages", "microbatch"), [(2, 1), (2, 4), (3, 2), (4, 2)])
def test_the_promise_is_kept(num_stages: int, microbatch: int, optimizer: dict[str, Any], streamed: Run) -> None:
    answers = streamed(t("pipeline", size=num_stages, schedule="async"), optimizer=optimizer, microbatch=microbatch)
    kept(answers)
    assert all(answer["lateness"] == 1 for answer in answers)


WITH: dict[str, tuple[Technique, ...]] = {
    "replicate": (tiny.REPLICATE,),
    "tensor": (tiny.TENSOR,),
    "sequenced": (tiny.SEQUENCED,),
    "recompute": (tiny.RECOMPUTE,),
    "chunked_loss": (tiny.CHUNKED,),
    "compile": (tiny.COMPILE,),
    "context": (t("context", size=2),),
    "all": (tiny.REPLICATE, tiny.TENSOR, tiny.RECOMPUTE_ONE),
}


@pytest.mark.parametrize("others", WITH)
def test_the_promise_is_kept_with_others(others: str, streamed: Run) -> None:
    kept(streamed(TWO, *WITH[others]))


def test_the_promise_is_kept_in_fewer_bits(streamed: Run) -> None:
    answers = streamed(TWO, tiny.BF16, optimizer=SGD, dtype="float32", like=(tiny.BF16,))
    weights = tiny.ROUNDED["parameter"]
    kept(answers, {"in_use": weights, "at_rest": weights, "loss": tiny.ROUNDED["loss"]})


@pytest.mark.parametrize("others", [(), (tiny.REPLICATE,), (tiny.RECOMPUTE,), (t("expert", size=2),)], ids=tiny.joined)
def test_experts_share_out_their_losses_by_batch(others: tuple[Technique, ...], streamed: Run) -> None:
    """A loss that arises inside of a layer is scaled by its own batch's tokens, also where it is computed again."""
    kept(streamed(TWO, *others, config={"section": {"name": "moe-tiny"}, "vocab": 256}, optimizer=SGD))


@pytest.mark.parametrize("frozen", [["embed.*"], ["embed.*", "blocks.0.*"]], ids=["some", "all of a stage"])
def test_frozen_parameters_have_one_version(frozen: list[str], streamed: Run) -> None:
    answers = streamed(TWO, config={"section": {"name": "byte-tiny", "freeze": frozen}, "vocab": 256})
    kept(answers)
    assert (answers[0]["second_version_bytes"] == 0) == (len(frozen) > 1)


def test_every_rank_stops_at_the_same_step(streamed: Run) -> None:
    """The last rank was told from the second call on: the first step's message, sent in that call, has it."""
    for answer in streamed(TWO, tiny.REPLICATE):
        assert answer["must_stop"] == [True] * sum(GROUPS)


def test_evaluation_sees_the_newest_weights(streamed: Run, replays: Replay, pool: RankPool) -> None:
    common = {"config": MODEL, "sequence": SEQUENCE, "batch": 8}
    folder = replays(**common, optimizer=ADAMW, groups=GROUPS, dtype="float64", techniques=[])
    answers = streamed(TWO, tiny.REPLICATE)
    for at in range(len(GROUPS)):
        asked = {**common, "folder": folder, "version": sum(GROUPS[: at + 1])}
        (wanted,) = pool.run("async_jobs:evaluate_job", asked, num_ranks=1)
        assert [answer["evaluated"][at] for answer in answers] == pytest.approx([wanted] * 4, rel=tiny.EXACT)


@pytest.mark.parametrize("others", [(), (tiny.REPLICATE,), (tiny.SEQUENCED, tiny.RECOMPUTE_ONE)], ids=tiny.joined)
def test_a_flush_after_every_step_is_one_device_and_a_steady_step_sends_what_is_priced(
    others: tuple[Technique, ...], ran: Run
) -> None:
    answers = ran(plan_of(TWO, *others, microbatch=1), MODEL, optimizer=ADAMW)
    assert tiny.departures(answers, tiny.bounds(tiny.EXACT)) == []
    assert tiny.price_differences(answers) == []


def misused(pool: RankPool, **changes: Any) -> list[dict[str, Any]]:
    question = {"config": MODEL, "optimizer": SGD, "sequence": SEQUENCE, "spoiled": False} | changes
    plan = plan_of(TWO, microbatch=2)
    return pool.run("async_jobs:misused_job", question | {"plan": json.loads(plan.to_json())}, plan.num_ranks)


def test_a_loss_that_is_no_number_ends_all_ranks_one_call_later(pool: RankPool) -> None:
    for answer in misused(pool, spoiled=True):
        assert answer["calls"] == 2, "batches 0 and 1 are fed, and 1 is known of in the call of 2"
        assert "the loss is nan" in answer["said"]
        assert answer["exit_code"] == 1


def test_an_evaluation_in_mid_flight_is_refused(pool: RankPool) -> None:
    for answer in misused(pool):
        assert answer["calls"] == 1
        assert "still under way" in answer["said"]


def problems(*techniques: Technique, config: dict[str, Any] = MODEL, **sizes: int) -> str:
    profile = decoder_profile(DecoderConfig(**config), "tiny")
    return "\n".join(map(str, plan_of(*techniques, **sizes).check(profile)))


def test_what_cannot_overlap_is_refused_with_a_reason() -> None:
    assert problems(TWO, microbatch=4) == ""
    four = t("pipeline", size=4, schedule="async")
    assert "a microbatch for each of 4 stages, a step has 2" in problems(four, microbatch=4)
    assert "tied across stages" in problems(TWO, config=tiny.QWEN, microbatch=1)
    assert "those that shard gathers have one" in problems(TWO, tiny.SHARD3, microbatch=1)
    assert "async has 1" in problems(t("pipeline", size=2, schedule="async", chunks=2), microbatch=1)


@pytest.mark.parametrize(("optimizer", "reason"), [({"clip": 1.0}, "clip = 0"), ({"name": "lamb", "clip": 0.0}, "sgd")])
def test_an_optimizer_that_needs_all_stages_at_once_is_refused(optimizer: dict[str, Any], reason: str) -> None:
    chosen = OptimizerConfig(**optimizer)
    (problem,) = chosen.problems_with(plan_of(TWO, microbatch=1))
    assert reason in problem.fix
    assert chosen.problems_with(plan_of(tiny.PIPELINE)) == []
    assert chosen.problems_with(plan_of(t("pipeline", size=1, schedule="async"))) == []


def test_it_is_approximate_and_search_does_not_offer_it() -> None:
    assert TWO.exactness == "approximate"
    assert type(TWO).exactness == tiny.PIPELINE.exactness == "exact"
    assert TWO.as_exact() == tiny.PIPELINE
    assert Plan.from_json(plan_of(TWO).to_json()).techniques[0].exactness == "approximate"
    with pytest.raises(MeshwrightError, match="approximate"):
        read_wishes(("pipeline.schedule=async",), allow="lossy")
