"""Spans on lanes, and memory over time: one type for what was predicted and what was measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar, Literal

from meshwright.core.codec import Artefact
from meshwright.core.errors import Problem, raise_problems

LANES = ("compute", "collective", "copy")
MESSAGES = ("send_", "receive_")
"""How the names of what stages hand each other begin."""


def _require(**values: float) -> None:
    problems = [Problem(where=name, what=f"is {value}, below zero.") for name, value in values.items() if value < 0]
    raise_problems(problems)


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Named as the loop names its actions: `forward 3`, `backward 3.1` (of chunk 1), `send_forward 3`, `exchange`,
    `update`."""

    device: int
    lane: Literal["compute", "collective", "copy"]
    name: str
    start_seconds: float
    seconds: float
    origin: str = ""
    """The technique that caused it; empty for the model's own work."""
    to_device: int | None = None
    """Of a message: who gets it."""

    def __post_init__(self) -> None:
        if self.device < 0 or self.start_seconds < 0 or self.seconds < 0:
            _require(device=self.device, start_seconds=self.start_seconds, seconds=self.seconds)

    @property
    def end_seconds(self) -> float:
        return self.start_seconds + self.seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPoint:
    device: int
    seconds: float
    bytes: int
    by_category: Mapping[str, int] = field(default_factory=dict)
    """The same bytes by what they are for, where that is known."""

    def __post_init__(self) -> None:
        if self.device < 0 or self.seconds < 0 or self.bytes < 0:
            _require(device=self.device, seconds=self.seconds, bytes=self.bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline(Artefact):
    """What every device does when, over a step: simulated or measured, as spans on lanes, and memory over time."""

    VERSION: ClassVar[int] = 2

    source: Literal["predicted", "measured"]
    plan_fingerprint: str
    spans: tuple[Span, ...]
    memory: tuple[MemoryPoint, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """What else is worth knowing; a predicted one says how many ranks each device stands for (`ranks_each`)."""
    version: int = 2

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(sorted({span.device for span in self.spans}))

    @property
    def seconds(self) -> float:
        if not self.spans:
            return 0.0
        start = min(span.start_seconds for span in self.spans)
        return max(span.end_seconds for span in self.spans) - start

    def to_chrome(self) -> str:
        """The trace-event format that chrome://tracing and ui.perfetto.dev open."""
        return json.dumps({"traceEvents": list(_trace_events(self)), "displayTimeUnit": "ms"})


def in_rows(spans: Iterable[Span]) -> list[list[Span]]:
    """As few rows as it takes for no two spans of one row to overlap, each in order of time."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start_seconds, -span.seconds)):
        slack = 1e-9 * span.end_seconds  # ends and starts are sums in different orders
        for row in rows:
            if row[-1].end_seconds <= span.start_seconds + slack:
                row.append(span)
                break
        else:
            rows.append([span])
    return rows


def last_step(timeline: Timeline) -> Timeline:
    """The last of several recorded steps, from zero on. Each device's steps end with its updates."""
    begins: dict[int, float] = {}
    for device in timeline.devices:
        mine = sorted((s for s in timeline.spans if s.device == device), key=lambda s: s.start_seconds)
        # An update may be several spans, one after the other.
        ends = [span.end_seconds for span, after in pairwise(mine) if span.name == "update" != after.name]
        ends += [span.end_seconds for span in mine[-1:]]
        if len(ends) > 1:
            begins[device] = ends[-2]
    kept = [span for span in timeline.spans if span.start_seconds >= begins.get(span.device, 0.0)]
    start = min((span.start_seconds for span in kept), default=0.0)
    memory = [point for point in timeline.memory if point.seconds >= begins.get(point.device, 0.0)]
    return replace(
        timeline,
        spans=tuple(replace(span, start_seconds=span.start_seconds - start) for span in kept),
        memory=tuple(replace(point, seconds=max(0.0, point.seconds - start)) for point in memory),
    )


def _threads(timeline: Timeline) -> Iterator[tuple[int, int, str, list[Span]]]:
    """(device, number, name, spans); messages have threads of their own, since they overlap with everything."""
    by_lane: dict[tuple[int, str], list[Span]] = {}
    for span in timeline.spans:
        kind = "message" if span.name.startswith(MESSAGES) else span.lane
        by_lane.setdefault((span.device, kind), []).append(span)
    for device in timeline.devices:
        number = 0
        for lane in (*LANES, "message"):
            rows = in_rows(by_lane.get((device, lane), ()))
            for turn, row in enumerate(rows or ([[]] if lane in LANES else [])):
                yield device, number, lane if turn == 0 else f"{lane} {turn + 1}", row
                number += 1


def _trace_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Names of processes (ranks) and threads (lanes), what happens, arrows from each message to what waited for it, and
    memory."""
    each = timeline.environment.get("ranks_each", "1")
    stands_for = "" if each == "1" else f", one of {each} equal ranks"
    for device in timeline.devices:
        label = {"name": f"rank {device} ({timeline.source}{stands_for})"}
        yield {"ph": "M", "name": "process_name", "pid": device, "args": label}
        yield {"ph": "M", "name": "process_sort_index", "pid": device, "args": {"sort_index": device}}
    computes: dict[tuple[int, str], list[Span]] = {}
    sends: list[tuple[Span, int]] = []
    for device, thread, lane, row in _threads(timeline):
        yield {"ph": "M", "name": "thread_name", "pid": device, "tid": thread, "args": {"name": lane}}
        for span in row:
            about = {"name": span.name, "cat": span.origin or "model", "pid": device, "tid": thread}
            yield {"ph": "X", **about, "ts": span.start_seconds * 1e6, "dur": span.seconds * 1e6}
            if lane == "compute":
                computes.setdefault((device, _work_of(span)), []).append(span)
            elif span.to_device is not None:
                sends.append((span, thread))
    for number, (span, thread) in enumerate(sends):
        # Whatever chunk it is for: those before it on this microbatch's way are done.
        result = computes.get((span.to_device or 0, _work_of(span)), [])
        target = next((each for each in result if each.start_seconds >= span.end_seconds * (1 - 1e-9)), None)
        if target is not None:
            arrow = {"name": "message", "cat": "message", "id": number}
            yield {**arrow, "ph": "s", "pid": span.device, "tid": thread, "ts": span.start_seconds * 1e6}
            yield {**arrow, "ph": "f", "bp": "e", "pid": target.device, "tid": 0, "ts": target.start_seconds * 1e6}
    for point in timeline.memory:
        values = dict(point.by_category) or {"bytes": point.bytes}
        yield {"ph": "C", "name": "memory", "pid": point.device, "ts": point.seconds * 1e6, "args": values}


def _work_of(span: Span) -> str:
    """`forward 3` of `forward 3.1` and of `send_forward 3`; both halves of a backward are one."""
    kind, _, number = span.name.removeprefix("send_").partition(" ")
    return f"{kind.split('_')[0]} {number.split('.')[0]}"
