"""Sharding in all its settings: stages with and without replicas, layers fetched ahead, gradients summed in bf16.

Tests of `ops/fsdp.py`, `techniques/shard.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from tiny import LLAMA, QWEN, plan_of, t

from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.launch.rank_pool import RankPool
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
    pytest.param((t("shard", size=4, secondary=2, prefetch=0),), marks=pytest.mark.slow),
    pytest.param((t("shard", size=4, secondary=2, prefetch=2), tiny.OFFLOAD_ONE), marks=pytest.mark.slow),
    pytest.param((SECOND, tiny.REPLICATE), marks=pytest.mark.slow),
    pytest.param((SECOND, tiny.TENSOR), marks=pytest.mark.slow),
    pytest.param((SECOND, tiny.COMPILE), marks=pytest.mark.slow),
    pytest.param((t("shard", size=8, secondary=4),), marks=pytest.mark.slow),
)


@pytest.mark.parametrize("techniques", BESIDE_SECOND, ids=tiny.joined)
def test_a_second_copy_keeps_the_gathers_of_backward_among_neighbours(techniques: tuple[Any, ...], ran: Run) -> None:
    """With two microbatches; half of the gathers of blocks stay, and nothing else is said otherwise."""
    others = techniques[1:]
    replicas = plan_of(*techniques, batch=16, microbatch=1).num_replicas
    answers = exact(plan_of(*techniques, batch=16, microbatch=8 // replicas), UNEVEN, ran)
    alone = replace(techniques[0], secondary=0)
    without = ran(plan_of(alone, *others, batch=16, microbatch=8 // replicas), UNEVEN)
    for answer, before in zip(answers, without, strict=True):
        expected = {tuple(message): count for *message, count in before["observed"]}
        gathers = {where[2]: count for where, count in expected.items() if where[:2] == ("all_gather", "fsdp")}
        block = max(gathers, key=lambda size: gathers[size])
        assert gathers[block] == 2 * 2 * UNEVEN["num_layers"]
        expected["all_gather", "fsdp", block] //= 2
        expected["all_gather", f"fsdp/{techniques[0].secondary}", block] = gathers[block] // 2
        assert {tuple(message): count for *message, count in answer["observed"]} == expected


@pytest.mark.parametrize("techniques", [(SECOND,), (SECOND, tiny.BF16)], ids=tiny.joined)
def test_a_second_copy_is_there_from_forward_to_backward(techniques: tuple[Any, ...], pool: RankPool) -> None:
    """26 rows over 4 ranks: there are more with padding."""
    plan, config = plan_of(*techniques, batch=16, microbatch=1), UNEVEN | {"ffn_size": 26}
    dtype = "float32" if tiny.BF16 in techniques else "float64"
    arguments = {"plan": json.loads(plan.to_json()), "config": config, "dtype": dtype}
    answers = pool.run("shard_jobs:second_copy_job", arguments, num_ranks=plan.num_ranks)
    element_bytes = 4 if tiny.BF16 in techniques else 8
    work = price(tiny.profile_of(config), plan, sequence=tiny.SEQUENCE, element_bytes=element_bytes)
    kept = [item for item in work.residents if item.category == "gathered" and item.life == "microbatch"]
    priced = sum(item.repeat * item.bytes for item in kept)
    for rank, answer in enumerate(answers):
        assert answer["during"] == [priced] * plan.num_microbatches
        assert answer["after_step"] == answer["after_evaluation"] == 0
        first = rank - rank % 2
        assert answer["ranks"] == {"fsdp/2": [first, first + 1]}


def test_a_second_copy_among_ranks_that_are_apart(pool: RankPool) -> None:
    plan = Plan(techniques=(SECOND, tiny.TENSOR), batch=8, microbatch=1, axis_order=("fsdp", "tp"))
    arguments = {"plan": json.loads(plan.to_json()), "config": LLAMA, "dtype": "float64"}
    ranks = [answer["ranks"]["fsdp/2"] for answer in pool.run("shard_jobs:second_copy_job", arguments, num_ranks=8)]
    assert ranks == [[0, 2], [1, 3], [0, 2], [1, 3], [4, 6], [5, 7], [4, 6], [5, 7]]


def test_runs_with_a_second_copy_are_evaluated_saved_and_resumed(pool: RankPool, tmp_path: Path) -> None:
    question = {"optimizer": tiny.ADAMW, "config": UNEVEN, "folder": ""}

    def trained(*techniques: Any, **more: Any) -> dict[str, Any]:
        plan = plan_of(*techniques)
        arguments = question | {"plan": json.loads(plan.to_json()), **more}
        return pool.run("local_jobs:trained_job", arguments, num_ranks=plan.num_ranks)[0]

    one = trained(steps=4)
    first = trained(SECOND, steps=2, folder=str(tmp_path))
    rest = trained(SECOND, steps=2, first=2, resume=str(tmp_path))
    for what in ("losses", "norms", "evaluated"):
        assert first[what] + rest[what] == pytest.approx(one[what], rel=tiny.EXACT)
    assert one["losses"][3] != pytest.approx(one["losses"][0], rel=1e-3)


@pytest.mark.slow
def test_a_second_copy_of_weights_of_8_bit_products_is_gathered_in_16(ran: Run) -> None:
    answers = ran(plan_of(SECOND, tiny.FP8, microbatch=1), tiny.WIDE, dtype="float32")
    assert tiny.departures(answers, tiny.LOSSY) == []
    assert tiny.price_differences(answers) == []


REFUSED = {
    "must divide size, 4": ({"size": 4, "secondary": 3}, ()),
    "Use 2 or 4, as many": ({"size": 8, "secondary": 8}, ()),
    "lie between 1 and size": ({"size": 4, "secondary": 1}, ()),
    "secondary is -2": ({"size": 4, "secondary": -2}, ()),
    "Use 0.": ({"size": 2, "secondary": 2}, ()),
    "stage 2 lets go of no weights": ({"size": 4, "secondary": 2, "stage": 2}, ()),
    "stage 1 lets go of no weights": ({"size": 4, "secondary": 2, "stage": 1}, ()),
    "a stage runs forwards of other microbatches": ({"size": 4, "secondary": 2}, (tiny.PIPELINE,)),
    "multi_rate leaves blocks without a backward": ({"size": 4, "secondary": 2}, (tiny.EVERY_STEP,)),
}


@pytest.mark.parametrize("says", REFUSED)
def test_a_second_copy_where_it_has_no_meaning_is_refused(says: str) -> None:
    settings, others = REFUSED[says]
    (problem,) = plan_of(t("shard", **settings), *others, batch=64).check(tiny.profile_of(LLAMA))
    assert says in str(problem)
    assert problem.where == "shard"
    assert problem.fix


def test_all_that_is_wrong_with_shards_is_said_at_once() -> None:
    problems = plan_of(t("shard", size=4, secondary=3, stage=2, prefetch=-1)).check(tiny.profile_of(LLAMA))
    assert len(problems) == 3


def test_plans_without_a_second_copy_are_written_as_before() -> None:
    assert "secondary" not in plan_of(tiny.SHARD3).to_json()
    assert Plan.from_json(plan_of(SECOND).to_json()).techniques == (SECOND,)
