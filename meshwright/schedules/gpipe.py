"""GPipe: all microbatches forward, then all backward. With several chunks: looped, breadth first.

stage 0   F0 F1 F2 F3             B0 B1 B2 B3
stage 1      F0 F1 F2 F3       B0 B1 B2 B3
stage 2         F0 F1 F2 F3 B0 B1 B2 B3
"""

from __future__ import annotations

from typing import Any

from meshwright.schedules.actions import Action, Actions
from meshwright.schedules.chunk_placement import Places


def gpipe(places: Places, num_microbatches: int) -> tuple[Actions, ...]:
    backward = [
        Action("backward", i, chunk) for chunk in reversed(range(places.chunks)) for i in range(num_microbatches)
    ]
    return tuple((*forward, *backward) for forward in forward_only(places, num_microbatches))


def forward_only(places: Places, num_microbatches: int) -> tuple[Actions, ...]:
    """Evaluation: the forward half."""
    forward = tuple(Action("forward", i, chunk) for chunk in range(places.chunks) for i in range(num_microbatches))
    return (forward,) * places.num_stages


def held(stage: Any, num_stages: Any, num_microbatches: Any, chunks: int) -> Any:
    return num_microbatches
