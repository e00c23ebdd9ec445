"""The fastest plan on groups of different devices: replicas or stages across the groups, or only some of the groups.

    ranks of one of a group --search--> plans inside a replica ----> shares of the microbatches --+
                                                                                                  +--> forecast
    all ranks of one kind --search--> plans with stages --split--> blocks of the stages ----------+

What lies inside a replica or a stage is found by the search for clusters of one kind, once for each kind of device, and
what each place gets is exact for that. So the best is no proof: the gap is told against a loose but certain bound. A
device is never faster than alone, with all the memory it wants, nobody to talk to and products that fit its
processors: what the search certifies for that is its least seconds for a batch, and devices together need at least

    1 / sum over devices (1 / least seconds)

What each place gets: the next microbatch goes to the replica that would have it done first, which for any times that
grow with their number makes the last one end as early as can be; blocks go to stages by dynamic programming over (span,
blocks so far), the slowest span as fast as can be.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from meshwright.core.cluster import Cluster, Device, Link
from meshwright.core.errors import MeshwrightError, Problem
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Technique, technique_named, technique_names
from meshwright.core.work import Updating
from meshwright.planner.best_first import limited, search_group
from meshwright.planner.scoreboard import Alternative, Scoreboard, ScoredPlan, SearchResult
from meshwright.planner.wishes import Wishes, read_wishes
from meshwright.simulator.forecast import Forecast
from meshwright.simulator.mixed_groups import replica_pipe, rests_seconds, seen_from
from meshwright.simulator.pricing import cutter_of, stage_plan

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


ENOUGH_BYTES = 1 << 52

Search = Callable[[Cluster], SearchResult | None]
"""What is best there for the whole batch."""


def least_seconds_alone(
    profile: Profile, group: UniformGroup, batch: int, sequence: int, optimizer: Updating, search: Search
) -> float:
    """Least seconds of one of its devices for the forward and backward passes of a batch."""
    machine = replace(group.cluster.resized(1), device=at_best(group.cluster.device))
    found = search(machine)
    if found is None or found.best is None or found.gap_fraction is None:
        return _least_by_flops(profile, machine.device, batch, sequence)
    plan, told = found.best
    # All plans for one device update the same parameters; several devices may share that out.
    staged = stage_plan(profile, plan, machine, sequence=sequence, optimizer=optimizer)
    return told.step_seconds * (1 - found.gap_fraction) - staged.stages[0].tail_seconds


def least_seconds_together(alone: Sequence[float], counts: Sequence[int]) -> float:
    """Least seconds of so many devices of each kind together."""
    return 1 / sum(count / seconds for count, seconds in zip(counts, alone, strict=True))


def at_best(device: Device) -> Device:
    """Without what makes some shapes slower than others: pieces of a product may fit better than all of it."""
    faster = max((1 / residual for *_, residual in device.residuals), default=1.0)
    return replace(
        device,
        memory_bytes=ENOUGH_BYTES,
        reserved_bytes=0,
        flops_per_second={dtype: max(1.0, faster) * rate for dtype, rate in device.flops_per_second.items()},
        residuals=(),
        num_processors=0,
        unaligned_slowdown=1.0,
    )


def _least_by_flops(profile: Profile, device: Device, batch: int, sequence: int) -> float:
    """As if all of it were products at the best rate."""
    flops = sum(
        layer.repeat * float(op.flops(1, sequence) + op.backward_flops(1, sequence))
        for layer in profile.layers
        for op in layer.ops
    )
    fraction = max(device.matmul_fraction, device.attention_fraction, device.attention_backward_fraction)
    return batch * flops / (max(device.flops_per_second.values()) * fraction)


NEAR, FAR = 1.03, 1.05
"""Times the best so far: what could at best be slower than the first is not looked at closely; where it is slower than
the second, and than what came before, nor are smaller replicas or more stages."""
FINE = 4
"""Microbatches that a replica should have, so that a faster one can be given more."""
EACH_KIND = 64
"""Devices up to which what lies inside is searched for on every kind of them, and for more microbatches than would be
best alone; beyond, on the fastest, and on those with less memory."""
ABOUT = 0.95
"""Of the largest memory, that counts as large."""
INSIDE = 4
"""Plans taken at least from each search for what lies inside a replica or a stage: half of those asked for, if more."""
MOVES = 48
"""Forecasts for moving single blocks from stage to stage after they were dealt out."""
SOME = 1.15
"""Times the best so far that a plan of few stages may take for that to be tried."""


def search_across(
    profile: Profile,
    cluster: Cluster,
    *,
    batch: int,
    pin: Sequence[str],
    ban: Sequence[str],
    top: int,
    **common: Any,
) -> SearchResult:
    """Plans for a cluster of several groups, best first. `common` is what all searches inside them are asked."""
    started = time.perf_counter()
    if (limit := common["max_memory_bytes"]) is not None:
        cluster = limited(cluster, limit)
    task = _GroupSearch(
        profile=profile,
        cluster=cluster,
        batch=batch,
        pin=tuple(pin),
        ban=tuple(ban),
        wishes=read_wishes(pin, ban, allow=common["allow"], microbatch=common["microbatch"]),
        common=common,
        inside=max(INSIDE, top // 2),
        board=Scoreboard(profile, cluster, common["sequence"], common["optimizer"]),
    )
    groups = uniform_groups(cluster)
    try:
        task.measure(groups)
        for chosen in subsets(groups):
            task.try_groups(chosen)
    except KeyboardInterrupt:
        task.board.is_interrupted = True
    if not any(task.board.scored.values()) and task.problems:
        raise MeshwrightError(task.problems)
    return replace(task.result(top), search_seconds=time.perf_counter() - started)


@dataclass(kw_only=True)
class _GroupSearch:
    """One search over all choices of groups."""

    profile: Profile
    cluster: Cluster
    batch: int
    pin: tuple[str, ...]
    ban: tuple[str, ...]
    wishes: Wishes
    common: dict[str, Any]
    inside: int
    """Plans taken from each search."""
    board: Scoreboard
    problems: list[Problem] = field(default_factory=list)
    alone: list[tuple[UniformGroup, float]] = field(default_factory=list)
    """Least seconds of one device of each kind."""
    least_seconds: float = 0.0
    """No plan is faster."""
    evaluated: int = 0

    def try_groups(self, groups: UniformGroups) -> None:
        """Plans whose ranks take all devices of these."""
        if len(groups) == 1:
            self._alone(groups[0])
            return
        num_devices = sum(group.num_devices for group in groups)
        common = math.gcd(*(group.num_devices for group in groups))
        for way in (self._replicas, self._stages):
            before = math.inf
            for ranks_each in (size for size in range(common, 0, -1) if common % size == 0):
                at_best = way(groups, ranks_each, num_devices // ranks_each)
                # A model that fits on no replica fits on none of fewer ranks.
                is_hopeless = at_best == math.inf if math.isfinite(before) else False
                if is_hopeless or (math.isfinite(at_best) and at_best > max(before, FAR * self.board.best_seconds)):
                    break
                before = min(before, at_best)

    def measure(self, groups: UniformGroups) -> None:
        """How fast each kind of device can be at all."""
        free: dict[str, Any] = {"pin": (), "ban": (), "top": 1, "microbatch": None, "max_memory_bytes": None}
        settings = (self.batch, self._sequence, self._optimizer)
        for group in distinct_kinds(groups):
            seconds = least_seconds_alone(
                self.profile, group, *settings, lambda machine: self._inside(machine, self.batch, **free)
            )
            self.alone.append((group, seconds))
        if self.problems:  # nothing was pinned: they are about the question itself
            raise MeshwrightError(self.problems)
        self.least_seconds = self._together(groups)

    def _alone_seconds(self, group: UniformGroup) -> float:
        return next(seconds for kind, seconds in self.alone if kind.is_like(group))

    def _together(self, groups: UniformGroups) -> float:
        return least_seconds_together(
            [self._alone_seconds(group) for group in groups], [group.num_devices for group in groups]
        )

    def _looks(
        self, groups: UniformGroups, search_on: Callable[[UniformGroup], SearchResult | None]
    ) -> tuple[float, list[Plan]]:
        """Plans found on kinds of device, and what the best of them could take here, if its times followed the speed of
        the devices. Where that is too slow, the slower and smaller kinds are left."""
        at_best, plans = math.inf, list[Plan]()
        count, least_bytes = sum(each.num_devices for each in groups), math.inf
        large = ABOUT * max(group.cluster.device.memory_bytes for group in groups)
        for group in sorted(distinct_kinds(groups), key=self._alone_seconds):
            if count > EACH_KIND and group.cluster.device.memory_bytes >= ABOUT * least_bytes:
                continue  # what fits on those before fits here
            least_bytes = min(least_bytes, group.cluster.device.memory_bytes)
            found = search_on(group)
            if found is None or found.best is None:
                continue
            alike = least_seconds_together([self._alone_seconds(group)], [count])
            at_best = min(at_best, found.best.forecast.step_seconds * self._together(groups) / alike)
            plans += [plan for plan, _ in found.ranked]
            if at_best > NEAR * self.board.best_seconds and group.cluster.device.memory_bytes >= large:
                return at_best, []
        return at_best, list(dict.fromkeys(plans))

    def _alone(self, group: UniformGroup) -> None:
        found = self._inside(group.cluster, self.batch, pin=self.pin, ban=self.ban, top=self.inside)
        if found is None:
            return
        for plan, forecast in found.ranked:
            self.board.record(ScoredPlan(replace(plan, groups=group.numbers), forecast))
        if found.nearest_miss is not None:  # also one that fits by its bytes, but not in the pieces they come in
            plan, forecast = found.nearest_miss
            self.board.record(ScoredPlan(replace(plan, groups=group.numbers), replace(forecast, fits=False)))

    def _inside(self, cluster: Cluster, batch: int, **wanted: Any) -> SearchResult | None:
        """Plans for devices of one kind; None where what is pinned cannot be on so many."""
        if self.board.is_interrupted:
            return None
        try:
            found = search_group(self.profile, cluster, batch=batch, **{**self.common, **wanted})
        except MeshwrightError as error:
            self.problems += [problem for problem in error.problems if problem not in self.problems]
            return None
        self.evaluated += found.evaluated
        self.board.rejected.update(found.rejected)
        self.board.is_interrupted = found.is_interrupted
        return found

    def _replicas(self, groups: UniformGroups, ranks_each: int, count: int) -> float:
        """Replicas of `ranks_each` ranks across the groups; what they could take at best."""
        kind = replica_technique()
        pinned = dict(self.wishes.pinned.get(kind.name, {}))
        if kind.name in self.wishes.banned or pinned.get("size", count) != count or count > self.batch:
            return math.inf
        inner = {"pin": pins_without(self.pin, kind), "ban": [*self.ban, kind.name], "top": self.inside}
        at_best, plans = math.inf, list[Plan]()
        whole_parts = largest_parts(self.batch, self.batch // count)
        parts = [*whole_parts]
        for within in parts:

            def search_on(group: UniformGroup, samples: int = within) -> SearchResult | None:
                return self._inside(group.sized(ranks_each), samples, **inner)

            looked, found = self._looks(groups, search_on)
            is_coarse = within in whole_parts and all(plan.num_microbatches < FINE for plan in found)
            if within >= FINE and found and is_coarse and ranks_each <= EACH_KIND:
                parts += largest_parts(self.batch, within // FINE)[-1:]  # too few to be dealt out by speed
            # Per sample: a part may be less than a replica's share.
            at_best, plans = min(at_best, looked * self.batch / (within * count)), [*plans, *found]
        for plan in dict.fromkeys(replace(plan, batch=self.batch) for plan in plans):
            outer = kind(**{**pinned, "size": count})
            order = (outer.axis, *plan.axis_order)
            whole = replace(plan, techniques=(*plan.techniques, outer), axis_order=order)
            self._share_out(whole, groups)
        return at_best

    def _share_out(self, plan: Plan, groups: UniformGroups) -> None:
        here = joined_cluster(groups, self.cluster.between)
        count = plan.mesh[plan.axis_order[0]]
        ranks_each = plan.num_ranks // count
        total, rest = divmod(self.batch, plan.num_replicas // count * plan.microbatch)
        if rest or total < count:
            self.board.rejected["a microbatch for each replica is more than the batch"] += 1
            return
        if not plan.shares:
            about = max(1, total // count)
            pipes = [
                replica_pipe(self.profile, plan, here, group, about, self._sequence, self._optimizer)
                for group in range(len(groups))
            ]
            rests = rests_seconds(pipes)
            times = [cached_seconds(pipe.seconds_of, rest) for pipe, rest in zip(pipes, rests, strict=True)]
            lying = group_of_each(groups, ranks_each)
            shares = share_microbatches(total, [times[at] for at in lying])
            if max(times[at](share) for at, share in zip(lying, shares, strict=True)) > self.board.best_seconds:
                self.board.rejected["slower"] += 1
                return
            plan = plan.with_shares(shares if len(set(shares)) > 1 else ())
        self._score(plan, groups)

    def _stages(self, groups: UniformGroups, ranks_each: int, count: int) -> float:
        """Stages of `ranks_each` ranks across the groups, in every order of them; what they could take at best."""
        kind = stage_technique()
        pinned = self.wishes.pinned.get(kind.name, {})
        if kind.name in self.wishes.banned or pinned.get("size", count) != count or count > self.profile.num_blocks:
            return math.inf
        pin = [*pins_without(self.pin, kind, "size"), f"{kind.name}.size={count}"]
        wanted = {"pin": pin, "ban": self.ban, "top": self.inside}
        at_best, plans = self._looks(
            groups, lambda group: self._inside(group.sized(ranks_each * count), self.batch, **wanted)
        )
        for plan in plans:
            order = (kind.axis, *(axis for axis in plan.axis_order if axis != kind.axis))
            for arranged in distinct_orders(groups):
                self._split(replace(plan, axis_order=order), arranged, is_pinned="stages" in pinned)
        return at_best

    def _split(self, plan: Plan, groups: UniformGroups, *, is_pinned: bool) -> None:
        """Deal out the blocks; where a stage is then too full, with fewer in it; then move single ones."""
        if is_pinned:
            self._score(plan, groups)
            return
        here = joined_cluster(groups, self.cluster.between)
        cutter = cutter_of(plan)
        assert cutter is not None
        size = plan.mesh[cutter.axis]
        ranks_each = plan.num_ranks // size
        units = group_of_each(groups, ranks_each)
        places = cutter.timetable.places(size)  # type: ignore[attr-defined]
        group_of_span = [units[places.stage(span)] for span in range(places.num_spans)]
        if places.num_spans > self.profile.num_blocks:
            return
        weights = block_weights(self.profile, self._sequence)
        seen = {group: seen_from(here, group) for group in set(units)}
        settings: dict[str, Any] = {"sequence": self._sequence, "optimizer": self._optimizer}
        times = span_times(self.profile, plan, seen, group_of_span, weights, **settings)
        most = [self.profile.num_blocks] * places.num_spans
        while stages := split_blocks(weights, times, most):
            edges = [0, *itertools.accumulate(stages)]
            busy = [0.0] * size
            for span, (alone, each) in enumerate(times):
                busy[places.stage(span)] += alone + each * sum(weights[edges[span] : edges[span + 1]])
            if max(busy) * plan.num_microbatches > self.board.best_seconds:
                self.board.rejected["slower"] += 1
                return
            told = self._score(with_stages(plan, stages), groups)
            if told is None or told.fits:
                break
            for chunk in range(places.chunks):
                fullest = places.span(told.worst_stage, chunk)
                most[fullest] = stages[fullest] - 1
        if stages:
            self._move(with_stages(plan, stages), stages, groups)

    def _move(self, plan: Plan, stages: tuple[int, ...], groups: UniformGroups) -> None:
        """One block at a time from one span to another, as long as that helps and is not too many to try."""
        best = self._score(plan, groups)
        pairs = list(itertools.permutations(range(len(stages)), 2))
        tried = 0
        near = SOME if len(pairs) < MOVES else NEAR
        while best is not None and best.fits and best.step_seconds <= near * self.board.best_seconds and tried < MOVES:
            better = None
            for giver, taker in pairs[: MOVES - tried]:
                if stages[giver] > 1:
                    tried += 1
                    moved = tuple(n - (at == giver) + (at == taker) for at, n in enumerate(stages))
                    told = self._score(with_stages(plan, moved), groups)
                    if told is not None and told.fits and told.step_seconds < best.step_seconds:
                        best, better = told, moved
            if better is None:
                return
            stages = better

    @property
    def _sequence(self) -> int:
        return int(self.common["sequence"])

    @property
    def _optimizer(self) -> Updating:
        return self.common["optimizer"]

    def _score(self, plan: Plan, groups: UniformGroups) -> Forecast | None:
        """Its forecast, or None (and the reason counted) if the plan's own check objects."""
        numbers = group_numbers(groups)
        plan = replace(plan, groups=() if numbers == tuple(range(len(self.cluster.groups))) else numbers)
        self.evaluated += (plan, False) not in self.board.scored
        scored = self.board.score(plan)
        if scored is None:
            return None
        if scored.forecast.fits:
            self.board.take(scored)
        return scored.forecast

    def result(self, top: int) -> SearchResult:
        ranked: list[ScoredPlan] = []
        missed = self.board.without_replay(fits=False)
        for known in self.board.without_replay(fits=True):
            scored = self.board.score(known.plan, replays=True)
            if scored is not None and scored.forecast.fits:
                ranked.append(scored)
            elif scored is not None:
                self.board.reject("does not fit in memory in pieces")
                missed.append(scored)
            if len(ranked) == top:
                break
        best = ranked[0] if ranked else None
        nearest = min(missed, key=lambda each: each.forecast.peak_bytes - each.forecast.memory_bytes, default=None)
        gap = max(0.0, 1.0 - self.least_seconds / best.forecast.step_seconds) if best else None
        return SearchResult(
            best=best,
            ranked=tuple(ranked),
            rejected=dict(self.board.rejected.most_common()),
            nearest_miss=None if best else nearest,
            evaluated=self.evaluated,
            search_seconds=0.0,
            gap_fraction=gap,
            alternatives=tuple(self._alternatives(best.plan)) if best else (),
            is_interrupted=self.board.is_interrupted,
        )

    def _alternatives(self, best: Plan) -> Iterator[Alternative]:
        used = {technique.name for technique in best.techniques}
        fitting = self.board.without_replay(fits=True)
        for name in sorted(used | {technique.name for each in fitting for technique in each.plan.techniques}):
            others = (each for each in fitting if (each.plan.technique(name) is None) == (name in used))
            first = next(others, None)
            if first is not None:  # else none was looked at, which says nothing
                yield Alternative(technique=name, is_used=name in used, scored=first)
