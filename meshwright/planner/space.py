"""The points of the search, as columns of numbers.

A `Dial` says what may be set on a technique, from its own options and the user's wishes. A `Grid` has one set of axes
and one way to cut stages; its candidates are (axis sizes, microbatch). What is not a number (which other techniques,
which settings) is walked in `bounds.py` with the same columns; the blocks of each stage, the policies they follow and
the order of the axes are solved for in `solve.py`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import numpy as np

from meshwright.core.plan import Plan
from meshwright.core.technique import (
    Axis,
    Choice,
    PerLayer,
    Spans,
    Technique,
    is_within,
    technique_named,
    technique_names,
)
from meshwright.core.work import Num
from meshwright.planner.splits import balanced_stages
from meshwright.planner.wishes import SearchInputs, alone
from meshwright.schedules import Timetable
from meshwright.simulator.peak_memory import stage_memory
from meshwright.simulator.pricing import price_sizes, runs_of, straight
from meshwright.simulator.stage_seconds import routes, stage_cost


@dataclass(frozen=True, kw_only=True, slots=True)
class Dial:
    kind: type[Technique]
    settings: tuple[dict[str, Any], ...]
    """Each way its enumerated fields can be set."""
    sizes: tuple[int, ...] = ()
    """Of its axis."""
    policies: tuple[str, ...] = ()
    """Fields whose blocks are solved for."""
    named: Mapping[str, Any] = field(default_factory=dict)
    """Fields whose blocks the user has named."""
    required: bool = False

    def example(self, settings: dict[str, Any], size: int = 2) -> Technique:
        """The technique so set; numbers that are arrays stand in the sizes instead."""
        return self.kind(**settings, **self.named, **({"size": size} if self.kind.axis else {}))

    @property
    def cuts(self) -> bool:
        """Whether it cuts the model into stages."""
        return bool(self.settings) and self.example(self.settings[0]).blocks_of_stages(1 << 20) is not None


def dials(inputs: SearchInputs, *, rescues: bool) -> tuple[Dial, ...]:
    """One for each technique that may be used, by name; one that may be folded has 1 among its sizes. `rescues`: with
    what is tried where nothing else fits."""
    unused = _measure(inputs, ())
    result = []
    for kind in map(technique_named, technique_names()):
        dial = None if kind.name in inputs.wishes.banned else _dial(kind, inputs, rescues)
        if dial is None or not (dial.settings or dial.required):  # bans may leave no way to set it
            continue
        if kind.check_optimizer(inputs.optimizer):
            continue
        if kind.axis and not dial.required:
            ones = [one for settings in dial.settings if not (one := dial.example(settings, 1)).acts_alone]
            # Stages change what a row of the grid is.
            cuts = any(one.blocks_of_stages(inputs.profile.num_blocks) is not None for one in ones)
            if not cuts and all(_measure(inputs, (one,)) == unused for one in ones):
                dial = replace(dial, sizes=(1, *dial.sizes))
        result.append(dial)
    return tuple(result)


def _dial(kind: type[Technique], inputs: SearchInputs, rescues: bool) -> Dial | None:
    wishes = inputs.wishes
    # What may be tried depends on the samples there are, not on the longest the model takes.
    inputs = replace(inputs, profile=replace(inputs.profile, max_sequence=inputs.sequence))
    pinned = dict(wishes.pinned.get(kind.name, {}))
    required = kind.name in wishes.pinned
    options = kind.options(inputs.profile, inputs.cluster)
    if not options and not required:
        return None

    def allowed(name: str, values: Sequence[Any]) -> list[Any]:
        return [value for value in values if value not in wishes.banned_values.get((kind.name, name), ())]

    sizes: list[int] = []
    if kind.axis:
        size = pinned.pop("size", None)
        least = 1 if kind(**{**pinned, "size": 1}).acts_alone else 2
        if size is not None and size < least:  # an axis of one rank is no axis
            return None
        possible = (1, *next((option.sizes for option in options if isinstance(option, Axis)), ()))
        sizes = [each for each in allowed("size", possible if size is None else (size,)) if each >= least]
    solved = next((o.fields for o in options if isinstance(o, PerLayer)), ())
    named = {policy: pinned.pop(policy) for policy in kind.policies if policy in pinned}
    none = {policy for policy, value in named.items() if value == "none"}
    if none and none >= set(solved or kind.policies):
        return None
    # Nothing may follow what is pinned to none or banned; the rest is solved for, unless blocks are named.
    policies: tuple[str, ...] = ()
    if none == set(named):
        banned = {policy for policy in kind.policies if (kind.name, policy) in wishes.banned_values}
        policies, named = tuple(policy for policy in solved if policy not in none | banned), {}
    # What is only a rescue is tried at once where it is asked for.
    chosen = [(o, rescues or (required and not o.values)) for o in options if isinstance(o, Choice)]
    choices = {o.field: allowed(o.field, o.values + o.rescues * is_rescued) for o, is_rescued in chosen}
    choices |= {name: [value] for name, value in pinned.items()}
    every = (dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values()))
    ways = [way for way in every if is_within(kind.exactness_with(way), wishes.allow)]
    dial = Dial(kind=kind, settings=tuple(ways), sizes=tuple(sizes), policies=policies, named=named, required=required)
    if len(ways) < 2 and not pinned:
        return dial
    # Without the settings that rule each other out, or that what is pinned does: chunks leave the schedules that have
    # them. Where nothing is pinned, the smallest size or the largest will do wherever any does.
    tried = (sizes if pinned else [*sizes[:1], *sizes[1:][-1:]]) or [1]
    kept = [way for way in ways if not all(alone(dial.example(way, size), inputs) for size in tried)]
    return replace(dial, settings=tuple(kept))


def _measure(inputs: SearchInputs, techniques: tuple[Technique, ...]) -> tuple[float, ...]:
    mesh = {technique.axis: 1 for technique in techniques}
    sizes = {"batch": 1, "sequence": inputs.sequence, "microbatch": 1, "num_microbatches": 1, "stage": 0}
    sizes |= {"num_stages": 1, "first_block": 0, "blocks": inputs.profile.num_blocks, **mesh}
    work = price_sizes(inputs.profile, techniques, sizes)
    cost = stage_cost(work, inputs.cluster, routes(inputs.cluster, mesh))
    seconds = [float(cost.seconds(part)) for part in ("forward", "backward", "step")]
    return (*seconds, float(stage_memory(work, inputs.cluster.device).peak_bytes()))


def orders_of(grid: Grid, index: int) -> tuple[tuple[str, ...], ...]:
    """Outermost first, the usual one first; each stands for all that put the same ranks into a node."""
    sizes, cluster = tuple(int(grid.columns[axis][index]) for axis in grid.axis_order), grid.inputs.cluster
    return _orders(grid.axis_order, sizes, cluster.devices_per_node, cluster.num_nodes)


@lru_cache(maxsize=1 << 14)
def _orders(axes: tuple[str, ...], sizes: tuple[int, ...], per_node: int, nodes: int) -> tuple[tuple[str, ...], ...]:
    if nodes == 1:
        return (axes,)
    size_of = dict(zip(axes, sizes, strict=True))
    ones = tuple(axis for axis in axes if size_of[axis] == 1)
    result: dict[tuple[tuple[str, int], ...], tuple[str, ...]] = {}
    for order in itertools.permutations(axis for axis in axes if size_of[axis] > 1):
        stride, inside = 1, []
        for axis in reversed(order):
            share = min(max(per_node // stride, 1), size_of[axis])
            # A group that leaves its node only in part is neither in nor out of it.
            inside.append((axis, share if stride * size_of[axis] > per_node else 0))
            stride *= size_of[axis]
        result.setdefault(tuple(sorted(inside)), (*ones, *order))
    return tuple(result.values())


ALL_DIVISORS_UP_TO = 64
"""Microbatches up to here may be any divisor of a replica's samples; above, powers of two."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    inputs: SearchInputs
    axis_dials: tuple[Dial, ...]
    cutter: tuple[Dial, dict[str, Any]] | None
    """Who cuts stages, and how it is set."""
    alike: tuple[Technique, ...]
    """It with other settings, which are priced alike but for the microbatches that a stage holds."""
    axis_order: tuple[str, ...]
    columns: Mapping[str, np.ndarray]
    """Per candidate: each axis's size, microbatch, num_microbatches, num_stages."""
    cuts: tuple[tuple[Spans, ...], ...]
    """Blocks of each stage, per candidate: where stages may be chosen, about as they should be."""

    @property
    def num_candidates(self) -> int:
        return len(self.cuts)

    @cached_property
    def may_choose(self) -> bool:
        """Whether blocks may be dealt out otherwise: chunks are even, what the user has pinned stays, and which blocks
        have local heads behind them is not a number of blocks."""
        is_free = self.cutter is not None and not self.cutter[1].get("stages") and len(self.cuts[0][0]) == 1
        return is_free and not self.inputs.profile.group_borders

    @cached_property
    def runs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(candidates, runs) each: the stage that stands for a run, its stages (0: the entry only fills the table), its
        first block and its blocks."""
        runs = {id(cut): runs_of(self.inputs.profile, cut) for cut in self.cuts}
        width = max(map(len, runs.values()))
        table = {
            key: [(r.start, r.count, r.first_block, r.blocks) for r in (*each, *(replace(each[-1], count=0),) * width)]
            for key, each in runs.items()
        }
        rows = np.array([table[id(cut)][:width] for cut in self.cuts])
        return rows[:, :, 0], rows[:, :, 1], rows[:, :, 2], rows[:, :, 3]

    def sizes(self, of: np.ndarray, stage: Num, first_block: Num, blocks: Num) -> dict[str, Num]:
        """What `price` reads, a row for each entry of `of` (candidates)."""
        result: dict[str, Num] = {name: column[of] for name, column in self.columns.items()}
        if self.cutter is None:  # plain numbers: a model that is not cut then costs nothing extra
            stage, first_block, blocks = 0, 0, self.inputs.profile.num_blocks
            result["num_stages"] = 1
        parts: Num = prod(result[dial.kind.axis] for dial in self.axis_dials if dial.kind.splits_sequence)
        result |= {
            "num_ranks": self.inputs.cluster.num_devices,
            "batch": self.inputs.batch,
            "sequence": self.inputs.sequence // parts,
            "sequence_parts": parts,
        }
        return result | {"stage": stage, "first_block": first_block, "blocks": blocks}

    def ways(self, dial: Dial) -> Sequence[dict[str, Any]]:
        """Settings of a technique: the first ones, and others with which some candidate uses it."""
        ways = [self.cutter[1]] if self.cutter is not None and dial is self.cutter[0] else dial.settings
        others = (way for way in ways[1:] if not dial.kind.axis or self.uses(dial.example(way, 1)).any())
        return [*ways[:1], *others]

    def uses(self, technique: Technique) -> np.ndarray:
        """Which candidates use a technique of this grid: with an axis of 1 only one that acts alone is used."""
        if technique.axis in self.columns:
            return (self.columns[technique.axis] > 1) | technique.acts_alone
        return np.ones(self.num_candidates, dtype=bool)

    def repeats(self, timetable: Timetable, names: Collection[str]) -> np.ndarray:
        """Candidates whose steps go as in another of these schedules."""
        repeats = timetable.goes_as(names, self.columns["num_stages"], self.columns["num_microbatches"])
        return np.broadcast_to(repeats, self.num_candidates)

    def plan(
        self, techniques: Sequence[Technique], index: int, cut: tuple[Spans, ...], axis_order: tuple[str, ...]
    ) -> Plan:
        """Candidate `index` with these techniques, which carry everything but axis sizes and stages."""
        chosen = []
        for technique in techniques:
            if technique.axis in self.columns:
                size = int(self.columns[technique.axis][index])
                if size == 1 and not technique.acts_alone:
                    continue
                technique = replace(technique, size=size)  # type: ignore[call-arg]
                own = technique.blocks_of_stages(self.inputs.profile.num_blocks)
                # Stages are written down only where they differ from what the technique would do by itself.
                if own is not None and all(len(spans) == 1 for spans in cut):
                    stages = tuple(last - first for ((first, last),) in cut)
                    if own != stages and any(f.name == "stages" for f in fields(technique)):
                        technique = replace(technique, stages=stages)  # type: ignore[call-arg]
            chosen.append(technique)
        microbatch = int(self.columns["microbatch"][index])
        plan = Plan(techniques=tuple(chosen), batch=self.inputs.batch, microbatch=microbatch)
        order = tuple(axis for axis in axis_order if axis in plan.mesh)
        return plan if order == plan.axis_order else replace(plan, axis_order=order)


def grids(inputs: SearchInputs, dials: tuple[Dial, ...], rejected: Counter[str]) -> Iterator[Grid]:
    """One for each set of axes (folded ones are in all) that can multiply to all devices, and each way to cut stages.

    What cannot be shared out is counted in `rejected`.
    """
    always = [dial for dial in dials if 1 in dial.sizes]
    axes = [dial for dial in dials if dial.kind.axis and dial not in always]
    for chosen in itertools.chain.from_iterable(itertools.combinations(axes, size) for size in range(len(axes) + 1)):
        if any(dial.required and dial not in chosen for dial in axes):
            continue
        present = (*chosen, *always)
        cutter = next((dial for dial in present if dial.cuts), None)
        for settings, *alike in _priced_alike(cutter) if cutter else [[{}]]:
            result = _grid(inputs, present, (cutter, settings) if cutter else None, alike, rejected)
            if result is not None:
                yield result


def _priced_alike(cutter: Dial) -> list[list[dict[str, Any]]]:
    """Its settings, those that differ only in the order of a step's actions together."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for number, settings in enumerate(cutter.settings):
        timetable = cutter.example(settings).timetable
        groups.setdefault(number if timetable is None else timetable.priced_as, []).append(settings)
    return list(groups.values())


