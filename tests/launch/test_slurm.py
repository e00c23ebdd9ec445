"""What Slurm does to a run, without Slurm: its environment, its signals, a grace that is short, a job that comes back.

The real thing is `python -m benchmarks.slurm_requeue`. Tests of `launch/environment.py`, `launch/rank_job.py`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from command import RUN, clean_environment, losses, mw, write_plan, write_run
from test_rank_launch import pids_in, start_parent, wait_until

from meshwright.core.errors import MeshwrightError
from meshwright.launch.environment import how_to_go_on, restarts_so_far
from meshwright.run.prepare import open_folder

ROOT = Path(__file__).parents[2]
REPLICATE = {"name": "replicate", "size": 2}
SLOW_DISK = """\
import os, time
_fsync = os.fsync
def fsync(file):
    time.sleep(2.0 if "/checkpoints" in os.readlink(f"/proc/self/fd/{file}") else 0.0)
    _fsync(file)
os.fsync = fsync
"""


def test_a_job_that_was_started_again_knows_it_and_how_to_go_on() -> None:
    assert restarts_so_far({"SLURM_RESTART_COUNT": "2", "TORCHELASTIC_RESTART_COUNT": "0"}) == 2
    assert restarts_so_far({"SLURM_RESTART_COUNT": "twice"}) == restarts_so_far({}) == 0
    assert "scontrol requeue 4711" in how_to_go_on({"SLURM_JOB_ID": "4711", "TORCHELASTIC_RUN_ID": "none"})
    assert "torchrun calls this a failure (exit code 75)" in how_to_go_on({"TORCHELASTIC_RUN_ID": "none"})
    assert how_to_go_on({}) == "the same command goes on"


def test_of_two_schedulers_the_second_is_refused_or_waits_and_names_the_owner(tmp_path: Path) -> None:
    first, said = open_folder(tmp_path), list[str]()
    for wait_seconds in (0.0, 1.3):
        start = time.monotonic()
        with pytest.raises(MeshwrightError, match=f"is in use by process {os.getpid()} on ") as caught:
            open_folder(tmp_path, wait_seconds, said.append)
        assert caught.value.exit_code == 2
        assert wait_seconds <= time.monotonic() - start < wait_seconds + 1
    assert len(said) == 1
    threading.Timer(1.2, first.close).start()
    open_folder(tmp_path, 30, said.append).close()
    assert len(said) == 2
    assert f"is in use by process {os.getpid()} on " in said[1]
    assert "waiting 30" in said[1]


def test_a_rank_leaves_within_its_grace_even_from_native_code(tmp_path: Path) -> None:
    parent = start_parent(tmp_path, 2.0, "save_for_ever", "save_for_ever")
    assert wait_until(lambda: len(pids_in(tmp_path)) == 2)
    start = time.monotonic()
    parent.send_signal(signal.SIGTERM)
    output, _ = parent.communicate(timeout=60)
    assert (parent.returncode, output) == (75, "stopped as asked. The same command resumes.\n")
    assert 0.9 < time.monotonic() - start < 2.0


@pytest.mark.parametrize("how", ["full", "read-only"])
def test_checkpoints_on_a_disk_that_cannot_be_written_are_refused_before_ranks_start(how: str, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    options = {"full": "size=4k", "read-only": "size=4k,ro"}[how]
    script = f'mount -t tmpfs -o {options} none "$0"; [ {how} = read-only ] || echo full > "$0/file"; exec "$@"'
    words = ["train", write_run(tmp_path), "--plan", write_plan(tmp_path, REPLICATE)]
    command = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        script,
        str(folder),
        sys.executable,
        "-m",
        "meshwright.cli.main",
        *words,
    ]
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces of mounts here")
    done = subprocess.run(command, capture_output=True, text=True, env=clean_environment(), timeout=300, check=False)
    assert done.returncode == 2, done.stderr
    reason = {"full": "No space left on device", "read-only": "Read-only file system"}[how]
    assert f"run.folder {folder}: cannot write there: {reason}." in " ".join(done.stderr.split())
    assert not (tmp_path / "run" / "logs").exists()


def start_train(folder: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    train = [sys.executable, "-m", "meshwright.cli.main", "train", str(folder / "run.toml"), *words]
    beside = clean_environment() | variables
    return subprocess.Popen(train, stderr=subprocess.PIPE, text=True, env=beside, cwd=ROOT)


def wait_for_step(folder: Path, step: int, started: subprocess.Popen[str]) -> None:
    metrics = folder / "run" / "metrics.jsonl"
    seen = wait_until(lambda: started.poll() is not None or (metrics.exists() and step in losses(folder / "run")), 240)
    assert seen
    assert started.poll() is None, started.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("is_known", [True, False], ids=["measured", "not yet"])
def test_a_grace_shorter_than_a_save_is_said_at_the_start_and_kept_at_the_end(is_known: bool, tmp_path: Path) -> None:
    """On a disk that needs 2 s for each fsync, of which a checkpoint has several."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_DISK)
    write_run(tmp_path, RUN)
    changes = ["run.grace_seconds=2.4", "train.steps=100000", "train.save_every=0"]
    changes += ['train.on_nan="roll_back"'] if is_known else []  # it saves before the first step
    words = [word for change in [*changes, "run.timeline_steps=0"] for word in ("--set", change)]
    variables = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    started = start_train(tmp_path, "--plan", write_plan(tmp_path, REPLICATE), *words, **variables)
    checkpoints = tmp_path / "run" / "checkpoints"
    wait_for_step(tmp_path, 7, started)
    start = time.monotonic()
    started.send_signal(signal.SIGTERM)
    _, errors = started.communicate(timeout=60)
    assert started.returncode == 75, errors
    assert time.monotonic() - start < 4.5, "the grace, and the end of a command on a busy machine"
    told = " ".join(errors.split())
    assert "warning: a checkpoint takes about" in told, errors
    assert "and a stop has 2.40 s (run.grace_seconds)" in told, errors
    if is_known:
        assert re.search(r"step \d+ is not saved: that takes .* checkpoints kept: 0 ", told), errors
    else:
        assert "the grace (run.grace_seconds) was over" in told, errors
    kept = [each.name for each in checkpoints.iterdir() if "." not in each.name]
    assert kept == (["step-00000000"] if is_known else [])


