"""`mw.build`: a plan in somebody's own loop trains as a plain torch loop over the whole batch does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tiny import GPT, MOE, t

import meshwright as mw
from meshwright.checkpoint.step_folders import verify_all
from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.launch.rank_pool import RankError, RankPool

SGD = {"name": "sgd", "lr": 0.05, "momentum": 0.5, "weight_decay": 0.1, "clip": 0.0}
ADAMW = {"name": "adamw", "lr": 0.01, "weight_decay": 0.5, "clip": 0.0}
SHORT = GPT | {"num_layers": 2}


def right(pool: RankPool, plan: Plan, model: Any, **more: Any) -> None:
    arguments = {"plan": json.loads(plan.to_json()), "model": model, "optimizer": SGD} | more
    for worst in pool.run("api_jobs:build_job", arguments, plan.num_ranks, timeout_seconds=100):
        assert max(worst.values()) < 1e-4, worst


PLANS: tuple[tuple[Any, ...], ...] = (
    ((tiny.RING,), SHORT),
    ((), SHORT),
    ((tiny.REPLICATE,), SHORT),
    ((tiny.SHARD3,), SHORT),
    ((tiny.SHARD1,), "by_hand"),
    ((tiny.TENSOR,), "by_hand"),
    ((tiny.SEQUENCED,), SHORT),
    ((tiny.PIPELINE,), SHORT),
    ((tiny.PIPELINE,), "by_hand"),
    ((tiny.ULYSSES,), SHORT),
    ((tiny.RING, tiny.REPLICATE), SHORT),
    ((tiny.RING, tiny.PIPELINE), SHORT),
    ((tiny.EXPERT,), MOE),
    ((tiny.ROWS,), "tables"),
    ((t("replicate", size=2, shares=(1, 3)),), SHORT),
    ((t("pipeline", size=2, schedule="zero_bubble_h1"), tiny.SHARD2), SHORT),
    ((t("pipeline", size=2, schedule="zbv"), tiny.REPLICATE), GPT),
    ((t("pipeline", size=2, schedule="async"),), SHORT | {"tied": False}),
)


def named(value: Any) -> str | None:
    return tiny.joined(value) if isinstance(value, tuple) else ""


@pytest.mark.parametrize(("techniques", "model"), PLANS, ids=named)
def test_every_axis(techniques: tuple[Any, ...], model: Any, pool: RankPool) -> None:
    right(pool, Plan(techniques=techniques, batch=8, microbatch=2), model, weights="random")


@pytest.mark.parametrize("weights", ["zeros", "small", "gaps"])
@pytest.mark.parametrize("technique", [tiny.REPLICATE, tiny.RING], ids=str)
def test_weights_whose_sum_is_zero_or_below_one_or_all_on_one_rank(
    technique: Any, weights: str, pool: RankPool
) -> None:
    right(pool, Plan(techniques=(technique,), batch=4, microbatch=1), SHORT, weights=weights)


def test_batch_norms_far_from_zero(pool: RankPool) -> None:
    right(pool, Plan(techniques=(tiny.REPLICATE,), batch=8, microbatch=4), "convolutions")


@pytest.mark.parametrize("order", [("fsdp", "dp"), ("fsdp", "tp", "dp")])
def test_shards_outside_of_replicas(order: tuple[str, ...], pool: RankPool) -> None:
    techniques = (tiny.REPLICATE, tiny.SHARD3, tiny.TENSOR)[: len(order)]
    right(pool, Plan(techniques=techniques, batch=8, microbatch=2, axis_order=order), SHORT)


def test_weights_that_make_no_mean_are_refused() -> None:
    built = mw.build(Plan(batch=2, microbatch=2), "byte-tiny", device="cpu")
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    for weights, reason in ((torch.ones(2), "shape"), (-torch.ones(2, 8), "add up to -16")):
        with pytest.raises(MeshwrightError, match=reason):
            built.step(tokens, tokens, weights)


@pytest.mark.parametrize("model", ["ragged", "routed", "dropping"])
@pytest.mark.parametrize("optimizer", [ADAMW, SGD], ids=["adamw", "sgd"])
def test_parameters_that_the_data_chooses(model: str, optimizer: dict[str, Any], pool: RankPool) -> None:
    """Also by one device: a parameter that took no part in a step is neither decayed nor moved."""
    for techniques in ((), (tiny.REPLICATE,)):
        right(pool, Plan(techniques=techniques, batch=4, microbatch=1), model, optimizer=optimizer, steps=4)


@pytest.mark.parametrize("technique", [tiny.SHARD1, tiny.SHARD3, tiny.PIPELINE], ids=str)
def test_parameters_inside_blocks_that_the_data_chooses(technique: Any, pool: RankPool) -> None:
    right(pool, Plan(techniques=(technique,), batch=4, microbatch=1), "ragged", optimizer=ADAMW, steps=4)


def test_blocks_that_the_data_leaves_out_are_refused_by_name_under_shard(pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"shard: block \d did not run"):
        right(pool, Plan(techniques=(tiny.SHARD3,), batch=4, microbatch=1), "dropping")


def test_what_was_built_is_saved_and_exported_by_all_ranks_together(pool: RankPool, tmp_path: Path) -> None:
    plan = Plan(techniques=(tiny.SHARD3,), batch=4, microbatch=1)
    arguments = {"plan": json.loads(plan.to_json()), "folder": str(tmp_path)}
    first, second = pool.run("api_jobs:export_job", arguments, 2, timeout_seconds=100)
    assert first == second == str(tmp_path / "checkpoints" / "step-00000000")
    assert verify_all(tmp_path / "checkpoints") == {0: ()}
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["num_hidden_layers"] > 0
    assert (tmp_path / "exported" / "model.safetensors").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", "exported"}
