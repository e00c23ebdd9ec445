"""When the last stage is done: the longest path through the actions of all stages.

The actions are those the runtime interprets, so what is simulated is what runs. Sends are asynchronous: a receive
waits until the matching send has left and travelled. The order of events depends only on (schedule, stages,
microbatches) and is kept; one sweep then serves any durations, single numbers or arrays over candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from meshwright.core.work import Num
from meshwright.schedules import SCHEDULES, Action

FULL_EVENTS = 2048
"""Stages x microbatches simulated one by one (at least four microbatches a stage); beyond, the steady state is
extended."""

_MATCH = {"receive_forward": ("send_forward", -1), "receive_backward": ("send_backward", 1)}


class Event(NamedTuple):
    stage: int
    is_backward: bool
    microbatch: int
    waits_for: tuple[int, ...]
    """Events of other stages whose results must have arrived."""


@lru_cache(maxsize=32)
def events_of(schedule: str, num_stages: int, num_microbatches: int) -> tuple[Event, ...]:
    """Every forward and backward of every stage, in an order in which each can run."""
    actions = [SCHEDULES[schedule].actions(s, num_stages, num_microbatches) for s in range(num_stages)]
    position, last = [0] * num_stages, [-1] * num_stages
    received: list[list[int]] = [[] for _ in range(num_stages)]
    sent: dict[tuple[int, str, int], int] = {}
    events: list[Event] = []
    progress = True
    while progress:
        progress = False
        for stage, mine in enumerate(actions):
            while position[stage] < len(mine):
                action = mine[position[stage]]
                if action.kind in _MATCH:
                    source = sent.get(_sender(action, stage))
                    if source is None:
                        break
                    received[stage].append(source)
                elif action.kind in ("forward", "backward"):
                    waits = tuple(received[stage])
                    events.append(Event(stage, action.kind == "backward", action.microbatch, waits))
                    received[stage], last[stage] = [], len(events) - 1
                else:
                    sent[stage, action.kind, action.microbatch] = last[stage]
                position[stage] += 1
                progress = True
    stuck = [s for s in range(num_stages) if position[s] < len(actions[s])]
    assert not stuck, f"{schedule}: stages {stuck} wait for ever ({num_stages} x {num_microbatches})"
    return tuple(events)


def _sender(action: Action, stage: int) -> tuple[int, str, int]:
    kind, offset = _MATCH[action.kind]
    return stage + offset, kind, action.microbatch


def sweep(
    events: Sequence[Event], forward: Sequence[Num], backward: Sequence[Num], send: Num
) -> tuple[list[Num], list[Num]]:
    """End of each event, and of each stage, in seconds from the start of the step."""
    is_array = any(isinstance(x, np.ndarray) for x in (*forward, *backward, send))
    latest: Callable[[Num, Num], Num] = np.maximum if is_array else max
    clock: list[Num] = [0.0] * len(forward)
    ends: list[Num] = []
    for stage, is_backward, _, waits_for in events:
        start = clock[stage]
        for source in waits_for:
            start = latest(start, ends[source] + send)
        end = start + (backward[stage] if is_backward else forward[stage])
        clock[stage] = end
        ends.append(end)
    return ends, clock


def lower_bound(forward: Sequence[Num], backward: Sequence[Num], send: Num, num_microbatches: int) -> Num:
    """No order of actions is faster: each stage runs all its microbatches between the first's way in and the
    last's way out, and one microbatch passes through all."""
    before: Num = 0.0
    bound: Num = 0.0
    for stage, (f, b) in enumerate(zip(forward, backward, strict=True)):
        bound = np.maximum(bound, before + 2 * stage * send + num_microbatches * (f + b))
        before = before + f + b
    return np.maximum(bound, before + 2 * (len(forward) - 1) * send)


def makespan(schedule: str, forward: Sequence[Num], backward: Sequence[Num], send: Num, num_microbatches: int) -> Num:
    """Seconds until the last backward ends. `forward` and `backward` have an entry per stage."""
    num_stages = len(forward)
    if num_stages == 1:
        return num_microbatches * (forward[0] + backward[0])

    def simulate(count: int) -> Num:
        _, finished = sweep(events_of(schedule, num_stages, count), forward, backward, send)
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
    return np.maximum(extended, lower_bound(forward, backward, send, num_microbatches))
