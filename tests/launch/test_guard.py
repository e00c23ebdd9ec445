"""The process that starts a killed supervisor again: real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from test_rank_launch import default_signals, is_running, wait_until

ROOT = Path(__file__).parents[2]
COMMAND = """\
import os, signal, sys, time
from pathlib import Path
from meshwright.launch.guard import cause_of_restart, command_pid, guard, tell_guard
folder = Path(sys.argv[1])
if (code := guard()) is not None:
    sys.exit(code)
def on_signal(number, frame):
    sys.exit(75)
signal.signal(signal.SIGUSR1, on_signal)
tell_guard(folder, 2)
with (folder / "starts").open("a") as file:
    print(os.getpid(), command_pid(), cause_of_restart(), sep=",", file=file)
while not (folder / "done").exists():
    time.sleep(0.02)
sys.exit(3)
"""


def start(folder: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", COMMAND, str(folder)]
    return subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True, preexec_fn=default_signals)


def starts(folder: Path) -> list[list[str]]:
    file = folder / "starts"
    return [line.split(",") for line in file.read_text().splitlines()] if file.exists() else []


def test_a_killed_supervisor_is_started_again_until_nothing_new_is_saved(tmp_path: Path) -> None:
    guard = start(tmp_path)
    for number in range(1, 6):
        assert wait_until(lambda number=number: len(starts(tmp_path)) == number)
        if number <= 3:  # what was saved starts the count anew
            (tmp_path / "checkpoints" / f"step-{number:08d}").mkdir(parents=True)
        if number < 5:
            os.kill(int(starts(tmp_path)[-1][0]), signal.SIGKILL)
    assert [cause for _, _, cause in starts(tmp_path)] == [
        "",
        *["the supervising process was killed by SIGKILL"] * 4,
    ]
    assert {int(command) for _, command, _ in starts(tmp_path)} == {guard.pid}
    os.kill(int(starts(tmp_path)[-1][0]), signal.SIGKILL)
    _, errors = guard.communicate(timeout=60)
    assert guard.returncode == 128 + 9
    assert errors.splitlines()[-1].endswith("the same command resumes from the last checkpoint")
    assert len(starts(tmp_path)) == 5


def test_its_exit_code_and_signals_pass_through(tmp_path: Path) -> None:
    guard = start(tmp_path)
    assert wait_until(lambda: starts(tmp_path))
    (tmp_path / "done").touch()
    assert guard.wait(timeout=60) == 3
    (tmp_path / "done").unlink()
    (tmp_path / "starts").unlink()
    guard = start(tmp_path)
    assert wait_until(lambda: starts(tmp_path))
    guard.send_signal(signal.SIGUSR1)
    assert guard.wait(timeout=60) == 75
    assert len(starts(tmp_path)) == 1


def test_it_takes_its_child_along(tmp_path: Path) -> None:
    guard = start(tmp_path)
    assert wait_until(lambda: starts(tmp_path))
    guard.kill()
    guard.communicate(timeout=60)
    assert wait_until(lambda: not is_running(int(starts(tmp_path)[0][0])))


def test_a_child_that_dies_of_a_stop_signal_had_nothing_to_save() -> None:
    code = "import sys, time; from meshwright.launch.guard import guard\nif code := guard(): sys.exit(code)\n"
    words = [sys.executable, "-c", code + "print(flush=True); time.sleep(60)"]
    guard = subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=default_signals
    )
    assert guard.stdout is not None
    guard.stdout.readline()
    guard.send_signal(signal.SIGTERM)
    _, errors = guard.communicate(timeout=60)
    assert guard.returncode == 75
    assert errors == "mw train: stopped, nothing is lost; the same command goes on\n"
