"""1F1B: a stage starts backward as soon as it can, so it holds at most `num_stages - stage` microbatches.

stage 0   F0 F1 F2          B0 F3    B1    B2    B3
stage 1      F0 F1       B0 F2 B1 F3    B2    B3
stage 2         F0 B0 F1 B1 F2 B2 F3 B3
"""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwright.schedules.actions import Action, Actions, with_transfers


def one_f_one_b(stage: int, num_stages: int, num_microbatches: int) -> Actions:
    warmup = min(num_stages - stage, num_microbatches)
    actions = [Action("forward", i) for i in range(warmup)]
    for i in range(num_microbatches):
        actions.append(Action("backward", i))
        if warmup + i < num_microbatches:
            actions.append(Action("forward", warmup + i))
    return with_transfers(tuple(actions), stage, num_stages)


def in_flight(stage: Any, num_stages: Any, num_microbatches: Any) -> Any:
    return np.minimum(num_stages - stage, num_microbatches)
