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
from meshwright.core.work import Num
from meshwright.planner.space import Grid
from meshwright.planner.wishes import Kinds, SearchInputs
from meshwright.schedules import Timetable
from meshwright.simulator.peak_memory import StageMemory, stage_memory
from meshwright.simulator.pricing import price_sizes
from meshwright.simulator.stage_seconds import Roads, Route, route, stage_cost

ALL = 1 << 30
"""Blocks that follow a policy, where all do."""


@dataclass(frozen=True, kw_only=True)
class BoundedGrid:
    """A grid with one way to set everything that is not a number."""

    grid: Grid
    techniques: tuple[Technique, ...]
    policies: tuple[tuple[str, str], ...]
    """(technique, field) of those whose blocks are solved for."""
    required: frozenset[str]
    """Of these techniques, those that some block of every stage must follow."""
    timetable: Timetable
    least_seconds: np.ndarray
    """No plan of the candidate is faster; infinite where the device cannot run it."""
    least_bytes: np.ndarray
    """No plan of the candidate has a fullest rank with less."""
    base_bytes: np.ndarray
    """Of these, what no policy can save."""
    seconds_within: Callable[[float], np.ndarray] | None
    """`least_seconds` for devices of another memory, where that is remembered."""
    is_new: np.ndarray
    """False where a technique is not used after all (its size is 1) and another leaf, with its other settings, has the
    same plan; or where the techniques do not go together."""

    @property
    def inputs(self) -> SearchInputs:
        return self.grid.inputs

    @cached_property
    def steps_factor(self) -> np.ndarray:
        """Of each candidate: times the steps until the same loss."""
        factors = np.ones(self.grid.num_candidates)
        for technique in self.techniques:
            if (mid := technique.steps_factor.mid) != 1:
                factors = factors * np.where(self.grid.uses(technique), mid, 1.0)
        return factors

    def slower(self, candidate: int) -> float:
        """Times a step of one rank until all ranks have learnt what a step that sums every gradient teaches."""
        return self.inputs.slower * float(self.steps_factor[candidate])

    def has(self, name: str) -> np.ndarray:
        """Which candidates use the technique, as far as that is decided."""
        for technique in self.techniques:
            if technique.name == name and name not in dict(self.policies):
                return self.grid.uses(technique)
        return np.zeros(self.grid.num_candidates, dtype=bool)

    def sequence_problems(self) -> Iterator[tuple[np.ndarray, Problem]]:
        """(candidates, why) where a technique cannot take samples of this length."""
        for technique in self.techniques:
            if type(technique).check_sequence is Technique.check_sequence:
                continue  # takes any
            used = self.has(technique.name)
            sizes = self.grid.columns[technique.axis] if technique.axis else np.ones(len(used), dtype=int)
            for size in sorted(set(sizes[used].tolist())):  # np.unique would import numpy.ma
                changes = {"size": size} if technique.axis else {}
                for problem in replace(technique, **changes).check_sequence(self.inputs.sequence)[:1]:
                    yield used & (sizes == size), problem


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


class Priced(NamedTuple):
    """Columns over rows, or the numbers of one row."""

    forward: Any
    backward: Any
    """Whole."""
    weight: Any
    tail: Any
    send: Any
    peak_bytes: Any
    kept_bytes: Any
    late_bytes: Any


def kinds_of(inputs: SearchInputs, spans: Spans) -> Kinds:
    each = [inputs.kinds(first, last - first) for first, last in spans]
    return each[0] if len(each) == 1 else tuple(sum(counts) for counts in zip(*each, strict=True))


def size_of(spans: Spans) -> int:
    return sum(last - first for first, last in spans)


def cells_of(leaf: BoundedGrid, at: int, pick: OrderedCandidate) -> list[StageCell]:
    """The stages of the `at`-th pick, cut as its candidate is."""
    return [
        StageCell(at, stage, kinds_of(leaf.inputs, spans), spans[0][0], size_of(spans))
        for stage, spans in enumerate(leaf.grid.cuts[pick.candidate])
    ]


def extreme_choices(profile: Profile, policies: int) -> np.ndarray:
    """(choices, kinds, policies): no policy, then each policy followed by all blocks."""
    choices = np.zeros((1 + policies, len(profile.block_layers), policies), dtype=int)
    choices[np.arange(policies) + 1, :, np.arange(policies)] = ALL
    return choices


