"""How a measuring process times an op: medians of samples long enough for the clock, ranks in step.."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where and for how long to measure."""

    device: torch.device
    rank: int
    num_devices: int
    section_seconds: float
    isa_limit: str | None = ""
    """What oneDNN had to be limited to for bf16 to run; None where it never runs."""

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def together(self, section: str) -> None:
        """Nobody starts a section before everybody has ended the last one. On a CPU tensor: always gloo."""
        if self.num_devices > 1:
            dist.all_reduce(torch.zeros(1))
        if self.rank == 0:
            print(json.dumps({"progress": section}), flush=True)

    def sample_seconds(self, op: Callable[[], Any], num_calls: int) -> float:
        self.finish()
        start = time.perf_counter()
        for _ in range(num_calls):
            op()
        self.finish()
        return (time.perf_counter() - start) / num_calls

    def median_seconds(
        self, op: Callable[[], Any], budget_seconds: float, between: Callable[[], Any] | None = None
    ) -> float:
        """Samples of at least 5 ms, so that the clock and a GPU's synchronisation do not show.

        `between` runs before each sample, untimed.
        """
        op()
        num_calls = max(1, min(10_000, int(0.005 / max(self.sample_seconds(op, 2), 1e-7))))
        end = time.perf_counter() + budget_seconds
        samples: list[float] = []
        while len(samples) < 3 or (time.perf_counter() < end and len(samples) < 500):
            if between is not None:
                between()
            samples.append(self.sample_seconds(op, num_calls))
        return statistics.median(samples)
