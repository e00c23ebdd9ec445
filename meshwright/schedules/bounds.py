"""Seconds of a step that no way to split the blocks into stages beats, for each schedule (docs/search.md derives them).

Everything is known of one split that is about even: what a microbatch takes in all stages together, the pace of the
slowest stage at least, and how stages share their time between forward and backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from meshwright.schedules.actions import Places


class PipelineTimes(NamedTuple):
    """Times of one pipeline, or of many as arrays, in seconds per microbatch."""

    microbatches: Any
    stages: Any
    through: Any
    """Seconds in all stages together."""
    pace: Any
    """Seconds in the slowest stage, at least."""
    send: Any
    """Seconds of a message between stages."""
    larger: Any
    """Of forward and backward the larger share of a stage's time, at least."""
    least_forward: Any
    """Share of forward in a stage's time, at least."""
    most_forward: Any
    least_way: Any
    """Share of a stage's time without the weights' half, at least."""
    later: Any
    """Seconds of weights' halves that are apart, of all stages."""
    chunk_forward: Any = 0.0
    """Seconds in the smallest chunk of layers where their split is given."""
    chunk_backward: Any = 0.0
    """The same, without the weights' half where that is apart."""


def pace_bound(times: PipelineTimes, places: Places) -> Any:
    """The slowest stage works without a gap: all that holds where steps follow each other without a flush."""
    return times.microbatches * times.pace


def flush_bound(times: PipelineTimes, places: Places) -> Any:
    """Also, one microbatch passes through all stages and back, and the last chunk runs all others between the first's
    way in and the last's way out. Holds for every schedule with a flush."""
    turns = places.chunks - 1 if places.shape == "vee" else 0  # at the turn of a V nothing is sent
    hops = 2 * (times.stages * places.chunks - 1 - turns)
    others = (times.microbatches - 1) * (times.chunk_forward + times.chunk_backward)
    return np.maximum(pace_bound(times, places), times.through - times.later + hops * times.send + others)


def one_f_one_b_bound(times: PipelineTimes, places: Places) -> Any:
    """Also, the slowest stage holds at most as many microbatches as stages come after it, so it waits for the first
    backward and drains after the last forward."""
    return np.maximum(flush_bound(times, places), whole_bound(*times[:4], times.larger))


def whole_bound(microbatches: Any, stages: Any, through: Any, pace: Any, larger: Any) -> Any:
    """Lower bound of 1F1B without messages, for every split whose slowest stage takes `pace` or longer."""
    m = microbatches
    wide = 2 * through + (m - stages - 1) * pace
    crossing = through / np.maximum(stages - m + 1 + (m - 1) * larger, 1e-30)
    narrow = through + (m - 1) * larger * np.maximum(pace, crossing)
    return np.where(m > stages, wide, narrow) * (1 - 1e-9)


def gpipe_bound(times: PipelineTimes, places: Places) -> Any:
    """With one chunk: the first microbatch passes through all stages and back, and the slowest stage, which runs all
    forwards before all backwards, adds as much for each other one."""
    p, m = times.stages, times.microbatches
    return (times.through + (m - 1) * times.pace + 2 * (p - 1) * times.send) * (1 - 1e-9)


def way_in_bound(times: PipelineTimes, places: Places) -> Any:
    """Also, with one chunk no stage begins before the first microbatch has come through those before it, nor ends
    before the last input half has gone back through them. So each later stage has room for a little less."""
    p, m, low, way = times.stages, times.microbatches, times.least_forward, times.least_way
    into = low / (1 - (1 - np.maximum(low, 1e-6) / m) ** p)
    both = way / (1 - (1 - 1 / m) ** p)
    return np.maximum(flush_bound(times, places), np.maximum(into, both) * times.through * (1 - 1e-8))


def first_wait_bound(times: PipelineTimes, places: Places) -> Any:
    """Also, weights' halves cannot fill the wait for a stage's first backward: what comes before the stage, and the
    rest of the way to the end and back. Holds where a stage holds no more microbatches than there are stages."""
    others = times.through - times.pace
    short = (times.stages - 1) * times.pace - others
    low, high, way = times.least_forward, times.most_forward, times.least_way
    rises = way > high
    kink = np.where(rises, low * (others - high * short / np.where(rises, way - high, 1.0)), 0.0)
    wait = np.maximum(0.0, np.minimum(kink, way * others - high * (short + others)))
    return np.maximum(way_in_bound(times, places), times.microbatches * times.pace + wait)


def zbv_bound(times: PipelineTimes, places: Places) -> Any:
    """Also, of four stages or more: from the third last on, a microbatch's way back to the turn of the V and from there
    comes after that of the microbatch before it. That is a circle of six backward passes and four messages."""
    m, p = times.microbatches, times.stages
    circle = (m - 1 - p / 2) * (6 * times.chunk_backward + 4 * times.send)
    whole = times.through - times.later + 2 * (2 * p - 2) * times.send + circle
    return np.maximum(flush_bound(times, places), np.where((p > 3) & (m >= 2 * p), whole, 0.0) * (1 - 1e-9))
