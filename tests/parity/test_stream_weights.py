"""Blocks whose weights stream through the device train one device's model, copy what was priced and need no more memory
than the ring.

Tests of `techniques/stream_weights.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import tiny
from tiny import LLAMA, MOE, QWEN, plan_of, t

from meshwright.core.technique import Technique
from meshwright.launch.rank_pool import RankPool
from meshwright.machine.named_clusters import cluster

Run = Callable[..., list[dict[str, Any]]]
DEEP = LLAMA | {"num_layers": 7}
ON_HOST, AHEAD = t("offload_states"), t("offload_states", ahead=True)
SHARED, SHARED_AHEAD = (t("offload_states", host_ranks=4, ahead=ahead) for ahead in (False, True))
STREAMED, THREE = t("stream_weights"), t("stream_weights", buffers=3)

PLANS: tuple[tuple[tuple[Technique, ...], dict[str, Any], int], ...] = (
    ((ON_HOST, STREAMED, tiny.RECOMPUTE), DEEP, 4),
    ((ON_HOST, STREAMED, tiny.RECOMPUTE), QWEN, 8),
    ((ON_HOST, THREE), DEEP, 4),
    ((AHEAD, STREAMED, tiny.RECOMPUTE_SOME), DEEP, 4),
    ((t("offload_states", share=0.5), THREE, tiny.RECOMPUTE), DEEP, 2),
    ((ON_HOST, STREAMED, tiny.RECOMPUTE, tiny.COMPILE), DEEP, 4),
    ((ON_HOST, STREAMED, tiny.COMPILE), DEEP, 8),
    ((ON_HOST, STREAMED, tiny.RECOMPUTE), MOE | {"num_layers": 5}, 4),
    ((ON_HOST, STREAMED, tiny.RECOMPUTE, tiny.CHUNKED), tiny.GPT, 4),
    ((ON_HOST, STREAMED, tiny.RECOMPUTE, tiny.TENSOR), DEEP, 4),
    ((ON_HOST, STREAMED, tiny.RECOMPUTE, tiny.SEQUENCED), QWEN, 4),
    ((ON_HOST, STREAMED, tiny.RECOMPUTE, tiny.PIPELINE), QWEN | {"num_layers": 8}, 2),
    ((ON_HOST, STREAMED, tiny.RECOMPUTE, tiny.INTERLEAVED), QWEN | {"num_layers": 8}, 2),
    ((ON_HOST, STREAMED, tiny.RECOMPUTE, tiny.REPLICATE), DEEP, 2),
    ((SHARED, STREAMED, tiny.RECOMPUTE, tiny.REPLICATE), DEEP, 4),
    ((SHARED, STREAMED, tiny.RECOMPUTE, tiny.REPLICATE), QWEN, 2),
    ((SHARED_AHEAD, STREAMED, tiny.RECOMPUTE, tiny.t("replicate", size=4)), DEEP, 2),
    ((SHARED, STREAMED, tiny.RECOMPUTE, tiny.t("replicate", size=4)), DEEP, 1),
    ((SHARED, STREAMED, tiny.REPLICATE, tiny.TENSOR), DEEP, 4),
    ((ON_HOST, STREAMED, tiny.RECOMPUTE, tiny.RING), DEEP, 4),
)
NAMES = [f"{tiny.joined(techniques)} x{tiny.BATCH // microbatch}" for techniques, _, microbatch in PLANS]


@pytest.mark.parametrize(("techniques", "config", "microbatch"), PLANS, ids=NAMES)
def test_the_same_numbers_and_the_priced_state(
    techniques: tuple[Technique, ...], config: dict[str, Any], microbatch: int, ran: Run
) -> None:
    plan = plan_of(*techniques, microbatch=microbatch)
    assert plan.check(tiny.profile_of(config)) == ()
    answers = ran(plan, config)
    assert tiny.departures(answers, tiny.bounds(tiny.EXACT)) == []
    assert tiny.price_differences(answers) == []
    if tiny.COMPILE in techniques:
        assert all(answer["num_graphs"] > 0 for answer in answers)


def copied(pool: RankPool, techniques: tuple[Technique, ...], config: dict[str, Any], microbatch: int, **more: Any):
    plan = plan_of(*techniques, microbatch=microbatch)
    arguments = {"plan": json.loads(plan.to_json()), "config": config, "optimizer": tiny.ADAMW, "dtype": "float64"}
    arguments |= {"sequence": tiny.SEQUENCE, **more}
    return pool.run("stream_jobs:copies_job", arguments, plan.num_ranks, timeout_seconds=300)


@pytest.mark.parametrize(("techniques", "config", "microbatch"), PLANS, ids=NAMES)
def test_what_is_copied_and_held_is_what_is_priced(
    techniques: tuple[Technique, ...], config: dict[str, Any], microbatch: int, pool: RankPool
) -> None:
    for answer in copied(pool, techniques, config, microbatch):
        assert answer["seen"] == answer["priced"]
        assert answer["held"] == answer["ring"] + answer["lasting"]


@pytest.mark.parametrize("microbatch", [2, 1])
def test_replicas_on_a_host_have_one_copy_of_the_priced_size(microbatch: int, pool: RankPool) -> None:
    """Two hosts of two ranks each: the same files in both ranks' memory, and no more bytes than the price says."""
    techniques = (t("offload_states", host_ranks=2), STREAMED, t("replicate", size=4))
    answers = copied(pool, techniques, DEEP, microbatch)
    for one, other in (answers[:2], answers[2:]):
        assert one["shared_files"] == other["shared_files"] != []
        assert one["shared_bytes"] + one["landed"] + other["landed"] == one["host"] + other["host"]
    assert not set(answers[0]["shared_files"]) & set(answers[2]["shared_files"])
    alone = copied(pool, (ON_HOST, STREAMED, t("replicate", size=4)), DEEP, microbatch)
    assert alone[0]["shared_files"] == []
    assert alone[0]["host"] == 2 * answers[0]["host"]


