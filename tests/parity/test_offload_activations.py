"""Blocks whose activations are in host memory train one device's model, and copy the bytes that were priced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
from tiny import GPT, LLAMA, MOE, OFFLOAD, QWEN, plan_of, t

Run = Callable[..., list[dict[str, Any]]]


def offload(layers: str = "all", inputs: bool = False, smallest: int = 300) -> Any:
    """At 300 bytes the statistics of norms, which are not priced, stay on the device."""
    return t("offload_activations", layers=layers, inputs=inputs, smallest=smallest)


PLANS = (
    (OFFLOAD,),
    (offload("first 2"),),
    (offload("1,3"),),
    (OFFLOAD, tiny.REPLICATE),
    (OFFLOAD, tiny.SHARD1),
    (OFFLOAD, tiny.SHARD3),
    (OFFLOAD, tiny.TENSOR),
    (OFFLOAD, tiny.SEQUENCED),
    (OFFLOAD, tiny.PIPELINE),
    (offload("first 1"), tiny.GPIPE),
    (offload("last 1"), tiny.UNEVEN),
    (OFFLOAD, tiny.INTERLEAVED),
    (OFFLOAD, tiny.RING),
    (OFFLOAD, tiny.ULYSSES),
    (OFFLOAD, tiny.CHUNKED, tiny.COMPILE),
    (offload("none", inputs=True), tiny.RECOMPUTE),
    (offload("none", inputs=True), tiny.RECOMPUTE, tiny.PIPELINE),
    (offload("none", inputs=True), tiny.RECOMPUTE, tiny.SEQUENCED),
    (offload("none", inputs=True), tiny.RECOMPUTE, tiny.SHARD3),
    (offload("2-3", inputs=True), t("recompute", layers="0", selective="1")),
    (offload("3"), t("recompute", layers="first 3", slots=1)),
    (offload("last 1", inputs=True), tiny.RECOMPUTE_ONE, tiny.GPIPE, tiny.SHARD2),
)


def exact(plan: Any, config: dict[str, Any], ran: Run) -> list[dict[str, Any]]:
    assert plan.check(tiny.profile_of(config)) == ()
    answers = ran(plan, config)
    assert tiny.departures(answers, tiny.bounds(tiny.EXACT)) == []
    assert tiny.price_differences(answers) == []
    assert any(answer["copied"]["out"] > 0 for answer in answers)
    return answers


@pytest.mark.parametrize("techniques", PLANS, ids=tiny.joined)
def test_the_same_numbers_and_the_priced_copies(techniques: tuple[Any, ...], ran: Run) -> None:
    for answer in exact(plan_of(*techniques), LLAMA, ran):
        assert answer["copied"] == pytest.approx(answer["priced_copies"], rel=1e-12)
        assert answer["copied"]["out"] == answer["copied"]["in"]


@pytest.mark.parametrize("config", [GPT, QWEN], ids=["gpt", "qwen"])
def test_other_families(config: dict[str, Any], ran: Run) -> None:
    for answer in exact(plan_of(offload("first 3")), config, ran):
        assert answer["copied"] == pytest.approx(answer["priced_copies"], rel=1e-12)


@pytest.mark.parametrize("techniques", [(), (tiny.EXPERT,), (tiny.RECOMPUTE_ONE, tiny.RING)], ids=tiny.joined)
def test_experts_whose_sizes_the_data_decides(techniques: tuple[Any, ...], ran: Run) -> None:
    exact(plan_of(offload("last 1", inputs=True), *techniques), MOE, ran)


def test_what_recomputed_blocks_that_are_compiled_keep(ran: Run) -> None:
    plan = plan_of(offload("none", inputs=True, smallest=1), tiny.RECOMPUTE, tiny.COMPILE)
    for answer in exact(plan, LLAMA | {"num_layers": 2}, ran):
        assert answer["num_graphs"] > 0
        # Beside the input, on a CPU, the state of its generator of random numbers.
        assert answer["priced_copies"]["out"] < answer["copied"]["out"] < 3 * answer["priced_copies"]["out"]


@pytest.mark.parametrize("techniques", [(), (tiny.TENSOR,), (tiny.SHARD3,)], ids=tiny.joined)
def test_in_bf16_copies_of_weights_go_too(techniques: tuple[Any, ...], ran: Run) -> None:
    answers = ran(plan_of(offload(smallest=200), tiny.BF16, *techniques), LLAMA, dtype="float32")
    assert tiny.departures(answers, tiny.ROUNDED) == []
    for answer in answers:
        assert answer["copied"] == pytest.approx(answer["priced_copies"], rel=1e-12)
