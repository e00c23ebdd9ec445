"""What is wrong with a step, and what is done about it."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.core.errors import MeshwrightError, Problem
from meshwright.runtime.loop import NO_LIMITS, StepLimits

WINDOW_STEPS = 64
LEAST_STEPS = 16
MOST_DEVIATIONS = 10.0
LEAST_RISES = (0.25, 2.0)
"""Of loss and gradient norm: a spike is at least so many medians above the median."""


class SpikeRule:
    """The largest loss and gradient norm that are no spike: the median of the last `WINDOW_STEPS` steps that were
    taken, and above it `MOST_DEVIATIONS` standard deviations (1.4826 times the median of absolute deviations) or
    `LEAST_RISES` of the median, whichever is more. Before `LEAST_STEPS` steps nothing is a spike.

    The step just before does not count: where the host reads a step late, it is not known.
    """

    def __init__(self, steps: Iterable[Sequence[Any]] = ()):
        """`steps`: of a checkpoint, (step, loss, gradient norm) each."""
        self.steps = deque([(int(step), float(loss), float(norm)) for step, loss, norm in steps], WINDOW_STEPS + 1)

    def add(self, step: int, loss: float, norm: float) -> None:
        self.steps.append((step, loss, norm))

    def limits(self, step: int) -> StepLimits:
        """For a step that is about to begin."""
        known = [each for each in self.steps if each[0] < step - 1][-WINDOW_STEPS:]
        if len(known) < LEAST_STEPS:
            return NO_LIMITS
        limits = []
        for values, rise in zip(list(zip(*known, strict=True))[1:], LEAST_RISES, strict=True):
            middle = statistics.median(values)
            deviation = 1.4826 * statistics.median(abs(value - middle) for value in values)
            limits.append(middle + max(MOST_DEVIATIONS * deviation, rise * abs(middle)))
        return StepLimits(loss=limits[0], gradient_norm=limits[1])


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """Something that went wrong in a step, and what was done about it: a line of troubles.jsonl."""

    step: int
    """The first is 1."""
    cursor: int
    """Of the step's batch: samples before it."""
    reason: str
    """not finite, spike or mismatch."""
    action: str
    """stop, skip, roll_back or warn."""
    loss: float = math.nan
    gradient_norm: float = math.nan
    what: str = ""

    def as_json(self, samples: Sequence[int]) -> dict[str, Any]:
        """`samples`: numbers of the batch's samples. What is not finite is a text."""
        found = {"loss": self.loss, "gradient_norm": self.gradient_norm}
        numbers = {name: value if math.isfinite(value) else str(value) for name, value in found.items()}
        about = {"cursor": self.cursor, "reason": self.reason, "action": self.action, "what": self.what}
        return {"step": self.step, **about, **numbers, "samples": list(samples)}


class TrainingTrouble(MeshwrightError):
    """A run cannot go on by itself: it stops, or rolls back. All ranks raise it together."""

    def __init__(self, trouble: Trouble, what: str, fix: str, *, is_state_good: bool, moves_on: bool):
        """`is_state_good`: the state in memory is the one before the step. `moves_on`: the batch is to blame, and is
        passed over after a roll back."""
        self.trouble, self.is_state_good, self.moves_on = trouble, is_state_good, moves_on
        super().__init__([Problem(where="train", what=what, fix=fix)], exit_code=1, is_everywhere=True)
