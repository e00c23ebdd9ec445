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
from typing import Any

import numpy as np

from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problem
from meshwright.core.profile import Profile
from meshwright.core.technique import PHASES, Spans, Technique
from meshwright.core.training_state import settle
from meshwright.core.work import Num, Updating, Work, base_work
from meshwright.planner.pipeline_bound import PipelineBound
from meshwright.planner.settings import Dial
from meshwright.planner.space import Grid
from meshwright.schedules import Timetable
from meshwright.simulator.axis_links import Route, route, routes
from meshwright.simulator.peak_memory import StageMemory, stage_memory, timetable_of
from meshwright.simulator.pricing import ELEMENT_BYTES
from meshwright.simulator.stage_seconds import LAUNCH, Charge, Known, StageCost, TaskTally, stage_cost, tally

ALL = 1 << 30
"""Blocks that follow a policy, where all do."""


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """A grid with one way to set everything that is not a number."""

    grid: Grid
    techniques: tuple[Technique, ...]
    policies: Mapping[str, tuple[str, ...]]
    """Technique -> fields whose blocks are solved for."""
    required: frozenset[str]
    """Of these techniques, those that some block of every stage must follow."""
    timetable: Timetable
    least_seconds: np.ndarray
    """No plan of the candidate is faster; infinite where the device cannot run it."""
    least_bytes: np.ndarray
    """No plan of the candidate has a fullest rank with less."""
    base_bytes: np.ndarray
    """Of these, what no policy can save."""
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


def least_memory(work: Work, cluster: Cluster) -> StageMemory:
    """Of a stage, at least: which of its chunks are held most depends on what blocks follow."""
    memory, timetable = stage_memory(work, cluster.device), timetable_of(work)
    if timetable.chunks == 1:
        return memory
    stage, stages, m = (work.size(name) for name in ("stage", "num_stages", "num_microbatches"))
    held = timetable.least_held(stage, stages, m)
    return replace(memory, in_flight=np.minimum(held, memory.in_flight))


def best_roads(cluster: Cluster, mesh: Mapping[str, Num]) -> dict[str, Route]:
    """Each axis's route as if it were the innermost, and no worse than outside of all others."""
    found = {}
    for axis, size in mesh.items():
        near, far = route(cluster, size, 1), route(cluster, size, cluster.devices_per_node)
        most = {
            name: np.maximum(getattr(near, name), getattr(far, name))
            for name in ("ring_bytes_per_second", "direct_bytes_per_second")
        }
        least = {
            name: np.minimum(getattr(near, name), getattr(far, name))
            for name in ("latency_seconds", "latency_growth", "half_bytes", "crossing", "shared")
        }
        fractions = {kind: np.maximum(share, far.fractions[kind]) for kind, share in near.fractions.items()}
        found[axis] = replace(near, **most, **least, fractions=fractions)
    return found


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
    rows = BoundRows(grid, cluster, [d.example(d.settings[0]) for d in others if d.named and d.settings], policies)
    default = {dial.kind.name: dial.settings[0] for dial in ordered if dial.settings}
    known: Known = {}
    swaps = sum(dial.kind.phase == PHASES[0] for dial in ordered)

    def walk(depth: int, work: Work, chosen: tuple[Technique, ...], done: TaskTally) -> Iterator[Leaf]:
        if depth == swaps and not wanted(work.facts.compute_dtype):
            return
        if depth == len(ordered):
            forbidden = rows.table(work.facts.forbidden).max(axis=(1, 2)) > 0
            cost = stage_cost(settled := settle(work), cluster, rows.roads, done, known)
            timetable, memory = timetable_of(settled), least_memory(settled, cluster)
            forbidden |= rows.table(memory.overflows(cluster)).max(axis=(1, 2)) > 0
            yield Leaf(
                grid=grid,
                techniques=chosen,
                policies=policies,
                required=frozenset(dial.kind.name for dial in others if dial.policies and dial.required),
                timetable=timetable,
                least_seconds=rows.least_seconds(cost, memory, timetable, cluster.device.memory_bytes),
                least_bytes=rows.least_bytes(memory),
                base_bytes=rows.base_bytes(memory),
                is_new=_is_new(grid, default, chosen) & ~forbidden,
            )
            return
        dial = ordered[depth]
        ways = [grid.cutter[1]] if grid.cutter is not None and dial is grid.cutter[0] else dial.settings
        priced = [(technique, technique.price(work)) for technique in map(dial.example, ways)]
        # Where these techniques only add tasks, those before them are gone through once for all below.
        if len(priced) > 1 and all(len(after.tasks) > len(work.tasks) for _, after in priced):
            here = TaskTally(tasks=work.tasks)
            if all(here.begins(after.tasks) for _, after in priced):
                done = tally(work, cluster, rows.roads, done, known)
        if dial.kind.name in may_skip:
            yield from walk(depth + 1, work, chosen, done)
        for technique, after in priced:
            if not np.all(after.facts.forbidden):
                yield from walk(depth + 1, after, (*chosen, technique), done)

    start = base_work(profile, rows.sizes, element_bytes=ELEMENT_BYTES, optimizer=optimizer)
    yield from walk(0, start, (), TaskTally())


