"""Steps that follow each other without a flush, as events: several of them, with their updates."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from meshwright.schedules.actions import Action, Actions
from meshwright.schedules.asynchronous import stream
from meshwright.schedules.chunk_placement import Places
from meshwright.schedules.events import ScheduleEvent, in_order

NUM_STEPS = 3
"""The first has its way in; from the end of the second to the end of the third is as every later one."""
UPDATE = "update"


@lru_cache(maxsize=16)
def stream_events(num_stages: int, num_microbatches: int) -> tuple[ScheduleEvent, ...]:
    """Microbatches are numbered through all steps; an update comes after its step's last backward."""
    orders = [_order(stage, num_stages, num_microbatches) for stage in range(num_stages)]
    events, _ = in_order(orders, Places(num_stages))
    return tuple(events)


def _order(stage: int, num_stages: int, num_microbatches: int) -> Actions:
    actions: list[Action] = []
    for step in range(NUM_STEPS):
        mine = stream(stage, num_stages, num_microbatches, "next" if step else "first")
        actions += [Action(each.kind, each.microbatch + step * num_microbatches) for each in mine]
    left = stream(stage, num_stages, num_microbatches, "flush")
    actions += [Action(each.kind, each.microbatch + NUM_STEPS * num_microbatches) for each in left]
    return tuple(actions)


def period_of(events: Sequence[ScheduleEvent], ends: Sequence[float]) -> tuple[float, float]:
    """From one update of the first stage, which is the last to make it, to the next."""
    updates = [end for event, end in zip(events, ends, strict=True) if event.kind == UPDATE and event.stage == 0]
    return updates[0], updates[1]
