"""Every schedule trains one device's model and sends what was priced.

Tests of `ops/split_backward.py`, `ops/stage_transport.py`, `techniques/pipeline.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import tiny
from tiny import BATCH, FAMILIES, GPT, LLAMA, QWEN, plan_of, t

from meshwright.core.technique import Technique
from meshwright.launch.rank_pool import RankPool
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.presets import DecoderConfig

Run = Callable[..., list[dict[str, Any]]]

SCHEDULES = ("interleaved", "looped_bfs", "zero_bubble_h1", "zero_bubble_h2", "zbv", "dualpipe_v", "greedy")
IN_CHUNKS = ("interleaved", "looped_bfs", "zbv", "dualpipe_v")
SPLIT = ("zero_bubble_h1", "zero_bubble_h2", "zbv", "dualpipe_v", "greedy")


def right(answers: list[dict[str, Any]]) -> None:
    assert tiny.departures(answers, tiny.bounds(tiny.EXACT)) == []
    assert "\n".join(tiny.price_differences(answers)) == ""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_on_two_stages(family: str, schedule: str, ran: Run) -> None:
    right(ran(plan_of(t("pipeline", size=2, schedule=schedule), microbatch=2), FAMILIES[family]))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_microbatches_that_are_no_multiple_of_the_stages(schedule: str, ran: Run) -> None:
    deep = LLAMA | {"num_layers": 7}
    plan = plan_of(t("pipeline", size=3, schedule=schedule), batch=7, microbatch=1)
    right(ran(plan, deep))


WITH: dict[str, tuple[Technique, ...]] = {
    "replicate": (tiny.REPLICATE,),
    "tensor": (tiny.SEQUENCED,),
    "recompute": (tiny.RECOMPUTE_ONE,),
    "all": (tiny.REPLICATE, tiny.TENSOR, tiny.RECOMPUTE),
}


@pytest.mark.parametrize("others", WITH)
@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble_h1", "zbv", "dualpipe_v"])
def test_a_schedule_with_others(schedule: str, others: str, ran: Run) -> None:
    techniques = (t("pipeline", size=2, schedule=schedule), *WITH[others])
    right(ran(plan_of(*techniques, microbatch=1), QWEN))


@pytest.mark.parametrize("shard", [tiny.SHARD1, tiny.SHARD2, tiny.SHARD3], ids=str)
@pytest.mark.parametrize("schedule", ["interleaved", "looped_bfs"])
def test_chunks_that_are_sharded(schedule: str, shard: Technique, ran: Run) -> None:
    right(ran(plan_of(t("pipeline", size=2, schedule=schedule), shard, microbatch=1), GPT))


@pytest.mark.parametrize(
    ("schedule", "others"),
    [
        ("zero_bubble_h1", (tiny.SHARD1,)),
        ("zbv", (tiny.SHARD2,)),
        pytest.param("zero_bubble_h2", (tiny.SHARD2,), marks=pytest.mark.slow),
        pytest.param("greedy", (tiny.SHARD2,), marks=pytest.mark.slow),
        pytest.param("zbv", (tiny.SHARD1, tiny.REPLICATE), marks=pytest.mark.slow),
        pytest.param("dualpipe_v", (tiny.SHARD2, tiny.REPLICATE), marks=pytest.mark.slow),
    ],
)
def test_gradients_of_second_halves_are_summed(schedule: str, others: tuple[Technique, ...], ran: Run) -> None:
    right(ran(plan_of(t("pipeline", size=2, schedule=schedule), *others, microbatch=1), GPT))


def test_weights_must_stay_for_the_second_half() -> None:
    plan = plan_of(t("pipeline", size=2, schedule="zbv"), tiny.SHARD3, microbatch=1)
    (problem,) = plan.check(decoder_profile(DecoderConfig(**GPT), "tiny"))
    assert "stage 2 or 1" in str(problem)


def test_three_chunks_of_uneven_size(ran: Run) -> None:
    deep = LLAMA | {"num_layers": 8}
    technique = t("pipeline", size=2, schedule="interleaved", chunks=3, stages=(1, 2, 1, 2, 1, 1))
    right(ran(plan_of(technique, batch=BATCH, microbatch=2), deep))


@pytest.mark.parametrize("schedule", ["interleaved", "zbv", "zero_bubble_h1"])
def test_chunks_of_a_module_that_knows_nothing_of_us(schedule: str, ran: Run) -> None:
    """Its blocks stand aside while another chunk of them runs; its linear layers have halves too."""
    config = {"section": {"factory": "foreign:deep_llama"}, "vocab": 36}
    right(ran(plan_of(t("pipeline", size=2, schedule=schedule), microbatch=2), config))


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_evaluation_and_the_step_after_it(schedule: str, pool: RankPool) -> None:
    plan = plan_of(t("pipeline", size=2, schedule=schedule), microbatch=2)
    asked = {"config": QWEN, "optimizer": tiny.ADAMW, "sequence": tiny.SEQUENCE}
    answers = pool.run("rank_jobs:evaluate_job", {"plan": json.loads(plan.to_json()), **asked}, plan.num_ranks)
    (alone,) = pool.run("rank_jobs:evaluate_job", {"plan": json.loads(plan_of().to_json()), **asked}, 1)
    for answer in answers:
        assert answer["untouched"]
        assert answer["tokens"] == alone["tokens"]
        for quantity in ("total", "loss"):
            assert answer[quantity] == pytest.approx(alone[quantity], rel=1e-12)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"size": 5}, ("5 stages for 4 blocks", "at most 4")),
        ({"size": 3, "schedule": "interleaved"}, ("3 stages of 2 chunks for 4 blocks", "at most 2")),
        ({"size": 2, "schedule": "interleaved", "chunks": 1}, ("needs 2 chunks or more",)),
        ({"size": 2, "schedule": "zbv", "chunks": 3}, ("3 chunks: zbv has 2",)),
        ({"size": 2, "chunks": 2}, ("2 chunks: 1f1b has 1",)),
        ({"size": 2, "stages": (1, 2)}, ("add up to 4 blocks", "(2, 2)")),
        ({"size": 2, "schedule": "interleaved", "stages": (2, 2)}, ("size is 2 x 2 chunks",)),
        ({"size": 2, "times": (1.0, 1.0, 1.0)}, ("greedy's, not 1f1b's",)),
        ({"size": 2, "schedule": "greedy", "times": (1.0, -1.0)}, ("times has 2 numbers", "3, or 6")),
        ({"size": 2, "schedule": "greedy", "most_held": -1}, ("most_held is -1",)),
    ],
)
def test_what_no_schedule_can_do_is_told(settings: dict[str, Any], words: tuple[str, ...]) -> None:
    plan = plan_of(t("pipeline", **settings), microbatch=1)
    told = "\n".join(map(str, plan.check(decoder_profile(DecoderConfig(**QWEN), "tiny"))))
    assert all(word in told for word in words), told


@pytest.mark.parametrize("other", [tiny.SHARD3, tiny.COMPILE], ids=str)
@pytest.mark.parametrize("schedule", SPLIT)
def test_halves_of_backward_are_refused_where_they_cannot_be(schedule: str, other: Technique) -> None:
    plan = plan_of(t("pipeline", size=2, schedule=schedule), other, microbatch=1)
    (problem,) = plan.check(decoder_profile(DecoderConfig(**QWEN), "tiny"))
    assert problem.where == other.name
    assert "this schedule" in problem.what
