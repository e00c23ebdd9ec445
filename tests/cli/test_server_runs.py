"""A run with servers end to end: what is recorded, a stop, a server that dies, and one device that goes on.

Tests of `techniques/parameter_server.py`, `runtime/rank.py`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import clean_environment, losses, mw, write_plan, write_run

SERVER = {"name": "parameter_server", "size": 2, "shards": 2, "mode": "ssp", "staleness": 1}


def descendants(pid: int, module: str) -> list[int]:
    """Processes under one that run a module."""
    found = []
    for each in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, each.read_text().split()):
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            found += [child] if module.encode() in words else []
            found += descendants(child, module)
    return found


@pytest.mark.slow
def test_gaps_and_ages_are_recorded_and_one_device_goes_on(tmp_path: Path) -> None:
    changes = ("train.evaluate_every=3", "train.save_every=2", "plan.allow=approximate", "train.steps=6")
    words = [word for change in changes for word in ("--set", change)]
    done = mw("train", write_run(tmp_path), "--plan", write_plan(tmp_path, SERVER), *words)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sorted(losses(tmp_path / "run")) == [*range(1, 7)]
    steps = [row for row in rows if "loss" in row]
    assert all(row["dropped_gradients"] == 0 and "staleness_mean" in row for row in steps)
    last = steps[-1]
    gaps = {name: count for name, count in last.items() if name.startswith("clock_gap_") and name[-1].isdigit()}
    assert set(gaps) <= {"clock_gap_0", "clock_gap_1"}
    assert 6 <= sum(gaps.values()) <= 12
    assert "mean staleness" in done.stderr
    assert mw("ckpt", "verify", str(tmp_path / "run")).returncode == 0
    more = mw("train", write_run(tmp_path), *words[:-1], "train.steps=8", "--set", "run.ranks=1")
    assert more.returncode == 0, more.stderr
    assert sorted(losses(tmp_path / "run")) == [*range(1, 9)]


@pytest.mark.slow
def test_after_a_server_has_died_the_run_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    changes = ("train.save_every=5", "plan.allow=approximate", "train.steps=400", "run.restarts=1")
    words = [word for change in changes for word in ("--set", change)]
    command = [sys.executable, "-m", "meshwright.cli.main", "train", write_run(tmp_path)]
    command += ["--plan", write_plan(tmp_path, SERVER), *words]
    log = tmp_path / "log"
    with log.open("w") as out, subprocess.Popen(command, stderr=out, stdout=out, env=clean_environment()) as process:
        try:
            end = time.monotonic() + 120
            while not list((tmp_path / "run" / "checkpoints").glob("*5")) and time.monotonic() < end:
                assert process.poll() is None, log.read_text()
                time.sleep(0.05)
            (first, *_) = descendants(process.pid, "meshwright.optimizers.server_process")
            os.kill(first, signal.SIGKILL)
            while "of the server has ended" not in log.read_text() and time.monotonic() < end:
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)  # the run that goes on saves, and stops
            process.wait(60)
        finally:
            process.kill()
    text = log.read_text()
    assert "of the server has ended, with exit code -9" in text
    assert "Going on from the checkpoint of step" in " ".join(text.split())
    assert process.returncode == 75, text
