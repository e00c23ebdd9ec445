"""The groups of a mixed cluster as a plan may take them, and what each place in them gets: microbatches for replicas,
blocks for stages.

Both are exact for their question. Microbatches: the next one goes to whoever would have it done first, which for any
times that grow with their number makes the last one end as early as can be. Blocks: by dynamic programming over (span,
blocks so far), the slowest span as fast as can be.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwright.core.cluster import Cluster, Link
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Technique, technique_named, technique_names
from meshwright.core.work import Updating
from meshwright.simulator.priced_stages import cutter_of, stage_plan

MOST_SUBSETS = 3
"""Groups up to which every choice of some of them is tried; beyond, all of them and each alone."""


@dataclass(frozen=True, kw_only=True)
class UniformGroup:
    """Neighbouring groups that are one, by their numbers in the cluster."""

    numbers: tuple[int, ...]
    cluster: Cluster

    @property
    def num_devices(self) -> int:
        return self.cluster.num_devices

    def is_like(self, other: UniformGroup) -> bool:
        return self.cluster.groups[0].is_like(other.cluster.groups[0])

    def sized(self, count: int) -> Cluster:
        """So many of its devices, in nodes as full as they can be."""
        per_node = self.cluster.devices_per_node
        full = count if count <= per_node else per_node if count % per_node == 0 else math.gcd(count, per_node)
        return self.cluster.resized(full, count // full)


UniformGroups = tuple[UniformGroup, ...]


def group_numbers(groups: UniformGroups) -> tuple[int, ...]:
    return tuple(number for group in groups for number in group.numbers)


def uniform_groups(cluster: Cluster) -> UniformGroups:
    """Groups, those that nothing tells apart as one."""
    runs: list[tuple[int, ...]] = []
    for number in range(len(cluster.groups)):
        longer = (*runs[-1], number) if runs else ()
        if longer and not cluster.arranged(longer).merged().others:
            runs[-1] = longer
        else:
            runs.append((number,))
    return tuple(UniformGroup(numbers=each, cluster=cluster.arranged(each).merged()) for each in runs)


def joined_cluster(groups: UniformGroups, between: Link | None) -> Cluster:
    """A cluster with a group for each of them, in this order."""
    first, *rest = (group.cluster for group in groups)
    others = tuple(each.groups[0] for each in rest)
    return replace(first, name="+".join(group.cluster.name for group in groups), others=others, between=between)


def limited(cluster: Cluster, limit: int) -> Cluster:
    """With at most so many bytes on each device."""

    def cut(device: Any) -> Any:
        return replace(device, memory_bytes=min(device.memory_bytes, limit))

    others = tuple(replace(group, device=cut(group.device)) for group in cluster.others)
    return replace(cluster, device=cut(cluster.device), others=others)


def subsets(groups: UniformGroups) -> Iterator[UniformGroups]:
    """The groups that a plan might use: each alone first, since they are the quickest to plan for."""
    sizes = range(1, len(groups) + 1) if len(groups) <= MOST_SUBSETS else (1, len(groups))
    for size in sizes:
        yield from itertools.combinations(groups, size)


def distinct_orders(groups: UniformGroups) -> Iterator[UniformGroups]:
    """Every order, one of those that only exchange equal groups."""
    seen: list[list[Any]] = []
    for order in itertools.permutations(groups):
        clusters = [group.cluster.groups for group in order]
        if clusters not in seen:
            seen.append(clusters)
            yield order


def distinct_kinds(groups: UniformGroups) -> list[UniformGroup]:
    """One group of each kind of device and node."""
    kinds: list[UniformGroup] = []
    for group in groups:
        if not any(group.is_like(other) for other in kinds):
            kinds.append(group)
    return kinds


def group_of_each(groups: UniformGroups, ranks_each: int) -> list[int]:
    """For each replica or stage of so many ranks, which group it lies on."""
    return [at for at, group in enumerate(groups) for _ in range(group.num_devices // ranks_each)]


def replica_technique() -> type[Technique]:
    """Whose ranks may run different numbers of microbatches."""
    return _first(lambda kind: kind.takes_shares)


def stage_technique() -> type[Technique]:
    return _first(lambda kind: kind.blocks_of_stages is not Technique.blocks_of_stages)


def _first(is_it: Callable[[type[Technique]], bool]) -> type[Technique]:
    return next(kind for kind in map(technique_named, technique_names()) if is_it(kind))


def pins_without(pin: Sequence[str], kind: type[Technique], setting: str = "") -> list[str]:
    """The pins that are not this technique's, or not of this setting."""

    def is_left(text: str) -> bool:
        target, equals, _ = (part.strip() for part in text.partition("="))
        name, _, own = target.partition(".")
        return name != kind.name or (bool(setting) and (own or ("size" if equals else "")) != setting)

    return [text for text in pin if is_left(text)]


MOST_PARTS = 3
"""Numbers of samples for which a replica is planned."""


