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
    placed: list[int] = []
    found: list[ScheduleEvent] = []
    for event in events:
        placed.append(len(found))
        found.append(event._replace(waits_for=tuple(placed[source] for source in event.waits_for)))
        if event.kind == "backward" and (event.microbatch + 1) % num_microbatches == 0:
            found.append(ScheduleEvent(event.stage, UPDATE, event.span, event.microbatch, ()))
    return tuple(found)


def _order(stage: int, num_stages: int, num_microbatches: int) -> Actions:
    found: list[Action] = []
    for step in range(NUM_STEPS):
        actions = stream(stage, num_stages, num_microbatches, "next" if step else "first")
        found += [Action(each.kind, each.microbatch + step * num_microbatches) for each in actions]
    left = stream(stage, num_stages, num_microbatches, "flush")
    found += [Action(each.kind, each.microbatch + NUM_STEPS * num_microbatches) for each in left]
    return tuple(found)


def period_of(events: Sequence[ScheduleEvent], ends: Sequence[float]) -> tuple[float, float]:
    """From one update of the first stage, which is the last to make it, to the next."""
    updates = [end for event, end in zip(events, ends, strict=True) if event.kind == UPDATE and event.stage == 0]
    return updates[0], updates[1]
