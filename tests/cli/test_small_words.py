"""What people read around a run: versions, counts, suggested commands; and what is checked before any work.

Tests of `cli/profile.py`.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from command import RUN, mw, write_plan, write_run

from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import MOST_SAMPLES, Plan
from meshwright.core.units import counted, pretty_seconds
from meshwright.runtime.run_record import Progress
from meshwright.techniques.replicate import Replicate


def test_version_is_printed_without_importing_torch() -> None:
    done = mw("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("meshwright 0.")
    assert "torch 2." in done.stdout


def test_counts_are_singular_and_plural() -> None:
    assert [counted(count, "batch") for count in (0, 1, 2)] == ["0 batches", "1 batch", "2 batches"]
    assert Plan(batch=4, microbatch=4).batch_words == "4 samples = 1 replica x 1 microbatch of 4"
    words = Plan(techniques=(Replicate(size=2),), batch=8, microbatch=1).batch_words
    assert words == "8 samples = 2 replicas x 4 microbatches of 1"
    assert pretty_seconds(0.0) == "0 s"


def test_the_last_line_of_progress_says_how_long_it_took(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(0, 2, 100.0)
    progress.step(0, 1.0, 50.0, 1024)
    progress.step(1, 1.0, 50.0, 1024)
    first, last = capsys.readouterr().err.splitlines()
    assert "left " in first
    assert "done in" in last
    assert "left" not in last


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "--model", "gpt2-124m", "--cluster", "8xh100", "--pin", "nothing"),
        ("probe",),
        ("profile", "gpt2-124m"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = mw(*words, "-o", str(tmp_path / "none" / "out.json"))
    assert done.returncode == 2
    assert "cannot be written: the folder" in done.stderr
    assert ('called "nothing"' in done.stderr) == ("nothing" in words)  # all problems at once
    done = mw(*words[:5], "-o", str(tmp_path))
    assert done.returncode == 2
    assert "is a folder" in done.stderr


def test_more_samples_than_a_step_can_have_are_refused() -> None:
    with pytest.raises(MeshwrightError, match="at most"):
        Plan(batch=2**62, microbatch=1)
    Plan(batch=MOST_SAMPLES, microbatch=1)


def test_what_this_machine_cannot_run_is_refused_before_data_is_prepared(tmp_path: Path) -> None:
    run = write_run(tmp_path, RUN.replace('cluster = "laptop"', 'cluster = "2xh100"'))
    done = mw("train", run)
    assert done.returncode == 2
    assert "run.cluster: 2xh100 means 2 GPUs; this machine has none." in done.stderr
    run = write_run(tmp_path / "large", RUN.replace("batch = 4", f"batch = {2**30}"))
    plan = write_plan(tmp_path / "large", {"name": "replicate", "size": 2}, batch=2**30)
    done = mw("train", run, "--plan", plan)
    assert done.returncode == 2
    assert "train.batch: a rank's part of the batch takes" in done.stderr
    assert not (tmp_path / "large" / "run" / "data").exists()


def test_suggested_commands_can_be_pasted(tmp_path: Path) -> None:
    folder = tmp_path / "my runs"
    run = write_run(folder)
    done = mw("train", run, "--set", "train.steps=1", "--set", "run.ranks=1")
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stderr.splitlines() if line.startswith("next: mw check"))
    words = shlex.split(line.removeprefix("next: ").partition("   (")[0])
    expected = ["mw", "check", run, "--set", "train.steps=1", "--set", "run.ranks=1"]
    assert words == [*expected, "--plan", f"{folder}/run/plan.json"]
    verify = next(line for line in done.stderr.splitlines() if "ckpt verify" in line)
    assert shlex.split(verify.partition("   (")[0])[:4] == ["mw", "ckpt", "verify", f"{folder}/run"]
    assert "1 step," in done.stderr


def test_layers_as_an_earlier_release_wrote_them_are_read_and_said_once() -> None:
    words = ("plan", "--model", "byte-3m", "--cluster", "2xh100", "--seq", "128", "--top", "1")
    done = mw(*words, "--pin", "recompute.layers=2")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count('mw plan: layers are written "first 2", no longer 2') == 1
    assert "recompute layers first 2" in done.stdout
    again = mw(*words, "--pin", "recompute.layers=first 2")
    assert "layers are written" not in again.stderr
    assert again.returncode == 0
    wrong = mw(*words, "--pin", "recompute.layers=some", "--pin", "recompute.selective=3-1")
    assert wrong.returncode == 2
    assert 'layers is "some"' in wrong.stderr
    assert 'selective is "3-1"' in wrong.stderr
    assert 'Use "none", "all", "first 3", "last 2"' in wrong.stderr
