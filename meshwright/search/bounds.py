"""Every candidate's least bytes and a time it cannot beat, thousands at once.

The techniques' settings form a tree in the order of their phases; candidates below a node share its priced work, and
the numbers in it are arrays over the grid. Blocks that may follow policies are priced following none, and all following
each; axes as if each lay innermost. So a bound holds for every order of the axes, every policy of every block, and
every way to deal blocks to stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problem
from meshwright.core.profile import Profile
from meshwright.core.settle import settle
from meshwright.core.technique import PHASES, Spans, Technique
from meshwright.core.work import Num, Updating, Work, base_work
from meshwright.schedules import Timetable
from meshwright.search.dials import Dial
from meshwright.search.space import Grid
from meshwright.simulate.cost import LAUNCH, Charge, Known, StageCost, Tally, stage_cost, tally
from meshwright.simulate.links import Route, routes
from meshwright.simulate.memory import StageMemory, stage_memory, timetable_of
from meshwright.simulate.price import ELEMENT_BYTES

ALL = 1 << 30
"""Blocks that follow a policy, where all do."""


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """A grid with one way to set everything that is not a number."""

    grid: Grid
    techniques: tuple[Technique, ...]
    policies: Mapping[str, tuple[str, ...]]
    """Technique -> fields whose blocks are solved for."""
    timetable: Timetable
    least_seconds: np.ndarray
    """No plan of the candidate is faster; infinite where the device cannot run it."""
    least_bytes: np.ndarray
    """No plan of the candidate has a fullest rank with less."""
    is_new: np.ndarray
    """False where a technique is not used after all (its size is 1) and another leaf, with its other settings, has the
    same plan; or where the techniques do not go together."""

    def has(self, name: str) -> np.ndarray:
        """Which candidates use the technique, as far as that is decided."""
        for technique in self.techniques:
            if technique.name == name and name not in self.policies:
                return self.grid.uses(technique)
        return np.zeros(self.grid.num_candidates, dtype=bool)

    def sequence_problems(self, sequence: int) -> Iterator[tuple[np.ndarray, Problem]]:
        """(candidates, why) where a technique cannot take samples of this length."""
        fields = {dial.kind.name: dial.axis_field for dial in self.grid.axis_dials}
        for technique in self.techniques:
            if type(technique).check_sequence is Technique.check_sequence:
                continue  # takes any
            used = self.has(technique.name)
            sizes = self.grid.columns[technique.axis] if technique.axis else np.ones(len(used), dtype=int)
            for size in np.unique(sizes[used]):
                changes = {fields[technique.name]: int(size)} if technique.axis else {}
                for problem in replace(technique, **changes).check_sequence(sequence)[:1]:
                    yield used & (sizes == size), problem


def best_roads(cluster: Cluster, mesh: Mapping[str, Num]) -> dict[str, Route]:
    """Each axis's route as if it were the innermost."""
    return {axis: routes(cluster, {axis: size})[axis] for axis, size in mesh.items()}


