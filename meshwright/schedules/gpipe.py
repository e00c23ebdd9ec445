"""GPipe: all microbatches forward, then all backward.

stage 0   F0 F1 F2 F3             B0 B1 B2 B3
stage 1      F0 F1 F2 F3       B0 B1 B2 B3
stage 2         F0 F1 F2 F3 B0 B1 B2 B3
"""

from __future__ import annotations

from typing import Any

from meshwright.schedules.actions import Action, Actions, with_transfers


def gpipe(stage: int, num_stages: int, num_microbatches: int) -> Actions:
    forward = [Action("forward", i) for i in range(num_microbatches)]
    backward = [Action("backward", i) for i in range(num_microbatches)]
    return with_transfers((*forward, *backward), stage, num_stages)


def forward_only(stage: int, num_stages: int, num_microbatches: int) -> Actions:
    """Evaluation: the forward half."""
    forward = tuple(Action("forward", i) for i in range(num_microbatches))
    return with_transfers(forward, stage, num_stages)


def in_flight(stage: Any, num_stages: Any, num_microbatches: Any) -> Any:
    return num_microbatches
