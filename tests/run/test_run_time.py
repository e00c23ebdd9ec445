"""The time ledger of a real run that is killed and started again: in its folder, metrics, summary and closing lines."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from command import RUN, write_plan, write_run

from meshwright.checkpoint.step_folders import list_steps
from meshwright.core.errors import MeshwrightError
from meshwright.core.time_ledger import TIME_FILE, read_marks, time_ledger
from meshwright.run.run import Run, StepEvent
from meshwright.run.run_list import list_runs

ENDLESS = RUN.replace("steps = 8", "steps = 100000").replace("save_every = 4", "save_every = 10")


def test_a_killed_run_loses_what_it_makes_again(tmp_path: Path) -> None:
    path = write_run(tmp_path, ENDLESS)
    plan = write_plan(tmp_path, {"name": "replicate", "size": 2})
    begin = time.monotonic()
    with Run(path, plan=plan) as first:
        first.start()
        for event in first.follow():
            if isinstance(event, StepEvent) and event.step >= 14:
                break
        live = time_ledger(read_marks(first.folder))
        assert live.num_starts == 1
        assert live.seconds["productive"] > 0, "while it runs"
        first.stop(now=True)
        with pytest.raises(MeshwrightError):
            first.result()
    steps_in_all = list_steps(first.folder / "checkpoints")[-1] + 30
    with Run(path, plan=plan, changes=[f"train.steps={steps_in_all}"]) as second:
        result = second.start().result()
    wall = time.monotonic() - begin
    assert result.summary is not None
    ledger = result.summary.time_ledger
    assert ledger is not None
    assert ledger.num_starts == 2
    assert wall - 2.0 < ledger.wall_seconds < wall, "what is before the first mark and after the last is not seen"
    assert ledger.seconds["restart"] > ledger.seconds["lost"] > 0
    assert ledger.seconds["checkpoint"] > 0
    assert ledger.seconds["evaluation"] > 0
    rows = [json.loads(line) for line in (second.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, steps_in_all + 1))
    productive = sum(row["seconds"] for row in steps)
    assert ledger.seconds["productive"] <= productive, (
        "each step once, without waits for data and the first ones' excess"
    )
    waits = ledger.seconds["data"] + ledger.seconds["compile"]
    assert ledger.seconds["productive"] + waits >= 0.95 * productive
    assert steps[-1]["goodput"] == pytest.approx(ledger.goodput, abs=0.05)
    assert [mark.about["exit_code"] for mark in read_marks(second.folder) if mark.event == "end"] == [1, 0]
    (row,) = list_runs(tmp_path)
    assert (row.state, row.model, row.step, row.loss) == ("finished", "byte-tiny", steps_in_all, steps[-1]["loss"])
    assert row.goodput == pytest.approx(ledger.goodput)
    assert "signal" in row.failure, "what ended the first start"
    os.utime(second.folder / TIME_FILE)  # as if marks had come after the summary
    assert list_runs(tmp_path)[0].goodput == pytest.approx(ledger.goodput, abs=1e-3)
