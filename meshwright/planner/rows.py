"""Stages of candidates, priced: one array of rows for many stages with many numbers of blocks and policies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np

from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problem
from meshwright.core.profile import Profile
from meshwright.core.technique import Spans, Technique
from meshwright.core.work import Num, Updating
from meshwright.planner.space import Grid
from meshwright.planner.wishes import Wishes
from meshwright.schedules import Timetable
from meshwright.simulator.peak_memory import StageMemory, stage_memory
from meshwright.simulator.pricing import price_sizes
from meshwright.simulator.stage_seconds import route, stage_cost

Kinds = tuple[int, ...]
"""Blocks of each kind in a stage."""

ALL = 1 << 30
"""Blocks that follow a policy, where all do."""


@dataclass(frozen=True, kw_only=True)
class BoundedGrid:
    """A grid with one way to set everything that is not a number."""

    grid: Grid
    techniques: tuple[Technique, ...]
    policies: Mapping[str, tuple[str, ...]]
    """Technique -> fields whose blocks are solved for."""
    required: frozenset[str]
    """Of these techniques, those that some block of every stage must follow."""
    timetable: Timetable
    least_seconds: np.ndarray
    """No plan of the candidate is faster; infinite where the device cannot run it."""
    least_bytes: np.ndarray
    """No plan of the candidate has a fullest rank with less."""
    base_bytes: np.ndarray
    """Of these, what no policy can save."""
    is_new: np.ndarray
    """False where a technique is not used after all (its size is 1) and another leaf, with its other settings, has the
    same plan; or where the techniques do not go together."""

    def has(self, name: str) -> np.ndarray:
        """Which candidates use the technique, as far as that is decided."""
        for technique in self.techniques:
            if technique.name == name and name not in self.policies:
                return self.grid.uses(technique)
        return np.zeros(self.grid.num_candidates, dtype=bool)

    def sequence_problems(self, sequence: int) -> Iterator[tuple[np.ndarray, Problem]]:
        """(candidates, why) where a technique cannot take samples of this length."""
        fields = {dial.kind.name: dial.axis_field for dial in self.grid.axis_dials}
        for technique in self.techniques:
            if type(technique).check_sequence is Technique.check_sequence:
                continue  # takes any
            used = self.has(technique.name)
            sizes = self.grid.columns[technique.axis] if technique.axis else np.ones(len(used), dtype=int)
            for size in sorted(set(sizes[used].tolist())):  # np.unique would import numpy.ma
                changes = {fields[technique.name]: size} if technique.axis else {}
                for problem in replace(technique, **changes).check_sequence(sequence)[:1]:
                    yield used & (sizes == size), problem


@dataclass(frozen=True, kw_only=True)
class SearchInputs:
    """What is asked of a search, and so the same for all its candidates."""

    profile: Profile
    cluster: Cluster
    optimizer: Updating
    batch: int
    """Samples of a step."""
    sequence: int
    wishes: Wishes
    epsilon: float
    """Share of a step below which a faster plan is not looked for any longer, after the first looks."""

    @cached_property
    def _known(self) -> dict[tuple[int, int], Kinds]:
        return {}

    def kinds(self, first: int, blocks: int) -> Kinds:
        """Of so many blocks from `first` on, how many are of each kind."""
        if (first, blocks) not in self._known:
            self._known[first, blocks] = self.profile.blocks_within(first, blocks)
        return self._known[first, blocks]

    @cached_property
    def is_one_kind(self) -> bool:
        return len(self.profile.block_layers) == 1


class OrderedCandidate(NamedTuple):
    """A candidate of a leaf, with the order of its axes and the bytes its ranks may have."""

    candidate: int
    axis_order: tuple[str, ...] | None
    """None: any, each axis as if it lay innermost."""
    memory_bytes: float


class StageCell(NamedTuple):
    """A stage with so many blocks."""

    at: int
    """Which of the picks."""
    stage: int
    kinds: Kinds
    first_block: int
    blocks: int


@dataclass(frozen=True, kw_only=True)
class Priced:
    """Columns over rows."""

    forward: np.ndarray
    backward: np.ndarray
    weight: np.ndarray
    tail: np.ndarray
    send: np.ndarray
    peak_bytes: np.ndarray
    kept_bytes: np.ndarray
    late_bytes: np.ndarray


def policy_fields(leaf: BoundedGrid) -> list[tuple[str, str]]:
    """(technique, policy) of all that are solved for."""
    return [(name, policy) for name, each in leaf.policies.items() for policy in each]


def kinds_of(problem: SearchInputs, spans: Spans) -> Kinds:
    each = [problem.kinds(first, last - first) for first, last in spans]
    return each[0] if len(each) == 1 else tuple(sum(counts) for counts in zip(*each, strict=True))


def size_of(spans: Spans) -> int:
    return sum(last - first for first, last in spans)


def extreme_choices(profile: Profile, policies: int) -> np.ndarray:
    """(choices, kinds, policies): no policy, then each policy followed by all blocks."""
    choices = np.zeros((1 + policies, len(profile.block_layers), policies), dtype=int)
    choices[np.arange(policies) + 1, :, np.arange(policies)] = ALL
    return choices


def row_sizes(
    grid: Grid,
    policies: Mapping[str, tuple[str, ...]],
    named: Sequence[Technique],
    stages: np.ndarray,
    spans_of: Callable[[int], Spans],
    choices: np.ndarray,
    counts: int | Sequence[int],
    chunk: int | None = None,
) -> dict[str, Num]:
    """What `price` reads, one row for each choice of each stage.

    `stages`: (candidate, stage, first block, blocks) of each, `spans_of` its number: the blocks it has; `counts`:
    choices that it has; `choices`: those of all stages one after the other; `named`: techniques whose blocks the user
    has named; `chunk`: of each stage only this chunk of layers.
    """
    sizes = grid.sizes(*(np.repeat(column, counts) for column in stages.T))
    if chunk is not None:
        sizes["chunk"] = chunk
    for at, (name, policy) in enumerate((name, policy) for name, each in policies.items() for policy in each):
        for kind, layer in enumerate(grid.profile.block_layers):
            sizes[f"{name}.{policy}.{layer.name}"] = choices[:, kind, at]
    for technique in named:
        known: dict[Spans, dict[str, int]] = {}
        rows = []
        for number in range(len(stages)):
            spans = spans_of(number)
            if spans not in known:
                known[spans] = technique.counts_in(grid.profile, spans, chunk)
            rows.append(known[spans])
        sizes |= {name: np.repeat([row[name] for row in rows], counts) for name in rows[0]}
    return sizes


class PricedRows:
    """The price of cells, each with its choices, one row for each."""

    def __init__(
        self,
        problem: SearchInputs,
        leaf: BoundedGrid,
        picks: Sequence[OrderedCandidate],
        cells: Sequence[StageCell],
        choices: Sequence[np.ndarray],
        chunk: int | None = None,
    ):
        """`chunk`: of each cell only this chunk of layers."""
        grid = leaf.grid
        counts = [len(each) for each in choices]
        self.length = sum(counts)

        def spans_of(number: int) -> Spans:
            cell = cells[number]
            if grid.may_choose:
                return ((cell.first_block, cell.first_block + cell.blocks),)
            return grid.cuts[picks[cell.at].candidate][cell.stage]

        sizes = row_sizes(
            grid,
            leaf.policies,
            [each for each in leaf.techniques if each.policies and each.name not in leaf.policies],
            np.array([(picks[cell.at].candidate, cell.stage, cell.first_block, cell.blocks) for cell in cells]),
            spans_of,
            np.concatenate(choices),
            counts,
            chunk,
        )
        self.work = work = price_sizes(problem.profile, leaf.techniques, sizes, optimizer=problem.optimizer)
        roads = _roads(problem.cluster, grid.axis_order, sizes, [picks[cell.at].axis_order for cell in cells], counts)
        self.cost = stage_cost(work, problem.cluster, roads)
        self.memory, self.cluster = stage_memory(work, problem.cluster.device), problem.cluster

    def columns(self) -> Priced:
        weight = self.column(self.cost.seconds("weight"))
        return Priced(
            forward=self.column(self.cost.seconds("forward")),
            backward=self.column(self.cost.seconds("backward")) + weight,
            weight=weight,
            tail=self.column(self.cost.seconds("step")),
            send=self.column(self.cost.send_seconds),
            peak_bytes=self.peak_bytes(self.memory),
            kept_bytes=self.column(self.memory.microbatch_bytes() * self.memory.in_flight),
            late_bytes=self.column(self.memory.late_bytes()),
        )

    def peak_bytes(self, memory: StageMemory) -> np.ndarray:
        """Of the device; infinite where another tier is too small, which no memory of the device makes up for."""
        return self.column(np.where(memory.overflows(self.cluster), np.inf, memory.peak_bytes()))

    def column(self, value: Num) -> np.ndarray:
        return np.broadcast_to(np.asarray(value, dtype=float), (self.length,))


def _roads(
    cluster: Cluster,
    axes: tuple[str, ...],
    sizes: Mapping[str, Num],
    orders: Sequence[tuple[str, ...] | None],
    counts: Sequence[int],
) -> dict[str, Any]:
    """Routes by row; rows may differ in the order of their axes."""
    if not axes:
        return {}
    distinct = list(dict.fromkeys(orders))
    which = np.repeat([distinct.index(order) for order in orders], counts)
    found = {}
    for axis in axes:
        strides: list[Num] = []  # ranks of the axes inside this one; any order: none
        for order in distinct:
            inside = () if order is None else order[order.index(axis) + 1 :]
            strides.append(prod(sizes[each] for each in inside))
        every = np.stack([np.broadcast_to(each, which.shape) for each in strides])
        stride = strides[0] if len(distinct) == 1 else every[which, np.arange(len(which))]
        found[axis] = route(cluster, sizes[axis], stride)
    return found
