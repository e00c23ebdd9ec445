"""`mw check` as a user runs it: on their model and data, with a plan of theirs.

Tests of `cli/check.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import mw, write_plan, write_run

from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named
from meshwright.run.run_file import read_run
from meshwright.verify.check import check


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
    assert exact["exactness"] == "reordered"
    assert exact["worst_error"] <= 1e-9
    assert rounded["exactness"] == "rounded"
    # bf16 keeps 8 bits: the difference must be there, and small
    assert 1e-4 < rounded["worst_error"] < 5e-2


def test_from_python_samples_that_a_plan_cannot_cut_are_refused_before_anything_runs(tmp_path: Path) -> None:
    config = read_run(write_run(tmp_path), ["data.sequence=30"])
    plan = Plan(techniques=(technique_named("context")(size=4),), batch=config.train.batch, microbatch=1)
    with pytest.raises(MeshwrightError, match="30 cannot be cut into 8"):
        check(config, plan)
