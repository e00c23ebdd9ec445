"""Rules of thumb beside what they are derived from. Tests of `ask/rules_of_thumb.py`."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from meshwright.ask.question import Question
from meshwright.ask.rules_of_thumb import batch_rules, overhead_for, servers_for, worker_rules, workers_for
from meshwright.ask.why import read_knobs, why
from meshwright.machine.named_clusters import cluster
from meshwright.models.presets import profile
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.planner.search import ScoredPlan

QUESTION = Question(
    profile=profile("byte-3m"),
    cluster=cluster("2x2xh100"),
    batch=16,
    sequence=128,
    allow="reordered",
    optimizer=OptimizerConfig(lr=1e-3),
    ban=("tensor", "pipeline", "shard", "context", "recompute", "chunked_loss"),
)


def _best() -> ScoredPlan:
    best = QUESTION.ask().best
    assert best is not None
    return best


@pytest.mark.parametrize(
    ("size", "workers", "rate", "seconds"), [(1e8, 4, 1e9, 0.1), (1e9, 16, 1e10, 0.9), (1, 2, 1e9, 1)]
)
def test_as_few_servers_as_hide_their_traffic(size: float, workers: int, rate: float, seconds: float) -> None:
    count = servers_for(size, workers, rate, seconds)

    def link_seconds(servers: int) -> float:
        """Of each server's link: its share of every worker's gradients in, and of the weights out."""
        return 2 * workers * size / servers / rate

    assert link_seconds(count) <= seconds
    assert count == 1 or link_seconds(count - 1) > seconds


@pytest.mark.parametrize("efficiency", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("workers", [2, 7, 64])
def test_as_much_overhead_as_the_efficiency_allows(efficiency: float, workers: int) -> None:
    overhead = overhead_for(efficiency, workers)
    speedup = workers / (1 + overhead * (workers - 1))
    assert speedup / workers == pytest.approx(efficiency)
    assert workers_for(efficiency, overhead) == pytest.approx(workers)


def test_why_says_the_rules_with_the_figures_of_the_plan() -> None:
    best = _best()
    knob, batch = read_knobs(["replicate", "batch"])
    notes = why(QUESTION, best, knob, lambda text: None).notes
    servers, efficiency = (line for line in notes if "Zou et al. 2017" in line)
    told = best.forecast
    busy = told.seconds_by_cause.get("compute", 0.0) + told.seconds_by_cause.get("launch", 0.0)
    shown = told.seconds_by_cause.get("inner", 0.0) + told.seconds_by_cause.get("outer", 0.0)
    params, rate = QUESTION.profile.num_trained_params, QUESTION.cluster.outer.bytes_per_second
    least = max(1, math.ceil(2 * 4 * params * 4 / (rate * busy)))
    assert f"at least {least} = 2 x " in servers
    assert "x 4 workers" in servers
    assert f"{0.1 / 0.9 / 3:.2g} of the compute" in efficiency
    assert f"now {shown / busy / 3:.2g}" in efficiency
    assert all("Limit: " in line for line in (servers, efficiency))
    strong, weak = why(QUESTION, best, batch, lambda text: None).notes
    assert "batch stays 16, 2 samples each" in strong
    assert "batch 32, 4 samples each, 1.41 times the learning rate with adamw, 0.001 -> 0.00141" in weak
    assert "Malladi et al. 2022" in weak


def test_sgd_has_the_linear_rule_and_one_device_no_workers() -> None:
    question = replace(QUESTION, optimizer=OptimizerConfig(name="sgd", lr=0.1))
    best = question.ask().best
    assert best is not None
    _, weak = batch_rules(question, best)
    assert "2 times the learning rate with sgd, 0.1 -> 0.2 (linear rule with warm-up, Goyal et al. 2017)" in weak
    alone = replace(QUESTION, cluster=cluster("h100"))
    single = alone.ask().best
    assert single is not None
    assert not list(worker_rules(alone, single))
