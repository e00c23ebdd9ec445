"""Zero bubble: weight gradients, which nobody waits for, fill the gaps (Qi et al. 2023). I: input half, W: weight half.

stage 0   F0 F1 F2       I0 W0 F3 I1 W1    I2 W2    I3 W3
stage 1      F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
stage 2         F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

A stage puts its weight halves off by as many microbatches as stages come before it (H1: what 1F1B's first stage holds,
everywhere), or by twice as many with a way in twice as long (H2: twice the memory, no gap but the way in).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwright.schedules.actions import Action, Actions
from meshwright.schedules.chunk_placement import Places


def h1(places: Places, num_microbatches: int) -> tuple[Actions, ...]:
    p = places.num_stages
    return tuple(_order(p - stage, stage, num_microbatches) for stage in range(p))


def h2(places: Places, num_microbatches: int) -> tuple[Actions, ...]:
    p = places.num_stages
    return tuple(_order(2 * (p - stage) - 1, 2 * stage, num_microbatches) for stage in range(p))


def _order(warmup: int, lag: int, num_microbatches: int) -> Actions:
    warmup = min(warmup, num_microbatches)
    actions = [Action("forward", i) for i in range(warmup)]
    for i in range(num_microbatches):
        actions.append(Action("backward_input", i))
        if i >= lag:
            actions.append(Action("backward_weight", i - lag))
        if warmup + i < num_microbatches:
            actions.append(Action("forward", warmup + i))
    actions += [Action("backward_weight", i) for i in range(max(0, num_microbatches - lag), num_microbatches)]
    return tuple(actions)


def held_h1(stage: Any, num_stages: Any, num_microbatches: Any, chunks: int) -> Any:
    return np.minimum(num_stages, num_microbatches)


def held_h2(stage: Any, num_stages: Any, num_microbatches: Any, chunks: int) -> Any:
    return np.minimum(2 * num_stages - 1, num_microbatches)
