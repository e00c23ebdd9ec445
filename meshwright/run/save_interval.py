"""How long a run trains between two checkpoints: as given, or chosen from what one costs and how often runs fail."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Literal

from meshwright.core.time_ledger import TimeMark
from meshwright.core.units import pretty_seconds
from meshwright.simulator.failure_replay import best_interval

MOST_SECONDS = 600.0
"""However reliable the machines are: a run may also end for other reasons than theirs."""
FIRST_SECONDS = 60.0
"""Until the first checkpoint, whose cost nobody knows yet."""
MOST_COST = 0.02
"""Of the time, whatever the failures."""
NODE_MTBF_SECONDS = 1000 * 3600.0
"""Before a run has failed by itself. Llama 3's 2,000 nodes failed every 6,300 hours each; most machines do worse."""


class SaveInterval:
    """When the next checkpoint is due, on this rank's clock."""

    def __init__(self, minutes: float | Literal["auto"]):
        self.minutes = minutes
        self.mtbf_seconds = NODE_MTBF_SECONDS
        self.saved_seconds = time.monotonic()
        self.costs: deque[float] = deque(maxlen=5)
        """Seconds that training has lost to each of the last checkpoints: it waits for them, and steps are slower while
        they are written."""
        self.waits: deque[float] = deque(maxlen=5)
        """Of these, the seconds that it has waited: the least of the cost, also where steps happened to be faster."""
        self.usual: deque[float] = deque(maxlen=64)
        self.said = 0.0

    def expect_failures(self, marks: Sequence[TimeMark], num_nodes: int) -> None:
        """What is known of the machines, and what this run has seen itself (its marks of time.jsonl)."""
        pairs = list(itertools.pairwise(marks))
        seconds = sum(later.seconds_since(mark) for mark, later in pairs if mark.event != "end")
        crashes = sum(mark.event == "end" and mark.about.get("exit_code") not in (0, 75) for mark in marks)
        crashes += sum(later.event == "start" and mark.event in ("resume", "time") for mark, later in pairs)
        self.mtbf_seconds = (NODE_MTBF_SECONDS / num_nodes + seconds) / (1 + crashes)

    def note_step(self, seconds: float, *, is_busy: bool) -> None:
        if not is_busy:
            self.usual.append(seconds)
        elif self.costs and self.usual:
            self.costs[-1] += seconds - self.step_seconds

    def note_save(self, waited_seconds: float) -> None:
        """A checkpoint was begun, or written, and training has waited so long."""
        self.costs.append(waited_seconds)
        self.waits.append(waited_seconds)
        self.saved_seconds = time.monotonic()

    @property
    def step_seconds(self) -> float:
        """Of a usual step; 0 before the first."""
        return statistics.median(self.usual) if self.usual else 0.0

    @property
    def cost_seconds(self) -> float:
        return statistics.median(map(max, self.costs, self.waits)) if self.costs else 0.0

    @property
    def seconds(self) -> float:
        if self.minutes != "auto":
            return 60 * self.minutes
        if not self.costs:
            return FIRST_SECONDS
        best = best_interval(self.cost_seconds, self.mtbf_seconds)
        return max(min(best, MOST_SECONDS), self.cost_seconds / MOST_COST, 1.0)

    @property
    def is_due(self) -> bool:
        return 0 < self.seconds <= time.monotonic() - self.saved_seconds

    def news(self) -> str:
        """What was chosen, where it is new or has changed by a quarter."""
        if self.minutes != "auto" or not self.costs or 0.8 < self.seconds / max(self.said, 1e-9) < 1.25:
            return ""
        self.said = self.seconds
        return (
            f"a checkpoint every {pretty_seconds(self.seconds)} of training: one costs "
            f"{pretty_seconds(self.cost_seconds)}, a failure is expected every {pretty_seconds(self.mtbf_seconds)}"
        )
