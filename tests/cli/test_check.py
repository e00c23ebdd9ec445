"""`mw check` as a user runs it: on their model and data, with a plan of theirs."""

from __future__ import annotations

import json
from pathlib import Path

from command import mw, write_plan, write_run


def test_a_plan_for_more_ranks_than_devices_is_proved_equal_to_one_device(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    plan = write_plan(tmp_path, {"name": "replicate", "size": 2}, {"name": "tensor", "size": 2, "sequence": True})
    done = mw("check", path, "--plan", plan)
    assert done.returncode == 0, done.stderr
    assert "trains as one device" in done.stdout
    assert "bytes as priced" in done.stdout


def test_a_plan_that_rounds_is_proved_in_two_parts(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    plan = write_plan(tmp_path, {"name": "replicate", "size": 2}, {"name": "precision"})
    done = mw("check", path, "--plan", plan, "--json")
    assert done.returncode == 0, done.stderr
    exact, rounded = json.loads(done.stdout)["parts"]
    assert exact["exactness"] == "exact"
    assert exact["worst_error"] <= 1e-9
    assert rounded["exactness"] == "rounded"
    # bf16 keeps 8 bits: the difference must be there, and small
    assert 1e-4 < rounded["worst_error"] < 5e-2
