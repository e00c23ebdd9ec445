"""A schedule driven by arrival, as a plugin: a stage takes whichever forward or backward was ready first.

`MESHWRIGHT_PLUGINS=toy_arrival_schedule` makes it `schedule = "arrival"` of `pipeline`: the package does not know it.
The order follows from a table of costs, the same on every stage, so that messages come as they are expected.
"""

from __future__ import annotations

from typing import Any

from meshwright.schedules import Action, Actions, Places, Schedule
from meshwright.schedules.bounds import flush_bound

COSTS = ((1.0, 3.0), (2.5, 1.0), (1.0, 1.5))
"""(forward, backward) of a microbatch, by stage; in turn where there are more stages."""


def arrival(places: Places, num_microbatches: int) -> tuple[Actions, ...]:
    stages = range(places.num_stages)
    last = places.num_stages - 1
    arrived: dict[tuple[str, int, int], float] = {("forward", 0, i): 0.0 for i in range(num_microbatches)}
    """(kind, stage, microbatch) -> when what it needs is there."""
    clock = [0.0 for _ in stages]
    following = {(kind, stage): 0 for kind in ("forward", "backward") for stage in stages}
    orders: list[list[Action]] = [[] for _ in stages]

    def choice(stage: int) -> tuple[float, float, str, int] | None:
        """(start, arrival, kind, stage) of what the stage does next; a backward first where both came at once."""
        ready = []
        for kind in ("backward", "forward"):
            when = arrived.get((kind, stage, following[kind, stage]))
            if when is not None:
                ready.append((max(when, clock[stage]), when, kind, stage))
        return min(ready) if ready else None

    while choices := [chosen for stage in stages if (chosen := choice(stage)) is not None]:
        start, _, kind, stage = min(choices)
        i = following[kind, stage]
        following[kind, stage] += 1
        forward, backward = COSTS[stage % len(COSTS)]
        if kind == "forward":
            clock[stage] = start + forward
            arrived["backward" if stage == last else "forward", min(stage + 1, last), i] = clock[stage]
            orders[stage].append(Action("forward", i))
        else:
            clock[stage] = start + backward
            arrived["backward", stage - 1, i] = clock[stage]
            orders[stage].append(Action("backward", i))
    return tuple(map(tuple, orders))


def held(stage: Any, num_stages: Any, num_microbatches: Any, chunks: int) -> Any:
    """At most all of them: nothing keeps a stage from running ahead."""
    return num_microbatches


SCHEDULES = {"arrival": Schedule(arrival, held, flush_bound)}
