"""Every schedule trains one device's model and sends what was priced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
from tiny import BATCH, FAMILIES, GPT, LLAMA, QWEN, plan_of, t

from meshwright.core.technique import Technique

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


def test_three_chunks_of_uneven_size(ran: Run) -> None:
    deep = LLAMA | {"num_layers": 8}
    technique = t("pipeline", size=2, schedule="interleaved", chunks=3, stages=(1, 2, 1, 2, 1, 1))
    right(ran(plan_of(technique, batch=BATCH, microbatch=2), deep))
