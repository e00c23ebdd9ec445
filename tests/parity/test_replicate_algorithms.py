"""Replicas that sum gradients by sends of their own train as one device does, and send what is priced.

Tests of `techniques/replicate.py`, `ops/gradient_exchange.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import tiny
from tiny import t

from meshwright.core.plan import Plan
from meshwright.core.technique import Technique
from meshwright.simulator.pricing import price

Run = Callable[..., list[dict[str, Any]]]
FLAT = ("ring", "tree", "doubling", "scatter_gather")
PLANS = (
    (t("replicate", size=2, algorithm="ring"), tiny.SEQUENCED, tiny.PIPELINE),
    *((t("replicate", size=4, algorithm=name),) for name in FLAT),
    (t("replicate", size=4, algorithm="hierarchical", node_size=2),),
    (t("replicate", size=8, algorithm="hierarchical", node_size=3),),
    (t("replicate", size=2, algorithm="tree", shares=(2, 6)),),
    (t("replicate", size=2, algorithm="doubling"), tiny.INTERLEAVED, tiny.RECOMPUTE_ONE),
    (t("replicate", size=2, algorithm="scatter_gather"), tiny.ZBV),
)


@pytest.mark.parametrize("techniques", PLANS, ids=tiny.joined)
def test_training_is_one_devices_and_sends_are_priced(techniques: tuple[Technique, ...], ran: Run) -> None:
    plan = tiny.plan_of(*techniques, microbatch=1)
    answers = ran(plan, tiny.QWEN)
    assert tiny.departures(answers, tiny.bounds(tiny.EXACT)) == []
    assert tiny.price_differences(answers) == []
    used = plan.technique("replicate")
    assert used is not None
    for rank, answer in enumerate(answers):
        kinds = {kind for kind, axis, *_ in answer["observed"] if axis == "dp"}
        assert kinds == {"send"}, f"rank {rank} sums by {kinds}"


def test_a_sum_by_sends_hides_nothing_and_auto_does() -> None:
    for algorithm in ("auto", *FLAT):
        plan = tiny.plan_of(t("replicate", size=4, algorithm=algorithm))
        tasks = [each for each in price(tiny.profile_of(tiny.QWEN), plan, sequence=16).collectives if each.per_step]
        assert tasks
        assert all(each.hidden == (algorithm == "auto") for each in tasks)


def test_plans_without_an_algorithm_are_written_as_before() -> None:
    assert "algorithm" not in tiny.plan_of(tiny.REPLICATE).to_json()
    plan = tiny.plan_of(t("replicate", size=4, algorithm="hierarchical", node_size=2))
    assert Plan.from_json(plan.to_json()) == plan
    assert json.loads(plan.to_json())["techniques"][0]["node_size"] == 2


@pytest.mark.parametrize(
    ("techniques", "said"),
    [
        ((t("replicate", size=2, algorithm="ring"), tiny.SHARD2), "shard takes or sums gradients layer by layer"),
        ((t("replicate", size=2, algorithm="ring"), tiny.KEEP_ALL), "compress_gradients takes or sums gradients"),
        ((t("replicate", size=2, algorithm="ring"), tiny.ON_HOST), "offload_states takes or sums gradients"),
        ((t("replicate", size=2, algorithm="tree"), t("pipeline", size=2, schedule="async")), "steps that overlap"),
        ((t("replicate", size=2, algorithm="hierarchical"),), "node_size is 0, of 2 replicas"),
        ((t("replicate", size=2, algorithm="hierarchical", node_size=3),), "node_size is 3, of 2 replicas"),
        ((t("replicate", size=2, algorithm="ring", node_size=2),), "node_size says nothing to ring"),
    ],
)
def test_what_cannot_be_summed_so_is_refused(techniques: tuple[Technique, ...], said: str) -> None:
    problems = tiny.plan_of(*techniques).check(tiny.profile_of(tiny.QWEN))
    assert any(said in str(problem) for problem in problems), problems


@pytest.mark.parametrize("other", [tiny.SHARD2, tiny.KEEP_ALL, tiny.ON_HOST])
def test_auto_is_not_refused_there(other: Technique) -> None:
    assert not tiny.plan_of(tiny.REPLICATE, other).check(tiny.profile_of(tiny.QWEN))
