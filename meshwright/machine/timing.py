"""How a measuring process times an op: medians of samples long enough for the clock, ranks in step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.core.units import MIB

_BURST_SECONDS = 0.004
"""Of a GPU's work between two events."""
_AHEAD_SECONDS = 0.0015
"""The host launches a burst in less: it is then ahead of the GPU, which is still at the memory work before."""
_MOST_CALLS = 300


def _median(sample: Callable[[], float], budget_seconds: float, most: int) -> float:
    """Median of as many samples as fit into the time, at least three."""
    end, samples = time.perf_counter() + budget_seconds, [sample() for _ in range(3)]
    while time.perf_counter() < end and len(samples) < most:
        samples.append(sample())
    return statistics.median(samples)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where and for how long to measure."""

    device: torch.device
    rank: int
    num_devices: int
    section_seconds: float
    sections: Path
    """Where rank 0 names each section that it enters."""
    isa_limit: str | None = ""
    """What oneDNN had to be limited to for bf16 to run; None where it never runs."""

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def is_quick(self) -> bool:
        return self.section_seconds < 1

    def finish(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def together(self, section: str) -> None:
        """Wait until all ranks have ended the previous section. Uses a CPU tensor, so always gloo."""
        if self.num_devices > 1:
            dist.all_reduce(torch.zeros(1))
        if self.rank == 0:
            with self.sections.open("a", encoding="utf-8") as file:
                file.write(f"{section}\n")

    def agreed(self, value: float) -> float:
        """The largest of all ranks'. All must make as many calls of a collective: one less hangs the others."""
        if self.num_devices == 1:
            return value
        largest = torch.tensor(value)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return float(largest)

    def sample_seconds(self, op: Callable[[], Any], num_calls: int) -> float:
        self.finish()
        start = time.perf_counter()
        for _ in range(num_calls):
            op()
        self.finish()
        return (time.perf_counter() - start) / num_calls

    def median_seconds(self, op: Callable[[], Any], budget_seconds: float) -> float:
        """As a program waits for it. Samples of at least 5 ms, so that the clock does not show."""
        op()
        num_calls = max(1, min(10_000, int(0.005 / max(self.sample_seconds(op, 2), 1e-7))))
        return _median(lambda: self.sample_seconds(op, num_calls), budget_seconds, 500)

    def device_seconds(self, op: Callable[[], Any], budget_seconds: float) -> float:
        """The device's own time, the host well ahead of it; on a CPU there is no other than the program's."""
        if not self.on_gpu:
            return self.median_seconds(op, budget_seconds)
        for _ in range(2):
            op()
        self.finish()
        start = time.perf_counter()
        op()
        host_seconds = time.perf_counter() - start
        guess = self._burst_seconds(op, 1)
        ahead = int(_AHEAD_SECONDS / max(host_seconds, 1e-7))
        num_calls = max(1, min(_MOST_CALLS, ahead, int(_BURST_SECONDS / max(guess, 1e-7))))
        return _median(lambda: self._burst_seconds(op, num_calls), budget_seconds, 100)

    def _burst_seconds(self, op: Callable[[], Any], num_calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.memory_work()
        start.record()
        for _ in range(num_calls):
            op()
        end.record()
        self.finish()
        return start.elapsed_time(end) / 1e3 / num_calls

    def memory_work(self) -> None:
        """A few milliseconds of copying between bursts of matmuls, as in a training step.

        A GPU at its power limit lowers its clock: an H200 gives 665 TFLOP/s back to back, 750 so, 765 in one
        burst, and 737 in a real step.
        """
        source, target = self.buffers
        for _ in range(5):
            target.copy_(source)

    @cached_property
    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        source = torch.ones(256 * MIB, device=self.device)
        return source, torch.empty_like(source)
