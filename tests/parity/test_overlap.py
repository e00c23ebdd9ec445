"""Regions that leave in pieces: one device's numbers, the pieces' bytes; and gloo's collectives made of messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import tiny
from tiny import GPT, LLAMA, QWEN, plan_of, t

from meshwright.core.plan import Plan
from meshwright.launch.rank_pool import RankPool
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.presets import DecoderConfig
from meshwright.simulator.pricing import price

Run = Callable[..., list[dict[str, Any]]]
IN_TWO = t("tensor", size=2, sequence=True, overlap=2)
SHORT = QWEN | {"num_layers": 2}
EXPERTS = {"section": {"name": "moe-tiny"}, "vocab": 256}


def exact(plan: Plan, config: dict[str, Any], ran: Run) -> list[dict[str, Any]]:
    answers = ran(plan, config)
    assert tiny.departures(answers, tiny.bounds(tiny.EXACT)) == []
    assert tiny.price_differences(answers) == []
    return answers


def _bytes(traffic: list[list[Any]]) -> Counter[tuple[str, str]]:
    total: Counter[tuple[str, str]] = Counter()
    for kind, axis, size, count in traffic:
        total[kind, axis] += size * count
    return total


@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt"])
def test_pieces_change_no_number_and_no_sum_of_bytes(config: dict[str, Any], ran: Run) -> None:
    whole, *cut = (
        exact(plan_of(t("tensor", size=2, sequence=True, overlap=overlap)), config, ran) for overlap in (1, 2, 4)
    )
    for answers in cut:
        for before, after in zip(whole, answers, strict=True):
            assert before["observed"] != after["observed"]
            assert _bytes(before["observed"]) == _bytes(after["observed"])


BESIDE = [
    (tiny.SHARD3, tiny.RECOMPUTE_ONE),
    (tiny.PIPELINE,),
    (tiny.COMPILE, tiny.RECOMPUTE_ONE),
]


@pytest.mark.parametrize("others", BESIDE, ids=tiny.joined)
def test_pieces_beside_others(others: tuple[Any, ...], ran: Run) -> None:
    exact(plan_of(IN_TWO, *others), SHORT, ran)


def test_pieces_on_four_ranks(ran: Run) -> None:
    exact(plan_of(t("tensor", size=4, sequence=True, overlap=2)), GPT | {"num_layers": 1}, ran)


def test_experts_leave_as_a_whole(ran: Run) -> None:
    exact(plan_of(IN_TWO), EXPERTS, ran)


def test_pieces_in_bf16(ran: Run) -> None:
    answers = ran(plan_of(IN_TWO, tiny.BF16, microbatch=4), SHORT, dtype="float32")
    assert tiny.departures(answers, tiny.ROUNDED) == []
    assert tiny.price_differences(answers) == []


def test_all_but_one_piece_can_hide() -> None:
    profile = decoder_profile(DecoderConfig(**LLAMA), "tiny")
    plan = plan_of(t("tensor", size=2, sequence=True, overlap=4))
    shared = [task for task in price(profile, plan, sequence=tiny.SEQUENCE).collectives if task.layer == "blocks"]
    sums = [task for task in shared if task.kind == "reduce_scatter" and task.phase == "forward"]
    assert sorted(task.hidden for task in sums) == sorted([False, True, True, True] * 2)
    entering = [task for task in shared if task.kind == "all_gather" and task.phase == "forward"]
    assert [task.hidden for task in entering] == [False, False]


def test_what_cannot_leave_in_pieces_is_refused() -> None:
    profile = decoder_profile(DecoderConfig(**LLAMA), "tiny")
    (problem,) = plan_of(t("tensor", size=2, overlap=2)).check(profile)
    assert "sequence = true" in str(problem)
    (problem,) = plan_of(t("tensor", size=2, sequence=True, overlap=0)).check(profile)
    assert "overlap is 0" in str(problem)
    assert plan_of(IN_TWO).check(profile) == ()
    (problem,) = plan_of(IN_TWO).check_sequence(18)
    assert "Use a multiple of 4" in str(problem)
    assert plan_of(IN_TWO).check_sequence(20) == ()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_messages_between_pairs_make_gloos_collectives(num_ranks: int, pool: RankPool) -> None:
    sizes = (0, 5, 1 << 18)  # nothing, a few, more than goes at once
    for answer in pool.run("gloo_jobs:compare_job", {"sizes": sizes}, num_ranks, timeout_seconds=60):
        assert answer["worst"] <= 1e-14
        # Seen as what they stand for, in the bytes of the whole, and as nothing else.
        expected = [[kind, "all", size * num_ranks * 8, 1] for kind in answer["kinds"] for size in sizes]
        assert answer["seen"] == sorted(expected)
