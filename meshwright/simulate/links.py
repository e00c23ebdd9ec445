"""How fast the ranks along each axis of a mesh can talk, from where the axis lies on the machines.

    axis_order (dp, tp), sizes (4, 8), 8 devices in a node:   tp strides 1, stays inside; dp strides 8, 4 nodes

Sizes may be NumPy arrays with one entry per candidate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from meshwright.core.cluster import Cluster, Link
from meshwright.core.work import Num

LATENCY_BY_RANK = 0.115
"""Of two ranks' latency that each further one inside a node adds: all_reduces of A100s take 46 us on 2, 79 us on 8
(vTrain's nccl-tests table)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """What an axis gives to each of its ranks, one direction."""

    size: Num
    ring_bytes_per_second: Num
    """For collectives in which data passes from neighbour to neighbour."""
    direct_bytes_per_second: Num
    """For messages between two given ranks."""
    latency_seconds: Num
    """Of two ranks."""
    latency_growth: Num
    """Times that of all its ranks."""
    shared: Num
    """Driven by the compute cores: nothing hides behind compute."""
    is_inner: Num
    crossing: Num = 1.0
    """Share of a rank's partners that a message to them leaves the node for."""
    near_bytes_per_second: Num = np.inf
    """To the partners inside."""
    half_bytes: Num = 0.0
    """What a rank passes on when the link reaches half its rate."""
    fractions: Mapping[str, Num] = field(default_factory=dict)

    def seconds(self, kind: str, num_bytes: Num) -> Num:
        """Latency once, then the bytes each rank must pass on (nccl-tests, PERFORMANCE.md), at a rate that grows with
        them."""
        talks = self.size > 1
        if kind in ("send", "ring"):  # the slowest of a ring's pairs is two devices in two nodes
            talks, passed, rate = True, num_bytes, self.direct_bytes_per_second
            latency = self.latency_seconds
        else:
            latency = self.latency_seconds * self.latency_growth
            is_direct = kind == "all_to_all"
            turns = 2 if kind == "all_reduce" else 1
            passed = turns * num_bytes * ((self.size - 1) / self.size)
            rate = self.ring_bytes_per_second
            if is_direct:  # both ways at once: the slower ends it
                far = self.crossing / self.direct_bytes_per_second
                rate = 1 / np.maximum(far, (1 - self.crossing) / self.near_bytes_per_second)
        rate = rate * self.fractions.get("send" if kind == "ring" else kind, 1.0)
        return talks * (latency + (passed + self.half_bytes) / rate)


def routes(cluster: Cluster, mesh: Mapping[str, Num]) -> dict[str, Route]:
    """Axis -> route; `mesh` is axis -> size, outermost first.

    An axis that leaves the node has as many network cards as it has ranks in a node: a ring enters and leaves
    each node once per card, so it moves per_node times one card's bytes (and never more than the inner link).
    Groups of the other axes run at the same time and use their own devices' cards.
    """
    inner, outer = cluster.inner, cluster.outer
    inner_rate = inner.bytes_per_second
    found: dict[str, Route] = {}
    stride: Num = 1
    for axis in reversed(tuple(mesh)):
        size = mesh[axis]
        is_inner = stride * size <= cluster.devices_per_node
        per_node = np.clip(cluster.devices_per_node // stride, 1, size)
        # Trees: latency grows with the logarithm of the nodes reached (NCCL's tuning; two nodes are the unit).
        nodes = np.maximum(-(-size // per_node), 1)
        hops = np.maximum(1.0, np.log2(nodes))
        inside = 1 + LATENCY_BY_RANK * np.maximum(size - 2, 0)
        outer_rate = outer.bytes_per_second * _left(outer, nodes)
        same = inner.shared == outer.shared
        found[axis] = Route(
            size=size,
            ring_bytes_per_second=_pick(is_inner, inner_rate, np.minimum(inner_rate, outer_rate * per_node)),
            direct_bytes_per_second=_pick(is_inner, inner_rate, outer_rate),
            latency_seconds=_pick(is_inner, inner.latency_seconds, outer.latency_seconds),
            latency_growth=_pick(is_inner, inside, hops),
            shared=inner.shared if same else _pick(is_inner, inner.shared, outer.shared),
            is_inner=is_inner,
            crossing=_pick(is_inner, 1.0, (size - per_node) / np.maximum(size - 1, 1)),
            near_bytes_per_second=inner_rate,
            half_bytes=_pick(is_inner, inner.half_bytes, outer.half_bytes),
            fractions={
                kind: _pick(is_inner, inner.fractions.get(kind, 1.0), outer.fractions.get(kind, 1.0))
                for kind in {*inner.fractions, *outer.fractions}
            },
        )
        stride = stride * size
    return {axis: found[axis] for axis in mesh}


def _left(link: Link, nodes: Num) -> Num:
    """Share of a link's rate when so many nodes talk at once."""
    if not link.by_nodes:
        return 1.0
    known, shares = zip(*link.by_nodes, strict=True)
    return np.exp(np.interp(np.log2(nodes), np.log2(known), np.log(shares)))


def _pick(condition: Num, yes: Num, no: Num) -> Num:
    return np.where(condition, yes, no) if isinstance(condition, np.ndarray) else (yes if condition else no)
