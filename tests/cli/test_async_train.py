"""`mw train` with overlapping steps: refused before it starts, or resumed bit for bit and told in order."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import pytest
from command import clean_environment, losses, mw, write_plan, write_run
from test_train import tensors

from meshwright.core.codec import field_types
from meshwright.run.run_file import PlanSection

ASYNC = {"name": "pipeline", "size": 2, "schedule": "async"}
ALLOWED = ("--set", f"plan.allow={get_args(field_types(PlanSection)['allow'])[-1]}")
UNCLIPPED = ("--set", "train.optimizer.clip=0.0", *ALLOWED)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps with checkpoints at 4 and 8, evaluations at 3 and 6: flushes of all kinds."""
    folder = tmp_path_factory.mktemp("overlapping")
    changes = (*UNCLIPPED, "--set", "train.evaluate_every=3")
    done = mw("train", write_run(folder), "--plan", write_plan(folder, ASYNC), *changes)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_step_is_told_once_and_in_order(finished: Path) -> None:
    lines = [json.loads(line) for line in (finished / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 9))
    assert [line["step"] for line in lines if "held_out_loss" in line] == [3, 6, 8]


def test_a_resumed_run_is_bit_identical_to_an_uninterrupted_one(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000008")
    changes = (*UNCLIPPED, "--set", "train.evaluate_every=3")
    done = mw("train", write_run(tmp_path), "--plan", write_plan(tmp_path, ASYNC), *changes)
    assert done.returncode == 0, done.stderr
    assert "resuming from step 4" in done.stderr
    assert losses(tmp_path / "run") == losses(finished / "run")
    assert tensors(tmp_path, 8) == tensors(finished, 8)


def test_a_signal_ends_all_steps_saves_and_exits_75(tmp_path: Path) -> None:
    words = ["train", write_run(tmp_path), "--plan", write_plan(tmp_path, ASYNC), *UNCLIPPED]
    words += ["--set", "train.steps=100000", "--set", "train.save_every=0", "--set", "train.save_minutes=0.005"]
    command = [sys.executable, "-m", "meshwright.cli.main", *words]
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=clean_environment())
    metrics = tmp_path / "run" / "metrics.jsonl"
    try:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and not (metrics.exists() and metrics.stat().st_size > 1000):
            assert started.poll() is None, started.communicate()
            time.sleep(0.1)
        started.send_signal(signal.SIGTERM)
        _, errors = started.communicate(timeout=240)
    finally:
        started.kill()
    assert started.returncode == 75, errors
    assert mw("ckpt", "verify", str(tmp_path / "run")).returncode == 0
    saved = json.loads((tmp_path / "run" / "result.json").read_text())["saved_step"]
    told = sorted(losses(tmp_path / "run"))
    assert told == list(range(1, saved + 1)), "every step in the checkpoint was told, and no other"


def test_a_run_that_diverges_ends_with_one_message_and_a_good_checkpoint(tmp_path: Path) -> None:
    wild = ("train.optimizer.lr=1e30", "train.optimizer.warmup=0", "train.save_every=1", "train.optimizer.clip=0.0")
    changes = [word for change in wild for word in ("--set", change)] + [*ALLOWED]
    done = mw("train", write_run(tmp_path), "--plan", write_plan(tmp_path, ASYNC), *changes)
    assert done.returncode == 1, done.stderr
    assert "known only after this step was taken" in done.stderr
    assert "Traceback" not in done.stderr
    assert mw("ckpt", "verify", str(tmp_path / "run")).returncode == 0


def test_clipping_is_refused_before_anything_starts(tmp_path: Path) -> None:
    done = mw("train", write_run(tmp_path), "--plan", write_plan(tmp_path, ASYNC))
    assert done.returncode == 2, done.stderr
    assert "train.optimizer.clip" in done.stderr
    assert "clip = 0" in done.stderr
    assert "and plan.allow is" in done.stderr, "all problems at once"
    assert not (tmp_path / "run" / "data").exists()
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_check_says_that_there_is_no_parity(tmp_path: Path) -> None:
    done = mw("check", write_run(tmp_path), "--plan", write_plan(tmp_path, ASYNC), *UNCLIPPED)
    assert done.returncode == 2, done.stderr
    assert "schedule=async) is approximate" in done.stderr
    assert "exact settings" in done.stderr
