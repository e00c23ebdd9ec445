"""Spans on lanes, and memory over time: one type for what was predicted and what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from meshwright.core.codec import read_artefact, to_json

LANES = ("compute", "collective", "copy")


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    device: int
    lane: Literal["compute", "collective", "copy"]
    name: str
    start_seconds: float
    seconds: float
    origin: str = ""
    """The technique that caused it; empty for the model's own work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPoint:
    device: int
    seconds: float
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    VERSION: ClassVar[int] = 1

    source: Literal["predicted", "measured"]
    plan_fingerprint: str
    spans: tuple[Span, ...]
    memory: tuple[MemoryPoint, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    version: int = 1

    @property
    def seconds(self) -> float:
        if not self.spans:
            return 0.0
        start = min(span.start_seconds for span in self.spans)
        return max(span.start_seconds + span.seconds for span in self.spans) - start

    def busy_fraction(self, device: int, lane: str = "compute") -> float:
        total = self.seconds
        busy = sum(span.seconds for span in self.spans if span.device == device and span.lane == lane)
        return busy / total if total else 0.0

    def to_json(self) -> str:
        return to_json(self)

    @classmethod
    def from_json(cls, text: str, source: str = "timeline") -> Timeline:
        return read_artefact(cls, text, source)

    def to_chrome(self) -> str:
        """The trace-event format that chrome://tracing and ui.perfetto.dev open."""
        events: list[dict[str, Any]] = []
        for device in sorted({span.device for span in self.spans}):
            label = {"name": f"rank {device} ({self.source})"}
            events.append({"ph": "M", "name": "process_name", "pid": device, "args": label})
            for row, lane in enumerate(LANES):
                label = {"name": lane}
                events.append({"ph": "M", "name": "thread_name", "pid": device, "tid": row, "args": label})
        for span in self.spans:
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": span.origin or "model",
                    "pid": span.device,
                    "tid": LANES.index(span.lane),
                    "ts": span.start_seconds * 1e6,
                    "dur": span.seconds * 1e6,
                }
            )
        for point in self.memory:
            value = {"bytes": point.bytes}
            ts = point.seconds * 1e6
            events.append({"ph": "C", "name": "memory", "pid": point.device, "ts": ts, "args": value})
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
