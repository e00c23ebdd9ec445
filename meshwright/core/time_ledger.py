"""Where the wall time of a run goes, over all its starts: categories that sum to the whole. No torch.

`RUN/time.jsonl` holds marks in the order in which they were made; a restart appends to it. Within one boot of a machine
marks are compared by the monotonic clock, so a clock that is set does not matter; otherwise by the time of day.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from meshwright.core.errors import MeshwrightError
from meshwright.core.files import append_line, open_to_append
from meshwright.core.units import pretty_seconds

TIME_FILE = "time.jsonl"
TimeEvent = Literal["start", "resume", "time", "end"]
CATEGORIES: dict[str, str] = {
    "productive": "steps that are part of the result",
    "compile": "what the first steps of a start take longer than later ones",
    "data": "waiting for samples",
    "evaluation": "evaluation on held-out data, sample texts",
    "checkpoint": "what steps wait for saves",
    "restart": "from the start of the command or of new ranks until training begins, the first time included",
    "lost": "steps that were made again, and what a crash interrupted",
    "idle": "between an end and the next start, and whatever else is between steps",
}


@dataclass(frozen=True, kw_only=True)
class TimeMark:
    """A line of time.jsonl."""

    event: TimeEvent
    """The command or new ranks were started; training goes on from `step`; time was spent; the ranks ended."""
    unix_seconds: float
    monotonic_seconds: float
    boot: str = ""
    """Which boot of which machine the monotonic clock belongs to."""
    step: int = 0
    """Steps made so far."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By category, since the last `resume`."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Of a start: model and steps. Of an end: exit_code and cause."""

    def to_row(self) -> dict[str, Any]:
        """As JSON, without what is empty."""
        kept = {name: value for name, value in asdict(self).items() if value not in ({}, "")}
        return kept | ({"seconds": {k: round(v, 4) for k, v in self.seconds.items() if v}} if self.seconds else {})

    def seconds_since(self, earlier: TimeMark) -> float:
        if self.boot == earlier.boot:
            return max(0.0, self.monotonic_seconds - earlier.monotonic_seconds)
        return max(0.0, self.unix_seconds - earlier.unix_seconds)


def mark_now(event: TimeEvent, **about: Any) -> TimeMark:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:13]
    except OSError:
        boot = ""
    return TimeMark(event=event, unix_seconds=time.time(), monotonic_seconds=time.monotonic(), boot=boot, **about)


def note_time(folder: Path, event: Literal["start", "end"], **about: Any) -> None:
    """Append a mark for a run folder; a disk that refuses it does not hurt the run."""
    with contextlib.suppress(OSError, MeshwrightError):
        line = json.dumps(mark_now(event, about=about).to_row()).encode() + b"\n"
        append_line(open_to_append(folder / TIME_FILE, os.O_RDWR), line)


def read_marks(folder: Path) -> list[TimeMark]:
    try:
        return parse_marks((folder / TIME_FILE).read_bytes())
    except OSError:
        return []


def parse_marks(data: bytes) -> list[TimeMark]:
    """Marks in their order; lines that were damaged are left out."""
    marks = []
    for line in data.splitlines():
        with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
            mark = TimeMark(**json.loads(line))
            numbers = (mark.unix_seconds, mark.monotonic_seconds, mark.step, *mark.seconds.values())
            if mark.event in get_args(TimeEvent) and all(map(math.isfinite, numbers)) and isinstance(mark.about, dict):
                marks.append(mark)
    return marks


@dataclass(frozen=True, kw_only=True)
class TimeLedger:
    """Seconds of wall time by category."""

    seconds: Mapping[str, float]
    num_starts: int

    @property
    def wall_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The share of wall time that was productive."""
        return self.seconds["productive"] / (self.wall_seconds or 1.0)

    @property
    def losses(self) -> str:
        """`restart 3.2%, lost 2.0%`: largest first; shares below 0.05 % are left out."""
        shares = {
            name: part / (self.wall_seconds or 1.0) for name, part in self.seconds.items() if name != "productive"
        }
        losses = sorted(((share, name) for name, share in shares.items() if share >= 5e-4), reverse=True)
        return ", ".join(f"{name} {share:.1%}" for share, name in losses) or "no loss"

    def text(self) -> str:
        return f"goodput {self.goodput:.1%} of {pretty_seconds(self.wall_seconds)}: {self.losses}"


def time_ledger(marks: Iterable[TimeMark]) -> TimeLedger:
    """What the marks of all starts add up to."""
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    reached: list[tuple[int, float]] = [(0, 0.0)]
    """Steps and the productive seconds that they took, of what is still part of the result."""
    before: TimeMark | None = None
    spent: Mapping[str, float] = {}
    num_starts = 0
    for mark in marks:
        gap = mark.seconds_since(before) if before is not None else 0.0
        came_from = before.event if before is not None else "end"
        if mark.event == "time":
            added = {name: mark.seconds.get(name, 0.0) - spent.get(name, 0.0) for name in CATEGORIES}
            for name, more in added.items():
                seconds[name] += more
            seconds["idle"] += max(0.0, gap - sum(added.values()))
            spent = mark.seconds
            reached.append((mark.step, seconds["productive"]))
        elif mark.event == "resume":
            seconds["restart" if came_from == "start" else "idle"] += gap
            while reached[-1][0] > mark.step:
                reached.pop()
            seconds["lost"] += seconds["productive"] - reached[-1][1]
            seconds["productive"] = reached[-1][1]
            spent = {}
        elif mark.event == "end" and came_from == "start":
            seconds["restart"] += gap
        elif mark.event == "end":
            seconds["idle" if mark.about.get("exit_code") in (0, 75) or came_from == "end" else "lost"] += gap
        else:  # where nobody noted an end, it is not known when it came
            seconds["idle" if came_from != "start" else "restart"] += gap
        num_starts += mark.event == "start"
        before = mark
    return TimeLedger(seconds=seconds, num_starts=num_starts)