def _grid(
    inputs: SearchInputs,
    present: tuple[Dial, ...],
    cutter: tuple[Dial, dict[str, Any]] | None,
    alike: Sequence[dict[str, Any]],
    rejected: Counter[str],
) -> Grid | None:
    points: list[tuple[int, ...]] = []
    cuts: list[tuple[Spans, ...]] = []
    known: dict[int, tuple[Spans, ...] | None] = {}
    at = next((i for i, dial in enumerate(present) if cutter and dial is cutter[0]), None)
    for sizes in _factorings(inputs.cluster.num_devices, present):
        stages = 1 if at is None else sizes[at]
        if stages not in known:
            known[stages] = _cut(inputs, cutter, stages)
        cut = known[stages]
        if cut is None:
            assert cutter is not None
            rejected[f"{cutter[0].kind.name}: more stages than the {inputs.profile.num_blocks} blocks"] += 1
            continue
        for each, count in _microbatches(inputs, present, sizes, rejected):
            points.append((*sizes, each, count, stages))
            cuts.append(cut)
    if not points:
        return None
    names = [*(dial.kind.axis for dial in present), "microbatch", "num_microbatches", "num_stages"]
    order = sorted((d.kind for d in present), key=lambda kind: (kind.closeness, kind.axis))
    return Grid(
        inputs=inputs,
        axis_dials=present,
        cutter=cutter,
        alike=tuple(cutter[0].example(settings) for settings in alike) if cutter else (),
        axis_order=tuple(kind.axis for kind in order),
        columns=dict(zip(names, np.array(points).T, strict=True)),
        cuts=tuple(cuts),
    )