def _is_new(grid: Grid, default: Mapping[str, dict[str, Any]], chosen: tuple[Technique, ...]) -> np.ndarray:
    """A technique with an axis of one rank counts once, with its first settings."""
    new = np.ones(grid.num_candidates, dtype=bool)
    for technique in chosen:
        if any(getattr(technique, name) != value for name, value in default[technique.name].items()):
            new &= grid.uses(technique)
    return new


class BoundRows:
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

        With another split the fullest stage may be another: certain is what the emptiest has, and an even share of what
        all stages together have whoever has it.
        """
        base, each = self.table(memory.base_bytes()), self.table(memory.microbatch_bytes())
        kept = base + self.table(memory.in_flight) * each
        runs = (self.table(memory.late_bytes()) - kept).min(axis=2)
        least = self.table(memory.peak_bytes())[:, :, 0] if self.shape[2] == 1 else kept.min(axis=2) + runs
        is_there = self.counts > 0
        if not self.grid.may_choose:
            return np.where(is_there, least, 0).max(axis=1)
        fewest = np.where(is_there, runs, np.inf).min(axis=1)
        even = (self.counts * (base[:, :, 0] + each.min(axis=2))).sum(axis=1) / self.counts.sum(axis=1)
        return np.maximum(np.where(is_there, least, np.inf).min(axis=1), even + fewest)

    def base_bytes(self, memory: StageMemory) -> np.ndarray:
        """What is always there, of the fullest stage, at least."""
        base = np.where(self.counts > 0, self.table(memory.base_bytes())[:, :, 0], 0.0)
        even = (self.counts * base).sum(axis=1) / self.counts.sum(axis=1)
        return even if self.grid.may_choose else base.max(axis=1)

    def least_seconds(
        self, cost: StageCost, memory: StageMemory, timetable: Timetable, memory_bytes: float
    ) -> np.ndarray:
        forced = None
        if self.shape[2] > 1 and not self.grid.may_choose and len(self.grid.profile.block_layers) == 1:
            forced, _ = forced_seconds(self.table, cost, memory, memory_bytes)
        everyone = np.arange(self.grid.num_candidates)
        return least_seconds(self.grid, everyone, cost, timetable, ways=self.shape[2], forced=forced)


def forced_seconds(
    table: Callable[[Num], np.ndarray], cost: StageCost, memory: StageMemory, memory_bytes: float
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of a microbatch's backward that memory forces a stage to add, (candidates, runs), at least; and for each
    further byte.

    Every policy saves bytes and costs time in proportion to the blocks that follow it, but for what hides behind
    compute, of which the least is taken; so mixtures lie on the lower hull of the policies' own points. That is so of
    one kind of block only: of several, the kind that saves most for its time may go first.
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
    # What runs at the fullest moment may be of a block that follows any of them.
    needed = kept[:, :, 0] + (table(memory.late_bytes()) - kept).min(axis=2) - memory_bytes
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
    tails = table(cost.seconds("step")).min(axis=2)
    # With another split the stage that ends last may be a smaller one.
    tail = tails.min(axis=1) if grid.may_choose else tails.max(axis=1)
    microbatches, stages = grid.columns["num_microbatches"][of], grid.columns["num_stages"][of]
    if grid.cutter is None:
        return microbatches * each[:, 0] + tail
    apart = weight if timetable.splits_backward else np.zeros_like(each)
    pipeline = PipelineBound(
        blocks=grid.profile.num_blocks,
        is_one_kind=len(grid.profile.block_layers) == 1,
        runs=runs,
        stages=stages,
        microbatches=microbatches,
        forward=forward,
        each=each,
        # What shows of hidden collectives may be less with another split.
        least=table(cost.bare_seconds())[:, :, 0] if grid.may_choose else each,
        apart=apart,
        send=table(cost.send_seconds).max(axis=(1, 2)),
        timetable=timetable,
    )
    return pipeline.least_seconds() + tail
