"""A run of peers end to end: the average is evaluated and saved, and how far peers are from it is recorded.

Tests of `techniques/gossip.py`, `runtime/rank.py`, `run/result.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

from command import losses, mw, write_plan, write_run

PEERS = {"name": "gossip", "size": 2, "every": 3, "drift": 0.5}


def test_the_consensus_distance_is_recorded_where_the_average_is_made(tmp_path: Path) -> None:
    changes = ("train.evaluate_every=3", "train.save_every=2", "plan.allow=approximate", "train.steps=4")
    words = [word for change in changes for word in ("--set", change)]
    done = mw("train", write_run(tmp_path), "--plan", write_plan(tmp_path, PEERS), *words)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sorted(losses(tmp_path / "run")) == [1, 2, 3, 4]
    found = {(row["step"], "loss" in row): row["consensus_distance"] for row in rows if "consensus_distance" in row}
    assert set(found) == {(3, False), (4, True), (4, False)}
    assert 0 <= found[3, False] < 1e-5, "two peers that have just met are equal"
    assert found[4, True] == found[4, False] > 1e-3, "then each has gone its own way"
    periods = {row["step"]: (row["meeting_period"], row["meeting_drift"]) for row in rows if "meeting_period" in row}
    assert list(periods) == [3], "they have met once"
    assert periods[3][0] == 4, "and were near each other"
    assert 0 < periods[3][1] < 0.35
    assert f"consensus distance {found[4, False]:.3g}" in done.stderr
    assert "mw check" not in done.stderr, "it would refuse the plan"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["held_out"]["consensus_distance"] == found[4, False]
    assert mw("ckpt", "verify", str(tmp_path / "run")).returncode == 0
    more = mw("train", write_run(tmp_path), *words[:-1], "train.steps=5", "--set", "run.ranks=1")
    assert more.returncode == 0, more.stderr
    assert sorted(losses(tmp_path / "run")) == [1, 2, 3, 4, 5], "one device goes on from the average"
