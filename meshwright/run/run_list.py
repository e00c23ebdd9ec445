"""Runs below a folder, each in a line: state, progress, time left, loss, goodput, last failure. No torch.

Only small files and the ends of long ones are read, so that hundreds of runs are listed at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from meshwright.checkpoint.manifest import MANIFEST
from meshwright.checkpoint.step_folders import committed_folders
from meshwright.core.codec import load_artefact
from meshwright.core.errors import MeshwrightError, error_at
from meshwright.core.files import is_locked, json_rows, last_lines
from meshwright.core.time_ledger import TIME_FILE, TimeMark, parse_marks, time_ledger
from meshwright.run.result import SUMMARY, RunSummary

_TAIL_BYTES = 1 << 16
_MOST_LEVELS = 6
"""Of folders below the one that is listed."""


@dataclass(frozen=True, kw_only=True)
class RunRow:
    folder: str
    state: Literal["running", "finished", "stopped", "failed", "crashed", "damaged"]
    """crashed: the process is gone and nobody noted an end."""
    model: str = ""
    step: int = 0
    steps: int = 0
    """0: not known."""
    loss: float | None = None
    seconds_left: float | None = None
    """Of training at the pace of the last steps and the share of time that steps had; None unless it is running."""
    goodput: float | None = None
    failure: str = ""
    """The last one, whatever came after it; for a damaged folder, what is wrong with it."""


def list_runs(folder: Path) -> list[RunRow]:
    """Every run folder below (or at) a folder, by name."""
    try:
        next(os.scandir(folder), None)
    except OSError as error:
        raise error_at(folder, f"cannot be listed: {error.strerror}.", "Name a folder that holds runs.") from None
    return sorted(_below(folder, _MOST_LEVELS), key=lambda row: row.folder)


def _below(folder: Path, levels: int) -> Iterator[RunRow]:
    try:
        with os.scandir(folder) as entries:
            kinds = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries if not entry.is_symlink()}
    except OSError as error:
        yield RunRow(folder=str(folder), state="damaged", failure=f"cannot be listed: {error.strerror}.")
        return
    if TIME_FILE in kinds or ("wishes.json" in kinds and "plan.json" in kinds):
        try:
            yield read_run_row(folder)
        except (OSError, MeshwrightError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            yield RunRow(folder=str(folder), state="damaged", failure=reason)
    elif levels:
        for name in sorted(name for name, is_folder in kinds.items() if is_folder and not name.startswith(".")):
            yield from _below(folder / name, levels - 1)


def read_run_row(folder: Path) -> RunRow:
    marks, summary = parse_marks(last_lines(folder / TIME_FILE, _TAIL_BYTES)), None
    if _changed(folder / SUMMARY) >= _changed(folder / TIME_FILE):
        summary = load_artefact(RunSummary, folder / SUMMARY)
    ledger = None if summary is None else summary.time_ledger
    if ledger is None and _changed(folder / TIME_FILE):
        marks = parse_marks((folder / TIME_FILE).read_bytes())
        if not marks:
            raise error_at(folder / TIME_FILE, "has no line that can be read.")
        ledger = time_ledger(marks)
    rows = [row for row in json_rows(last_lines(folder / "metrics.jsonl", _TAIL_BYTES)) if "loss" in row]
    saved = committed_folders(folder / "checkpoints")
    if saved and not (list(saved.values())[-1] / MANIFEST).is_file():
        raise error_at(list(saved.values())[-1], f"has no {MANIFEST}.")
    about = next((mark.about for mark in reversed(marks) if mark.event == "start"), {})
    steps = int(about.get("steps", summary.steps if summary else 0))
    step = max(int(rows[-1]["step"]) if rows else 0, max(saved, default=0))
    state, failure = _state(folder, marks, is_finished=bool(steps) and max(saved, default=0) >= steps)
    left = None
    if state == "running" and rows and steps and ledger is not None:
        pace = sum(float(row["seconds"]) for row in rows) / len(rows)
        spent = ledger.seconds  # evaluations and saves go on beside steps; restarts are not expected
        trained = spent["productive"] + spent["data"]
        beside = (spent["evaluation"] + spent["checkpoint"]) / trained if trained else 0.0
        left = (steps - step) * pace * (1 + beside)
    return RunRow(
        folder=str(folder),
        state=state,
        model=str(about.get("model", summary.model if summary else "")),
        step=step,
        steps=steps,
        loss=float(rows[-1]["loss"]) if rows else None,
        seconds_left=left,
        goodput=ledger.goodput if ledger is not None and ledger.wall_seconds else None,
        failure=failure,
    )


def _state(
    folder: Path, marks: list[TimeMark], *, is_finished: bool
) -> tuple[Literal["running", "finished", "stopped", "failed", "crashed"], str]:
    """The state, and the last failure there was."""
    ends = [mark.about for mark in marks if mark.event == "end"]
    failures = [str(end.get("cause", "")).splitlines() for end in ends if end.get("exit_code") not in (0, 75)]
    failure = next((lines[0] for lines in reversed(failures) if lines), "")
    if is_locked(folder):
        return "running", failure
    if is_finished:
        return "finished", failure
    if not marks or marks[-1].event != "end":
        return "crashed", failure or "the process is gone; nobody noted why"
    return ("stopped" if ends[-1].get("exit_code") in (0, 75) else "failed"), failure


def _changed(path: Path) -> float:
    """When a file was changed; 0 where there is none."""
    return path.stat().st_mtime if path.is_file() else 0.0
