"""Replicas that run different numbers of microbatches train as one device does, and send what was priced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import tiny
from tiny import EXACT, GPT, LLAMA, MOE, QWEN, plan_of, t

from meshwright.core.plan import Plan
from meshwright.data.dataset import part_rows
from meshwright.verify.check import shortened

Ran = Callable[..., list[dict[str, Any]]]

UNEVEN = t("replicate", size=2, shares=(3, 1))
THREE = t("replicate", size=3, shares=(2, 1, 1))

PLANS = {
    "two replicas": (plan_of(UNEVEN), QWEN),
    "three replicas": (plan_of(THREE), GPT),
    "stages inside": (plan_of(UNEVEN, tiny.PIPELINE), QWEN),
    "stages inside, replicas outermost": (
        replace(plan_of(UNEVEN, tiny.PIPELINE), axis_order=("dp", "pp")),
        LLAMA,
    ),
    "weights made later": (plan_of(UNEVEN, t("pipeline", size=2, schedule="zero_bubble_h1")), LLAMA),
    "shards inside": (plan_of(UNEVEN, tiny.SHARD3, batch=16), QWEN),
    "gradients kept whole": (plan_of(UNEVEN, tiny.SHARD1, batch=16), LLAMA),
    "layers split inside": (plan_of(UNEVEN, tiny.SEQUENCED), QWEN),
    "sequences split inside": (plan_of(UNEVEN, tiny.RING), LLAMA),
    "experts inside": (plan_of(UNEVEN, tiny.EXPERT, batch=16), MOE),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_same_as_one_device(name: str, ran: Ran) -> None:
    plan, config = PLANS[name]
    answers = ran(plan, config)
    assert tiny.departures(answers, tiny.bounds(EXACT)) == []


@pytest.mark.parametrize("name", PLANS)
def test_what_moves_is_what_was_priced(name: str, ran: Ran) -> None:
    plan, config = PLANS[name]
    answers = ran(plan, config)
    assert tiny.price_differences(answers) == []
    assert all(answer["observed"] for answer in answers)


def test_messages_of_each_microbatch_follow_the_share(ran: Ran) -> None:
    """Three microbatches cross the boundary of one pipeline, one that of the other; gradients are summed once."""
    answers = ran(*PLANS["stages inside, replicas outermost"])
    sends = [sum(count for kind, _, _, count in answer["observed"] if kind == "send") for answer in answers]
    assert sends == [3, 3, 1, 1]
    sums = [[row for row in answer["observed"] if row[:2] == ["all_reduce", "dp"]] for answer in answers]
    assert sums[0] == sums[2]
    assert sums[1] == sums[3]
    assert sums[0]


@pytest.mark.parametrize(
    ("batch", "num_parts", "shares", "expected"),
    [
        (8, 2, (3, 1), [(0, 6), (6, 8)]),
        (8, 3, (2, 1, 1), [(0, 4), (4, 6), (6, 8)]),
        # Two ranks in each replica: the replica's rows, halved.
        (16, 4, (3, 1), [(0, 6), (6, 12), (12, 14), (14, 16)]),
        (7, 2, (), [(0, 3), (3, 7)]),
    ],
)
def test_rows_follow_the_shares(batch: int, num_parts: int, shares: tuple[int, ...], expected: list[Any]) -> None:
    rows = [part_rows(batch, part, num_parts, shares) for part in range(num_parts)]
    assert [(each.start, each.stop) for each in rows] == expected


def test_microbatches_of_each_part() -> None:
    plan = plan_of(UNEVEN, tiny.SHARD3, batch=16)
    assert [plan.microbatches_of(part) for part in range(4)] == [3, 3, 1, 1]
    assert plan.num_microbatches == 3
    assert "microbatch 2 x 1 to 3" in str(plan)
    assert plan.with_shares((5, 2)).batch == 2 * 2 * 7


def test_a_shortened_plan_keeps_its_shares_within_its_batch(profile: Any) -> None:
    short = shortened(plan_of(t("replicate", size=2, shares=(9, 1)), batch=20), 1)
    assert short.shares == (3, 1)
    assert short.batch == 8
    assert short.check(profile) == ()


@pytest.fixture
def profile() -> Any:
    from meshwright.models.cost_decoder import decoder_profile
    from meshwright.models.presets import DecoderConfig

    return decoder_profile(DecoderConfig(**QWEN), "tiny")


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (plan_of(t("replicate", size=2, shares=(3, 1, 1)), batch=10), "at least 1 for each of 2 replicas"),
        (plan_of(t("replicate", size=2, shares=(4, 0))), "at least 1 for each of 2 replicas"),
        (plan_of(t("replicate", size=2, shares=(3, 2))), "add up to 5 microbatches of 2, 10 samples; the batch has 8"),
        (
            plan_of(t("replicate", size=2, shares=(3, 1)), tiny.SHARD3, batch=8),
            "4 microbatches of 2 on each of 2 ranks, 16 samples",
        ),
        (
            replace(plan_of(UNEVEN, tiny.SHARD3, batch=16), axis_order=("fsdp", "dp")),
            "dp comes first of the axes that share samples out, not fsdp",
        ),
        (
            plan_of(t("replicate", size=2, shares=(3, 5)), t("pipeline", size=2, schedule="async"), batch=16),
            "steps that overlap need equally many",
        ),
    ],
)
def test_shares_that_cannot_be(plan: Plan, words: str, profile: Any) -> None:
    told = [str(problem) for problem in plan.check(profile)]
    assert any(words in line for line in told), told


def test_batch_norms_need_equally_many_microbatches() -> None:
    from meshwright.run.model import describe
    from meshwright.run.run_file import ModelSection

    profile = describe(ModelSection(name="resnet50"), 1).profile
    told = [str(problem) for problem in plan_of(UNEVEN).check(profile)]
    assert any("talk over dp in every microbatch" in line for line in told), told
    assert not any("talk over dp" in str(problem) for problem in plan_of(tiny.REPLICATE).check(profile))


def test_equal_shares_are_no_reason_to_refuse(profile: Any) -> None:
    assert plan_of(t("replicate", size=2, shares=(2, 2))).check(profile) == ()
