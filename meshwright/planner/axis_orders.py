"""The orders of a plan's axes that differ: which of them share a node."""

from __future__ import annotations

import itertools
from functools import lru_cache

from meshwright.core.cluster import Cluster
from meshwright.planner.space import Grid


def orders_of(grid: Grid, index: int, cluster: Cluster) -> tuple[tuple[str, ...], ...]:
    """Outermost first, the usual one first; each stands for all that put the same ranks into a node."""
    sizes = tuple(int(grid.columns[axis][index]) for axis in grid.axis_order)
    return _orders(grid.axis_order, sizes, cluster.devices_per_node, cluster.num_nodes)


@lru_cache(maxsize=1 << 14)
def _orders(axes: tuple[str, ...], sizes: tuple[int, ...], per_node: int, nodes: int) -> tuple[tuple[str, ...], ...]:
    if nodes == 1:
        return (axes,)
    size_of = dict(zip(axes, sizes, strict=True))
    ones = tuple(axis for axis in axes if size_of[axis] == 1)
    found: dict[tuple[tuple[str, int], ...], tuple[str, ...]] = {}
    for order in itertools.permutations(axis for axis in axes if size_of[axis] > 1):
        stride, inside = 1, []
        for axis in reversed(order):
            share = min(max(per_node // stride, 1), size_of[axis])
            # A group that leaves its node only in part is neither in nor out of it.
            inside.append((axis, share if stride * size_of[axis] > per_node else 0))
            stride *= size_of[axis]
        found.setdefault(tuple(sorted(inside)), (*ones, *order))
    return tuple(found.values())
