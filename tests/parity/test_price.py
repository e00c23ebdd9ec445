"""The bytes `price` promises are the bytes that move, and the state it promises is the state that is held.

Every collective of a steady step: kind, axis, bytes and how often, on every rank. Exactly.

Tests of `ops/collectives.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
from tiny import BATCH, FAMILIES, GPT, LLAMA, QWEN, SGD, plan_of, t

from meshwright.core.plan import Plan

Honest = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def honest(ran: Callable[..., list[dict[str, Any]]]) -> Honest:
    """Fails unless a plan sends and holds exactly what its price says."""

    def check(plan: Plan, config: dict[str, Any], **question: Any) -> list[dict[str, Any]]:
        dtype = "float32" if any(each.rounds for each in plan.techniques) else "float64"
        answers = ran(plan, config, **{"dtype": dtype, **question})
        assert tiny.price_differences(answers) == []
        if plan.num_ranks > 1:
            assert all(answer["observed"] for answer in answers), "a plan of several ranks sends nothing"
        return answers

    return check


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("technique", tiny.ALONE, ids=str)
def test_a_technique_alone(family: str, technique: Any, honest: Honest) -> None:
    answers = honest(plan_of(technique), FAMILIES[family])
    assert all(min(answer["state"].values()) > 0 for answer in answers)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("techniques", tiny.IN_BF16, ids=tiny.joined)
def test_in_bf16(family: str, techniques: tuple[Any, ...], honest: Honest) -> None:
    honest(plan_of(tiny.BF16, *techniques, microbatch=4), FAMILIES[family])


@pytest.mark.parametrize("technique", [tiny.SHARD3, tiny.PIPELINE, tiny.SEQUENCED], ids=str)
def test_bf16_halves_gathers_and_boundaries_but_no_sum_of_gradients(technique: Any, honest: Honest) -> None:
    whole = honest(plan_of(technique, microbatch=4), LLAMA, dtype="float32")
    halved = honest(plan_of(technique, tiny.BF16, microbatch=4), LLAMA)
    gradient_sums = {"fsdp": ("reduce_scatter",), "tp": ("all_reduce",)}.get(technique.axis, ())
    for before, after in zip(whole, halved, strict=True):
        expected = [
            [kind, axis, size if kind in gradient_sums else size // 2, count]
            for kind, axis, size, count in before["observed"]
        ]
        assert sorted(expected) == after["observed"]


@pytest.mark.parametrize("techniques", tiny.CUBES, ids=tiny.joined)
def test_three_axes_on_eight_ranks(techniques: tuple[Any, ...], honest: Honest) -> None:
    honest(plan_of(*techniques, microbatch=2), tiny.model_for(techniques))


@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt"])
def test_other_families_on_eight_ranks(config: dict[str, Any], honest: Honest) -> None:
    honest(plan_of(*tiny.CUBES[1], microbatch=2), config)


def test_another_order_of_axes(honest: Honest) -> None:
    techniques = (tiny.REPLICATE, tiny.SEQUENCED, tiny.PIPELINE)
    honest(Plan(techniques=techniques, batch=BATCH, microbatch=2, axis_order=("tp", "dp", "pp")), GPT)


@pytest.mark.parametrize("technique", tiny.LONG, ids=str)
def test_longer_axes(technique: Any, honest: Honest) -> None:
    honest(plan_of(technique, microbatch=2), GPT)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("recompute", [tiny.RECOMPUTE, tiny.RECOMPUTE_ONE], ids=str)
def test_what_recomputation_says_again(sequence: bool, recompute: Any, honest: Honest) -> None:
    tensor = t("tensor", size=2, sequence=sequence)
    honest(plan_of(tensor, recompute, tiny.CHUNKED, microbatch=4), QWEN)


@pytest.mark.parametrize("techniques", tiny.FOR_SGD, ids=tiny.joined)
def test_the_state_of_sgd(techniques: tuple[Any, ...], honest: Honest) -> None:
    answers = honest(plan_of(*techniques, microbatch=2), QWEN, optimizer=SGD)
    assert all(answer["state"]["optimizer"] == answer["state"]["parameters"] for answer in answers)


@pytest.mark.parametrize("techniques", [(), (tiny.SHARD3, tiny.TENSOR), (tiny.PIPELINE, tiny.SHARD1)], ids=tiny.joined)
def test_states_in_four_bits(techniques: tuple[Any, ...], honest: Honest) -> None:
    answers = honest(plan_of(tiny.LOWEST_BIT, *techniques, microbatch=2), QWEN)
    assert all(answer["state"]["optimizer"] < 2 * answer["state"]["parameters"] for answer in answers)


@pytest.mark.parametrize("techniques", tiny.RAGGED, ids=tiny.joined)
def test_the_largest_piece_of_a_vocabulary_that_does_not_divide(
    techniques: tuple[Any, ...], ran: Callable[..., list[dict[str, Any]]]
) -> None:
    largest = ran(plan_of(*techniques, microbatch=2), QWEN | {"vocab_size": 37})[:1]
    assert tiny.price_differences(largest) == []
