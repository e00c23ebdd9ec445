"""Stages of candidates, priced: one array of rows for many stages with many numbers of blocks and policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from meshwright.core.cluster import Cluster
from meshwright.core.profile import Profile
from meshwright.core.technique import Spans
from meshwright.core.work import Num, Updating
from meshwright.search.bounds import Leaf
from meshwright.search.policies import Kinds
from meshwright.simulate.cost import stage_cost
from meshwright.simulate.links import routes
from meshwright.simulate.memory import stage_memory
from meshwright.simulate.price import price_sizes


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is the same for all candidates."""

    profile: Profile
    cluster: Cluster
    optimizer: Updating


class Pick(NamedTuple):
    """A candidate of a leaf, with the order of its axes and the bytes its ranks may have."""

    candidate: int
    axis_order: tuple[str, ...]
    memory_bytes: float


class Cell(NamedTuple):
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


def policy_fields(leaf: Leaf) -> list[tuple[str, str]]:
    """(technique, policy) of all that are solved for."""
    return [(name, policy) for name, each in leaf.policies.items() for policy in each]


def kinds_of(profile: Profile, spans: Spans) -> Kinds:
    each = [profile.blocks_within(first, last - first) for first, last in spans]
    return tuple(sum(counts) for counts in zip(*each, strict=True))


def size_of(spans: Spans) -> int:
    return sum(last - first for first, last in spans)


class Rows:
    """The price of cells, each with its choices, one row for each."""

    def __init__(
        self,
        problem: Problem,
        leaf: Leaf,
        picks: Sequence[Pick],
        cells: Sequence[Cell],
        choices: Sequence[np.ndarray],
    ):
        grid = leaf.grid
        counts = [len(each) for each in choices]
        index = np.array([picks[cell.at].candidate for cell in cells])
        place = np.array([(cell.stage, cell.first_block, cell.blocks) for cell in cells])
        self.length = sum(counts)
        sizes = grid.sizes(np.repeat(index, counts), *(np.repeat(place[:, i], counts) for i in range(3)))
        together = np.concatenate(choices)
        for at, (name, policy) in enumerate(policy_fields(leaf)):
            for kind, layer in enumerate(problem.profile.block_layers):
                sizes[f"{name}.{policy}.{layer.name}"] = together[:, kind, at]
        for technique in leaf.techniques:
            if technique.policies and technique.name not in leaf.policies:  # the user has named its blocks
                rows = [technique.counts_in(problem.profile, _spans_of(leaf, picks[cell.at], cell)) for cell in cells]
                sizes |= {name: np.repeat([row[name] for row in rows], counts) for name in rows[0]}
        work = price_sizes(problem.profile, leaf.techniques, sizes, optimizer=problem.optimizer)
        orders = np.repeat([picks[cell.at].axis_order for cell in cells], counts, axis=0) if grid.axis_order else None
        self.cost = stage_cost(work, problem.cluster, _roads(problem.cluster, grid.axis_order, sizes, orders))
        self.memory = stage_memory(work, problem.cluster.device)

    def columns(self) -> Priced:
        weight = self.column(self.cost.seconds("weight"))
        return Priced(
            forward=self.column(self.cost.seconds("forward")),
            backward=self.column(self.cost.seconds("backward")) + weight,
            weight=weight,
            tail=self.column(self.cost.seconds("step")),
            send=self.column(self.cost.send_seconds),
            peak_bytes=self.column(self.memory.peak_bytes()),
            kept_bytes=self.column(self.memory.microbatch_bytes() * self.memory.in_flight),
        )

    def column(self, value: Num) -> np.ndarray:
        return np.broadcast_to(np.asarray(value, dtype=float), (self.length,))


def _spans_of(leaf: Leaf, pick: Pick, cell: Cell) -> Spans:
    cut = leaf.grid.cuts[pick.candidate]
    return ((cell.first_block, cell.first_block + cell.blocks),) if leaf.grid.may_choose else cut[cell.stage]


def _roads(
    cluster: Cluster, axes: tuple[str, ...], sizes: Mapping[str, Num], orders: np.ndarray | None
) -> dict[str, Any]:
    """Routes by row; rows may differ in the order of their axes."""
    if orders is None:
        return {}
    unique, which = np.unique(orders, axis=0, return_inverse=True)
    each = [routes(cluster, {axis: sizes[axis] for axis in order}) for order in unique.tolist()]
    if len(each) == 1:
        return each[0]
    which = which.reshape(-1)
    return {axis: _merged([roads[axis] for roads in each], which) for axis in axes}


def _merged(values: list[Any], which: np.ndarray) -> Any:
    """Of each row, the number of the route it takes."""
    first = values[0]

    def chosen(parts: list[Any]) -> Any:
        if all(part is parts[0] for part in parts):
            return parts[0]
        return np.choose(which, [np.broadcast_to(part, which.shape) for part in parts])

    changes: dict[str, Any] = {}
    for name in type(first).__dataclass_fields__:
        parts = [getattr(value, name) for value in values]
        if isinstance(parts[0], Mapping):
            changes[name] = {key: chosen([part[key] for part in parts]) for key in parts[0]}
        else:
            changes[name] = chosen(parts)
    return replace(first, **changes)
