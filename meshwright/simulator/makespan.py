"""When the last stage is done: the longest path through the actions of all stages (`schedules.events`).

The actions are those the runtime interprets, so what is simulated is what runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from meshwright.core.work import Num
from meshwright.schedules import Timetable
from meshwright.schedules.events import halves, sweep

FULL_EVENTS = 2048
"""Stages x microbatches simulated one by one (at least four microbatches a stage); beyond, the steady state is
extended."""


def stage_bound(
    timetable: Timetable,
    *,
    stage: Num,
    num_stages: Num,
    num_microbatches: Num,
    forward: Num,
    backward: Num,
    apart: Num,
    before: tuple[Num, Num],
    after: Num,
) -> Num:
    """No step in which a stage of one chunk takes so long is faster. `backward` is without the weights' half where that
    is `apart`; `before`: what stages before it take, forward and back; `after`: those after it, both ways; sends
    included.

    Before its first backward a stage has run at most as many forwards as it may hold, and one microbatch has been to
    the end and back; after its last forward as many backwards are left, and the last one has to go there and back. Both
    times it idles for the rest. They are two times where not all microbatches are held at once.
    """
    if timetable.overlaps_steps:
        return num_microbatches * (forward + backward + apart)
    held = np.floor(timetable.held(stage, num_stages, num_microbatches))
    waits = np.maximum(0.0, after - (held - 1) * forward)
    drains = np.maximum(0.0, after - (held - 1) * backward)
    way_in, way_out = before
    # Weights' halves may fill what is idle, but for the first wait: nothing has come back yet.
    full = way_in + waits + num_microbatches * (forward + backward + apart)
    busy = way_in + num_microbatches * (forward + backward) + way_out
    if timetable.splits_backward:
        return np.maximum(full, busy + np.maximum(waits, drains))
    return busy + np.where(num_microbatches > held, waits + drains, np.maximum(waits, drains))


def lower_bound(
    timetable: Timetable,
    forward: Sequence[Num],
    backward: Sequence[Num],
    weight: Sequence[Num],
    send: Num,
    num_microbatches: Num,
) -> Num:
    """No order of these actions is faster. Seconds are by span.

    A stage of one chunk runs all its microbatches between the first's way in and the last's way out; weight halves that
    are apart may be done meanwhile. And one microbatch passes through all spans. Where steps overlap there is no way in
    or out, and what passes through takes several steps.
    """
    if timetable.overlaps_steps:
        each = [num_microbatches * (f + b) for f, b in zip(forward, backward, strict=True)]
        return np.maximum.reduce(np.broadcast_arrays(*each))
    places = timetable.places(len(forward) // timetable.chunks)
    busy: list[Num] = [0.0] * places.num_stages
    way_in: Num = 0.0
    way_out: Num = 0.0
    bound: Num = 0.0
    for span, (f, b, w) in enumerate(zip(forward, backward, weight, strict=True)):
        stage, apart = places.stage(span), w if timetable.splits_backward else 0.0
        way_out = 0.0 if span in timetable.cut_spans else way_out
        busy[stage] = busy[stage] + num_microbatches * (f + b)
        bound = np.maximum(bound, busy[stage] if timetable.chunks > 1 else way_in + busy[stage])
        if timetable.chunks == 1:
            bound = np.maximum(bound, way_in + busy[stage] - num_microbatches * apart + way_out)
        hops = span + 1 < len(forward) and places.stage(span) != places.stage(span + 1)
        way_in, way_out = way_in + f + hops * send, way_out + b - apart + hops * send
    return np.maximum(bound, way_in + way_out)


def makespan(
    timetable: Timetable,
    forward: Sequence[Num],
    backward: Sequence[Num],
    weight: Sequence[Num],
    send: Num | list[float],
    num_microbatches: int,
) -> Num:
    """Seconds until the last action ends; from one step to the next, where they overlap.

    `forward`, `backward` (whole) and its `weight` half are by span; `send` may be a list by boundary between spans.
    """
    num_stages = len(forward) // timetable.chunks
    if num_stages == 1:
        return num_microbatches * (sum(forward) + sum(backward))
    if timetable.overlaps_steps:
        return num_microbatches * pace_of_stream(forward, backward, send)
    seconds = halves(forward, backward, weight)

    def simulate(count: int) -> Num:
        _, finished = sweep(timetable.events(num_stages, count), seconds, send)
        return np.maximum.reduce(np.broadcast_arrays(*finished))

    full = max(FULL_EVENTS // num_stages, 4 * num_stages)
    if num_microbatches <= full + num_stages:
        return simulate(num_microbatches)
    # n neighbouring stages that wait for each other repeat themselves every n microbatches, so the pace is taken over
    # a number that all n divide, where there is one; else over many turns of all stages.
    base = full + (num_microbatches - full) % num_stages
    repeats = math.lcm(*range(1, num_stages + 1))
    span = base // 2 // repeats * repeats or base // 2 // num_stages * num_stages
    simulated = simulate(base)
    pace = (simulated - simulate(base - span)) / span
    extended = simulated + pace * (num_microbatches - base)
    least = min(send) if isinstance(send, list) else send
    return np.maximum(extended, lower_bound(timetable, forward, backward, weight, least, num_microbatches))


def pace_of_stream(forward: Sequence[Num], backward: Sequence[Num], send: Num | list[float]) -> Num:
    """Seconds a microbatch where steps overlap: of the slowest circle of stages that wait for each other.

    A circle goes forward through n neighbouring stages and back again, with 2 (n - 1) messages, and ends n microbatches
    after it began: one is held for each stage of it. Every circle without a smaller one in it is of this kind.
    """
    slowest: Num = 0.0
    for first in range(len(forward)):
        circle: Num = 0.0
        for hops, stage in enumerate(range(first, len(forward))):
            circle = circle + (forward[stage] + backward[stage])
            sent = sum(send[first:stage]) if isinstance(send, list) else hops * send
            slowest = np.maximum(slowest, (circle + 2 * sent) / (hops + 1))
    return slowest