def _factorings(devices: int, present: tuple[Dial, ...]) -> Iterator[tuple[int, ...]]:
    """Sizes that multiply to `devices`."""
    if not present:
        if devices == 1:
            yield ()
        return
    for size in present[0].sizes:
        if devices % size == 0:
            for rest in _factorings(devices // size, present[1:]):
                yield (size, *rest)


def _cut(inputs: SearchInputs, cutter: tuple[Dial, dict[str, Any]] | None, stages: int) -> tuple[Spans, ...] | None:
    """Blocks of each stage; None: there are not enough."""
    num_blocks = inputs.profile.num_blocks
    if cutter is None:
        return (((0, num_blocks),),)
    dial, settings = cutter
    technique = dial.example(settings, stages)
    chunks = len(technique.spans_of_stage(1 << 20, 0) or ((),))
    pinned = settings.get("stages")
    if stages * chunks > num_blocks or (pinned and len(pinned) != stages * chunks):
        return None
    if chunks > 1 or pinned:
        return tuple(technique.spans_of_stage(num_blocks, stage) or () for stage in range(stages))
    return straight(balanced_stages(inputs.profile, stages, inputs.sequence))


def _microbatches(
    inputs: SearchInputs, present: tuple[Dial, ...], sizes: tuple[int, ...], rejected: Counter[str]
) -> Iterator[tuple[int, int]]:
    """(samples of each, how many) of a replica."""
    pinned = inputs.wishes.microbatch
    replicas = prod(size for dial, size in zip(present, sizes, strict=True) if dial.kind.splits_samples)
    samples, rest = divmod(inputs.batch, replicas)
    if rest:
        rejected["batch cannot be shared by so many replicas"] += 1
    elif pinned is not None and samples % pinned:
        rejected[f"a replica's samples cannot be cut into microbatches of {pinned}"] += 1
    else:
        small = range(1, min(samples, ALL_DIVISORS_UP_TO) + 1)
        large = (1 << i for i in range(samples.bit_length()) if 1 << i > ALL_DIVISORS_UP_TO)
        for each in (*small, *large) if pinned is None else (pinned,):
            if samples % each == 0 and ("samples" not in inputs.profile.uncut or each == samples):
                yield each, samples // each
