"""Work -> bytes of one stage's rank at its fullest moment. Numbers may be arrays over candidates.

peak = what is always there + microbatches in flight x what each keeps + the largest moment + what is reserved
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshwright.core.cluster import Device
from meshwright.core.work import Num, Work
from meshwright.schedules import Timetable


def timetable_of(work: Work) -> Timetable:
    """Without stages every schedule that frees a microbatch before the next is the same."""
    return work.facts.get("schedule", Timetable())


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes by category, by how long they live."""

    always: Mapping[str, Num]
    microbatch: Mapping[str, Num]
    """For each microbatch between its forward and its backward."""
    moments: Mapping[str, Mapping[str, Num]]
    """Layer -> category -> bytes while that layer runs; layers take turns."""
    in_flight: Num
    """The most microbatches held at once."""

    def base_bytes(self) -> Num:
        return _total(self.always)

    def microbatch_bytes(self) -> Num:
        return _total(self.microbatch)

    def moment_bytes(self) -> Num:
        largest: Num = 0
        for items in self.moments.values():
            largest = np.maximum(largest, _total(items))
        return largest

    def peak_bytes(self) -> Num:
        return np.ceil(self.base_bytes() + self.in_flight * self.microbatch_bytes() + self.moment_bytes())

    def by_category(self) -> dict[str, int]:
        """At the peak, of one candidate (numbers, not arrays)."""
        moment = max(self.moments.values(), key=_total, default={})
        shown: dict[str, float] = {}
        held = {name: value * self.in_flight for name, value in self.microbatch.items()}
        for items in (self.always, held, moment):
            for category, value in items.items():
                shown[category] = shown.get(category, 0) + float(value)
        return {category: math.ceil(value) for category, value in sorted(shown.items()) if value > 0}


def stage_memory(work: Work, device: Device) -> StageMemory:
    always: dict[str, Num] = {"reserved": device.reserved_bytes}
    microbatch: dict[str, Num] = {}
    moments: dict[str, dict[str, Num]] = {}
    for item in work.residents:
        if item.life == "moment":
            # One layer instance runs at a time, however many there are.
            place, amount = moments.setdefault(item.layer, {}), item.bytes * (item.repeat > 0)
        else:
            place, amount = (always if item.life == "always" else microbatch), item.repeat * item.bytes
        place[item.category] = place.get(item.category, 0) + amount
    in_flight = timetable_of(work).held(work.size("stage"), work.size("num_stages"), work.size("num_microbatches"))
    return StageMemory(always=always, microbatch=microbatch, moments=moments, in_flight=in_flight)


def _total(items: Mapping[str, Num]) -> Num:
    total: Num = 0
    for value in items.values():
        total = total + value
    return total
