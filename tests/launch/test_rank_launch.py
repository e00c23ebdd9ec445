"""Real processes: every way a rank can end, and what the one who launched it is told.

Tests of `core/process.py`, `launch/failure.py`, `launch/local_ranks.py`, `launch/rank_job.py`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.core.errors import MeshwrightError
from meshwright.launch.failure import Failure, cause
from meshwright.launch.local_ranks import (
    KEPT_ATTEMPTS,
    STOP_SIGNALS,
    LaunchOutcome,
    Standby,
    StopRequests,
    launch,
    set_logs_aside,
)

HERE = Path(__file__).parent


def run(folder: Path, *behaviours: str, **options: object) -> LaunchOutcome:
    arguments = {"behaviours": behaviours, "pids": str(folder), "waits": options.pop("waits", False)}
    environment = {"PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parents[1]}"}
    options = {"environment": environment, "show_rank_zero": False} | options
    return launch("launched_rank", arguments, len(behaviours), log_folder=folder / "logs", **options)  # type: ignore[arg-type]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_until(condition: Callable[[], object], seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def pids_in(folder: Path) -> list[int]:
    return [int(pid) for file in folder.glob("pid-*") for pid in file.read_text().split()]


def default_signals() -> None:
    """As in a terminal: under `nohup`, or behind `&` in a script, children inherit signals that are ignored."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def start_parent(folder: Path, grace_seconds: float, *behaviours: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "launching_parent", str(folder), str(grace_seconds), *behaviours],
        env={
            **os.environ,
            "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parents[1]}",
            "TMPDIR": str(folder),
            **variables,
        },
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=default_signals,
    )


def test_all_ranks_finish_and_each_has_its_log_and_environment(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    outcome = run(tmp_path, "ok", "show_environment", threads_per_rank=3)
    assert (outcome.exit_code, outcome.failures) == (0, ())
    assert "rank 0 says hello" in (tmp_path / "logs/rank-0.log").read_text()
    assert (tmp_path / "logs/rank-1.log").read_text().split() == [
        "RANK=1",
        "LOCAL_RANK=1",
        "WORLD_SIZE=2",
        "LOCAL_WORLD_SIZE=2",
        "GLOO_SOCKET_IFNAME=lo",
        "OMP_NUM_THREADS=3",
    ]
    assert signal.getsignal(signal.SIGTERM) is before


def test_rank_zero_is_shown_on_our_own_output(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "ok", "ok", show_rank_zero=True).exit_code == 0
    assert capfd.readouterr().out == "rank 0 says hello\n"


def test_message_names_the_rank_that_raised_and_not_its_peers(tmp_path: Path) -> None:
    outcome = run(tmp_path, "raise_lost_peer", "raise_value_error", "raise_lost_peer")
    assert outcome.exit_code == 1
    assert [failure.rank for failure in outcome.failures] == [0, 1, 2]
    assert [failure.is_secondary for failure in outcome.failures] == [True, False, True]
    assert outcome.message().startswith("rank 1 of 3 failed: ValueError: three is not four\n")
    log = tmp_path / "logs/rank-1.log"
    assert str(log) in outcome.message()
    assert "raise ValueError" in log.read_text()
    assert "raise ValueError" in outcome.failures[1].details


def test_a_peer_that_loses_its_connection_is_not_the_cause(tmp_path: Path) -> None:
    outcome = run(tmp_path, "raise_at_a_collective", "raise_at_a_collective")
    assert outcome.message().startswith("rank 1 of 2 failed: ValueError: no more")
    assert [(failure.kind, failure.is_secondary) for failure in outcome.failures] == [
        ("exception", True),
        ("exception", False),
    ]


@pytest.mark.parametrize("behaviour", ["die_at_a_collective", "die_before_a_send"])
def test_a_rank_killed_while_others_wait_for_it_is_the_one_told(tmp_path: Path, behaviour: str) -> None:
    outcome = run(tmp_path, *[behaviour] * 3)
    assert outcome.exit_code == 1
    assert outcome.message().startswith("rank 2 of 3 was killed by SIGKILL (often")
    assert [failure.is_secondary for failure in outcome.failures] == [True, True, False]


def test_a_mendable_error_exits_two_in_its_own_words(tmp_path: Path) -> None:
    outcome = run(tmp_path, "raise_meshwright_error", "raise_meshwright_error")
    assert outcome.exit_code == 2
    assert outcome.message().startswith("rank 0 of 2 failed: tensor: 12 heads cannot be cut 8 ways. Use 1,")


def test_kill_and_crash_and_exit_are_told_apart(tmp_path: Path) -> None:
    killed = run(tmp_path, "kill_itself")
    assert killed.message() == (
        f"rank 0 of 1 was killed by SIGKILL (often the out-of-memory killer)\nSee {tmp_path}/logs/rank-0.log"
    )
    crashed = run(tmp_path, "crash")
    assert "was killed by SIGSEGV (a crash in native code)" in crashed.message()
    assert "Fatal Python error: Segmentation fault" in crashed.failures[0].details
    exited = run(tmp_path, "exit_three")
    assert "rank 0 of 1 ended with exit code 3" in exited.message()
    assert {killed.exit_code, crashed.exit_code, exited.exit_code} == {1}


def test_a_hung_peer_of_a_killed_rank_is_ended_with_its_children(tmp_path: Path) -> None:
    start = time.monotonic()
    outcome = run(tmp_path, "hang", "kill_itself")
    assert time.monotonic() - start < 200, "it was waited for until it ended by itself"
    assert outcome.exit_code == 1
    assert "rank 1 of 2 was killed by SIGKILL (often" in outcome.message()
    assert outcome.failures[0].is_secondary
    assert "rank 1 had failed" in outcome.failures[0].message
    assert wait_until(lambda: not any(map(is_running, pids_in(tmp_path))))


def test_a_module_that_does_not_exist_is_a_failure(tmp_path: Path) -> None:
    outcome = launch("no_such_module", {}, 1, log_folder=tmp_path, show_rank_zero=False)
    assert outcome.exit_code == 1
    assert "No module named no_such_module" in outcome.failures[0].details


def test_no_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match="Use 1 or more"):
        launch("launched_rank", {}, 0, log_folder=tmp_path)


