"""Every plan trains the model one device would train: losses, gradients and weights, step after step.

Three steps in float64 with clipping and masked tokens; the error is relative to the quantity's global norm.

Tests of `ops/cross_entropy.py`, `ops/gradient_exchange.py`, `ops/tensor_parallel.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
from safetensors import safe_open
from tiny import ADAMW, BATCH, EXACT, FAMILIES, GPT, LLAMA, QWEN, SEQUENCE, SGD, STEPS, plan_of, t

from meshwright.core.plan import Plan

Run = Callable[..., list[dict[str, Any]]]
Same = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def same(ran: Run) -> Same:
    """Fails unless a plan's run is one device's run."""

    def check(plan: Plan, config: dict[str, Any], **question: Any) -> list[dict[str, Any]]:
        answers = ran(plan, config, **question)
        assert len(answers) == plan.num_ranks
        assert tiny.departures(answers, tiny.bounds(EXACT)) == []
        return answers

    return check


@pytest.mark.parametrize("family", FAMILIES)
def test_clipping_is_at_work_in_every_reference(family: str, references: Callable[..., str]) -> None:
    question = {"batch": BATCH, "sequence": SEQUENCE, "steps": STEPS, "dtype": "float64", "techniques": []}
    for optimizer in (ADAMW, SGD):
        folder = references(FAMILIES[family], optimizer, **question)
        for step in range(STEPS):
            with safe_open(f"{folder}/step-{step}.safetensors", framework="numpy") as reference:
                assert float(reference.get_tensor("norm")[0]) > optimizer["clip"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("technique", tiny.ALONE, ids=str)
def test_a_technique_alone(family: str, technique: Any, same: Same) -> None:
    answers = same(plan_of(technique), FAMILIES[family])
    if technique.name == "compile":
        assert all(answer["num_graphs"] > 0 for answer in answers), "nothing was compiled"


@pytest.mark.parametrize("microbatch", [1, 4])
def test_microbatches_only_change_the_order_of_sums(microbatch: int, same: Same) -> None:
    same(plan_of(microbatch=microbatch), QWEN)
    same(plan_of(tiny.REPLICATE, microbatch=microbatch), GPT)
    same(plan_of(tiny.SEQUENCED, tiny.PIPELINE, microbatch=microbatch), QWEN)


@pytest.mark.parametrize("technique", tiny.LONG, ids=str)
def test_longer_axes(technique: Any, same: Same) -> None:
    same(plan_of(technique, microbatch=2), GPT)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sequence", [False, True])
def test_a_vocabulary_that_does_not_divide(family: str, sequence: bool, same: Same) -> None:
    config = FAMILIES[family] | {"vocab_size": 37}
    same(plan_of(t("tensor", size=2, sequence=sequence), microbatch=4), config)


@pytest.mark.parametrize("techniques", tiny.RAGGED, ids=tiny.joined)
def test_shards_that_do_not_divide(techniques: tuple[Any, ...], same: Same) -> None:
    """37 rows over 4 ranks: the last one is padded."""
    same(plan_of(*techniques, microbatch=2), QWEN | {"vocab_size": 37})


@pytest.mark.parametrize("techniques", tiny.CUBES, ids=tiny.joined)
def test_three_axes_on_eight_ranks(techniques: tuple[Any, ...], same: Same) -> None:
    plan = plan_of(*techniques, microbatch=2)
    assert plan.num_ranks == 8
    answers = same(plan, tiny.model_for(techniques))
    if plan.technique("compile"):
        assert all(answer["num_graphs"] > 0 for answer in answers), "nothing was compiled"


@pytest.mark.parametrize("techniques", [*tiny.LONG_CUBES, *tiny.EXPERT_CUBES], ids=tiny.joined)
def test_three_and_four_axes_with_a_split_sequence(techniques: tuple[Any, ...], same: Same) -> None:
    plan = plan_of(*techniques, microbatch=2)
    assert plan.num_ranks == 2 ** len(plan.axis_order)
    assert len(plan.axis_order) >= 3
    answers = same(plan, tiny.MOE if plan.technique("expert") else QWEN)
    assert tiny.price_differences(answers) == []


@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt"])
def test_other_families_on_eight_ranks(config: dict[str, Any], same: Same) -> None:
    same(plan_of(*tiny.CUBES[1], microbatch=2), config)


def test_another_order_of_axes(same: Same) -> None:
    techniques = (tiny.REPLICATE, tiny.SEQUENCED, tiny.PIPELINE)
    plan = Plan(techniques=techniques, batch=BATCH, microbatch=2, axis_order=("tp", "dp", "pp"))
    assert plan.axis_order != plan_of(*techniques).axis_order
    same(plan, GPT)


@pytest.mark.parametrize("techniques", tiny.FOR_SGD, ids=tiny.joined)
def test_sgd_with_momentum(techniques: tuple[Any, ...], same: Same) -> None:
    same(plan_of(*techniques, microbatch=2), QWEN, optimizer=SGD)


@pytest.mark.slow
def test_the_inductor_backend(same: Same) -> None:
    plan = plan_of(t("compile", backend="inductor"), microbatch=BATCH)
    answers = same(plan, LLAMA | {"num_layers": 1}, prices=False)
    assert answers[0]["num_graphs"] > 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("techniques", tiny.IN_BF16, ids=tiny.joined)
def test_bf16_is_float32_rounded_and_the_same_on_one_device(family: str, techniques: tuple[Any, ...], ran: Run) -> None:
    config, plan = FAMILIES[family], plan_of(tiny.BF16, *techniques, microbatch=4)
    against_float32 = ran(plan, config, dtype="float32")
    assert tiny.departures(against_float32, tiny.ROUNDED) == []
    errors = [answer["errors"]["first gradient"][0] for answer in against_float32]
    assert min(errors) > 1e-5, "nothing was rounded"
    against_bf16 = ran(plan, config, dtype="float32", like=(tiny.BF16.encode_self(),))
    assert tiny.departures(against_bf16, tiny.ROUNDED) == []
