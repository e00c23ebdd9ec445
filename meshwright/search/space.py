"""The points of the search: which axes there are and how they multiply to the machine, as columns of numbers.

A grid has one set of axes. Its candidates are rows of (axis sizes, microbatch, per-layer counts); what is not a number
(which other techniques, which settings) is walked in `bounds.py` with the same columns.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from meshwright.core.cluster import Cluster
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Technique
from meshwright.core.work import Num
from meshwright.search.dials import Dial
from meshwright.search.split import balanced_stages
from meshwright.simulate.stages import Run, runs_of, straight

ALL_DIVISORS_UP_TO = 64
"""Microbatches up to here may be any divisor of a replica's samples; above, powers of two."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    axis_dials: tuple[Dial, ...]
    count_dials: tuple[Dial, ...]
    axis_order: tuple[str, ...]
    columns: Mapping[str, np.ndarray]
    """Per candidate: each axis's size, microbatch, num_microbatches, num_stages, `technique.field` counts."""
    sizes: Mapping[str, Num]
    """Per row, a candidate's run of stages: what `price` reads."""
    stages: tuple[tuple[int, ...], ...]
    """Blocks of each stage, per candidate."""
    starts: np.ndarray
    """(candidates, runs): the stage that stands for a run."""
    counts: np.ndarray
    """(candidates, runs): stages in a run; 0 where the row only fills the table."""
    batch: int

    @property
    def num_candidates(self) -> int:
        return len(self.stages)

    def uses(self, name: str) -> np.ndarray:
        """Which candidates use a technique of this grid: a per-layer count of 0 or an axis of 1 is not using it."""
        used = np.ones(self.num_candidates, dtype=bool)
        for dial in (*self.axis_dials, *self.count_dials):
            if dial.kind.name == name and dial.count_field:
                used &= self.columns[f"{name}.{dial.count_field}"] > 0
            if dial.kind.name == name and dial.axis_field:
                used &= self.columns[dial.kind.axis] > 1
        return used

    def plan(self, techniques: tuple[Technique, ...], index: int) -> Plan:
        """Candidate `index` with these techniques, which carry everything that is not a number."""
        chosen = []
        fields_of = {d.kind.name: (d.axis_field, d.count_field) for d in (*self.axis_dials, *self.count_dials)}
        for technique in techniques:
            axis_field, count_field = fields_of.get(technique.name, ("", ""))
            changes: dict[str, Any] = {}
            if count_field:
                count = int(self.columns[f"{technique.name}.{count_field}"][index])
                if count == 0:
                    continue
                changes[count_field] = count
            if axis_field:
                changes[axis_field] = int(self.columns[technique.axis][index])
                if changes[axis_field] == 1:
                    continue
            technique = replace(technique, **changes)
            chosen.append(_with_stages(technique, self.stages[index]))
        microbatch = int(self.columns["microbatch"][index])
        return Plan(techniques=tuple(chosen), batch=self.batch, microbatch=microbatch)


def _with_stages(technique: Technique, stages: tuple[int, ...]) -> Technique:
    """Stages are written down only where they differ from what the technique would do by itself."""
    own = technique.blocks_of_stages(sum(stages))
    if (
        own is None
        or own == stages
        or len(technique.spans_of_stage(sum(stages), 0) or ()) > 1
        or not any(f.name == "stages" for f in fields(technique))
    ):
        return technique
    return replace(technique, stages=stages)  # type: ignore[call-arg]


def grids(
    profile: Profile,
    cluster: Cluster,
    dials: tuple[Dial, ...],
    *,
    batch: int,
    sequence: int,
    microbatch: int | None,
    rejected: Counter[str],
) -> Iterator[Grid]:
    """One for each set of axes (folded ones are in all) that can multiply to all devices.

    What cannot be shared out is counted in `rejected`.
    """
    always = [dial for dial in dials if 1 in dial.sizes]
    axes = [dial for dial in dials if dial.axis_field and dial not in always]
    counted = tuple(dial for dial in dials if dial.count_field)
    for size in range(len(axes) + 1):
        for chosen in itertools.combinations(axes, size):
            if any(dial.required and dial not in chosen for dial in axes):
                continue
            present = (*chosen, *always)
            points: list[_Point] = []
            for sizes in _factorings(cluster.num_devices, present):
                points += _points(profile, present, counted, sizes, batch, sequence, microbatch, rejected)
            if points:
                yield _grid(profile, present, counted, points, batch, sequence)


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


