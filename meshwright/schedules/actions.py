"""The words of a schedule. The runtime interprets them; the simulator reads the same list.

`Places` says which stage holds which span of consecutive layers:

    loop   spans 0 1 2 3 4 5 on 3 stages:   stage 0: 0 3   stage 1: 1 4   stage 2: 2 5
    vee    (two chunks)                     stage 0: 0 5   stage 1: 1 4   stage 2: 2 3

With one chunk a stage's span has its own number. Numbers may be arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal[
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
    "send_forward",
    "receive_forward",
    "send_backward",
    "receive_backward",
    "begin",
    "exchange",
    "update",
]
"""`backward` does both halves: `backward_input` hands gradients back to the stage before, `backward_weight` makes those
of the weights, which nobody waits for. `begin` clears the gradients for a step, `exchange` makes them whole over all
ranks once its backward passes are over, `update` is the optimizer's step."""

COMPUTES = ("forward", "backward", "backward_input", "backward_weight")
WEIGHTS = ("backward", "backward_weight")
"""Actions after which a microbatch has all its gradients in a chunk."""
WHOLE_STEP = ("begin", "exchange", "update")


@dataclass(frozen=True, slots=True)
class Action:
    kind: Kind
    microbatch: int
    """Below 0: one of the step before, counted from its end."""
    chunk: int = 0
    """Which of the stage's chunks of layers."""

    def __str__(self) -> str:
        if self.kind in WHOLE_STEP:
            return self.kind
        return f"{self.kind} {self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


Actions = tuple[Action, ...]


def as_step(computes: Actions, num_microbatches: int) -> Actions:
    """A stage's computations of one step, with its beginning and its end."""
    last = num_microbatches - 1
    return (Action("begin", 0), *computes, Action("exchange", last), Action("update", last))


def last_of_chunks(actions: Actions) -> set[int]:
    """Positions of the actions after which a chunk's gradients of a step are whole: the last before its `exchange`."""
    positions: set[int] = set()
    chunks: dict[bool, set[int]] = {}
    for position in reversed(range(len(actions))):
        action = actions[position]
        is_of_step_before = action.microbatch < 0
        if action.kind == "exchange":
            chunks[is_of_step_before] = set()
        elif action.kind in WEIGHTS and action.chunk not in chunks.get(is_of_step_before, {action.chunk}):
            chunks[is_of_step_before].add(action.chunk)
            positions.add(position)
    return positions


@dataclass(frozen=True, slots=True)
class Places:
    num_stages: Any
    chunks: int = 1
    shape: Literal["loop", "vee"] = "loop"

    @property
    def num_spans(self) -> Any:
        return self.num_stages * self.chunks

    def span(self, stage: Any, chunk: Any) -> Any:
        at = chunk * self.num_stages + stage
        if self.shape == "vee":  # the second chunk goes back
            return at + (chunk == 1) * (self.num_stages - 1 - 2 * stage)
        return at

    def stage(self, span: Any) -> Any:
        if self.shape == "loop":
            return span % self.num_stages
        return span if span < self.num_stages else 2 * self.num_stages - 1 - span

    def chunk(self, span: Any) -> Any:
        return span // self.num_stages


class BlockSpan:
    """A run of blocks, first to last - 1, as the `at`-th span, and whether other stages are its neighbours."""

    def __init__(self, first: Any, last: Any, at: Any, places: Places):
        self.first, self.last = first, last
        self.is_first, self.is_last = (at == 0) * 1, (at == places.num_spans - 1) * 1
        turns = (at == places.num_stages - 1) * (places.shape == "vee")
        turned = (at == places.num_stages) * (places.shape == "vee")
        self.hands_on = (1 - self.is_last) * (1 - turns)
        self.hands_back = (1 - self.is_first) * (1 - turned)
