"""How fast the ranks along each axis of a mesh can talk, from where the axis lies on the machines.

    axis_order (dp, tp), sizes (4, 8), 8 devices in a node:   tp strides 1, stays inside; dp strides 8, 4 nodes

Sizes may be NumPy arrays with one entry per candidate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshwright.core.cluster import Cluster
from meshwright.core.work import Num

SHEET_FRACTION = 0.76
"""Share of a data sheet's link that collectives reach: NCCL all_reduce over 8 A100s moves 227 of 300 GB/s
(vTrain's published table). A link that was measured already includes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """What an axis gives to each of its ranks, one direction."""

    size: Num
    ring_bytes_per_second: Num
    """For collectives in which data passes from neighbour to neighbour."""
    direct_bytes_per_second: Num
    """For messages between two given ranks."""
    latency_seconds: Num
    shared: Num
    """Driven by the compute cores: nothing hides behind compute."""
    is_inner: Num

    def seconds(self, kind: str, num_bytes: Num) -> Num:
        """Alpha-beta: latency once, then the bytes each rank must pass on (nccl-tests, PERFORMANCE.md)."""
        if kind in ("send", "ring"):  # the slowest of a ring's pairs is two devices in two nodes
            return self.latency_seconds + num_bytes / self.direct_bytes_per_second
        talks = self.size > 1
        passed = num_bytes * ((self.size - 1) / self.size)
        if kind == "all_to_all":
            return talks * (self.latency_seconds + passed / self.direct_bytes_per_second)
        turns = 2 if kind == "all_reduce" else 1
        return talks * (self.latency_seconds + turns * passed / self.ring_bytes_per_second)


def is_measured(cluster: Cluster, link: str) -> bool:
    """Whether the probe (or the preset's author) timed collectives over it, rather than read a data sheet."""
    return cluster.sources.get(link, "").startswith("measured")


def routes(cluster: Cluster, mesh: Mapping[str, Num]) -> dict[str, Route]:
    """Axis -> route; `mesh` is axis -> size, outermost first.

    An axis that leaves the node has as many network cards as it has ranks in a node: a ring enters and leaves
    each node once per card, so it moves per_node times one card's bytes (and never more than the inner link).
    Groups of the other axes run at the same time and use their own devices' cards.
    """
    inner, outer = cluster.inner, cluster.outer
    inner_rate = inner.bytes_per_second * (1.0 if is_measured(cluster, "inner") else SHEET_FRACTION)
    outer_rate = outer.bytes_per_second * (1.0 if is_measured(cluster, "outer") else SHEET_FRACTION)
    found: dict[str, Route] = {}
    stride: Num = 1
    for axis in reversed(tuple(mesh)):
        size = mesh[axis]
        is_inner = stride * size <= cluster.devices_per_node
        per_node = np.clip(cluster.devices_per_node // stride, 1, size)
        # Trees: latency grows with the logarithm of the nodes reached (NCCL's tuning; two nodes are the unit).
        hops = np.maximum(1.0, np.log2(np.maximum(-(-size // per_node), 1)))
        same = inner.shared == outer.shared
        found[axis] = Route(
            size=size,
            ring_bytes_per_second=_pick(is_inner, inner_rate, np.minimum(inner_rate, outer_rate * per_node)),
            direct_bytes_per_second=_pick(is_inner, inner_rate, outer_rate),
            latency_seconds=_pick(is_inner, inner.latency_seconds, outer.latency_seconds * hops),
            shared=inner.shared if same else _pick(is_inner, inner.shared, outer.shared),
            is_inner=is_inner,
        )
        stride = stride * size
    return {axis: found[axis] for axis in mesh}


def _pick(condition: Num, yes: Num, no: Num) -> Num:
    return np.where(condition, yes, no) if isinstance(condition, np.ndarray) else (yes if condition else no)