def test_a_child_takes_nothing_from_the_working_folder_but_what_is_found_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent has that folder first on its path, as `python -m` puts it there."""
    for name in ("random", "subprocess", "own_module"):
        (tmp_path / f"{name}.py").write_text("from pathlib import Path\nPath('ran-' + __name__).touch()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(HERE), *sys.path])
    assert run(tmp_path, "show_imports", environment={}).exit_code == 0
    standard, own = (tmp_path / "logs/rank-0.log").read_text().split()
    assert Path(standard).parent == Path(os.__file__).parent
    assert own == str(tmp_path / "own_module.py")
    assert [path.name for path in tmp_path.glob("ran-*")] == ["ran-own_module"]


def test_logs_of_the_last_attempts_are_kept(tmp_path: Path) -> None:
    run(tmp_path, "raise_value_error")
    assert run(tmp_path, "ok").exit_code == 0
    kept = tmp_path / "logs" / "attempt-1"
    assert "three is not four" in (kept / "rank-0.log").read_text()
    assert "three is not four" in (kept / "rank-0.error.json").read_text()
    assert "hello" in (tmp_path / "logs" / "rank-0.log").read_text()
    for _ in range(10):
        (tmp_path / "logs" / "rank-0.log").write_text("it crashed")
        set_logs_aside(tmp_path / "logs")
    (tmp_path / "logs" / "rank-0.log").write_text("")
    set_logs_aside(tmp_path / "logs")
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == sorted(
        f"attempt-{number}" for number in range(12 - KEPT_ATTEMPTS, 12)
    ), "an attempt that says nothing does not push one out that does"


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_stop_signal_reaches_every_rank_once(tmp_path: Path, number: signal.Signals) -> None:
    parent = start_parent(tmp_path, 20, "work_until_stopped", "work_until_stopped")
    assert wait_until(lambda: len(pids_in(tmp_path)) == 2)
    parent.send_signal(number)
    output, _ = parent.communicate(timeout=60)
    assert parent.returncode == 75
    assert output == "stopped as asked. The same command resumes.\n"
    assert len(list(tmp_path.glob("saved-*"))) == 2


def test_a_stop_while_ranks_still_import_ends_them_at_once(tmp_path: Path) -> None:
    parent = start_parent(tmp_path, 600, *["work_until_stopped"] * 2, IMPORTS_UNTIL=str(tmp_path / "never"))
    assert wait_until((tmp_path / "importing").exists)
    parent.send_signal(signal.SIGTERM)
    output, _ = parent.communicate(timeout=60)
    assert (parent.returncode, output) == (75, "stopped as asked. The same command resumes.\n")
    assert not list(tmp_path.glob("saved-*"))


def test_a_rank_with_nothing_to_save_leaves_at_once_even_from_native_code(tmp_path: Path) -> None:
    parent = start_parent(tmp_path, 300, "stick_in_native_code", "stick_in_native_code")
    assert wait_until(lambda: len(pids_in(tmp_path)) == 2)
    parent.send_signal(signal.SIGUSR1)
    output, _ = parent.communicate(timeout=60)
    assert (parent.returncode, output) == (75, "stopped as asked. The same command resumes.\n")


def test_an_ignored_hangup_stays_ignored(tmp_path: Path) -> None:
    code = (
        "import os, signal; from meshwright.launch.local_ranks import stop_signals; signal.signal(1, signal.SIG_IGN)\n"
        "with stop_signals() as stop: os.kill(os.getpid(), 1); print(stop.first_seconds)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HERE.parents[1])
    assert done.stdout == "inf\n", done.stderr


def test_a_rank_deaf_to_the_stop_is_killed_after_grace(tmp_path: Path) -> None:
    parent = start_parent(tmp_path, 0.5, "hang")
    assert wait_until(lambda: len(pids_in(tmp_path)) == 2)
    parent.send_signal(signal.SIGTERM)
    output, _ = parent.communicate(timeout=60)
    assert parent.returncode == 1
    assert "it did not stop within 0.5 s of the stop signal" in output
    assert wait_until(lambda: not any(map(is_running, pids_in(tmp_path))))


def test_a_second_signal_kills_at_once(tmp_path: Path) -> None:
    parent = start_parent(tmp_path, 600, "hang")
    assert wait_until(lambda: len(pids_in(tmp_path)) == 2)
    parent.send_signal(signal.SIGINT)
    time.sleep(0.7)
    assert parent.poll() is None
    parent.send_signal(signal.SIGINT)
    if not wait_until(lambda: parent.poll() is not None, seconds=10):
        parent.send_signal(signal.SIGINT)  # the first two came so late that they counted as one
    output, _ = parent.communicate(timeout=60)
    assert parent.returncode == 1
    assert "a second stop signal" in output


def test_no_rank_outlives_a_killed_parent(tmp_path: Path) -> None:
    parent = start_parent(tmp_path, 20, "work_until_stopped", "work_until_stopped")
    assert wait_until(lambda: len(pids_in(tmp_path)) == 2)
    assert all(map(is_running, pids_in(tmp_path)))
    parent.kill()
    parent.communicate(timeout=60)
    assert wait_until(lambda: not any(map(is_running, pids_in(tmp_path))))
    assert not list(tmp_path.glob("saved-*"))
    assert not list(tmp_path.glob("meshwright-*")), "that is TMPDIR"


def test_a_rank_that_still_imports_dies_with_its_parent(tmp_path: Path) -> None:
    parent = start_parent(tmp_path, 60, "work_until_stopped", IMPORTS_UNTIL=str(tmp_path / "never"))
    assert wait_until((tmp_path / "importing").exists)
    parent.kill()
    parent.communicate(timeout=60)
    assert wait_until(lambda: not is_running(int((tmp_path / "importing").read_text())))


def test_a_rank_whose_parent_died_before_it_could_ask_ends_itself(tmp_path: Path) -> None:
    code = "from meshwright.core.process import die_with_process; print('here', flush=True); die_with_process(1 << 30)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HERE.parents[1])
    assert (done.returncode, done.stdout, done.stderr) == (1, "here\n", "")


def test_the_cause_is_the_lowest_primary_failure() -> None:
    def failure(rank: int, is_secondary: bool) -> Failure:
        return Failure(rank=rank, kind="exit", message="", details="", is_secondary=is_secondary)

    assert cause([failure(0, True), failure(2, False), failure(3, False)]).rank == 2
    assert cause([failure(1, True), failure(3, True)]).rank == 1


def test_supervise_never_imports_torch_or_numpy() -> None:
    names = [path.stem for path in (HERE.parents[1] / "meshwright" / "launch").glob("*.py")]
    imports = "; ".join(f"import meshwright.launch.{name}" for name in names)
    code = f"import sys; {imports}; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=HERE.parents[1])
    assert done.stdout == "[]\n"


def test_a_stop_before_the_ranks_start_ends_as_preempted(tmp_path: Path) -> None:
    stop = StopRequests()
    stop.request()
    stop.request(is_urgent=True)
    outcome = launch("no.such.module", {}, 2, log_folder=tmp_path, stop=stop)
    assert outcome.exit_code == 75


@pytest.mark.parametrize("are_alive", [True, False])
def test_a_launch_after_a_failure_uses_the_processes_on_standby_if_all_are_alive(
    are_alive: bool, tmp_path: Path
) -> None:
    def end() -> None:
        wait_until(lambda: len(standby.ranks) == 2)
        (tmp_path / "enough").touch()

    with Standby() as standby:
        thread = threading.Thread(target=end)
        thread.start()
        assert run(tmp_path, "train_and_die", "train_and_die", standby=standby).exit_code == 1
        thread.join()
        waiting = [each.child for each in standby.ranks]
        if not are_alive:
            os.kill(waiting[1].process.pid, signal.SIGKILL)
            assert wait_until(lambda: waiting[1].exit_code is not None)
        assert run(tmp_path, "ok", "ok", standby=standby).exit_code == 0
        assert [each.exit_code for each in waiting] == ([0, 0] if are_alive else [-signal.SIGKILL] * 2)
        for rank in range(2):
            assert f"rank {rank} says hello" in (tmp_path / f"logs/rank-{rank}.log").read_text()
    assert not any(is_running(each.process.pid) for each in waiting)
