"""What moves over a slow link is what is priced, on two ranks; and the tables made from what was measured."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import slow_links
from meshwright.core.codec import encode
from meshwright.launch.rank_pool import RankPool


@pytest.mark.parametrize("name", ["all_reduce", "streaming int8, H = 32"])
def test_ranks_send_the_priced_bytes_and_learn(name: str) -> None:
    plan = slow_links.plan_of(slow_links.PLANS[name], 1)
    steps = 32 if "32" in name else 4
    job = slow_links.Job(plan=encode(plan), steps=steps, warm_up=2, evaluate_every=steps // 2, records=True)
    with RankPool(2, threads_per_rank=1) as pool:
        answer, other = pool.run("benchmarks.slow_links:train_job", {"job": asdict(job)}, 2, timeout_seconds=120)
    assert answer["losses"] == other["losses"]
    assert answer["losses"][-1][1] < 5.6, "a guess among 256 bytes is 5.55"
    assert len(answer["seconds"]) == steps
    passed = sum(size * count * (1.0 if kind == "all_reduce" else 0.5) for kind, _, size, count in answer["traffic"])
    assert passed / steps == pytest.approx(slow_links.priced_sent(plan), rel=1e-12)


@pytest.mark.slow
def test_hosts_are_joined_by_a_link_that_is_limited() -> None:
    sys.path += [str(Path(__file__).parents[1] / "launch")]
    from namespaces import why_there_are_none

    if reason := why_there_are_none():
        pytest.skip(f"network namespaces cannot be made here: {reason}")
    plan, rate = slow_links.plan_of(slow_links.PLANS["all_reduce"], 1), 20e6
    job = slow_links.Job(plan=encode(plan), steps=4, warm_up=2, bytes_per_second=rate)
    (answer,) = slow_links.run_jobs([job], 1, 120)
    priced = slow_links.priced_sent(plan)
    assert sum(answer["sent"]) / 4 == pytest.approx(priced / slow_links.PAYLOAD, rel=0.05)
    assert sum(answer["seconds"]) / 4 > 0.9 * priced / rate


def test_a_pick_is_judged_by_the_soonest_plan_that_has_the_loss() -> None:
    reached = {"rows": {name: {"steps": 100} for name in slow_links.PLANS}}
    reached["rows"]["islands, H = 16"] = {"steps": None}
    rows = {
        name: slow_links.row_of(slow_links.plan_of(slow_links.PLANS[name], 2), 0.5, means, reached)
        for name, means in {"all_reduce": [3.0, 2.0], "islands, H = 64": [2.5, 2.6], "islands, H = 16": [1.0]}.items()
    }
    assert rows["all_reduce"]["seconds"] == 200
    assert rows["all_reduce"]["forecast_seconds"] == 50
    assert slow_links.regret_of(rows, "islands, H = 64") == {"best": "all_reduce", "regret": 0.25}
    assert slow_links.regret_of(rows, "islands, H = 16") == {"best": "all_reduce", "regret": None}


def test_the_tables_are_made_from_the_results() -> None:
    results = json.loads(slow_links.RESULTS.read_text(encoding="utf-8"))
    assert slow_links.render(results) in slow_links.PAGE.read_text(encoding="utf-8")
    assert list(results["scenarios"]) == list(slow_links.SCENARIOS)
