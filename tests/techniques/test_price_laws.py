"""Prices obey the laws of splitting: nothing is lost, an axis of one rank is nothing, arrays are one by one.

Tests of `core/work.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named, technique_names
from meshwright.core.work import Work
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.presets import DecoderConfig, preset
from meshwright.simulator.pricing import price, price_sizes, sizes_of

LLAMA = decoder_profile(preset("llama3-8b"), "llama3-8b")
TINY = decoder_profile(DecoderConfig(**tiny.QWEN), "tiny")
AXES = [name for name in technique_names() if technique_named(name).axis]
laws = settings(max_examples=30, deadline=None)


def flops(work: Work) -> float:
    return float(sum(task.repeat * task.flops for task in work.computes))


def held(work: Work) -> dict[str, float]:
    total: dict[str, float] = {}
    for item in work.residents:
        total[item.category] = total.get(item.category, 0.0) + float(item.repeat * item.bytes)
    return total


def state(work: Work) -> float:
    return sum(held(work)[category] for category in ("parameters", "gradients", "optimizer"))


def test_there_are_axes() -> None:
    assert len(AXES) >= 4


@pytest.mark.parametrize("name", AXES)
def test_an_axis_of_one_rank_changes_no_flops_and_no_state(name: str) -> None:
    alone, split = (price(LLAMA, Plan(techniques=t, batch=8), sequence=64) for t in ((), (tiny.t(name, size=1),)))
    assert flops(split) == flops(alone)
    assert state(split) == state(alone)
    assert held(split)["activations"] == held(alone)["activations"]


@laws
@given(stages=st.lists(st.integers(1, 9), min_size=2, max_size=6), schedule=st.sampled_from(["1f1b", "gpipe"]))
def test_stages_share_out_all_work_and_all_state(stages: list[int], schedule: str) -> None:
    config = DecoderConfig(**(tiny.LLAMA | {"num_layers": sum(stages)}))
    profile = decoder_profile(config, "tiny")
    pipeline = tiny.t("pipeline", size=len(stages), stages=tuple(stages), schedule=schedule)
    plan = Plan(techniques=(pipeline,), batch=8)
    works = [price(profile, plan, sequence=16, stage=stage) for stage in range(len(stages))]
    whole = price(profile, Plan(batch=8), sequence=16)
    assert sum(map(flops, works)) == pytest.approx(flops(whole), rel=1e-12)
    assert sum(map(state, works)) == state(whole)
    sends = [sum(int(task.repeat) for task in work.collectives if task.kind == "send") for work in works]
    assert sum(sends) == 2 * (len(stages) - 1)


@pytest.mark.parametrize("ways", [1, 2, 4, 8])
@pytest.mark.parametrize("sequence", [False, True])
def test_ranks_of_a_split_layer_share_out_all_matmuls(ways: int, sequence: bool) -> None:
    plan = Plan(techniques=(tiny.t("tensor", size=ways, sequence=sequence),), batch=8)
    assert ways * flops(price(LLAMA, plan, sequence=64)) == pytest.approx(
        flops(price(LLAMA, Plan(batch=8), sequence=64)), rel=1e-12
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_shards_share_out_the_state(stage: int) -> None:
    plan = Plan(techniques=(tiny.t("shard", size=8, stage=stage),), batch=8)
    assert 8 * state(price(LLAMA, plan, sequence=64)) == state(price(LLAMA, Plan(batch=8), sequence=64))


@laws
@given(layers=st.integers(0, 32))
def test_recomputing_trades_flops_for_memory(layers: int) -> None:
    plain = price(LLAMA, Plan(batch=8), sequence=4096)
    again = price(LLAMA, Plan(techniques=(tiny.t("recompute", layers=layers),), batch=8), sequence=4096)
    forward = sum(t.repeat * t.flops for t in plain.computes if t.phase == "forward" and t.layer == "blocks")
    assert flops(again) - flops(plain) == pytest.approx(forward * layers / 32, rel=1e-12, abs=1e-3)
    saved = held(plain)["activations"] - held(again)["activations"]
    assert saved > 0 if layers else saved == 0


def test_collectives_name_the_technique_that_causes_them() -> None:
    for plan in (tiny.plan_of(*cube) for cube in tiny.CUBES):
        origins = {task.origin for task in price(TINY, plan, sequence=16).collectives if task.repeat}
        assert origins == {each.name for each in plan.techniques if each.axis}


@pytest.mark.parametrize("techniques", [*((each,) for each in tiny.ALONE), *tiny.CUBES], ids=tiny.joined)
def test_many_candidates_at_once_are_one_by_one(techniques: tuple[Any, ...]) -> None:
    """Microbatches, sequences and stages as arrays, against the same numbers alone."""
    plan = tiny.plan_of(*techniques)
    stages = range(len(plan.blocks_of_stages(TINY)))
    alone = [
        sizes_of(plan, TINY, sequence=sequence, stage=stage) | {"microbatch": microbatch}
        for sequence in (16, 32)
        for microbatch in (1, 2, 4)
        for stage in stages
    ]
    arrays = {name: np.array([sizes[name] for sizes in alone]) for name in alone[0]}
    together = price_sizes(TINY, plan.in_phase_order(), arrays)
    for index, sizes in enumerate(alone):
        single = price_sizes(TINY, plan.in_phase_order(), sizes)
        assert len(single.tasks) == len(together.tasks)
        for mine, theirs in zip(
            (*single.tasks, *single.residents), (*together.tasks, *together.residents), strict=True
        ):
            for field in ("repeat", "flops", "moved_bytes", "bytes"):
                if hasattr(mine, field):
                    value = np.broadcast_to(getattr(theirs, field), len(alone))[index]
                    assert float(value) == float(getattr(mine, field)), (mine, field)


def test_the_busiest_rank_of_experts_waits_for_nobody() -> None:
    """It has `imbalance` times the rows of the mean, in products and on the way, and no more than there are."""
    even = decoder_profile(preset("mixtral-8x7b"), "mixtral")

    def asked(imbalance: float, ways: int) -> tuple[float, float]:
        plan = Plan(techniques=(technique_named("expert")(size=ways),) if ways > 1 else (), batch=ways)
        work = price(replace(even, imbalance=imbalance), plan, sequence=128)
        products = sum(task.repeat * task.flops for task in work.computes if task.role == "experts")
        sent = sum(task.repeat * task.bytes for task in work.collectives if task.kind == "all_to_all")
        return float(products), float(sent)

    assert asked(1.5, 8)[0] == pytest.approx(1.5 * asked(1.0, 8)[0])
    assert asked(1.5, 8)[1] == pytest.approx(1.5 * asked(1.0, 8)[1], rel=1e-4)  # counts of rows stay
    assert asked(1.5, 1) == asked(1.0, 1)
    assert asked(4.0, 2) == asked(2.0, 2)
    assert replace(even, imbalance=2.0).fingerprint == even.fingerprint


def test_experts_are_nearer_than_shards_and_further_than_what_cuts_layers() -> None:
    """Tokens travel in every layer and microbatch; parameters once a step, or beside compute."""
    kinds = ("replicate", "shard", "expert", "context", "tensor")
    techniques = tuple(technique_named(name)(size=2) for name in kinds)
    assert Plan(techniques=techniques, batch=16).axis_order == ("dp", "fsdp", "ep", "cp", "tp")
