"""What terminal and picture both ask of timelines: which devices to show, what a span is, how time is spent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshwright.core.timeline import MESSAGES, MemoryPoint, Span, Timeline
from meshwright.core.units import pretty_seconds

MOST_LANES = 32
"""Devices that are shown: the first, the last and some between, where there are more."""

Interval = tuple[float, float]

_KINDS = {"forward": "forward", "backward": "backward", "backward_input": "backward", "backward_weight": "weight"}


def shown_devices(timeline: Timeline, wanted: Sequence[int] = ()) -> tuple[int, ...]:
    """`wanted`: those of another timeline, to lie beside them."""
    devices = timeline.devices
    chosen = tuple(device for device in devices if device in wanted) or devices
    if len(chosen) <= MOST_LANES:
        return chosen
    last = len(chosen) - 1
    return tuple(chosen[round(at * last / (MOST_LANES - 1))] for at in range(MOST_LANES))


def spans_by_device(timeline: Timeline, devices: Iterable[int]) -> dict[int, list[Span]]:
    result: dict[int, list[Span]] = {device: [] for device in devices}
    for span in timeline.spans:
        if span.device in result:
            result[span.device].append(span)
    return result


def kind_of(span: Span) -> str:
    """forward, backward, weight (its second half, apart), update, collective, copy or message."""
    if span.name.startswith(MESSAGES):
        return "message"
    if span.lane != "compute":
        return span.lane
    return _KINDS.get(span.name.split(" ")[0], "update")


def fullest(timeline: Timeline) -> tuple[int, int]:
    """(device with the most memory, its bytes)."""
    most = max(timeline.memory, key=lambda point: point.bytes)
    return most.device, most.bytes


def by_column(timeline: Timeline, device: int, total: float, columns: int) -> list[MemoryPoint | None]:
    """The fullest point of each column of a drawing; none before the first."""
    points = sorted((point for point in timeline.memory if point.device == device), key=lambda point: point.seconds)
    result: list[MemoryPoint | None] = [None] * columns
    for at, point in enumerate(points):
        until = points[at + 1].seconds if at + 1 < len(points) else max(timeline.seconds, point.seconds)
        first, last = (min(columns - 1, int(each / total * columns)) for each in (point.seconds, until))
        for column in range(first, last + 1):
            most = result[column]
            if most is None or point.bytes > most.bytes:
                result[column] = point
    return result


def memory_bytes(timeline: Timeline) -> int:
    """What a device has; 0 where nobody says."""
    text = timeline.environment.get("memory_bytes", "")
    return int(text) if text.isdecimal() else 0


def is_near(limit: int, peak: int) -> bool:
    """A limit many times the peak would leave nothing of the curve."""
    return 0 < limit <= 6 * peak


def said(timeline: Timeline) -> list[str]:
    """What a drawing of it leaves out or stands for."""
    environment, words = timeline.environment, []
    shown, devices = shown_devices(timeline), timeline.devices
    if (each := environment.get("ranks_each", "1")) != "1":
        words.append(f"each row stands for {each} equal ranks of {environment.get('ranks', '?')}")
    if len(shown) < len(devices):
        words.append(f"{len(shown)} of {len(devices)} distinct ranks")
    if not is_whole(timeline):
        words.append(f"microbatches: {environment['microbatches']}")
    if "steps" in environment:
        words.append(f"the first {environment['steps']} of steps that overlap, and their way out")
    return words


def period(timeline: Timeline) -> Interval | None:
    """Where steps overlap: from when to when one of them is."""
    try:
        environment = timeline.environment
        return float(environment["period_start_seconds"]), float(environment["period_end_seconds"])
    except (KeyError, ValueError):
        return None


def step_seconds(timeline: Timeline) -> float:
    marked = period(timeline)
    return timeline.seconds if marked is None else marked[1] - marked[0]


def is_whole(timeline: Timeline) -> bool:
    """Whether it has every microbatch of its step."""
    shown, _, all_of_them = timeline.environment.get("microbatches", "").partition(" of ")
    return shown == all_of_them


def united(intervals: Iterable[Interval]) -> list[Interval]:
    """Without overlaps, in order."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        elif end > start:
            result.append((start, end))
    return result


def without(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """What of `intervals` lies in none of `others`; both united."""
    result: list[Interval] = []
    at = 0
    for start, end in intervals:
        while at < len(others) and others[at][1] <= start:
            at += 1
        turn = at
        while turn < len(others) and others[turn][0] < end:
            if others[turn][0] > start:
                result.append((start, others[turn][0]))
            start = max(start, others[turn][1])
            turn += 1
        if start < end:
            result.append((start, end))
    return result


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


@dataclass(frozen=True, kw_only=True)
class Spent:
    """How a step of one rank is spent, on average over the ranks; adds up to the step."""

    compute: float
    collective: float
    """That compute waits for; of pipelines' messages only the waiting counts, and it is idle time."""
    copy: float = 0.0
    """Between tiers of memory, while nothing is computed or exchanged."""
    idle: float


def spent(timeline: Timeline) -> Spent:
    """Seconds of one step."""
    window = period(timeline) or (0.0, math.inf)
    total, devices = step_seconds(timeline), timeline.devices
    compute = collective = copy = 0.0
    for spans in spans_by_device(timeline, devices).values():
        inside: dict[str, list[Interval]] = {"compute": [], "collective": [], "copy": [], "message": []}
        for span in spans:
            kind = "compute" if span.lane == "compute" else kind_of(span)
            inside[kind].append((max(span.start_seconds, window[0]), min(span.end_seconds, window[1])))
        computing, talking, copying, _ = map(united, inside.values())
        compute += length(computing) / len(devices)
        collective += length(without(talking, computing)) / len(devices)
        copy += length(without(copying, united([*computing, *talking]))) / len(devices)
    idle = max(0.0, total - compute - collective - copy)
    return Spent(compute=compute, collective=collective, copy=copy, idle=idle)


def compared(predicted: Timeline, measured: Timeline) -> str:
    """One line: a step of both, and which part of it differs most."""
    steps = [pretty_seconds(step_seconds(each)) for each in (predicted, measured)]
    line = f"timeline: a step of {steps[0]} predicted, {steps[1]} measured while profiled"
    if not is_whole(predicted):
        return line
    before, after = spent(predicted), spent(measured)
    names = ("compute", "collective", "copy", "idle")
    by_part = {name: getattr(after, name) - getattr(before, name) for name in names}
    worst = max(by_part, key=lambda name: abs(by_part[name]))
    more = "more" if by_part[worst] > 0 else "less"
    was, now = (pretty_seconds(getattr(each, worst)) for each in (before, after))
    subjects = {"collective": "collectives differ", "copy": "copies differ", "idle": "idle time differs"}
    words = subjects.get(worst, "compute differs")
    return f"{line}; {words} most: {pretty_seconds(abs(by_part[worst]))} {more} ({was} -> {now})"
