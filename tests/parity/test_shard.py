"""Sharding in all its settings: stages with and without replicas, layers fetched ahead, gradients summed in bf16.

Tests of `ops/fsdp.py`, `techniques/shard.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
from tiny import LLAMA, QWEN, plan_of, t

from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.presets import DecoderConfig
from meshwright.ops.fsdp import set_prefetch
from meshwright.planner.wishes import read_wishes
from meshwright.simulator.pricing import price

Run = Callable[..., list[dict[str, Any]]]
UNEVEN = QWEN | {"vocab_size": 37}
"""37 rows over 2 ranks: one holds a row more."""


def exact(plan: Plan, config: dict[str, Any], ran: Run) -> list[dict[str, Any]]:
    answers = ran(plan, config)
    assert tiny.departures(answers, tiny.bounds(tiny.EXACT)) == []
    assert tiny.price_differences(answers) == []
    return answers


@pytest.mark.parametrize(("stage", "prefetch"), [(1, 0), (2, 1), (3, 2)])
def test_shards_inside_groups_and_sums_between_them(stage: int, prefetch: int, ran: Run) -> None:
    exact(plan_of(t("shard", size=2, stage=stage, prefetch=prefetch), tiny.REPLICATE), UNEVEN, ran)


def test_how_far_ahead_layers_are_fetched_changes_no_number_and_no_byte(ran: Run) -> None:
    plans = [plan_of(t("shard", size=2, prefetch=prefetch)) for prefetch in (0, 1, 2, 9)]
    moved = [[answer["observed"] for answer in exact(plan, LLAMA | {"vocab_size": 37}, ran)] for plan in plans]
    assert all(each == moved[0] for each in moved)


@pytest.mark.parametrize("with_others", [(tiny.PIPELINE,), (tiny.RECOMPUTE_ONE,)], ids=tiny.joined)
def test_fetching_ahead_beside_others(with_others: tuple[Any, ...], ran: Run) -> None:
    exact(plan_of(t("shard", size=2, prefetch=2), *with_others), QWEN, ran)


def _gathered(**settings: Any) -> float:
    profile = decoder_profile(DecoderConfig(**LLAMA), "tiny")
    work = price(profile, plan_of(t("shard", size=2, **settings)), sequence=tiny.SEQUENCE)
    return sum(item.repeat * item.bytes for item in work.residents if item.category == "gathered")


def test_each_layer_fetched_ahead_is_a_block_more_in_memory() -> None:
    held = [_gathered(prefetch=prefetch) for prefetch in (0, 1, 2, 3, 4, 9)]
    block = held[1] - held[0]
    assert block > 0
    assert held == [held[0] + block * more for more in (0, 1, 2, 3, 3, 3)], "the model has 4 blocks"


class Seen:
    """A module that only remembers what it is told to fetch."""

    def __init__(self, name: str):
        self.name = name
        self.after: list[str] = []
        self.before: list[str] = []

    def set_modules_to_forward_prefetch(self, modules: list[Seen]) -> None:
        self.after = [each.name for each in modules]

    def set_modules_to_backward_prefetch(self, modules: list[Seen]) -> None:
        self.before = [each.name for each in modules]


def test_nothing_is_fetched_across_chunks_nor_for_what_has_no_backward() -> None:
    modules = [Seen(name) for name in ("a0", "a1", "b0", "b1", "root")]
    set_prefetch(modules, [False, True, True, True], [0, 0, 1, 1], 2)
    assert [each.after for each in modules] == [["a1"], [], ["b1"], [], []]
    # Itself: so that FSDP does not guess.
    assert [each.before for each in modules] == [["a0"], ["a1"], ["b0"], ["b0"], ["root"]]
    set_prefetch(modules, [True] * 4, [0] * 4, 2)
    assert [each.after for each in modules] == [["a1", "b0"], ["b0", "b1"], ["b1"], [], []]
    assert [each.before for each in modules] == [["a0"], ["a0"], ["a1", "a0"], ["b0", "a1"], ["b1", "b0"]]


BF16_SUMS = [
    (t("shard", size=2, reduce="bf16"),),
    (t("shard", size=2, stage=1, reduce="bf16"), tiny.REPLICATE),
]


@pytest.mark.parametrize("techniques", BF16_SUMS, ids=tiny.joined)
def test_sums_in_bf16_are_rounded_and_half_the_bytes(techniques: tuple[Any, ...], ran: Run) -> None:
    plan = plan_of(*techniques)
    answers = ran(plan, QWEN, dtype="float32")
    assert tiny.departures(answers, tiny.ROUNDED) == []
    assert tiny.price_differences(answers) == []
    assert min(answer["errors"]["first gradient"][0] for answer in answers) > 1e-5, "nothing was rounded"
    whole = ran(plan_of(*(each.as_exact() for each in techniques)), QWEN, dtype="float32")
    for halved, before in zip(answers, whole, strict=True):
        expected = [
            [kind, axis, size if kind == "all_gather" else size // 2, count]
            for kind, axis, size, count in before["observed"]
        ]
        assert sorted(expected) == halved["observed"]


def test_the_dtype_of_sums_decides_how_exact_it_is() -> None:
    assert type(tiny.SHARD3).exactness == tiny.SHARD3.exactness == "reordered"
    rounded = t("shard", size=2, reduce="bf16")
    assert rounded.exactness == "rounded"
    assert rounded.as_exact() == tiny.SHARD3
    assert Plan.from_json(plan_of(rounded).to_json()).techniques[0].exactness == "rounded"
    read_wishes(["shard.reduce=bf16"], allow="rounded")
    read_wishes(["shard.reduce=fp32"], allow="reordered")
    with pytest.raises(MeshwrightError, match="it is rounded, and only reordered techniques are allowed"):
        read_wishes(["shard.reduce=bf16"], allow="reordered")


def test_a_layer_behind_cannot_be_fetched_ahead() -> None:
    (problem,) = plan_of(t("shard", size=2, prefetch=-1)).check(decoder_profile(DecoderConfig(**LLAMA), "tiny"))
    assert "prefetch is -1" in str(problem)


SECOND = t("shard", size=4, secondary=2)
BESIDE_SECOND = (
    (SECOND,),
    (SECOND, tiny.RECOMPUTE),
    (SECOND, tiny.RECOMPUTE_SOME, tiny.CHUNKED),
    (t("shard", size=4, secondary=2, prefetch=0),),
    (t("shard", size=4, secondary=2, prefetch=2), tiny.OFFLOAD_ONE),
    pytest.param((SECOND, tiny.REPLICATE), marks=pytest.mark.slow),
    pytest.param((SECOND, tiny.TENSOR), marks=pytest.mark.slow),
    pytest.param((SECOND, tiny.COMPILE), marks=pytest.mark.slow),
    pytest.param((t("shard", size=8, secondary=4),), marks=pytest.mark.slow),
)


@pytest.mark.parametrize("techniques", BESIDE_SECOND, ids=tiny.joined)
def test_a_second_copy_keeps_the_gathers_of_backward_among_neighbours(techniques: tuple[Any, ...], ran: Run) -> None:
    """Two microbatches a rank."""
    plan = plan_of(*techniques, batch=16, microbatch=1)
    plan = plan_of(*techniques, batch=16, microbatch=8 // plan.num_replicas)
    answers = exact(plan, UNEVEN, ran)
    without = ran(plan_of(*(replace(techniques[0], secondary=0), *techniques[1:]), batch=16, microbatch=plan.microbatch), UNEVEN)
    for answer, before in zip(answers, without, strict=True):
        print(answer["observed"], before["observed"])
