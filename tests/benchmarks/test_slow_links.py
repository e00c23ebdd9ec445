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
    rows = {}
    for name, seconds in {"all_reduce": 2.0, "islands, H = 64": 2.5, "islands, H = 16": 1.0}.items():
        plan = slow_links.plan_of(slow_links.PLANS[name], 2)  # of two devices each: what is learnt is the same
        job = slow_links.Job(plan=encode(plan), steps=64)
        blocks = [{"seconds": [seconds + 1.5] * 64, "waited": [waited] * 64} for waited in (1.0, 1.5)]
        rows[name] = slow_links.row_of(plan, job, 0.5, blocks)
    reached = {name: {"steps": 100} for name in slow_links.PLANS} | {"islands, H = 16": {"steps": None}}
    results = {"reached": {"rows": reached}, "scenarios": {"one": {"rows": rows, "picked": "islands, H = 64"}}}
    slow_links.judge(results)
    assert rows["all_reduce"]["seconds"] == 200
    assert rows["all_reduce"]["wall_step_seconds"] == 3.5
    assert rows["all_reduce"]["forecast_seconds"] == 50
    assert rows["islands, H = 16"]["seconds"] is None
    assert results["scenarios"]["one"]["best"] == "all_reduce"
    assert results["scenarios"]["one"]["regret"] == 0.25
    assert slow_links.regret_of(rows, "islands, H = 16") == {"best": "all_reduce", "regret": None}


def test_of_a_long_period_the_steps_around_its_meeting_stand_for_all() -> None:
    plan = slow_links.plan_of(slow_links.PLANS["islands, H = 256"], 1)
    job = slow_links.job_of(plan, slow_links.SCENARIOS["2 MB/s"], 0.02, 0.02, quick=False)
    seconds = [0.5 if job.first + job.warm_up + at + 1 == 256 else 0.1 for at in range(job.steps)]
    assert sorted(set(seconds)) == [0.1, 0.5]
    assert slow_links.mean_step(job, 256, seconds) == pytest.approx(0.1 + 0.4 / 256)
    assert slow_links.mean_step(job, 16, seconds) == pytest.approx(sum(seconds) / len(seconds))


def test_the_tables_are_made_from_the_results() -> None:
    results = json.loads(slow_links.RESULTS.read_text(encoding="utf-8"))
    assert slow_links.render(results) in slow_links.PAGE.read_text(encoding="utf-8")
    assert list(results["reached"]["rows"]) == list(slow_links.PLANS)
    assert set(results["scenarios"]) <= set(slow_links.SCENARIOS)
    for row in results["reached"]["rows"].values():  # what the recorder saw is what is priced; headers come on top
        assert row["recorded_a_step"] == row["priced_a_step"]
        assert row["priced_a_step"] < row["sent_a_step"] < 1.25 * row["priced_a_step"]
    rows = results["reached"]["rows"]
    assert rows["streaming int8, H = 32"]["sent_a_step"] < rows["all_reduce"]["sent_a_step"] / 100