def share_microbatches(total: int, seconds: Sequence[Callable[[int], float]]) -> tuple[int, ...]:
    """At least one for each; `seconds[r](n)`: when replica r is done with n, which grows with n."""
    shares = [1] * len(seconds)
    waiting = [(times(2), replica) for replica, times in enumerate(seconds)]
    heapq.heapify(waiting)
    for _ in range(total - len(shares)):
        _, replica = waiting[0]
        shares[replica] += 1
        heapq.heapreplace(waiting, (seconds[replica](shares[replica] + 1), replica))
    return tuple(shares)


def cached_seconds(seconds_of: Callable[[int], float], rest: float) -> Callable[[int], float]:
    """The same and a rest, each number computed once."""
    known: dict[int, float] = {}

    def seconds(count: int) -> float:
        if count not in known:
            known[count] = seconds_of(count) + rest
        return known[count]

    return seconds


def largest_parts(batch: int, most: int) -> list[int]:
    """Divisors of the batch up to `most`, without those that divide another: together they have all microbatches."""
    parts = [size for size in range(1, most + 1) if batch % size == 0]
    return [size for size in parts if not any(other > size and other % size == 0 for other in parts)][-MOST_PARTS:]


def split_blocks(
    weights: Sequence[float], spans: Sequence[tuple[float, float]], most: Sequence[int] = ()
) -> tuple[int, ...]:
    """Blocks of each span, at least one, so that the slowest is as fast as can be.

    `weights` of the blocks; `spans`: (seconds without blocks, seconds for a weight of 1) of each; `most`: blocks that a
    span may have. Empty where that cannot be.
    """
    num_blocks, edges = len(weights), np.concatenate([[0.0], np.cumsum(weights)])
    counts = np.arange(num_blocks + 1)[None, :] - np.arange(num_blocks + 1)[:, None]  # [from, to]
    best = np.where(np.arange(num_blocks + 1) == 0, 0.0, np.inf)
    choices = []
    for at, (alone, each) in enumerate(spans):
        cost = alone + each * (edges[None, :] - edges[:, None])
        cost = np.where((counts >= 1) & (counts <= (most[at] if most else num_blocks)), cost, np.inf)
        slowest = np.maximum(best[:, None], cost)
        choices.append(slowest.argmin(axis=0))
        best = slowest.min(axis=0)
    if not np.isfinite(best[num_blocks]):
        return ()
    found, end = [], num_blocks
    for choice in reversed(choices):
        found.append(end - int(choice[end]))
        end = int(choice[end])
    return tuple(reversed(found))


def block_weights(profile: Profile, sequence: int) -> tuple[float, ...]:
    """Of each block, by its flops."""

    def flops(ops: Any) -> float:
        return float(sum(op.flops(1, sequence) + op.backward_flops(1, sequence) for op in ops)) or 1.0

    return tuple(flops(layer.ops) for layer in profile.block_layers for _ in range(layer.repeat))


def with_stages(plan: Plan, stages: tuple[int, ...]) -> Plan:
    """The same with so many blocks in each span."""
    cutter = cutter_of(plan)
    assert cutter is not None

    def changed(technique: Technique) -> Technique:
        return replace(technique, stages=stages) if technique.name == cutter.name else technique  # type: ignore[call-arg]

    return replace(plan, techniques=tuple(map(changed, plan.techniques)))


def span_times(
    profile: Profile,
    plan: Plan,
    seen: Mapping[int, Cluster],
    group_of_span: Sequence[int],
    weights: Sequence[float],
    *,
    sequence: int,
    optimizer: Updating,
) -> list[tuple[float, float]]:
    """For each span on its own group's device: seconds without blocks, and for a weight of 1.

    From two ways to deal out the blocks that differ in the first and the last span, where the ends of the model are.
    """
    count = len(group_of_span)
    each, more = divmod(profile.num_blocks, count)
    even = [each + (at < more) for at in range(count)]
    points: list[list[list[tuple[float, float]]]] = []
    for stages in (even, [even[0] - 1, *even[1:-1], even[-1] + 1]):
        if min(stages) < 1:
            continue
        tried = with_stages(plan, tuple(stages))
        edges = np.cumsum([0, *stages])
        sums = [float(sum(weights[a:b])) for a, b in itertools.pairwise(edges)]
        by_group = {}
        for group, cluster in seen.items():
            staged = stage_plan(profile, tried, cluster, sequence=sequence, optimizer=optimizer)
            by_group[group] = [span.forward + span.backward for span in staged.spans]
        points.append([[(sums[at], by_group[group][at])] for at, group in enumerate(group_of_span)])
    found = []
    for at in range(count):
        measured = [point for way in points for point in way[at]]
        (x, seconds), *others = measured
        other = next((point for point in others if point[0] != x), None)
        slope = (seconds - other[1]) / (x - other[0]) if other else seconds / x
        found.append((max(0.0, seconds - slope * x), slope))
    return found