@pytest.mark.slow
def test_ranks_of_srun_save_at_sigusr1_and_the_requeued_job_goes_on(tmp_path: Path) -> None:
    """Two tasks as `srun --ntasks=2` starts them, signalled as `scancel --signal=USR1` does."""
    write_run(tmp_path, RUN)
    changes = ["train.steps=400", "train.save_every=0", "run.timeline_steps=0"]
    words = ["--plan", write_plan(tmp_path, REPLICATE), *(word for change in changes for word in ("--set", change))]
    step = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": str(4000 + os.getpid() % 1000), "SLURM_STEP_ID": "0"}
    step |= {"SLURM_JOB_NODELIST": "node0", "OMP_NUM_THREADS": "1"}

    def srun(**variables: str) -> list[subprocess.Popen[str]]:
        places = [{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
        return [start_train(tmp_path, *words, **step, **place, **variables) for place in places]

    tasks = srun()
    wait_for_step(tmp_path, 20, tasks[0])
    for task in tasks:
        task.send_signal(signal.SIGUSR1)
    told = [task.communicate(timeout=120)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [75, 75], told
    assert f"and saved; the same command goes on (in a batch job: scontrol requeue {step['SLURM_JOB_ID']})" in " ".join(
        told[0].split()
    )
    made = max(losses(tmp_path / "run"))
    tasks = srun(SLURM_RESTART_COUNT="1")
    told = [task.communicate(timeout=300)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], told
    assert f"resuming from step {made}" in told[0]
    write_run(tmp_path / "whole", RUN)
    assert mw("train", str(tmp_path / "whole" / "run.toml"), *words).returncode == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "whole" / "run")