@dataclass(frozen=True, slots=True)
class _Point:
    sizes: tuple[int, ...]
    microbatch: int
    num_microbatches: int
    stages: tuple[int, ...]
    counts: tuple[int, ...]


def _points(
    profile: Profile,
    present: tuple[Dial, ...],
    counted: tuple[Dial, ...],
    sizes: tuple[int, ...],
    batch: int,
    sequence: int,
    microbatch: int | None,
    rejected: Counter[str],
) -> Iterator[_Point]:
    replicas = 1
    stages: tuple[int, ...] = (profile.num_blocks,)
    for dial, size in zip(present, sizes, strict=True):
        if dial.kind.splits_samples:
            replicas *= size
        own = dial.example(dial.settings[0], size).blocks_of_stages(profile.num_blocks) if dial.settings else None
        if own is not None:
            if size > profile.num_blocks:
                rejected[f"{dial.kind.name}: more stages than the {profile.num_blocks} blocks"] += 1
                return
            is_pinned = bool(dial.settings[0].get("stages"))
            stages = own if is_pinned else balanced_stages(profile, size, sequence)
    if batch % replicas:
        rejected["batch cannot be shared by so many replicas"] += 1
        return
    samples = batch // replicas
    if microbatch is not None and samples % microbatch:
        rejected[f"a replica's samples cannot be cut into microbatches of {microbatch}"] += 1
        return
    tried = (microbatch,) if microbatch is not None else _microbatches(samples)
    if "samples" in profile.uncut:
        tried = tuple(each for each in tried if each == samples)
    ways = tuple(itertools.product(*(dial.counts(max(stages)) for dial in counted)))
    for each in tried:
        for counts in ways:
            yield _Point(sizes, each, samples // each, stages, counts)


def _microbatches(samples: int) -> tuple[int, ...]:
    small = [b for b in range(1, min(samples, ALL_DIVISORS_UP_TO) + 1) if samples % b == 0]
    large = [1 << i for i in range(samples.bit_length()) if 1 << i > ALL_DIVISORS_UP_TO]
    return (*small, *(b for b in large if samples % b == 0))


def _grid(
    profile: Profile,
    present: tuple[Dial, ...],
    counted: tuple[Dial, ...],
    points: list[_Point],
    batch: int,
    sequence: int,
) -> Grid:
    columns: dict[str, np.ndarray] = {
        dial.kind.axis: np.array([point.sizes[i] for point in points]) for i, dial in enumerate(present)
    }
    columns["microbatch"] = np.array([point.microbatch for point in points])
    columns["num_microbatches"] = np.array([point.num_microbatches for point in points])
    columns["num_stages"] = np.array([len(point.stages) for point in points])
    for i, dial in enumerate(counted):
        columns[f"{dial.kind.name}.{dial.count_field}"] = np.array([point.counts[i] for point in points])
    known: dict[tuple[int, ...], tuple[Run, ...]] = {p.stages: runs_of(profile, straight(p.stages)) for p in points}
    width = max(len(runs) for runs in known.values())
    table = {
        stages: [
            (run.start, run.count, run.first_block, run.blocks)
            for run in (*runs, *(replace(runs[-1], count=0),) * (width - len(runs)))
        ]
        for stages, runs in known.items()
    }
    rows = np.array([table[point.stages] for point in points])
    starts, counts, firsts, blocks = (rows[:, :, i] for i in range(4))
    sizes: dict[str, Num] = {name: np.repeat(column, width) for name, column in columns.items()}
    for dial in counted:
        for layer in profile.block_layers:
            key = f"{dial.kind.name}.{dial.count_field}"
            sizes[f"{key}.{layer.name}"] = sizes[key]
    parts: Num = 1
    for dial in present:
        parts = parts * sizes[dial.kind.axis] if dial.kind.splits_sequence else parts
    sizes |= {"batch": batch, "sequence": sequence // parts, "sequence_parts": parts}
    if any(len(point.stages) > 1 for point in points):
        sizes |= {"stage": starts.ravel(), "first_block": firsts.ravel(), "blocks": blocks.ravel()}
    else:  # plain numbers: a model that is not cut then costs nothing extra
        sizes |= {"stage": 0, "num_stages": 1, "first_block": 0, "blocks": points[0].stages[0]}
    order = sorted((d.kind for d in present), key=lambda kind: (kind.closeness, kind.axis))
    return Grid(
        axis_dials=present,
        count_dials=counted,
        axis_order=tuple(kind.axis for kind in order),
        columns=columns,
        sizes=sizes,
        stages=tuple(point.stages for point in points),
        starts=starts,
        counts=counts,
        batch=batch,
    )
