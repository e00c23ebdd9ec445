"""Rows of the reliability scorecard about processes that are killed while `mw train` runs: R1."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.scorecard import RowResult, clean_environment, final_state, toy_run, train, train_words
from meshwright.core.time_ledger import read_marks

STEPS, SAVE_EVERY = 60, 5


@dataclass(frozen=True, kw_only=True)
class KilledRun:
    """A toy run of which one process was killed."""

    exit_code: int
    state: object
    """`final_state`, to be compared with that of a run that nobody killed."""
    lost_steps: int
    """That were made again."""
    seconds: float
    """From the kill to the first step of what was started again; 0: nothing was."""
    noticed_seconds: float
    """From the kill until the supervisor saw it; 0: it did not."""


def children(parent: int) -> list[int]:
    def listed() -> Iterator[int]:
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                words = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            except OSError:
                continue
            if int(words[1]) == parent:
                yield int(path.parent.name)

    return sorted(listed())


def killed_run(folder: Path, victim: str, at_step: int, number: signal.Signals = signal.SIGKILL) -> KilledRun:
    """Train, and send a signal to a rank ("rank") or to the supervisor once that step was made."""
    run_file = toy_run(folder, steps=STEPS, save_every=SAVE_EVERY)
    command = subprocess.Popen(train_words(run_file), stderr=subprocess.DEVNULL, env=clean_environment())
    metrics = folder / "run" / "metrics.jsonl"

    def lines() -> int:
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def wait_for(count: int) -> None:
        while lines() < count and command.poll() is None:
            time.sleep(0.005)

    try:
        wait_for(at_step)
        (supervisor,) = children(command.pid)
        target = random.choice(children(supervisor)) if victim == "rank" else supervisor
        num_before, killed_at = lines(), time.monotonic()
        os.kill(target, number)
        code = command.wait(timeout=600)
    finally:
        command.kill()
        command.wait()
    marks = read_marks(folder / "run")
    resumed = [mark for mark in marks if mark.event == "resume" and mark.monotonic_seconds > killed_at]
    ends = [mark for mark in marks if mark.event == "end" and mark.monotonic_seconds > killed_at]
    noticed = float(ends[0].about.get("noticed_monotonic", 0.0)) if ends else 0.0
    return KilledRun(
        exit_code=code,
        state=final_state(folder / "run"),
        lost_steps=num_before - resumed[0].step if resumed else 0,
        seconds=resumed[0].monotonic_seconds - killed_at if resumed else 0.0,
        noticed_seconds=max(0.0, noticed - killed_at) if noticed else 0.0,
    )


def r1(count: int) -> RowResult:
    """Ranks and supervisors, at random steps."""
    rng, failures, worst = random.Random(0), list[str](), 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train(toy_run(folder / "whole", steps=STEPS, save_every=SAVE_EVERY))
        expected = final_state(folder / "whole" / "run")
        for case in range(count):
            victim, at_step = ("rank", "supervisor")[case % 2], rng.randrange(1, STEPS - 10)
            found = killed_run(folder / str(case), victim, at_step)
            worst = max(worst, found.lost_steps)
            if found.exit_code or found.state != expected:
                failures.append(f"case {case}: {victim} killed at step {at_step}: exit code {found.exit_code}")
    figures = f"{count - len(failures)} of {count} bit-identical, at most {worst} steps made again (saved every 5)"
    is_right = not failures and worst <= SAVE_EVERY
    return RowResult(passed=is_right, count=count, figures=figures, failures=tuple(failures[:10]))
