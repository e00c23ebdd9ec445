"""The groups of a mixed cluster as a plan may take them: which, in which order, and how many devices of one kind."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from meshwright.core.cluster import Cluster, Link

MOST_SUBSETS = 3
"""Groups up to which every choice of some of them is tried; beyond, all of them and each alone."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """Neighbouring groups that are one, by their numbers in the cluster."""

    numbers: tuple[int, ...]
    cluster: Cluster

    @property
    def num_devices(self) -> int:
        return self.cluster.num_devices

    def is_like(self, other: Side) -> bool:
        return self.cluster.groups[0].is_like(other.cluster.groups[0])

    def sized(self, count: int) -> Cluster:
        """So many of its devices, in nodes as full as they can be."""
        per_node = self.cluster.devices_per_node
        full = count if count <= per_node else per_node if count % per_node == 0 else math.gcd(count, per_node)
        return self.cluster.resized(full, count // full)


Sides = tuple[Side, ...]


def numbers_of(sides: Sides) -> tuple[int, ...]:
    return tuple(number for side in sides for number in side.numbers)


def sides_of(cluster: Cluster) -> Sides:
    """Groups, those that nothing tells apart as one."""
    found: list[tuple[int, ...]] = []
    for number in range(len(cluster.groups)):
        joined = (*found[-1], number) if found else ()
        if joined and not cluster.arranged(joined).merged().others:
            found[-1] = joined
        else:
            found.append((number,))
    return tuple(Side(numbers=each, cluster=cluster.arranged(each).merged()) for each in found)


def joined(sides: Sides, between: Link | None) -> Cluster:
    """A cluster with a group for each of them, in this order."""
    first, *rest = (side.cluster for side in sides)
    others = tuple(each.groups[0] for each in rest)
    return replace(first, name="+".join(side.cluster.name for side in sides), others=others, between=between)


def limited(cluster: Cluster, limit: int) -> Cluster:
    """With at most so many bytes on each device."""

    def cut(device: Any) -> Any:
        return replace(device, memory_bytes=min(device.memory_bytes, limit))

    others = tuple(replace(group, device=cut(group.device)) for group in cluster.others)
    return replace(cluster, device=cut(cluster.device), others=others)


def choices(sides: Sides) -> Iterator[Sides]:
    """The groups that a plan might use: each alone first, since they are the quickest to plan for."""
    sizes = range(1, len(sides) + 1) if len(sides) <= MOST_SUBSETS else (1, len(sides))
    for size in sizes:
        yield from itertools.combinations(sides, size)


def orders(sides: Sides) -> Iterator[Sides]:
    """Every order, one of those that only exchange equal groups."""
    seen: list[list[Any]] = []
    for order in itertools.permutations(sides):
        groups = [side.cluster.groups for side in order]
        if groups not in seen:
            seen.append(groups)
            yield order


def kinds(sides: Sides) -> list[Side]:
    """One side of each kind of device and node."""
    found: list[Side] = []
    for side in sides:
        if not any(side.is_like(other) for other in found):
            found.append(side)
    return found


def members(sides: Sides, ranks_each: int) -> list[int]:
    """For each replica or stage of so many ranks, which side it lies on."""
    return [at for at, side in enumerate(sides) for _ in range(side.num_devices // ranks_each)]