def test_memory_is_the_same_at_any_depth(pool: RankPool) -> None:
    techniques = (ON_HOST, STREAMED, tiny.RECOMPUTE)
    held = [copied(pool, techniques, LLAMA | {"num_layers": depth}, 4)[0]["held"] for depth in (3, 9)]
    assert held[0] == held[1] > 0


def test_16_bit_weights_are_those_of_blocks_that_stay(ran: Run) -> None:
    """Gradients land where a streamed block's weights were, and the update makes these anew."""
    like = ({"name": "offload_states"}, {"name": "precision"})
    for microbatch in (8, 4):
        plan = plan_of(ON_HOST, STREAMED, tiny.RECOMPUTE, tiny.BF16, microbatch=microbatch)
        answers = ran(plan, DEEP, dtype="float32", like=like)
        assert tiny.departures(answers, tiny.ROUNDED) == []


@pytest.mark.parametrize(
    ("techniques", "words"),
    [
        ((STREAMED, tiny.RECOMPUTE), ["states", "Put the states"]),
        ((ON_HOST, t("stream_weights", buffers=1)), ["buffers is 1", "2 or more"]),
        ((ON_HOST, STREAMED, tiny.SHARD3), ["shard gathers", "Leave out shard"]),
        ((ON_HOST, STREAMED, tiny.ZBV), ["weights' gradients", "another schedule"]),
        ((ON_HOST, STREAMED, t("recompute", slots=1)), ["run again", "slots = 0"]),
        ((ON_HOST, STREAMED, t("compile", scope="model")), ["one graph", "block"]),
    ],
    ids=lambda value: tiny.joined(value) if isinstance(value[0], Technique) else "",
)
def test_what_cannot_be_is_refused_with_a_way_out(techniques: tuple[Technique, ...], words: list[str]) -> None:
    problems = [p for p in plan_of(*techniques).check(tiny.profile_of(QWEN)) if p.where == "stream_weights"]
    assert len(problems) == 1
    for word in words:
        assert word in str(problems[0])


@pytest.mark.parametrize(
    ("techniques", "words"),
    [
        ((t("offload_states", host_ranks=0),), "host_ranks is 0"),
        ((SHARED, tiny.LOW_BIT, tiny.REPLICATE), "cannot be shared by rows"),
    ],
    ids=lambda value: tiny.joined(value) if isinstance(value, tuple) else "",
)
def test_copies_that_cannot_be_shared_are_refused(techniques: tuple[Technique, ...], words: str) -> None:
    (problem,) = plan_of(*techniques).check(tiny.profile_of(QWEN))
    assert words in problem.what
    assert problem.fix


def test_unknown_hosts_are_refused() -> None:
    problems = plan_of(ON_HOST, STREAMED).check(tiny.profile_of(QWEN), cluster("rtx4090"))
    assert any(problem.where == "stream_weights" and "mw probe" in str(problem) for problem in problems)