def row_sizes(
    sizes: dict[str, Num],
    profile: Profile,
    policies: Sequence[tuple[str, str]],
    named: Sequence[Technique],
    choices: np.ndarray,
    spans: Sequence[tuple[Spans, int | None]],
    by_row: Callable[[np.ndarray], np.ndarray],
) -> dict[str, Num]:
    """What `price` reads: the `sizes` of a grid, and the blocks that follow policies.

    `choices`: by row, or by the last dimension of rows; `named`: techniques whose blocks the user has named; `spans`:
    blocks of each stage, and of these which chunk alone; `by_row`: a column over these stages -> over rows.
    """
    for at, (name, policy) in enumerate(policies):
        for kind, layer in enumerate(profile.block_layers):
            sizes[f"{name}.{policy}.{layer.name}"] = choices[:, kind, at]
    for technique in named:
        known = {each: technique.counts_in(profile, *each) for each in dict.fromkeys(spans)}
        for name in known[spans[0]]:
            sizes[name] = by_row(np.array([known[each][name] for each in spans]))
    return {name: _single(value) for name, value in sizes.items()}


def _single(value: Num) -> Num:
    """A number in the place of an array in which all are equal: most of what is priced then costs a tenth."""
    is_one = isinstance(value, np.ndarray) and (value == value.flat[0]).all()
    return value.flat[0].item() if is_one else value


class PricedRows:
    """The price of cells, each with its choices, one row for each. `chunks`: of each cell only this chunk of layers.

    Stages between the first and the last that have as many blocks of each kind differ only in the microbatches they
    hold (as in `pricing.runs_of`): rows that are equal but for that are priced once.
    """

    def __init__(
        self,
        leaf: BoundedGrid,
        picks: Sequence[OrderedCandidate],
        cells: Sequence[StageCell],
        choices: Sequence[np.ndarray],
        chunks: Sequence[int] | None = None,
    ):
        grid, inputs = leaf.grid, leaf.inputs
        cell_of, every = np.repeat(np.arange(len(cells)), [len(each) for each in choices]), np.concatenate(choices)
        self.length = len(cell_of)
        named = [each for each in leaf.techniques if each.policies and each.name not in dict(leaf.policies)]
        groups = np.arange(len(cells)) if named else _groups(leaf, picks, cells, chunks)
        which, self.row_of = _distinct(groups[cell_of], every, inputs.profile.num_blocks)

        def spans_of(number: int, cell: StageCell) -> tuple[Spans, int | None]:
            span = ((cell.first_block, cell.first_block + cell.blocks),)
            spans = span if grid.may_choose else grid.cuts[picks[cell.at].candidate][cell.stage]
            return spans, None if chunks is None else chunks[number]

        stages = np.array([(picks[cell.at].candidate, cell.stage, cell.first_block, cell.blocks) for cell in cells])
        rows = cell_of[which]
        sizes = grid.sizes(*stages[rows].T) | ({} if chunks is None else {"chunk": np.asarray(chunks)[rows]})
        spans = [spans_of(*each) for each in enumerate(cells)] if named else []
        sizes = row_sizes(sizes, inputs.profile, leaf.policies, named, every[which], spans, lambda column: column[rows])
        self.work = work = price_sizes(inputs.profile, leaf.techniques, sizes, optimizer=inputs.optimizer)
        orders = [picks[cell.at].axis_order for cell in cells]
        roads = _roads(inputs.cluster, grid.axis_order, sizes, orders, rows)
        self.cost = stage_cost(work, inputs.cluster, roads)
        self.memory, self.cluster = stage_memory(work, inputs.cluster.device), inputs.cluster
        of, stage = stages[cell_of, :2].T
        m = grid.columns["num_microbatches"][of]
        self.place = (stage, grid.columns["num_stages"][of], m)
        """Of each row: its stage, the number of stages and of microbatches."""
        if self.row_of is not None:
            held = leaf.timetable.held(*self.place)
            self.memory = replace(self.memory, row_of=self.row_of, in_flight=held, num_microbatches=m)

    def columns(self) -> Priced:
        weight = self.column(self.cost.seconds("weight"))
        return Priced(
            forward=self.column(self.cost.seconds("forward")),
            backward=self.column(self.cost.seconds("backward")) + weight,
            weight=weight,
            tail=self.column(self.cost.seconds("step")),
            send=self.column(self.cost.send_seconds),
            peak_bytes=self.peak_bytes(self.memory),
            kept_bytes=self.column(self.memory.microbatch_bytes * self.memory.in_flight),
            late_bytes=self.column(self.memory.late_bytes),
        )

    def peak_bytes(self, memory: StageMemory) -> np.ndarray:
        """Peak bytes of the device; infinite where another tier is too small."""
        return self.column(np.where(memory.overflows(self.cluster), np.inf, memory.peak_bytes()))

    def column(self, value: Num) -> np.ndarray:
        """By row, of a number that is the same for all, or by row, or by priced row."""
        array = np.asarray(value, dtype=float)
        if self.row_of is not None and array.ndim and len(array) < self.length:
            return array[self.row_of]
        return np.broadcast_to(array, (self.length,))


