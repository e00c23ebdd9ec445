"""Bytes of each stage's rank over a step, along the events of its schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from meshwright.core.timeline import MemoryPoint
from meshwright.schedules.events import ScheduleEvent
from meshwright.simulator.priced_stages import Stage

Sizes = tuple[int, Mapping[str, int]]
"""Bytes, and by what they are for."""
_KEEPS, _FREES = ("forward",), ("backward", "backward_weight")


def memory_points(
    stages: Sequence[Stage],
    devices: Sequence[int],
    events: Sequence[ScheduleEvent],
    ends: Sequence[float],
    seconds: Mapping[str, Sequence[float]],
) -> Iterator[MemoryPoint]:
    """When a microbatch's work starts (at its fullest) and when it is over."""
    chunks = len(seconds["forward"]) // len(stages)
    held, made = [0.0] * len(stages), [0.0] * len(stages)
    known: dict[tuple[int, float, str, float], Sizes] = {}

    def point(at: int, when: float, kind: str) -> MemoryPoint:
        stage, has = stages[at], round(held[at], 9)
        key = stage.run.start, has, kind, made[at]  # few, however many microbatches there are
        if key not in known:
            memory = stage.memory
            known[key] = _rounded(
                memory.during(has, kind in _KEEPS, made[at]) if kind else memory.between(has, made[at])
            )
        total, sizes = known[key]
        return MemoryPoint(device=devices[at], seconds=float(when), bytes=total, by_category=sizes)

    points = [point(at, 0.0, "") for at in range(len(stages))]
    for event, end in zip(events, ends, strict=True):
        at = event.stage
        is_forward = event.kind in _KEEPS
        held[at] += is_forward / chunks
        points.append(point(at, max(0.0, end - seconds[event.kind][event.span]), event.kind))
        held[at] -= (event.kind in _FREES) / chunks
        made[at] = made[at] if is_forward else 1.0
        points.append(point(at, end, ""))
    yield from sorted(points, key=lambda point: (point.seconds, point.device))


def _rounded(sizes: Mapping[str, float]) -> Sizes:
    found = {name: round(size) for name, size in sorted(sizes.items()) if size >= 1}
    return round(sum(sizes.values())), found