def bound_all(
    profile: Profile,
    cluster: Cluster,
    grid: Grid,
    dials: tuple[Dial, ...],
    *,
    optimizer: Updating,
    wanted: Callable[[str], bool],
) -> Iterator[Leaf]:
    """Leaves whose compute dtype is `wanted`."""
    others = [dial for dial in dials if not dial.axis_field]
    ordered = sorted(
        (*grid.axis_dials, *others),
        key=lambda dial: (PHASES.index(dial.kind.phase), dial.kind.name),
    )
    may_skip = {dial.kind.name for dial in others if not dial.required and not dial.policies}
    policies = {dial.kind.name: dial.policies for dial in others if dial.policies}
    rows = Rows(grid, cluster, [d.example(d.settings[0]) for d in others if d.named and d.settings], policies)
    default = {dial.kind.name: dial.settings[0] for dial in ordered if dial.settings}

    def is_new(chosen: tuple[Technique, ...]) -> np.ndarray:
        new = np.ones(grid.num_candidates, dtype=bool)
        for technique in chosen:
            if any(getattr(technique, f) != value for f, value in default[technique.name].items()):
                new &= grid.uses(technique)
        return new

    known: Known = {}
    swaps = sum(dial.kind.phase == PHASES[0] for dial in ordered)

    def walk(depth: int, work: Work, chosen: tuple[Technique, ...], done: Tally) -> Iterator[Leaf]:
        if depth == swaps and not wanted(work.facts["compute_dtype"]):
            return
        if depth == len(ordered):
            forbidden = rows.table(work.facts.get("forbidden", False)).max(axis=(1, 2)) > 0
            cost = stage_cost(settled := settle(work), cluster, rows.roads, done, known)
            timetable, memory = timetable_of(settled), stage_memory(settled, cluster.device)
            yield Leaf(
                grid=grid,
                techniques=chosen,
                policies=policies,
                timetable=timetable,
                least_seconds=rows.least_seconds(cost, memory, timetable, cluster.device.memory_bytes),
                least_bytes=rows.least_bytes(memory),
                is_new=is_new(chosen) & ~forbidden,
            )
            return
        dial = ordered[depth]
        ways = [grid.cutter[1]] if grid.cutter is not None and dial is grid.cutter[0] else dial.settings
        priced = [(technique, technique.price(work)) for technique in map(dial.example, ways)]
        # Where these techniques only add tasks, those before them are gone through once for all below.
        if len(priced) > 1 and all(len(after.tasks) > len(work.tasks) for _, after in priced):
            here = Tally(tasks=work.tasks)
            if all(here.begins(after.tasks) for _, after in priced):
                done = tally(work, cluster.device, rows.roads, done, known)
        if dial.kind.name in may_skip:
            yield from walk(depth + 1, work, chosen, done)
        for technique, after in priced:
            if not np.all(after.facts.get("forbidden", False)):
                yield from walk(depth + 1, after, (*chosen, technique), done)

    start = base_work(profile, rows.sizes, element_bytes=ELEMENT_BYTES, optimizer=optimizer)
    yield from walk(0, start, (), Tally())


