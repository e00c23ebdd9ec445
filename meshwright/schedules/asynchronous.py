"""No flush (PipeDream-2BW; Narayanan et al. 2021): the next step's microbatches follow the last one's without a gap.

Two stages, three microbatches a step; U: exchange and update, ': of the step after, |: between two calls:

stage 0   F0 F1 B0 F2 B1 | F0' B2  U   F1' B0' F2' B1' | F0" B2' U' ...
stage 1   F0 B0 F1 B1 F2 B2 U | F0' B0' F1' B1' F2' B2' U' | ...

A stage is `num_stages - 1 - stage` backwards behind its forwards, so that many cross from one call into the next, where
their numbers are below 0. A flush does those that are left, and is all there is between the calls before and after it.

The promise, whatever the timing: every microbatch of batch t, on every stage, forward and backward, uses the weights
after t - 1 updates (after f, where the last flush came after f updates and f is more), and

    W[t + 1] = update(W[t], gradient of batch t at its promised weights).

So a stage holds two versions of its weights (`ops/weight_versions.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from meshwright.schedules.actions import Action, Actions

Call = Literal["first", "next", "flush"]
"""The first step after a flush (or of all), a step that follows another, what a flush does."""


def stream(stage: int, num_stages: int, num_microbatches: int, call: Call) -> Actions:
    """What a stage computes. Needs as many microbatches as stages: a step is updated within the next call."""
    assert num_microbatches >= num_stages
    lag = num_stages - 1 - stage
    if call == "flush":
        return tuple(action for i in range(-lag, 0) for action in _backward(i, num_microbatches))
    actions: list[Action] = []
    for i in range(num_microbatches):
        actions.append(Action("forward", i))
        if i >= lag or call == "next":
            actions += _backward(i - lag, num_microbatches)
    return tuple(actions)


def _backward(i: int, num_microbatches: int) -> Iterator[Action]:
    """With the step's beginning before its first backward and its end after the last."""
    if i in (0, -num_microbatches):
        yield Action("begin", i)
    yield Action("backward", i)
    if i in (-1, num_microbatches - 1):
        yield Action("exchange", i)
        yield Action("update", i)
