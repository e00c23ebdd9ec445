"""`mw train` with replicas that take different shares of the batch, resumed with others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command import losses, mw, write_plan, write_run


def test_a_run_goes_on_with_other_shares(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    first = mw("train", run, "--plan", write_plan(tmp_path, {"name": "replicate", "size": 2, "shares": [3, 1]}))
    assert first.returncode == 0, first.stderr
    assert "x 1 to 3 microbatches of 1" in first.stderr + first.stdout
    through = losses(tmp_path / "run")
    assert sorted(through) == list(range(1, 9))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000008")
    plan = write_plan(tmp_path, {"name": "replicate", "size": 2, "shares": [1, 3]})
    second = mw("train", run, "--plan", plan)
    assert second.returncode == 0, second.stderr
    assert "step 4" in second.stderr
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["techniques"][0]["shares"] == [1, 3]
    assert losses(tmp_path / "run") == pytest.approx(through, rel=1e-5)


def test_shares_that_do_not_make_the_batch_are_refused(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, {"name": "replicate", "size": 2, "shares": [3, 2]})
    refused = mw("train", write_run(tmp_path), "--plan", plan)
    assert refused.returncode == 2
    assert "shares add up to 5 microbatches of 1, 5 samples; the batch has 4" in refused.stderr
