"""The points of the search: which axes there are and how they multiply to the machine, as columns of numbers.

A grid has one set of axes and one way to cut stages. Its candidates are (axis sizes, microbatch); what is not a number
(which other techniques, which settings) is walked in `bounds.py` with the same columns, and the blocks of each stage,
the policies they follow and the order of the axes are solved for in `solve.py`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from meshwright.core.cluster import Cluster
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Spans, Technique
from meshwright.core.work import Num
from meshwright.planner.even_split import balanced_stages
from meshwright.planner.settings import Dial
from meshwright.simulator.priced_stages import runs_of, straight

ALL_DIVISORS_UP_TO = 64
"""Microbatches up to here may be any divisor of a replica's samples; above, powers of two."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    profile: Profile
    axis_dials: tuple[Dial, ...]
    cutter: tuple[Dial, dict[str, Any]] | None
    """Who cuts stages, and how it is set."""
    axis_order: tuple[str, ...]
    columns: Mapping[str, np.ndarray]
    """Per candidate: each axis's size, microbatch, num_microbatches, num_stages."""
    cuts: tuple[tuple[Spans, ...], ...]
    """Blocks of each stage, per candidate: where stages may be chosen, about as they should be."""
    batch: int
    sequence: int

    @property
    def num_candidates(self) -> int:
        return len(self.cuts)

    @cached_property
    def may_choose(self) -> bool:
        """Whether blocks may be dealt out otherwise: chunks are even, and what the user has pinned stays."""
        return self.cutter is not None and not self.cutter[1].get("stages") and len(self.cuts[0][0]) == 1

    @cached_property
    def runs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(candidates, runs) each: the stage that stands for a run, its stages (0: the entry only fills the table), its
        first block and its blocks."""
        known = {id(cut): cut for cut in self.cuts}
        runs = {key: runs_of(self.profile, cut) for key, cut in known.items()}
        width = max(map(len, runs.values()))
        table = {
            key: [(r.start, r.count, r.first_block, r.blocks) for r in (*each, *(replace(each[-1], count=0),) * width)]
            for key, each in runs.items()
        }
        rows = np.array([table[id(cut)][:width] for cut in self.cuts])
        return rows[:, :, 0], rows[:, :, 1], rows[:, :, 2], rows[:, :, 3]

    def sizes(self, of: np.ndarray, stage: Num, first_block: Num, blocks: Num) -> dict[str, Num]:
        """What `price` reads, a row for each entry of `of` (candidates)."""
        if self.cutter is None:
            stage, first_block, blocks = 0, 0, self.profile.num_blocks
        found: dict[str, Num] = {name: column[of] for name, column in self.columns.items()}
        if self.cutter is None:  # a plain number: a model that is not cut then costs nothing extra
            found["num_stages"] = 1
        parts: Num = 1
        for dial in self.axis_dials:
            parts = parts * found[dial.kind.axis] if dial.kind.splits_sequence else parts
        found |= {"batch": self.batch, "sequence": self.sequence // parts, "sequence_parts": parts}
        return found | {"stage": stage, "first_block": first_block, "blocks": blocks}

    def uses(self, technique: Technique) -> np.ndarray:
        """Which candidates use a technique of this grid: an axis of 1 is not using it."""
        if technique.axis in self.columns:
            return self.columns[technique.axis] > 1
        return np.ones(self.num_candidates, dtype=bool)

    def plan(
        self,
        techniques: Sequence[Technique],
        index: int,
        cut: tuple[Spans, ...],
        axis_order: tuple[str, ...],
    ) -> Plan:
        """Candidate `index` with these techniques, which carry everything but axis sizes and stages."""
        axis_fields = {dial.kind.name: dial.axis_field for dial in self.axis_dials}
        chosen = []
        for technique in techniques:
            axis_field = axis_fields.get(technique.name, "")
            if axis_field:
                size = int(self.columns[technique.axis][index])
                if size == 1:
                    continue
                technique = _with_stages(replace(technique, **{axis_field: size}), cut)
            chosen.append(technique)
        microbatch = int(self.columns["microbatch"][index])
        plan = Plan(techniques=tuple(chosen), batch=self.batch, microbatch=microbatch)
        order = tuple(axis for axis in axis_order if axis in plan.mesh)
        return plan if order == plan.axis_order else replace(plan, axis_order=order)


def _with_stages(technique: Technique, cut: tuple[Spans, ...]) -> Technique:
    """Stages are written down only where they differ from what the technique would do by itself."""
    blocks = sum(last - first for spans in cut for first, last in spans)
    own = technique.blocks_of_stages(blocks)
    stages = tuple(last - first for ((first, last),) in cut) if all(len(spans) == 1 for spans in cut) else ()
    if own is None or not stages or own == stages or not any(f.name == "stages" for f in fields(technique)):
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
    """One for each set of axes (folded ones are in all) that can multiply to all devices, and each way to cut stages.

    What cannot be shared out is counted in `rejected`.
    """
    always = [dial for dial in dials if 1 in dial.sizes]
    axes = [dial for dial in dials if dial.axis_field and dial not in always]
    for size in range(len(axes) + 1):
        for chosen in itertools.combinations(axes, size):
            if any(dial.required and dial not in chosen for dial in axes):
                continue
            present = (*chosen, *always)
            cutter = next((dial for dial in present if dial.cuts), None)
            for settings in cutter.settings if cutter else ({},):
                found = _grid(
                    profile,
                    cluster,
                    present,
                    (cutter, settings) if cutter else None,
                    batch=batch,
                    sequence=sequence,
                    microbatch=microbatch,
                    rejected=rejected,
                )
                if found is not None:
                    yield found


def _grid(
    profile: Profile,
    cluster: Cluster,
    present: tuple[Dial, ...],
    cutter: tuple[Dial, dict[str, Any]] | None,
    *,
    batch: int,
    sequence: int,
    microbatch: int | None,
    rejected: Counter[str],
) -> Grid | None:
    points: list[tuple[int, ...]] = []
    cuts: list[tuple[Spans, ...]] = []
    known: dict[int, tuple[Spans, ...] | None] = {}
    at = next((i for i, dial in enumerate(present) if cutter and dial is cutter[0]), None)
    for sizes in _factorings(cluster.num_devices, present):
        stages = 1 if at is None else sizes[at]
        if stages not in known:
            known[stages] = _cut(profile, cutter, stages, sequence)
        cut = known[stages]
        if cut is None:
            assert cutter is not None
            rejected[f"{cutter[0].kind.name}: more stages than the {profile.num_blocks} blocks"] += 1
            continue
        for each, count in _microbatches(profile, present, sizes, batch, microbatch, rejected):
            points.append((*sizes, each, count, stages))
            cuts.append(cut)
    if not points:
        return None
    names = [*(dial.kind.axis for dial in present), "microbatch", "num_microbatches", "num_stages"]
    order = sorted((d.kind for d in present), key=lambda kind: (kind.closeness, kind.axis))
    return Grid(
        profile=profile,
        axis_dials=present,
        cutter=cutter,
        axis_order=tuple(kind.axis for kind in order),
        columns=dict(zip(names, np.array(points).T, strict=True)),
        cuts=tuple(cuts),
        batch=batch,
        sequence=sequence,
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


def _cut(
    profile: Profile, cutter: tuple[Dial, dict[str, Any]] | None, stages: int, sequence: int
) -> tuple[Spans, ...] | None:
    """Blocks of each stage; None: there are not enough."""
    if cutter is None:
        return (((0, profile.num_blocks),),)
    dial, settings = cutter
    technique = dial.example(settings, stages)
    chunks = len(technique.spans_of_stage(1 << 20, 0) or ((),))
    if stages * chunks > profile.num_blocks:
        return None
    pinned = bool(settings.get("stages"))
    if pinned and len(settings["stages"]) != stages * chunks:
        return None
    if chunks > 1 or pinned:
        return tuple(technique.spans_of_stage(profile.num_blocks, stage) or () for stage in range(stages))
    return straight(balanced_stages(profile, stages, sequence))


def _microbatches(
    profile: Profile,
    present: tuple[Dial, ...],
    sizes: tuple[int, ...],
    batch: int,
    microbatch: int | None,
    rejected: Counter[str],
) -> Iterator[tuple[int, int]]:
    """(samples of each, how many) of a replica."""
    replicas = 1
    for dial, size in zip(present, sizes, strict=True):
        replicas *= size if dial.kind.splits_samples else 1
    if batch % replicas:
        rejected["batch cannot be shared by so many replicas"] += 1
        return
    samples = batch // replicas
    if microbatch is not None and samples % microbatch:
        rejected[f"a replica's samples cannot be cut into microbatches of {microbatch}"] += 1
        return
    for each in (microbatch,) if microbatch is not None else _divisors(samples):
        if "samples" not in profile.uncut or each == samples:
            yield each, samples // each


def _divisors(samples: int) -> tuple[int, ...]:
    small = [b for b in range(1, min(samples, ALL_DIVISORS_UP_TO) + 1) if samples % b == 0]
    large = [1 << i for i in range(samples.bit_length()) if 1 << i > ALL_DIVISORS_UP_TO]
    return (*small, *(b for b in large if samples % b == 0))
