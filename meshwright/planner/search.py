"""The search: the fastest plan that fits, on devices of one kind or on groups that differ.

    one group alone -----------best_first.py--> plans -------------------------------------------+
    ranks of one replica ------best_first.py--> plans inside it --> shares of the microbatches --+--> forecast
    all ranks, of one kind ----best_first.py--> plans with stages --> blocks of the stages ------+

Where all devices are of one kind there is one group, and the first line is the whole search. Else plans may use some of
the groups, with replicas or stages across them. What lies inside a replica or a stage is found by the search for
devices of one kind, once for each kind, and what each place gets is exact for that: the next microbatch goes to the
replica that would have it done first, which for any times that grow with their number makes the last one end as early
as can be; blocks go to stages as in `splits.py`, each at the pace of its own device.

So the best of several groups is no proof: the gap is told against a loose but certain bound. A device is never faster
than alone, with all the memory it wants, nobody to talk to and products that fit its processors: what the search
certifies for that is its least seconds for a batch, and devices together need at least

    1 / sum over devices (1 / least seconds)
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from meshwright.core.cluster import Cluster, Device
from meshwright.core.errors import MeshwrightError, Problem
from meshwright.core.placement import group_of_units, placed
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Technique, is_within, technique_named, technique_names
from meshwright.core.work import ADAM, Updating
from meshwright.planner.best_first import Bounds, search_uniform
from meshwright.planner.scoreboard import TABLE, Alternative, Scoreboard, ScoredPlan, SearchResult, simpler_first
from meshwright.planner.splits import fastest_splits, layer_flops, most_even, run_sums
from meshwright.planner.wishes import SearchInputs, Wishes, read_wishes
from meshwright.simulator.forecast import Forecast
from meshwright.simulator.mixed_groups import replica_pipe, rests_seconds, seen_from
from meshwright.simulator.pricing import cutter_of, stage_plan

__all__ = ["EPSILON", "Alternative", "Bounds", "ScoredPlan", "SearchResult", "search"]

EPSILON = 0.01
"""Share of a step below which a faster plan is not looked for any longer, after the first looks."""
MOST_COUNTED = 2**53
"""Samples or tokens; above, the floats that prices are cannot count them one by one."""


def search(
    profile: Profile,
    cluster: Cluster,
    *,
    batch: int,
    sequence: int,
    optimizer: Updating = ADAM,
    allow: str = "rounded",
    pin: Sequence[str] = (),
    ban: Sequence[str] = (),
    top: int = 10,
    microbatch: int | None = None,
    epsilon: float = EPSILON,
    compares: bool = True,
    tie: float = 0.0,
    bounds: Bounds | None = None,
    seconds: float | None = None,
    tell: Callable[[str], None] | None = None,
) -> SearchResult:
    """The `top` fastest plans for `batch` samples of `sequence` tokens a step on the devices of `cluster`, best first:
    fewer are always the first of more. `compares`: also what each technique is worth. `tie`: of plans whose steps
    differ by less than this share, the simpler comes first. `bounds`: what was found out when the same was asked of
    devices with other memory, and where to remember it. `seconds`: after so many the search ends with the plans it has
    found and a larger gap; it goes on until there is one. `tell`: is called now and then with how far it is."""
    started = time.perf_counter()
    wishes = read_wishes(pin, ban, allow=allow, microbatch=microbatch)
    numbers = {"batch": batch, "sequence": sequence, "top": top, "microbatch": wishes.microbatch}
    problems = [
        Problem(where=name, what=f"is {value}.", fix=f"Use at {'least 1' if value < 1 else f'most {MOST_COUNTED}'}.")
        for name, value in numbers.items()
        if value is not None and not 1 <= value <= MOST_COUNTED
    ]
    for name in wishes.pinned:
        problems += (replace(p, where=f"pin {p.where}") for p in technique_named(name).check_optimizer(optimizer))
    if problems:
        raise MeshwrightError(problems)
    inputs = SearchInputs(
        profile=profile,
        cluster=cluster,
        optimizer=optimizer,
        batch=batch,
        sequence=sequence,
        wishes=wishes,
        epsilon=epsilon,
        deadline=math.inf if seconds is None else time.monotonic() + seconds,
        tell=tell,
    )
    groups, count = uniform_groups(cluster), -(-top // TABLE) * TABLE if tie else top
    if len(groups) == 1:
        result = search_uniform(
            replace(inputs, cluster=cluster.merged()), count, compares=compares, tie=tie, bounds=bounds
        )
    else:
        result = GroupSearch(inputs, groups).result(count, tie)
    return replace(result, ranked=result.ranked[:top], search_seconds=time.perf_counter() - started)


# Groups.

MOST_SUBSETS = 3
"""Groups up to which every choice of some of them is tried; beyond, all of them and each alone."""


@dataclass(frozen=True, kw_only=True)
class UniformGroup:
    """Neighbouring groups that are one, by their numbers in the cluster."""

    numbers: tuple[int, ...]
    cluster: Cluster

    def is_like(self, other: UniformGroup) -> bool:
        return self.cluster.groups[0].is_like(other.cluster.groups[0])

    def sized(self, count: int) -> Cluster:
        """The group with this many of its devices, in nodes as full as possible."""
        per_node = self.cluster.devices_per_node
        full = count if count <= per_node else per_node if count % per_node == 0 else math.gcd(count, per_node)
        return self.cluster.resized(full, count // full)


UniformGroups = tuple[UniformGroup, ...]


def uniform_groups(cluster: Cluster) -> UniformGroups:
    """Groups, those that nothing tells apart as one."""
    runs: list[tuple[int, ...]] = []
    for number in range(len(cluster.groups)):
        if runs and not cluster.arranged((*runs[-1], number)).merged().others:
            runs[-1] = (*runs[-1], number)
        else:
            runs.append((number,))
    return tuple(UniformGroup(numbers=each, cluster=cluster.arranged(each).merged()) for each in runs)


def distinct_kinds(groups: UniformGroups) -> list[UniformGroup]:
    """One group of each kind of device and node."""
    return [each for at, each in enumerate(groups) if not any(each.is_like(other) for other in groups[:at])]


def first_technique(is_it: Callable[[type[Technique]], bool]) -> type[Technique]:
    return next(kind for kind in map(technique_named, technique_names()) if is_it(kind))


# What each place gets.

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


def largest_parts(batch: int, most: int) -> list[int]:
    """Divisors of the batch up to `most`, without those that divide another: together they have all microbatches."""
    parts = [size for size in range(1, most + 1) if batch % size == 0]
    return [size for size in parts if not any(other > size and other % size == 0 for other in parts)][-MOST_PARTS:]


def span_costs(weights: Sequence[float], times: Sequence[tuple[float, float]], most: Sequence[int]) -> np.ndarray:
    """Seconds of a microbatch by (span, first block, blocks - 1); infinite beyond the `most` blocks that a span may
    have. `weights` of the blocks; `times`: (seconds without blocks, seconds for a weight of 1) of each span."""
    own, counts = run_sums(weights), np.arange(1, len(weights) + 1)
    costs = [
        np.where(limit >= counts, alone + each * own, np.inf) for (alone, each), limit in zip(times, most, strict=True)
    ]
    return np.stack(costs)


def span_times(
    inputs: SearchInputs,
    plan: Plan,
    seen: Mapping[int, Cluster],
    group_of_span: Sequence[int],
    weights: Sequence[float],
) -> list[tuple[float, float]]:
    """For each span on its own group's device: seconds without blocks, and for a weight of 1.

    From two ways to deal out the blocks that differ in the first and the last span, where the ends of the model are.
    """
    profile, count = inputs.profile, len(group_of_span)
    each, more = divmod(profile.num_blocks, count)
    even = [each + (at < more) for at in range(count)]
    measured: list[list[tuple[float, float]]] = [[] for _ in group_of_span]
    for stages in (even, [even[0] - 1, *even[1:-1], even[-1] + 1]):
        if min(stages) < 1:
            continue
        tried = with_stages(plan, tuple(stages))
        by_group = {
            group: stage_plan(profile, tried, cluster, sequence=inputs.sequence, optimizer=inputs.optimizer).spans
            for group, cluster in seen.items()
        }
        first = 0
        for span, (group, blocks) in enumerate(zip(group_of_span, stages, strict=True)):
            seconds = by_group[group][span].forward + by_group[group][span].backward
            measured[span].append((float(sum(weights[first : first + blocks])), seconds))
            first += blocks
    times = []
    for (weight, seconds), *others in measured:
        other = next((point for point in others if point[0] != weight), None)
        slope = (seconds - other[1]) / (weight - other[0]) if other else seconds / weight
        times.append((max(0.0, seconds - slope * weight), slope))
    return times


def with_stages(plan: Plan, stages: tuple[int, ...]) -> Plan:
    """The same with so many blocks in each span."""
    cutter = cutter_of(plan)
    changed = (replace(each, stages=stages) if each is cutter else each for each in plan.techniques)  # type: ignore[call-arg]
    return replace(plan, techniques=tuple(changed))


def at_best(device: Device) -> Device:
    """With more memory than anybody needs, and without what makes some shapes slower than others: pieces of a product
    may fit better than all of it."""
    faster = max((1 / residual for *_, residual in device.residuals), default=1.0)
    return replace(
        device,
        memory_bytes=1 << 52,
        reserved_bytes=0,
        flops_per_second={dtype: max(1.0, faster) * rate for dtype, rate in device.flops_per_second.items()},
        residuals=(),
        num_processors=0,
        unaligned_slowdown=1.0,
    )


# Plans across groups.

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
"""Plans taken from each search for devices of one kind: what lies inside a replica or a stage, or a group alone."""
MOVES = 48
"""Forecasts for moving single blocks from stage to stage after they were dealt out."""
SOME = 1.15
"""Times the best so far that a plan of few stages may take for that to be tried."""


class GroupSearch:
    """Plans on every choice of a cluster's groups."""

    def __init__(self, inputs: SearchInputs, groups: UniformGroups):
        self.inputs, self.wishes = inputs, inputs.wishes
        self.board = Scoreboard(inputs)
        self.problems: list[Problem] = []
        self.evaluated = 0
        self.alone: list[tuple[UniformGroup, float]] = []
        """Least seconds of one device of each kind for the forward and backward passes of a batch."""
        self.least_seconds = 0.0
        """No plan is faster."""
        try:
            self.alone += [(group, self._least_seconds_alone(group)) for group in distinct_kinds(groups)]
            self.least_seconds = self._together(groups)
            # Each group alone first, since they are the quickest to plan for.
            sizes = range(1, len(groups) + 1) if len(groups) <= MOST_SUBSETS else (1, len(groups))
            for chosen in itertools.chain.from_iterable(itertools.combinations(groups, size) for size in sizes):
                self._try(chosen)
        except KeyboardInterrupt:
            self.board.is_interrupted = True
        if not any(self.board.scored.values()) and self.problems:
            raise MeshwrightError(self.problems)

    def _search(self, cluster: Cluster, batch: int, wishes: Wishes, top: int) -> SearchResult | None:
        """Plans for devices of one kind; None where what is pinned cannot be on so many."""
        if self.board.is_interrupted:
            return None
        try:
            result = search_uniform(replace(self.inputs, cluster=cluster, batch=batch, wishes=wishes), top)
        except MeshwrightError as error:
            self.problems += [problem for problem in error.problems if problem not in self.problems]
            return None
        self.evaluated += result.evaluated
        self.board.rejected.update(result.rejected)
        self.board.is_interrupted = result.is_interrupted
        return result

    def _least_seconds_alone(self, group: UniformGroup) -> float:
        profile, batch, sequence = self.inputs.profile, self.inputs.batch, self.inputs.sequence
        machine = replace(group.cluster.resized(1), device=at_best(group.cluster.device))
        result = self._search(machine, batch, Wishes(allow=self.wishes.allow), 1)
        if result is None or result.best is None or result.gap_fraction is None:
            # As if all of it were products at the best rate.
            device, flops = machine.device, sum(each.repeat * layer_flops(each, sequence) for each in profile.layers)
            fraction = max(device.matmul_fraction, device.attention_fraction, device.attention_backward_fraction)
            return batch * flops / (max(device.flops_per_second.values()) * fraction)
        plan, told = result.best
        # All plans for one device update the same parameters; several devices may share that out.
        staged = stage_plan(profile, plan, machine, sequence=sequence, optimizer=self.inputs.optimizer)
        return told.step_seconds * (1 - result.gap_fraction) - staged.stages[0].tail_seconds

    def _alone_seconds(self, group: UniformGroup) -> float:
        return next(seconds for kind, seconds in self.alone if kind.is_like(group))

    def _together(self, groups: UniformGroups) -> float:
        """Least seconds of all devices of these groups."""
        return 1 / sum(group.cluster.num_devices / self._alone_seconds(group) for group in groups)

    def _try(self, groups: UniformGroups) -> None:
        """Plans whose ranks take all devices of these."""
        if len(groups) == 1:
            self._try_alone(groups[0])
            return
        num_devices = sum(group.cluster.num_devices for group in groups)
        common = math.gcd(*(group.cluster.num_devices for group in groups))
        for way in (self._try_replicas, self._try_stages):
            before = math.inf
            for ranks_each in (size for size in range(common, 0, -1) if common % size == 0):
                at_best = way(groups, ranks_each, num_devices // ranks_each)
                # A model that fits on no replica fits on none of fewer ranks.
                is_hopeless = math.isfinite(before) and at_best == math.inf
                if is_hopeless or (math.isfinite(at_best) and at_best > max(before, FAR * self.board.best_seconds)):
                    break
                before = min(before, at_best)

    def _try_alone(self, group: UniformGroup) -> None:
        result = self._search(group.cluster, self.inputs.batch, self.wishes, INSIDE)
        if result is None:
            return
        scored = list(result.ranked)
        if result.nearest_miss is not None:  # also one that fits by its bytes, but not in the pieces they come in
            scored.append(result.nearest_miss._replace(forecast=replace(result.nearest_miss.forecast, fits=False)))
        for plan, forecast in scored:
            self.board.record(ScoredPlan(replace(plan, groups=group.numbers), forecast))

    def _settings(self, kind: type[Technique], count: int) -> dict[str, Any] | None:
        """Settings of the technique whose ranks lie across groups; None where the user's wishes exclude that size."""
        wishes, pinned = self.wishes, self.wishes.pinned.get(kind.name, {})
        is_banned = kind.name in wishes.banned or count in wishes.banned_values.get((kind.name, "size"), ())
        is_near_enough = is_within(kind.exactness_with(pinned), wishes.allow)
        if is_banned or not is_near_enough or pinned.get("size", count) != count:
            return None
        return {**pinned, "size": count}

    def _looks(self, groups: UniformGroups, ranks: int, batch: int, wishes: Wishes) -> tuple[float, list[Plan]]:
        """Plans for so many ranks on each kind of device, and what the best of them could take here, if its times
        followed the speed of the devices. Where that is too slow, the slower and smaller kinds are left."""
        at_best, plans = math.inf, list[Plan]()
        count, least_bytes = sum(each.cluster.num_devices for each in groups), math.inf
        large = ABOUT * max(group.cluster.device.memory_bytes for group in groups)
        for group in sorted(distinct_kinds(groups), key=self._alone_seconds):
            if count > EACH_KIND and group.cluster.device.memory_bytes >= ABOUT * least_bytes:
                continue  # what fits on those before fits here
            least_bytes = min(least_bytes, group.cluster.device.memory_bytes)
            result = self._search(group.sized(ranks), batch, wishes, INSIDE)
            if result is None or result.best is None:
                continue
            alike = self._alone_seconds(group) / count
            at_best = min(at_best, result.best.seconds_to_target * self._together(groups) / alike)
            plans += [plan for plan, _ in result.ranked]
            if at_best > NEAR * self.board.best_seconds and group.cluster.device.memory_bytes >= large:
                return at_best, []
        return at_best, list(dict.fromkeys(plans))

    def _try_replicas(self, groups: UniformGroups, ranks_each: int, count: int) -> float:
        """Replicas of `ranks_each` ranks across the groups; what they could take at best."""
        kind, batch = first_technique(lambda kind: kind.takes_shares), self.inputs.batch
        settings = self._settings(kind, count)
        if settings is None or count > batch:
            return math.inf
        pinned = {name: each for name, each in self.wishes.pinned.items() if name != kind.name}
        inner = replace(self.wishes, pinned=pinned, banned=self.wishes.banned | {kind.name})
        at_best, plans = math.inf, list[Plan]()
        whole_parts = largest_parts(batch, batch // count)
        parts = [*whole_parts]
        for within in parts:
            looked, more = self._looks(groups, ranks_each, within, inner)
            is_coarse = within in whole_parts and all(plan.num_microbatches < FINE for plan in more)
            if self.board.best is not None and time.monotonic() >= self.inputs.deadline:
                break
            if within >= FINE and more and is_coarse and ranks_each <= EACH_KIND:
                parts += largest_parts(batch, within // FINE)[-1:]  # too few to be dealt out by speed
            # Per sample: a part may be less than a replica's share.
            at_best, plans = min(at_best, looked * batch / (within * count)), [*plans, *more]
        for plan in dict.fromkeys(replace(plan, batch=batch) for plan in plans):
            techniques, order = (*plan.techniques, kind(**settings)), (kind.axis, *plan.axis_order)
            self._share_out(self._on(replace(plan, techniques=techniques, axis_order=order), groups))
        return at_best

    def _share_out(self, plan: Plan) -> None:
        """Give each replica as many microbatches as its device is fast."""
        inputs, here = self.inputs, placed(plan, self.inputs.cluster)
        group_of_replica = group_of_units(plan, here)
        count = len(group_of_replica)
        total, rest = divmod(inputs.batch, plan.num_replicas // count * plan.microbatch)
        if rest or total < count:
            self.board.reject("a microbatch for each replica is more than the batch")
            return
        if not plan.shares:
            pipes = [
                replica_pipe(inputs.profile, plan, here, group, total // count, inputs.sequence, inputs.optimizer)
                for group in range(len(here.groups))
            ]
            times = [
                cache(lambda share, pipe=pipe, rest=rest: pipe.seconds(share) + rest)
                for pipe, rest in zip(pipes, rests_seconds(pipes), strict=True)
            ]
            own = [times[group] for group in group_of_replica]
            shares = share_microbatches(total, own)
            if max(seconds(share) for seconds, share in zip(own, shares, strict=True)) > self.board.best_seconds:
                self.board.reject("slower")
                return
            plan = plan.with_shares(shares if len(set(shares)) > 1 else ())
        self._score(plan)

    def _try_stages(self, groups: UniformGroups, ranks_each: int, count: int) -> float:
        """Stages of `ranks_each` ranks across the groups, in every order of them; what they could take at best."""
        kind = first_technique(lambda kind: kind.blocks_of_stages is not Technique.blocks_of_stages)
        settings = self._settings(kind, count)
        if settings is None or count > self.inputs.profile.num_blocks:
            return math.inf
        inner = replace(self.wishes, pinned={**self.wishes.pinned, kind.name: settings})
        at_best, plans = self._looks(groups, ranks_each * count, self.inputs.batch, inner)
        orders: list[UniformGroups] = []  # every order, one of those that only exchange equal groups
        for each in itertools.permutations(groups):
            if not any([g.cluster.groups for g in each] == [g.cluster.groups for g in other] for other in orders):
                orders.append(each)
        for plan in plans:
            order = (kind.axis, *(axis for axis in plan.axis_order if axis != kind.axis))
            for arranged in orders:
                whole = self._on(replace(plan, axis_order=order), arranged)
                if "stages" in settings:
                    self._score(whole)
                else:
                    self._split(whole)
        return at_best

    def _split(self, plan: Plan) -> None:
        """Deal out the blocks; where a stage is then too full, with fewer in it; then move single ones."""
        profile, here = self.inputs.profile, placed(plan, self.inputs.cluster)
        group_of_stage = group_of_units(plan, here)
        places = cutter_of(plan).timetable.places(len(group_of_stage))  # type: ignore[union-attr]
        if places.num_spans > profile.num_blocks:
            return
        weights = [
            layer_flops(layer, self.inputs.sequence) or 1.0
            for layer in profile.block_layers
            for _ in range(layer.repeat)
        ]
        seen = {group: seen_from(here, group) for group in set(group_of_stage)}
        group_of_span = [group_of_stage[places.stage(span)] for span in range(places.num_spans)]
        times = span_times(self.inputs, plan, seen, group_of_span, weights)
        most = [profile.num_blocks] * places.num_spans
        while True:
            costs = span_costs(weights, times, most)
            _, splits = fastest_splits(costs, most_even)
            if not splits:
                return
            (stages,) = splits
            busy, first = [0.0] * len(group_of_stage), 0
            for span, blocks in enumerate(stages):
                busy[places.stage(span)] += costs[span, first, blocks - 1]
                first += blocks
            if max(busy) * plan.num_microbatches > self.board.best_seconds:
                self.board.reject("slower")
                return
            told = self._score(with_stages(plan, stages))
            if told is None or told.fits:
                break
            for chunk in range(places.chunks):
                fullest = places.span(told.worst_stage, chunk)
                most[fullest] = stages[fullest] - 1
        self._move(with_stages(plan, stages), stages, told)

    def _move(self, plan: Plan, stages: tuple[int, ...], best: Forecast | None) -> None:
        """One block at a time from one span to another, as long as that helps and is not too many to try."""
        pairs = list(itertools.permutations(range(len(stages)), 2))
        tried = 0
        near = SOME if len(pairs) < MOVES else NEAR
        while best is not None and best.fits and best.step_seconds <= near * self.board.best_seconds and tried < MOVES:
            better = None
            for giver, taker in pairs[: MOVES - tried]:
                if stages[giver] > 1:
                    tried += 1
                    moved = tuple(n - (at == giver) + (at == taker) for at, n in enumerate(stages))
                    told = self._score(with_stages(plan, moved))
                    if told is not None and told.fits and told.step_seconds < best.step_seconds:
                        best, better = told, moved
            if better is None:
                return
            stages = better

    def _on(self, plan: Plan, groups: UniformGroups) -> Plan:
        """The same with its ranks on these groups, in this order."""
        numbers = tuple(number for group in groups for number in group.numbers)
        return replace(plan, groups=() if numbers == tuple(range(len(self.inputs.cluster.groups))) else numbers)

    def _score(self, plan: Plan) -> Forecast | None:
        """Its forecast, or None (and the reason counted) if the plan's own check objects."""
        self.evaluated += (plan, False) not in self.board.scored
        scored = self.board.score(plan)
        if scored is None:
            return None
        if scored.forecast.fits:
            self.board.take(scored)
        return scored.forecast

    def result(self, top: int, tie: float) -> SearchResult:
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
        ranked = simpler_first(ranked, tie, self.inputs.cluster.devices_per_node)
        best = ranked[0] if ranked else None
        nearest = min(missed, key=lambda each: each.forecast.peak_bytes - each.forecast.memory_bytes, default=None)
        gap = max(0.0, 1.0 - self.least_seconds / best.seconds_to_target) if best else None
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
                yield Alternative(technique=name, is_used=name in used, scored=first, least_seconds=self.least_seconds)