def _groups(
    leaf: BoundedGrid, picks: Sequence[OrderedCandidate], cells: Sequence[StageCell], chunks: Sequence[int] | None
) -> np.ndarray:
    """Numbers of the cells; equal ones are priced alike, but for the microbatches that they hold."""
    inputs, cuts, numbers = leaf.inputs, leaf.grid.cuts, dict[Any, int]()
    layers = inputs.profile.block_layers
    is_alike = all(layer.boundary == layers[0].boundary for layer in layers)  # stages hand on the same
    is_alike = is_alike and not inputs.profile.group_borders
    result = []
    for number, cell in enumerate(cells):
        candidate, axis_order, _ = picks[cell.at]
        stages = len(cuts[candidate])
        place = -1 if cell.stage == stages - 1 else min(cell.stage, 1) if is_alike else cell.stage
        if leaf.timetable.chunks == 1:
            has: Any = inputs.kinds(cell.first_block, cell.blocks) if is_alike else number
        else:
            first, last = cuts[candidate][cell.stage][0 if chunks is None else chunks[number]]
            has = cell.kinds if chunks is None else (chunks[number], inputs.kinds(first, last - first))
        key = candidate, axis_order, place, has
        result.append(numbers.setdefault(key, len(numbers)))
    return np.array(result)


def _distinct(groups: np.ndarray, choices: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray | None]:
    """One row of each group and choice; and which of these each row is, None where all differ. `most`: blocks."""
    keys, flat = groups.astype(np.int64), np.minimum(choices.reshape(len(choices), -1), most + 1)
    if (int(groups.max()) + 1) * (most + 2) ** flat.shape[1] >= 1 << 62:
        return np.arange(len(groups)), None
    for column in flat.T:
        keys = keys * (most + 2) + column
    order = np.argsort(keys, kind="stable")
    is_first = np.diff(keys[order], prepend=-1) != 0
    if is_first.all():
        return np.arange(len(groups)), None
    row_of = np.empty(len(keys), dtype=int)
    row_of[order] = np.cumsum(is_first) - 1
    return order[is_first], row_of


def _roads(
    cluster: Cluster,
    axes: tuple[str, ...],
    sizes: Mapping[str, Num],
    orders: Sequence[tuple[str, ...] | None],
    cell_of: np.ndarray,
) -> Mapping[str, Route]:
    """Routes by row; rows may differ in the order of their axes. `orders`: of each cell; `cell_of` each row."""
    if not axes:
        return {}
    distinct = list(dict.fromkeys(orders))
    number = {order: at for at, order in enumerate(distinct)}
    which = np.array([number[order] for order in orders])[cell_of]
    stride_of: dict[str, Num] = {}
    result = Roads(lambda axis, count: route(cluster, count, stride_of[axis]))
    for axis in axes:
        # Ranks of the axes inside this one; any order: none.
        inside = [() if order is None else order[order.index(axis) + 1 :] for order in distinct]
        strides: list[Num] = [prod(sizes[each] for each in every) for every in inside]
        stride = strides[0]
        if len(distinct) > 1:
            table = np.stack([np.broadcast_to(each, which.shape) for each in strides])
            stride = table[which, np.arange(len(which))]
        stride_of[axis] = stride
        result[axis] = route(cluster, sizes[axis], stride)
    return result
