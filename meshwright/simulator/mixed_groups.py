"""A plan on groups of different devices: every stage or replica priced where it lies.

    stages across groups      |  stage 0, stage 1  | -between-> |  stage 2  |     each stage at its own pace
    replicas across groups    |  replica 0: 5 microbatches  |   |  replica 1: 3  |     as slow as the slowest of them

Groups are priced one by one as ordinary clusters; only the outermost axis lies across them (`routes`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from meshwright.core.cluster import Cluster
from meshwright.core.errors import MeshwrightError
from meshwright.core.placement import group_of_units, group_problems, outermost, placed
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.work import Updating
from meshwright.simulator.forecast import Forecast, forecast_of, reserved_by, slowest_of, told
from meshwright.simulator.makespan import makespan
from meshwright.simulator.pricing import Stage, Staged, cutter_of, price, stage_plan
from meshwright.simulator.stage_seconds import Route, routes


@dataclass(frozen=True, kw_only=True)
class Pipe:
    """Stages that a microbatch passes through: all of a plan's, or one replica's."""

    plan: Plan
    """With this many microbatches for every replica."""
    staged: Staged
    groups: tuple[int, ...]
    """Where each of `staged.stages` lies."""
    first_rank: int = 0

    @property
    def seconds(self) -> float:
        """Until the last backward has ended."""
        return self.seconds_of(self.plan.num_microbatches)

    def seconds_of(self, num_microbatches: int) -> float:
        """The same for another number of microbatches."""
        send = list(self.staged.sends_seconds) or self.staged.send_seconds
        return float(makespan(self.staged.timetable, *self.staged.columns, send, num_microbatches))


def forecast_mixed(
    profile: Profile, plan: Plan, cluster: Cluster, *, sequence: int, optimizer: Updating, replays: bool
) -> Forecast:
    here = _placed(plan, cluster)
    if not here.others:
        staged = stage_plan(profile, plan, here, sequence=sequence, optimizer=optimizer)
        return forecast_of(staged, profile, plan, here, sequence=sequence, replays=replays)
    pipes = pipes_of(profile, plan, here, sequence, optimizer)
    slowest = _slowest(pipes)
    lying = [(pipe, *each) for pipe in pipes for each in zip(pipe.staged.stages, pipe.groups, strict=True)]

    def room(each: tuple[Pipe, Stage, int]) -> float:
        return here.groups[each[2]].device.memory_bytes - float(each[1].memory.peak_bytes())

    # Of each group the tightest rank is looked at tensor by tensor; all of them must fit.
    tightest: dict[int, tuple[Pipe, Stage, int]] = {}
    for each in sorted(lying, key=room):
        tightest.setdefault(each[2], each)
    reserved = {
        group: reserved_by(stage, pipe.staged, seen_from(here, group), replays=replays)
        for group, (pipe, stage, _) in tightest.items()
    }
    _, fullest, group = min(tightest.values(), key=room)
    units = group_of_units(plan, here)
    ranks_each = plan.num_ranks // len(units)
    return told(
        slowest.staged,
        profile,
        replace(slowest.plan, batch=plan.batch),
        seen_from(here, group),
        sequence=sequence,
        step=step_seconds(pipes) * slowest_of(here, plan.num_ranks),
        fullest=fullest,
        reserved=replace(reserved[group], fits=all(each.fits for each in reserved.values())),
        lying=[(stage, seen_from(here, group)) for _, stage, group in lying],
        devices=[(here.groups[group].device, ranks_each) for group in units],
    )


def drawn_plan(
    profile: Profile, plan: Plan, cluster: Cluster, *, sequence: int, optimizer: Updating
) -> tuple[Staged, Plan, int]:
    """What a timeline shows: the stages, with how many microbatches, from which rank on. Of replicas, the slowest."""
    here = _placed(plan, cluster)
    if not here.others:
        return stage_plan(profile, plan, here, sequence=sequence, optimizer=optimizer), plan, 0
    slowest = _slowest(pipes_of(profile, plan, here, sequence, optimizer))
    return slowest.staged, slowest.plan, slowest.first_rank


def step_seconds(pipes: list[Pipe]) -> float:
    """A step ends for all at once."""
    return max(pipe.seconds + rest for pipe, rest in zip(pipes, rests_seconds(pipes), strict=True))


def rests_seconds(pipes: list[Pipe]) -> list[float]:
    """What follows each one's last backward, were it the slowest.

    A layer's gradients are summed once all replicas have them, so the exchange ends when it would for the slowest one
    alone; then all ranks of a stage update, also those that take longer for that.
    """
    rests = [0.0] * len(pipes)
    for stages in zip(*(pipe.staged.stages for pipe in pipes), strict=True):
        updates = []
        for stage in stages:
            charges = stage.cost.charges.items()
            exposed = float(sum(seconds for charge, seconds in charges if charge.part == "step" and charge.axis))
            updates.append(stage.tail_seconds - exposed)
        for at, (stage, update) in enumerate(zip(stages, updates, strict=True)):
            rests[at] = max(rests[at], stage.tail_seconds + (max(updates) - update))
    return rests


def _slowest(pipes: list[Pipe]) -> Pipe:
    return max(zip(pipes, rests_seconds(pipes), strict=True), key=lambda each: each[0].seconds + each[1])[0]


def _placed(plan: Plan, cluster: Cluster) -> Cluster:
    if cluster.others and (problems := list(group_problems(plan, cluster))):
        raise MeshwrightError(problems)
    return placed(plan, cluster)


def pipes_of(profile: Profile, plan: Plan, here: Cluster, sequence: int, optimizer: Updating) -> list[Pipe]:
    """One for all stages, or one for each kind of replica: its group and its share."""
    units = group_of_units(plan, here)
    seen = {group: seen_from(here, group) for group in set(units)}
    cutter = cutter_of(plan)
    if cutter is not None and cutter.axis == outermost(plan):
        by_group = {g: stage_plan(profile, plan, seen[g], sequence=sequence, optimizer=optimizer) for g in seen}
        sizes = _sent_bytes(profile, plan, by_group[units[0]], sequence, optimizer)
        return [_joined(plan, here, units, by_group, max(sizes, default=0.0))]
    ranks_each = plan.num_ranks // len(units)
    found: dict[tuple[int, int], Pipe] = {}
    shares = plan.shares or (plan.num_microbatches,) * len(units)
    for replica, (group, count) in enumerate(zip(units, shares, strict=True)):
        if (group, count) not in found:
            pipe = replica_pipe(profile, plan, here, group, count, sequence, optimizer)
            found[group, count] = replace(pipe, first_rank=replica * ranks_each)
    return list(found.values())


def replica_pipe(
    profile: Profile, plan: Plan, here: Cluster, group: int, count: int, sequence: int, optimizer: Updating
) -> Pipe:
    """A replica in this group that runs so many microbatches."""
    equal, seen = plan.with_shares((count,) * plan.mesh[outermost(plan)]), seen_from(here, group)
    staged = stage_plan(profile, equal, seen, sequence=sequence, optimizer=optimizer)
    stages = tuple(_named(stage, seen) for stage in staged.stages)
    return Pipe(plan=equal, staged=replace(staged, stages=stages), groups=(group,) * len(stages))


def seen_from(cluster: Cluster, group: int) -> Cluster:
    """The same groups, this one first: what prices its ranks."""
    others = [index for index in range(len(cluster.groups)) if index != group]
    return replace(cluster.arranged((group, *others)), name=cluster.group_names[group])


def _joined(
    plan: Plan, here: Cluster, units: tuple[int, ...], by_group: Mapping[int, Staged], sent_bytes: float
) -> Pipe:
    """One pipeline of which each stage is as its own group has it."""
    any_staged = by_group[units[0]]
    timetable = any_staged.timetable
    alone = {group: staged.unfolded for group, staged in by_group.items()}
    stages: list[Stage] = []
    groups: list[int] = []
    before: tuple[int, int] | None = None
    for stage, group in enumerate(units):
        mine = alone[group][stage]
        if before == (mine.run.start, group):
            stages[-1] = replace(stages[-1], run=replace(stages[-1].run, count=stages[-1].run.count + 1))
        else:
            later = stage - mine.run.start
            run = replace(mine.run, start=stage, count=1, first_block=mine.run.first_block + later * mine.run.blocks)
            memory = mine.memory
            if later and timetable.chunks == 1:  # the run began in another group, with a stage that holds more
                held = timetable.held(stage, len(units), plan.num_microbatches)
                memory = replace(memory, in_flight=held)
            stages.append(_named(replace(mine, run=run, memory=memory), here.view(group)))
            groups.append(group)
        before = mine.run.start, group
    spans = timetable.places(len(units))
    group_of_span = [units[spans.stage(span)] for span in range(spans.num_spans)]
    sends = _sends(plan, here, group_of_span, sent_bytes)
    staged = Staged(
        stages=tuple(stages),
        spans=tuple(by_group[group].spans[span] for span, group in enumerate(group_of_span)),
        timetable=timetable,
        compute_dtype=any_staged.compute_dtype,
        send_seconds=max(sends),
        sends_seconds=tuple(sends) if len(set(sends)) > 1 else (),
    )
    return Pipe(plan=plan, staged=staged, groups=tuple(groups))


def _sent_bytes(profile: Profile, plan: Plan, staged: Staged, sequence: int, optimizer: Updating) -> Iterator[float]:
    """Of the messages between stages."""
    for stage in staged.stages:
        work = price(profile, plan, sequence=sequence, stage=stage.run.start, optimizer=optimizer)
        yield from (float(each.bytes) for each in work.collectives if each.kind == "send" and float(each.repeat) > 0)


def _sends(plan: Plan, here: Cluster, group_of_span: list[int], sent_bytes: float) -> list[float]:
    """Seconds of a message over each boundary between spans: inside a group over its own links, else between."""
    axis = outermost(plan)
    known: dict[tuple[int, int], Route] = {}
    found = []
    for pair in itertools.pairwise(group_of_span):
        if pair not in known:
            cluster = here.view(pair[0]) if pair[0] == pair[1] else here.arranged(pair)
            known[pair] = routes(cluster, plan.mesh)[axis]
        found.append(float(known[pair].seconds("send", sent_bytes)))
    return found


def _named(stage: Stage, place: Cluster) -> Stage:
    """Its roads by the names of its own group's links."""
    roads = {
        axis: replace(road, name=road.name or (place.inner if road.is_inner else place.outer).name)
        for axis, road in stage.cost.roads.items()
    }
    return replace(stage, cost=replace(stage.cost, roads=roads))
