"""What a run tells of its own steps: how long they took, and what they waited for. No torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from meshwright.core.ledger import LEAST_STEPS
from meshwright.core.timeline import Span, Timeline, last_step
from meshwright.report.timeline_lanes import spent

WARM_UP_STEPS = 3
"""Steps before measurements: allocation, compilation, caches."""
COMPARED_AFTER = 20
"""Steps after which a run is compared with its forecast, while it goes on; and again at its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Of the steps that were measured: neither the first ones nor those that were profiled."""

    step_seconds: float
    """The median, as everywhere here."""
    step_seconds_p10: float
    step_seconds_p90: float
    num_measured: int
    num_left_out: int
    first_step_seconds: float
    """Of the very first step, which is not measured."""
    early_step_seconds: float
    """Of the first third of the measured steps."""
    late_step_seconds: float
    """Of the last third."""
    data_seconds: float
    """That a step of rank 0 waits for its samples."""
    waited_fraction: float
    """Of the time in which rank 0 was ready to run and had no core."""
    parts: Mapping[str, float]
    """Shares of a profiled step: compute, collective (that nothing hides) and idle; empty where none was profiled."""
    peak_bytes: int
    reserved_bytes: int
    num_retries: int
    """How often, since the first measured step, a GPU's allocator ran full and gave back what it had cached."""

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> Facts:
        """As a run's result.json has them, among other things."""
        return cls(**{field.name: result[field.name] for field in fields(cls)})


class StepTally:
    """Steps as they come; costs the loop two numbers a step, and a look at one file twice in a run."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.data_seconds: list[float] = []
        self.num_left_out = 0
        self.first_seconds: float | None = None
        self.start = (0.0, 0.0)

    def add(self, seconds: float, data_seconds: float, *, is_measured: bool) -> None:
        if self.first_seconds is None:
            self.first_seconds = seconds
        if not is_measured:
            self.num_left_out += 1
            return
        if not self.seconds:
            self.start = time.perf_counter() - seconds, _waited_seconds()
        self.seconds.append(seconds)
        self.data_seconds.append(data_seconds)

    @property
    def is_enough(self) -> bool:
        """To be compared before the run has ended."""
        return len(self.seconds) >= LEAST_STEPS and len(self.seconds) + self.num_left_out >= COMPARED_AFTER

    def facts(self, spans: Iterable[Span], memory: Mapping[str, int]) -> Facts | None:
        """So far; None before the first measured step. `memory` has the last three fields."""
        if not self.seconds or self.first_seconds is None:
            return None
        times, third = sorted(self.seconds), -(-len(self.seconds) // 3)
        began, waited = self.start
        passed = time.perf_counter() - began
        return Facts(
            step_seconds=times[len(times) // 2],
            step_seconds_p10=times[len(times) // 10],
            step_seconds_p90=times[-1 - len(times) // 10],
            num_measured=len(times),
            num_left_out=self.num_left_out,
            first_step_seconds=self.first_seconds,
            early_step_seconds=statistics.median(self.seconds[:third]),
            late_step_seconds=statistics.median(self.seconds[-third:]),
            data_seconds=statistics.median(self.data_seconds),
            waited_fraction=min(1.0, max(0.0, _waited_seconds() - waited) / passed),
            parts=parts_of(spans),
            **memory,
        )


def parts_of(spans: Iterable[Span]) -> dict[str, float]:
    """Shares of the last profiled step, on average over the ranks."""
    step = last_step(Timeline(source="measured", plan_fingerprint="", spans=tuple(spans)))
    if not step.seconds:
        return {}
    found = spent(step)
    return {name: getattr(found, name) / step.seconds for name in ("compute", "collective", "idle")}


def _waited_seconds(file: Path = Path("/proc/thread-self/schedstat")) -> float:
    """How long this thread has been ready without a core, as Linux counts it; 0 where it does not."""
    try:
        return int(file.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
