"""The words of a schedule. The runtime interprets them; the simulator reads the same list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["forward", "backward", "send_forward", "receive_forward", "send_backward", "receive_backward"]


@dataclass(frozen=True, slots=True)
class Action:
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} {self.microbatch}"


Actions = tuple[Action, ...]


def with_transfers(kinds: Actions, stage: int, num_stages: int) -> Actions:
    """Compute actions of one stage, with the receives before and the sends after that they imply."""
    first, last = stage == 0, stage == num_stages - 1
    actions: list[Action] = []
    for action in kinds:
        if action.kind == "forward":
            if not first:
                actions.append(Action("receive_forward", action.microbatch))
            actions.append(action)
            if not last:
                actions.append(Action("send_forward", action.microbatch))
        else:
            if not last:
                actions.append(Action("receive_backward", action.microbatch))
            actions.append(action)
            if not first:
                actions.append(Action("send_backward", action.microbatch))
    return tuple(actions)
