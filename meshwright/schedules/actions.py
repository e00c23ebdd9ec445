"""The words of a schedule. The runtime interprets them; the simulator reads the same list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
    "send_forward",
    "receive_forward",
    "send_backward",
    "receive_backward",
    "update",
]
"""`backward` does both halves: `backward_input` hands gradients back to the stage before, `backward_weight` makes those
of the weights, which nobody waits for. `update`: the optimizer's step, where it comes between microbatches."""

COMPUTES = ("forward", "backward", "backward_input", "backward_weight")


@dataclass(frozen=True, slots=True)
class Action:
    kind: Kind
    microbatch: int
    """Below 0: one of the step before, counted from its end."""
    chunk: int = 0
    """Which of the stage's chunks of layers."""

    def __str__(self) -> str:
        return f"{self.kind} {self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


Actions = tuple[Action, ...]
