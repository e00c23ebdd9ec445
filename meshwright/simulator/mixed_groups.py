"""A plan on groups of different devices: every stage or replica priced where it lies.

    stages across groups      |  stage 0, stage 1  | -between-> |  stage 2  |     each stage at its own pace
    replicas across groups    |  replica 0: 5 microbatches  |   |  replica 1: 3  |     as slow as the slowest of them

Groups are priced one by one as ordinary clusters; only the outermost axis lies across them (`routes`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

from meshwright.core.cluster import Cluster
from meshwright.core.errors import MeshwrightError
from meshwright.core.placement import group_of_units, group_problems, outermost, placed
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.work import Updating
from meshwright.simulator.pricing import Stage, Staged, cutter_of, price, stage_plan
from meshwright.simulator.stage_seconds import Route, routes


def rests_seconds(pipes: list[Staged]) -> list[float]:
    """What follows each one's last backward, were it the slowest.

    A layer's gradients are summed once all replicas have them, so the exchange ends when it would for the slowest one
    alone; then all ranks of a stage update, also those that take longer for that.
    """
    rests = [0.0] * len(pipes)
    for stages in zip(*(pipe.stages for pipe in pipes), strict=True):
        updates = []
        for stage in stages:
            charges = stage.cost.charges.items()
            exposed = float(sum(seconds for charge, seconds in charges if charge.part == "step" and charge.axis))
            updates.append(stage.tail_seconds - exposed)
        for at, (stage, update) in enumerate(zip(stages, updates, strict=True)):
            rests[at] = max(rests[at], stage.tail_seconds + (max(updates) - update))
    return rests


def slowest_pipe(pipes: list[Staged]) -> tuple[float, Staged]:
    """The one for which all others wait, and the seconds until its step ends: which it does for all at once."""
    ends = (
        pipe.seconds(pipe.plan.num_microbatches) + rest for pipe, rest in zip(pipes, rests_seconds(pipes), strict=True)
    )
    return max(zip(ends, pipes, strict=True), key=lambda each: each[0])


def pipes_of(
    profile: Profile, plan: Plan, cluster: Cluster, sequence: int, optimizer: Updating
) -> tuple[Cluster, list[Staged]]:
    """The groups that the plan's ranks take; and one pipe for all stages, or one for each kind of replica: its group
    and its share."""
    here = cluster
    if cluster.others:
        if problems := list(group_problems(plan, cluster)):
            raise MeshwrightError(problems)
        here = placed(plan, cluster)
    if not here.others:
        return here, [stage_plan(profile, plan, here, sequence=sequence, optimizer=optimizer)]
    units = group_of_units(plan, here)
    cutter = cutter_of(plan)
    if cutter is not None and cutter.axis == outermost(plan):
        by_group = {
            group: stage_plan(profile, plan, seen_from(here, group), sequence=sequence, optimizer=optimizer)
            for group in set(units)
        }
        works = [
            price(profile, plan, sequence=sequence, stage=stage.run.start, optimizer=optimizer)
            for stage in by_group[units[0]].stages
        ]
        sends = [each for work in works for each in work.collectives if each.kind == "send" and not each.per_step]
        boundary = max((float(each.bytes) for each in sends if float(each.repeat) > 0), default=0.0)
        return here, [_joined(plan, here, units, by_group, boundary)]
    ranks_each = plan.num_ranks // len(units)
    result: dict[tuple[int, int], Staged] = {}
    shares = plan.shares or (plan.num_microbatches,) * len(units)
    for replica, (group, count) in enumerate(zip(units, shares, strict=True)):
        if (group, count) not in result:
            pipe = replica_pipe(profile, plan, here, group, count, sequence, optimizer)
            result[group, count] = replace(pipe, first_rank=replica * ranks_each)
    return here, list(result.values())


def replica_pipe(
    profile: Profile, plan: Plan, here: Cluster, group: int, count: int, sequence: int, optimizer: Updating
) -> Staged:
    """A replica in this group that runs so many microbatches."""
    equal, seen = plan.with_shares((count,) * plan.mesh[outermost(plan)]), seen_from(here, group)
    staged = stage_plan(profile, equal, seen, sequence=sequence, optimizer=optimizer)
    stages = tuple(_named(stage, seen) for stage in staged.stages)
    return replace(staged, stages=stages, groups=(group,) * len(stages))


def seen_from(cluster: Cluster, group: int) -> Cluster:
    """The same groups, this one first: what prices its ranks."""
    others = [index for index in range(len(cluster.groups)) if index != group]
    return replace(cluster.arranged((group, *others)), name=cluster.group_names[group])


def _joined(
    plan: Plan, here: Cluster, units: tuple[int, ...], by_group: Mapping[int, Staged], sent_bytes: float
) -> Staged:
    """One pipeline of which each stage is as its own group has it."""
    timetable = by_group[units[0]].timetable
    alone = {group: staged.unfolded for group, staged in by_group.items()}
    stages, groups = [], []
    runs = itertools.groupby(range(len(units)), key=lambda at: (alone[units[at]][at].run.start, units[at]))
    for (start, group), members in runs:
        stage, *others = members
        mine, later = alone[group][stage], stage - start
        first_block = mine.run.first_block + later * mine.run.blocks
        run = replace(mine.run, start=stage, count=1 + len(others), first_block=first_block)
        memory = mine.memory
        if later and timetable.chunks == 1:  # the run began in another group, with a stage that holds more
            memory = replace(memory, in_flight=timetable.held(stage, len(units), plan.num_microbatches))
        stages.append(_named(replace(mine, run=run, memory=memory), here.view(group)))
        groups.append(group)
    spans = timetable.places(len(units))
    group_of_span = [units[spans.stage(span)] for span in range(spans.num_spans)]
    axis, known = outermost(plan), dict[tuple[int, int], Route]()
    sends = []  # over each boundary between spans: inside a group over its own links, else between
    for pair in itertools.pairwise(group_of_span):
        if pair not in known:
            cluster = here.view(pair[0]) if pair[0] == pair[1] else here.arranged(pair)
            known[pair] = routes(cluster, plan.mesh)[axis]
        sends.append(float(known[pair].seconds("send", sent_bytes)))
    return replace(
        by_group[units[0]],
        stages=tuple(stages),
        spans=tuple(by_group[group].spans[span] for span, group in enumerate(group_of_span)),
        send_seconds=sends if len(set(sends)) > 1 else sends[0],
        groups=tuple(groups),
    )


def _named(stage: Stage, place: Cluster) -> Stage:
    """Its roads by the names of its own group's links."""
    roads = {
        axis: replace(road, name=road.name or (place.inner if road.is_inner else place.outer).name)
        for axis, road in stage.cost.roads.items()
    }
    return replace(stage, cost=replace(stage.cost, roads=roads))
