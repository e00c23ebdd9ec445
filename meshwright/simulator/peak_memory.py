"""Work -> bytes of one stage's rank, layer by layer, and at its fullest moment. Numbers may be arrays over candidates.

A microbatch passes through the layers, and each leaves what its backward will need; backward frees it from the end. So
while a layer runs, the microbatch has what was kept up to there:

    peak = always + (microbatches in flight - 1) x what each keeps
         + the largest over layers of (kept up to there + what is there while the layer runs + gradients made so far)

Gradients that are made anew in each step count from the layer's first backward on. Where a stage has several chunks, or
makes weights' gradients later, a whole microbatch is counted at every layer: never too little.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from meshwright.core.cluster import Cluster, Device, TierName
from meshwright.core.work import Num, Resident, Work
from meshwright.schedules import Timetable

NCCL_BYTES = 600_000_000
"""Of a GPU that a communicator takes: 544 to 688 MB on four A100s (nccl#964)."""

_MOMENTS = ("moment", "forward", "backward")
"""Lives of what is there while a layer instance runs."""


def timetable_of(work: Work) -> Timetable:
    """Without stages every schedule that frees a microbatch before the next is the same."""
    return work.facts.schedule or Timetable()


class LayerInstances(NamedTuple):
    """Instances of one layer that are alike: where recomputation takes the first ones, a layer is two places."""

    layer: str
    count: Num
    kept: tuple[Resident, ...]
    """From a microbatch's forward to its backward."""
    running: tuple[Resident, ...]
    """While an instance runs."""
    gradients: tuple[Resident, ...]
    """From the first backward to the end of the step."""

    def gradient_bytes(self, item: Resident) -> Num:
        return np.minimum(item.repeat, self.count) * item.bytes


class PlaceSums:
    """Bytes at one place, summed over what is there; each sum is made when it is first asked for."""

    def __init__(self, place: LayerInstances, row_of: np.ndarray | None):
        self._place, self._row_of = place, row_of

    @cached_property
    def kept(self) -> Num:
        """Of all instances, by one microbatch; `_once`: of one."""
        return _by_candidate(sum(_bytes(item) for item in self._place.kept), self._row_of)

    @cached_property
    def kept_once(self) -> Num:
        return _by_candidate(_sum_once(self._place.kept), self._row_of)

    @cached_property
    def gradients(self) -> Num:
        return _by_candidate(sum(self._place.gradient_bytes(item) for item in self._place.gradients), self._row_of)

    @cached_property
    def gradients_once(self) -> Num:
        return _by_candidate(_sum_once(self._place.gradients), self._row_of)

    @cached_property
    def forward(self) -> Num:
        """Beside that while an instance runs, on the way forward; or back."""
        return _by_candidate(_sum_once(item for item in self._place.running if _is_there(item, True)), self._row_of)

    @cached_property
    def backward(self) -> Num:
        return _by_candidate(_sum_once(item for item in self._place.running if _is_there(item, False)), self._row_of)

    @cached_property
    def is_here(self) -> Num:
        """1 where the stage has any instance of it."""
        return _by_candidate((self._place.count > 0) * 1, self._row_of)


class StageSums(NamedTuple):
    """What every moment is made of."""

    places: tuple[PlaceSums, ...]
    later_gradients: tuple[Num, ...]
    """Of the places after each."""
    kept: Num
    gradients: Num


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    always: Mapping[str, Num]
    """Bytes by category, `non_torch` among them."""
    places: tuple[LayerInstances, ...]
    """In the order of forward."""
    in_flight: Num
    """The most microbatches held at once."""
    num_microbatches: Num
    is_by_place: bool = True
    """False: chunks take turns, so a whole microbatch and all gradients are counted at every place."""
    setup: tuple[Resident, ...] = field(default=(), repr=False)
    """What is always there, tensor by tensor."""
    elsewhere: tuple[Resident, ...] = ()
    """What other tiers than the device's hold."""
    row_of: np.ndarray | None = None
    """Where candidates share the numbers of a row but for `in_flight` and `num_microbatches`: the row of each."""

    def holding(self, in_flight: Num) -> StageMemory:
        """The same with another order of a step's actions."""
        result = replace(self, in_flight=in_flight)
        result.__dict__["_sums"] = self._sums  # what one microbatch keeps, whatever the order
        return result

    def tier_bytes(self) -> dict[TierName, Num]:
        """What a rank has of each other tier that is used, counted as if all of it were there at one moment."""
        result: dict[TierName, Num] = {}
        for item in self.elsewhere:
            size = _once(item) if item.life in _MOMENTS else _bytes(item)
            times = self.in_flight if item.life == "microbatch" else 1
            result[item.tier] = result.get(item.tier, 0) + _by_candidate(size, self.row_of) * times
        return result

    def overflows(self, cluster: Cluster) -> Num:
        """Whether another tier than the device's is too small for it."""
        full: Num = False
        for tier, size in self.tier_bytes().items():
            full = full | (size > cluster.tiers[tier].bytes_each)
        return full

    @cached_property
    def base_bytes(self) -> Num:
        return _by_candidate(sum(self.always.values()), self.row_of)

    @cached_property
    def microbatch_bytes(self) -> Num:
        return _by_candidate(sum(_bytes(item) for place in self.places for item in place.kept), self.row_of)

    def gradient_bytes(self) -> Num:
        """Made anew in each step."""
        return self._sums.gradients

    def peak_bytes(self) -> Num:
        return self._peak_bytes

    @cached_property
    def _peak_bytes(self) -> Num:  # asked several times for each forecast
        largest: Num = 0
        for held, is_forward, gradients in self._fullest_actions():
            for _, _, size in self._moments(held, is_forward, gradients):
                largest = np.maximum(largest, size)
        return np.ceil(self.base_bytes + largest)

    @cached_property
    def late_bytes(self) -> Num:
        """While the last layer instance there is runs: everything kept is there then. Never above the peak."""
        last: Num = 0
        places = self._sums.places
        # Of places that every candidate has, only the last one can be it.
        since = max((at for at, place in enumerate(places) if np.all(place.is_here)), default=0)
        for held, is_forward, gradients in self._fullest_actions():
            here: Num = 0
            for place, _, size in self._moments(held, is_forward, gradients, since=since, turns=(True,)):
                here = np.where(places[place].is_here > 0, size, here)
            last = np.maximum(last, here)
        return self.base_bytes + last

    def allocated_bytes(self) -> Num:
        """At the peak, as torch counts: without what it does not know of."""
        return self.peak_bytes() - self.always["non_torch"]

    def by_category(self) -> dict[str, int]:
        """At the peak, of one candidate (numbers, not arrays)."""
        each = [self.during(*action) for action in self._fullest_actions()]
        fullest = max(each, key=lambda found: sum(found.values()))
        return {category: math.ceil(size) for category, size in sorted(fullest.items()) if size > 0}

    def during(self, held: float, is_forward: bool, gradients: float) -> dict[str, float]:
        """The fullest moment of one action, by category. `held`: microbatches, this one included; `gradients`: 1 where
        an earlier backward of the step has made them."""
        moments = list(self._moments(held, is_forward, gradients))
        if not moments:
            return self.between(held, gradients)
        at, is_last, _ = max(moments, key=lambda each: float(each[2]))
        return self._moment(held, is_forward, gradients, at, float(self.places[at].count) if is_last else 1.0)

    def _moment(self, held: float, is_forward: bool, gradients: float, at: int, turn: float) -> dict[str, float]:
        """While the `turn`-th instance of a place runs, from 1 on in the order of forward."""
        result = defaultdict(float, self.between(held - 1, gradients))
        for index, place in enumerate(self.places):
            for item in place.kept if index <= at or not self.is_by_place else ():
                is_part = index == at and self.is_by_place
                result[item.category] += float(min(item.repeat, turn) * item.bytes if is_part else _bytes(item))
            for item in place.gradients if index >= at and not is_forward and self.is_by_place else ():
                size = place.gradient_bytes(item)
                if index == at:
                    size = min(item.repeat, place.count - turn + 1) * item.bytes
                result[item.category] += float(size * (1 - gradients))
        for item in self.places[at].running:
            if _is_there(item, is_forward):
                result[item.category] += float(_once(item))
        return result

    def course(
        self, held: float, is_forward: bool, gradients: float, *, seconds: Mapping[str, float], frees: float, most: int
    ) -> list[tuple[float, dict[str, float]]]:
        """One action from its start to its end: (share of its time that has passed, bytes by category), at most so many
        moments a place. `seconds`: by layer. `frees`: microbatches that it makes or frees, 1 / chunks; where there are
        chunks or gradients are made in two halves they grow or shrink evenly, beside the layer that needs most."""
        if not self.is_by_place or not self.places:
            shares = [at / most for at in range(most + 1)]
            left = [frees * (share - 1 if is_forward else -share) for share in shares]
            return [
                (share, self.during(held + part, is_forward, gradients))
                for share, part in zip(shares, left, strict=True)
            ]
        here = [(at, place.layer, int(place.count)) for at, place in enumerate(self.places) if place.count > 0]
        counts: dict[str, int] = {}
        for _, layer, count in here:
            counts[layer] = counts.get(layer, 0) + count
        total = sum(seconds.get(layer, 0.0) for layer in counts) or math.inf
        passed, result = 0.0, []
        for at, layer, count in here if is_forward else reversed(here):
            each = seconds.get(layer, 0.0) / total / counts[layer]
            for done in sorted({round(i * (count - 1) / max(most - 1, 1)) for i in range(most)}):
                turn = done + 1 if is_forward else count - done
                result.append((passed + done * each, self._moment(held, is_forward, gradients, at, turn)))
            passed += count * each
        return result

    def between(self, held: float, gradients: float) -> dict[str, float]:
        """While no microbatch runs."""
        result = defaultdict(float, {name: float(size) for name, size in self.always.items()})
        for place in self.places:
            for item in place.kept:
                result[item.category] += float(held * _bytes(item))
            for item in place.gradients:
                result[item.category] += float(place.gradient_bytes(item) * (gradients if self.is_by_place else 1))
        return result

    def _fullest_actions(self) -> tuple[tuple[Num, bool, Num], ...]:
        """(microbatches held, whether forward, gradients) of those that may be. From the second backward on all
        gradients are there; with no more microbatches than are held at once, one fewer is held by then."""
        is_long = (self.num_microbatches > self.in_flight) * 1
        fewer = np.maximum(self.in_flight - (self.num_microbatches > 1), 1)
        return (
            (self.in_flight, True, is_long),
            (self.in_flight, False, is_long),
            (fewer, False, (self.num_microbatches > 1) * 1),
        )

    @cached_property
    def _sums(self) -> StageSums:
        places = tuple(PlaceSums(place, self.row_of) for place in self.places)
        each = [place.gradients for place in places]
        later = tuple(sum(each[at + 1 :]) for at in range(len(each)))
        return StageSums(places, later, sum(place.kept for place in places), sum(each))

    def _moments(
        self, held: Num, is_forward: bool, gradients: Num, *, since: int = 0, turns: Sequence[bool] = (True, False)
    ) -> Iterator[tuple[int, bool, Num]]:
        """While an instance of a place runs: (place, whether its last instance, which backward takes first, or else its
        first, bytes beside those that are always there). `since`: the first place that is asked for."""
        sums = self._sums
        others, earlier = (held - 1) * sums.kept, gradients * sums.gradients
        before: Num = 0
        for at, place in enumerate(sums.places):
            if at >= since:
                runs = (place.forward if is_forward else place.backward) + others
                if not self.is_by_place:
                    yield at, True, place.is_here * (runs + (sums.kept + sums.gradients))
                elif is_forward:
                    yield at, True, place.is_here * (runs + (before + place.kept + earlier))
                else:
                    for is_last in turns:
                        here = before + (place.kept if is_last else place.kept_once)
                        so_far = sums.later_gradients[at] + (place.gradients_once if is_last else place.gradients)
                        size = here + earlier + (1 - gradients) * so_far
                        yield at, is_last, place.is_here * (runs + size)
            before = before + place.kept


def stage_memory(work: Work, device: Device) -> StageMemory:
    timetable = timetable_of(work)
    # A communicator for each axis along which ranks talk, and for neighbours of it among themselves.
    groups = {(task.axis, task.within) for task in work.collectives} if device.kind == "cuda" else set()
    communicators = sum((work.size(axis) > 1) * NCCL_BYTES for axis, _ in groups)
    always: dict[str, Num] = {"non_torch": device.reserved_bytes + communicators}
    by_layer: dict[str, list[Resident]] = {layer.name: [] for layer in work.profile.layers}
    setup, elsewhere = [], []
    for item in work.residents:
        if item.tier != "device":
            elsewhere.append(item)
        elif item.life == "always":
            always[item.category] = always.get(item.category, 0) + _bytes(item)
            setup.append(item)
        else:
            by_layer[item.layer].append(item)
    return StageMemory(
        always=always,
        places=tuple(place for name, items in by_layer.items() for place in _places(name, items)),
        in_flight=timetable.held(work.size("stage"), work.size("num_stages"), work.size("num_microbatches")),
        num_microbatches=work.size("num_microbatches"),
        is_by_place=timetable.chunks == 1 and not timetable.splits_backward and not timetable.overlaps_steps,
        setup=tuple(setup),
        elsewhere=tuple(elsewhere),
    )


def _places(layer: str, items: list[Resident]) -> list[LayerInstances]:
    def place(turn: int) -> LayerInstances:
        kept = tuple(item for item in items if item.life == "microbatch" and item.turn == turn)
        running = tuple(item for item in items if item.life in _MOMENTS and item.turn in (turn, 0))
        gradients = tuple(item for item in items if item.life == "step")
        count: Num = 0
        for item in kept or running or gradients:
            count = np.maximum(count, item.repeat)
        return LayerInstances(layer, count, kept, running, gradients)

    return [place(turn) for turn in sorted({0, *(item.turn for item in items)})]


def _is_there(item: Resident, is_forward: bool) -> bool:
    return item.life == "moment" or (item.life == "forward") == is_forward


def _by_candidate(value: Num, row_of: np.ndarray | None) -> Num:
    return value[row_of] if row_of is not None and isinstance(value, np.ndarray) else value


def _bytes(item: Resident) -> Num:
    return item.repeat * item.bytes


def _once(item: Resident) -> Num:
    """One layer instance runs at a time, however many there are."""
    return item.bytes * (item.repeat > 0)


def _sum_once(items: Iterable[Resident]) -> Num:
    """Sum of `_once`: items of one place mostly come as often as each other."""
    sizes: dict[int, tuple[Num, Num]] = {}
    for item in items:
        _, size = sizes.get(id(item.repeat), (item.repeat, 0))
        sizes[id(item.repeat)] = item.repeat, size + item.bytes
    return sum(size * (repeat > 0) for repeat, size in sizes.values())
