"""Runs whose processes are killed and go on by themselves, and those that are given up."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
from command import RUN, write_plan, write_run

from benchmarks.scorecard import final_state
from meshwright.core.errors import MeshwrightError
from meshwright.core.time_ledger import read_marks, time_ledger
from meshwright.launch.failure import Failure
from meshwright.launch.local_ranks import LaunchOutcome
from meshwright.run.recovery import CRASH_LOOP_EXIT_CODE, Attempt, Remedy, remedy_for
from meshwright.run.run import RestartEvent, Run, SaveEvent, StepEvent

LONGER = RUN.replace("steps = 8", "steps = 48").replace("timeline_steps = 1", "timeline_steps = 0")


def attempt(
    saved_step: int = 5, steps: int = 9, *, copied_step: int = -1, exit_code: int = 1, **about: object
) -> Attempt:
    told = {"rank": 1, "kind": "signal", "message": "killed by SIGKILL", "details": "", "is_secondary": False}
    failure = Failure(**(told | about))  # type: ignore[arg-type]
    failures = (failure,) if exit_code else ()
    outcome = LaunchOutcome(exit_code=exit_code, failures=failures, num_ranks=2, steps=steps)
    return Attempt(outcome=outcome, saved_step=saved_step, copied_step=copied_step)


def test_what_a_restart_may_cure() -> None:
    def action(*attempts: Attempt, restarts: int = 3, is_stopped: bool = False) -> str:
        return remedy_for(attempts, restarts=restarts, is_stopped=is_stopped).action

    assert action(attempt()) == "restart"
    assert action(attempt(steps=0)) == "restart", "it was killed while it started"
    assert action(attempt(kind="exception", message="RuntimeError: it broke")) == "restart"
    assert action(attempt(kind="exception", message="RuntimeError: it broke", steps=0)) == "give up"
    assert action(attempt(), attempt(kind="exception", message="RuntimeError", steps=0)) == "restart"
    assert action(attempt(kind="exception", is_ours=True, exit_code=2)) == "give up"
    assert action(attempt(), restarts=0) == "give up"
    assert action(attempt(), is_stopped=True) == "give up"
    assert action(attempt(exit_code=0)) == "give up"


def test_a_crash_loop_is_given_up_with_its_causes() -> None:
    attempts = [attempt(5), attempt(10), attempt(10), attempt(10, message="killed by SIGSEGV")]
    remedy = remedy_for(attempts, restarts=3, is_stopped=False)
    assert (remedy.action, remedy.pause_seconds) == ("restart", 2.0)
    assert "restart 3 of 3 without a new checkpoint" in remedy.why
    remedy = remedy_for([*attempts, attempt(10)], restarts=3, is_stopped=False)
    assert (remedy.action, remedy.exit_code) == ("give up", CRASH_LOOP_EXIT_CODE)
    assert "rank 1 of 2 was killed by SIGKILL (3 times); rank 1 of 2 was killed by SIGSEGV." in remedy.why
    assert "from the checkpoint of step 10" in remedy.why
    assert remedy_for([*attempts, attempt(15)], restarts=3, is_stopped=False).action == "restart"


def test_copies_in_memory_are_progress_unless_they_are_of_nearly_the_same_step() -> None:
    def remedy(*copied_steps: int) -> Remedy:
        attempts = [attempt(5, copied_step=each) for each in copied_steps]
        return remedy_for(attempts, restarts=2, is_stopped=False)

    assert "Going on from the copy of step 40 in memory (restart 1 of 2" in remedy(40).why
    assert "Going on from the checkpoint of step 5" in remedy(4).why
    assert "restart 1 of 2" in remedy(10, 20, 30, 40).why
    assert "restart 2 of 2" in remedy(10, 39, 40).why
    for creeping in ((40, 40, 40), (38, 39, 40), (36, 38, 40)):
        assert remedy(*creeping).exit_code == CRASH_LOOP_EXIT_CODE


def test_a_run_goes_on_by_itself_after_a_rank_was_killed(tmp_path: Path) -> None:
    whole = write_run(tmp_path / "whole", LONGER)
    plan = write_plan(tmp_path, {"name": "replicate", "size": 2})
    with Run(whole, plan=plan) as reference:
        reference.start().result()
    path = write_run(tmp_path / "killed", LONGER)
    said: list[str] = []
    with Run(path, plan=plan, report=said.append) as run:
        events = []
        for event in run.start().follow():
            events.append(event)
            if (
                isinstance(event, StepEvent)
                and event.step == 9
                and not any(isinstance(e, RestartEvent) for e in events)
            ):
                os.kill(rank_of_run(1), signal.SIGKILL)
        assert run.result().exit_code == 0
    (at,) = (place for place, event in enumerate(events) if isinstance(event, RestartEvent))
    restart = events[at]
    assert isinstance(restart, RestartEvent)
    assert "rank 1 of 2 was killed by SIGKILL" in restart.cause
    assert restart.step % 4 == 0, "checkpoints are written behind training"
    assert restart.step >= 4
    steps = [event.step for event in events[at:] if isinstance(event, StepEvent)]
    assert steps == list(range(restart.step + 1, 49)), "after the restart, every step once and in order"
    assert sum(isinstance(event, SaveEvent) for event in events) >= 5
    assert final_state(run.folder) == final_state(reference.folder)
    assert any("Going on from the checkpoint of step" in line for line in said)
    marks = read_marks(run.folder)
    assert [mark.about["exit_code"] for mark in marks if mark.event == "end"] == [1, 0]
    ledger = time_ledger(marks)
    assert ledger.num_starts == 2
    assert ledger.wall_seconds == pytest.approx(marks[-1].seconds_since(marks[0]), rel=1e-3, abs=0.01)
    assert ledger.seconds["restart"] > 0


def rank_of_run(rank: int) -> int:
    """The process id of a rank of the run among this process's children, which may also be ranks of a pool."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text(encoding="utf-8").rpartition(")")[2].split()
            about, command = ((path.parent / name).read_bytes() for name in ("environ", "cmdline"))
        except OSError:
            continue
        is_own = int(words[1]) == os.getpid() and b"\0meshwright.runtime.rank\0" in command
        if is_own and f"\0RANK={rank}\0".encode() in about:
            return int(path.parent.name)
    raise AssertionError("there is no such rank")


def test_a_crash_loop_ends_the_run(tmp_path: Path) -> None:
    text = RUN.replace("steps = 8", "steps = 100000").replace("save_every = 4", "").replace("ranks = 2", "restarts = 1")
    path = write_run(tmp_path, text)
    killed = set[int]()
    with Run(path, changes=["run.ranks=1", "train.save_minutes=0"]) as run:
        for event in run.start().follow():
            if isinstance(event, StepEvent) and event.step >= 3:
                with contextlib.suppress(AssertionError):  # it is dead already, and its last steps are still read
                    killed.add(rank := rank_of_run(0))
                    os.kill(rank, signal.SIGKILL)
        with pytest.raises(MeshwrightError) as caught:
            run.result()
    assert len(killed) == 2
    assert caught.value.exit_code == CRASH_LOOP_EXIT_CODE
    assert "This is a crash loop: 2 failures in a row without a new checkpoint" in str(caught.value)
    assert "rank 0 of 1 was killed by SIGKILL (often the out-of-memory killer) (2 times)" in str(caught.value)
    ends = [mark.about["exit_code"] for mark in read_marks(run.folder) if mark.event == "end"]
    assert ends == [1, CRASH_LOOP_EXIT_CODE]
