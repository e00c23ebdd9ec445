"""How fast the ranks along each axis of a mesh can talk, from where the axis lies on the machines.

    axis_order (dp, tp), sizes (4, 8), 8 devices in a node:   tp strides 1, stays inside; dp strides 8, 4 nodes

On a mixed cluster they are as the first group's ranks see them: its own links, but for the outermost axis, which lies
across the groups.

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
    name: str = ""
    """Of what joins the groups, where the axis lies across them."""

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
    found: dict[str, Route] = {}
    stride: Num = 1
    for axis in reversed(tuple(mesh)):
        found[axis] = route(cluster, mesh[axis], stride)
        stride = stride * mesh[axis]
    if cluster.others and (outermost := next((axis for axis in mesh if mesh[axis] > 1), "")):
        found[outermost] = _across(cluster, mesh[outermost], stride // mesh[outermost])
    return {axis: found[axis] for axis in mesh}


def route(cluster: Cluster, size: Num, stride: Num) -> Route:
    """Of an axis whose neighbours are `stride` ranks apart."""
    inner, outer = cluster.inner, cluster.outer
    inner_rate = inner.bytes_per_second
    is_inner = stride * size <= cluster.devices_per_node
    per_node = np.clip(cluster.devices_per_node // stride, 1, size)
    # Trees: latency grows with the logarithm of the nodes reached (NCCL's tuning; two nodes are the unit).
    nodes = np.maximum(-(-size // per_node), 1)
    hops = np.maximum(1.0, np.log2(nodes))
    inside = 1 + LATENCY_BY_RANK * np.maximum(size - 2, 0)
    outer_rate = outer.bytes_per_second * _left(outer, nodes)
    same = inner.shared == outer.shared
    return Route(
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


def _across(cluster: Cluster, size: int, stride: int) -> Route:
    """Of the axis that lies across all groups.

    A ring enters and leaves each group once per card, as it does each node, and is as fast as its slowest link. The
    latency of a tree is that between groups for the doublings that reach all of them, and inside them for the rest.
    """
    groups, link = cluster.groups, cluster.link_between(range(len(cluster.groups)))
    per_node = [min(max(group.devices_per_node // stride, 1), size) for group in groups]
    nodes = [-(-min(group.num_devices // stride, size) // each) for group, each in zip(groups, per_node, strict=True)]
    total = sum(nodes)
    inside = [(g.outer, each) for g, each, count in zip(groups, per_node, nodes, strict=True) if count > 1]
    rates = [(each * used.bytes_per_second * _left(used, total), used) for used, each in inside]
    rates += [(min(per_node) * link.bytes_per_second * _left(link, total), link)]
    slowest_rate, slowest = min(rates, key=lambda item: item[0])
    across = np.log2(len(groups))
    latency = link.latency_seconds
    further = max((used.latency_seconds for used, _ in inside), default=latency)
    growth = across + (np.log2(total) - across) * (further / latency if latency else 1.0)
    return Route(
        size=size,
        ring_bytes_per_second=min(slowest_rate, *(group.inner.bytes_per_second for group in groups)),
        direct_bytes_per_second=link.bytes_per_second * _left(link, total),
        latency_seconds=latency or further,
        latency_growth=growth,
        shared=link.shared,
        is_inner=False,
        crossing=(size - min(per_node)) / max(size - 1, 1),
        near_bytes_per_second=min(group.inner.bytes_per_second for group in groups),
        half_bytes=slowest.half_bytes,
        fractions=slowest.fractions,
        name=link.name or "the link between groups",
    )


def _left(link: Link, nodes: Num) -> Num:
    """Share of a link's rate when so many nodes talk at once."""
    if not link.by_nodes:
        return 1.0
    known, shares = zip(*link.by_nodes, strict=True)
    return np.exp(np.interp(np.log2(nodes), np.log2(known), np.log(shares)))


def _pick(condition: Num, yes: Num, no: Num) -> Num:
    return np.where(condition, yes, no) if isinstance(condition, np.ndarray) else (yes if condition else no)