class Rows:
    """The rows of a grid's bounds: (candidates, runs of stages, no policy and each policy followed by all blocks)."""

    def __init__(
        self, grid: Grid, cluster: Cluster, named: Sequence[Technique], policies: Mapping[str, tuple[str, ...]]
    ):
        self.grid = grid
        starts, self.counts, firsts, blocks = grid.runs
        ways = 1 + sum(map(len, policies.values()))
        self.shape = (*self.counts.shape, ways)
        of = np.repeat(np.arange(grid.num_candidates), self.shape[1] * ways)
        self.sizes = grid.sizes(of, *(np.repeat(each.ravel(), ways) for each in (starts, firsts, blocks)))
        for at, (name, field) in enumerate((name, field) for name, each in policies.items() for field in each):
            which = np.tile(ALL * (np.arange(ways) == at + 1), len(of) // ways)
            self.sizes |= {f"{name}.{field}.{layer.name}": which for layer in grid.profile.block_layers}
        if named:
            self._count_named(named, np.repeat(starts.ravel(), ways), of)
        mesh = {axis: self.sizes[axis] for axis in grid.axis_order}
        self.roads = routes(cluster, mesh) if cluster.num_nodes == 1 else best_roads(cluster, mesh)

    def _count_named(self, named: Sequence[Technique], stages: np.ndarray, of: np.ndarray) -> None:
        known: dict[tuple[int, Spans], dict[str, int]] = {}
        rows = []
        for candidate, stage in zip(of, stages, strict=True):
            spans = self.grid.cuts[candidate][stage]
            key = (int(stage), spans)
            if key not in known:
                known[key] = {}
                for technique in named:
                    known[key] |= technique.counts_in(self.grid.profile, spans)
            rows.append(known[key])
        self.sizes |= {name: np.array([row[name] for row in rows]) for name in rows[0]}

    def table(self, value: Num) -> np.ndarray:
        return np.broadcast_to(np.asarray(value, dtype=float), (np.prod(self.shape),)).reshape(self.shape)

    def least_bytes(self, memory: StageMemory) -> np.ndarray:
        """Whatever blocks follow, what is kept is a mixture, and the last block runs as one of the policies lets it.
        With another split the fullest stage may be another: only what the emptiest has is certain."""
        if self.shape[2] == 1:
            least = self.table(memory.peak_bytes())[:, :, 0]
        else:
            kept = self.table(memory.base_bytes() + memory.in_flight * memory.microbatch_bytes())
            runs = self.table(memory.late_bytes()) - kept
            least = kept.min(axis=2) + runs.min(axis=2)
        if self.grid.may_choose:
            return np.where(self.counts > 0, least, np.inf).min(axis=1)
        return np.where(self.counts > 0, least, 0).max(axis=1)

    def least_seconds(
        self, cost: StageCost, memory: StageMemory, timetable: Timetable, memory_bytes: float
    ) -> np.ndarray:
        forced = None
        if self.shape[2] > 1 and not self.grid.may_choose:
            forced, _ = forced_seconds(self.table, cost, memory, memory_bytes)
        everyone = np.arange(self.grid.num_candidates)
        return least_seconds(self.grid, everyone, cost, timetable, ways=self.shape[2], forced=forced)


def forced_seconds(
    table: Callable[[Num], np.ndarray], cost: StageCost, memory: StageMemory, memory_bytes: float
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of a microbatch's backward that memory forces a stage to add, (candidates, runs), at least; and for each
    further byte.

    Every policy saves bytes and costs time in proportion to the blocks that follow it, but for what hides behind
    compute, of which the least is taken; so mixtures lie on the lower hull of the policies' own points.
    """
    kept = table(memory.base_bytes() + memory.in_flight * memory.microbatch_bytes())
    bare = np.zeros_like(kept)
    for charge, seconds in cost.bare.items():
        bare += table(seconds) if charge.part == "backward" else 0.0
    waits = table(cost.charges.get(Charge(LAUNCH, "", "backward"), 0.0))
    shown = table(cost.seconds("backward")) - bare - waits
    more = bare - bare[:, :, :1] + shown.min(axis=2, keepdims=True) - (shown + waits)[:, :, :1]
    more[:, :, 0] = 0.0
    saved = kept[:, :, :1] - kept
    needed = table(memory.late_bytes())[:, :, 0] - memory_bytes
    found, slope = np.full(needed.shape, np.inf), np.zeros(needed.shape)
    ways = kept.shape[2]
    for low, high in itertools.combinations_with_replacement(range(ways), 2):
        for a, b in ((low, high), (high, low)):
            span = saved[:, :, b] - saved[:, :, a]
            share = np.clip((needed - saved[:, :, a]) / np.where(span > 0, span, 1.0), 0.0, 1.0)
            reaches = saved[:, :, b] >= needed
            mixed = more[:, :, a] + share * (more[:, :, b] - more[:, :, a])
            is_better = reaches & ((span > 0) | (a == b)) & (mixed < found)
            found = np.where(is_better, mixed, found)
            rises = (share > 0) & (span > 0)
            each = (more[:, :, b] - more[:, :, a]) / np.where(span > 0, span, 1.0)
            slope = np.where(is_better, np.where(rises, each, 0.0), slope)
    is_forced = np.isfinite(found) & (found > 0)
    return np.where(is_forced, found, 0.0), np.where(is_forced, np.maximum(slope, 0.0), 0.0)


def least_seconds(
    grid: Grid,
    of: np.ndarray,
    cost: StageCost,
    timetable: Timetable,
    *,
    ways: int = 1,
    forced: np.ndarray | None = None,
) -> np.ndarray:
    """Of candidates `of`, from the cost of their runs of stages, each in `ways` ways of which the first is fastest, and
    what is forced upon them beside."""
    runs = tuple(table[of] for table in grid.runs)
    shape = (*runs[1].shape, ways)

    def table(value: Num) -> np.ndarray:
        return np.broadcast_to(np.asarray(value, dtype=float), (np.prod(shape),)).reshape(shape)

    forward, backward, weight = (table(cost.seconds(part))[:, :, 0] for part in ("forward", "backward", "weight"))
    each = forward + backward + weight + (0.0 if forced is None else forced)
    tail = table(cost.seconds("step")).min(axis=2).max(axis=1)
    microbatches, stages = grid.columns["num_microbatches"][of], grid.columns["num_stages"][of]
    if grid.cutter is None:
        return microbatches * each[:, 0] + tail
    apart = weight if timetable.splits_backward else np.zeros_like(each)
    pipeline = _Pipeline(
        blocks=grid.profile.num_blocks,
        is_one_kind=len(grid.profile.block_layers) == 1,
        runs=runs,
        stages=stages,
        microbatches=microbatches,
        forward=forward,
        each=each,
        apart=apart,
        send=table(cost.send_seconds).max(axis=(1, 2)),
        timetable=timetable,
    )
    return pipeline.least_seconds() + tail


@dataclass(frozen=True, kw_only=True)
class _Pipeline:
    """A bound for every way to deal blocks out, from one that is about even (docs/search.md derives it)."""

    blocks: int
    is_one_kind: bool
    runs: tuple[np.ndarray, ...]
    stages: np.ndarray
    microbatches: np.ndarray
    forward: np.ndarray
    """(candidates, runs), as the two after it."""
    each: np.ndarray
    """All of a microbatch's seconds."""
    apart: np.ndarray
    """What backward leaves for later."""
    send: np.ndarray
    timetable: Timetable

    def least_seconds(self) -> np.ndarray:
        counts = self.runs[1]
        through, forward, later = ((counts * each).sum(axis=1) for each in (self.each, self.forward, self.apart))
        bound = any_split(
            self.timetable, self.microbatches, self.stages, through, self._pace(through), forward, later, self.send
        )
        return np.maximum(bound, self._after_the_way()) if self.timetable.chunks > 1 else bound

    def _pace(self, through: np.ndarray) -> np.ndarray:
        """The slowest stage's seconds for a microbatch, at least: of an even share of it all; and of as many blocks as
        some stage must have, where they are alike."""
        _, counts, _, blocks = self.runs
        if self.timetable.chunks > 1:  # dealt out evenly, as they are
            return np.where(counts > 0, self.each, 0.0).max(axis=1)
        least = through / self.stages
        if not self.is_one_kind or counts.shape[1] < 3:
            return least
        most = -(-self.blocks // self.stages)
        # An inner stage: without ends, and what it has beside its blocks only makes fewer cost more each.
        is_inner = (self.stages > 2) & (blocks[:, 1] >= most)
        inner = self.each[:, 1] * most / np.maximum(blocks[:, 1], 1)
        return np.maximum(least, np.where(is_inner, inner, 0.0))

    def _after_the_way(self) -> np.ndarray:
        """A stage waits for the first chunks of those before it, going forward; and they for it, going back, unless it
        has work left for then."""
        starts, counts, _, blocks = self.runs
        m = self.microbatches[:, None]
        chunk = (self.blocks // (self.stages * self.timetable.chunks))[:, None] / np.maximum(blocks, 1)
        before = np.maximum(starts + counts - 1, 0)
        is_there = counts > 0
        back = self.each - self.forward - self.apart
        way_in = before * np.where(is_there, self.forward * chunk, np.inf).min(axis=1, keepdims=True)
        way_out = before * np.where(is_there, back * chunk, np.inf).min(axis=1, keepdims=True)
        bound = way_in + np.maximum(m * self.each, m * (self.each - self.apart) + way_out)
        return np.where(is_there, bound, 0.0).max(axis=1)


def any_split(
    timetable: Timetable,
    microbatches: np.ndarray,
    stages: np.ndarray,
    through: np.ndarray,
    pace: np.ndarray,
    forward: np.ndarray,
    later: np.ndarray,
    send: np.ndarray,
) -> np.ndarray:
    """A step of every split whose slowest stage takes `pace` or longer for a microbatch; `through`: what a microbatch
    takes in all stages, `forward` and `later` (what backward leaves for later) of it."""
    m = microbatches
    bound = m * pace
    if timetable.overlaps_steps:
        return bound
    bound = np.maximum(bound, through - later + 2 * (stages * timetable.chunks - 1) * send)
    if timetable.chunks > 1:
        return bound
    share = forward / np.maximum(through, 1e-30)
    if timetable.splits_backward:
        back = 1 - share - later / np.maximum(through, 1e-30)
        first = share * (through - stages * pace) + back * (through - pace)
        more = m * pace + np.minimum(first, share * (through - pace))
        return np.where(2 * m >= stages, np.maximum(bound, more), bound)
    if timetable.name != "1f1b":
        return bound
    return np.maximum(bound, whole_bound(through, pace, m, stages, np.minimum(share, 1 - share)))


def whole_bound(through: Num, pace: Num, microbatches: Num, stages: Num, smaller: Num) -> Num:
    """Of 1F1B, for every split whose slowest stage takes `pace` or longer; `smaller`: the lesser share of forward and
    backward in a stage's time."""
    m = microbatches
    wide = 2 * through + (m - stages - 1) * pace
    crossing = through / np.maximum(stages - m + 1 + (m - 1) * (1 - smaller), 1e-30)
    narrow = through + (m - 1) * (1 - smaller) * np.maximum(pace, crossing)
    return np.where(m > stages, wide, narrow) * (1 - 1e-9)
