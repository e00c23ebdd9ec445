"""Every candidate's least bytes and a time it cannot beat, thousands at once; then closer, for one order of its axes.

The techniques' settings form a tree in the order of their phases; candidates below a node share its priced work, and
the numbers in it are arrays over the grid. Blocks that may follow policies are priced following none, and all following
each; axes as if each lay innermost. So a bound holds for every order of the axes, every policy of every block, and
every way to split blocks into stages. `order_bounds` then prices every stage by itself, with its axes in one order and
with what its memory forces on it. docs/search.md derives the bounds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwright.core.cluster import Cluster
from meshwright.core.profile import Profile
from meshwright.core.technique import PHASES, Spans, Technique
from meshwright.core.training_state import settle
from meshwright.core.work import Num, Updating, Work, base_work
from meshwright.planner.rows import ALL, Cell, Leaf, Pick, PricedRows, SearchInputs, kinds_of, policy_fields, size_of
from meshwright.planner.space import Dial, Grid
from meshwright.schedules import PipelineTimes, Timetable
from meshwright.simulator.axis_links import Route, route, routes
from meshwright.simulator.forecast import slowest_of
from meshwright.simulator.peak_memory import StageMemory, stage_memory, timetable_of
from meshwright.simulator.pricing import ELEMENT_BYTES
from meshwright.simulator.stage_seconds import LAUNCH, Charge, Known, StageCost, TaskTally, stage_cost, tally


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


@dataclass(frozen=True, kw_only=True)
class PipelineBound:
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
    least: np.ndarray
    """Of these, what a stage has in every split."""
    apart: np.ndarray
    """What backward leaves for later."""
    send: np.ndarray
    timetable: Timetable

    def least_seconds(self) -> np.ndarray:
        counts = self.runs[1]
        through = (counts * self.least).sum(axis=1)
        there, each = counts > 0, np.maximum(self.each, 1e-30)
        forward = np.where(there, self.forward / each, np.inf)
        larger = np.maximum(self.forward, self.each - self.forward) / each
        times = PipelineTimes(
            microbatches=self.microbatches,
            stages=self.stages,
            through=through,
            pace=self._pace(through),
            send=self.send,
            larger=np.where(there, larger, np.inf).min(axis=1),
            least_forward=forward.min(axis=1),
            most_forward=np.where(there, forward, 0.0).max(axis=1),
            least_way=np.where(there, (self.each - self.apart) / each, np.inf).min(axis=1),
            later=(counts * self.apart).sum(axis=1),
        )
        bound = self.timetable.step_bound(times)
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


_HALVINGS = 16
"""Until the pace is known to a part in ten thousand."""


def order_bounds(problem: SearchInputs, leaf: Leaf, picks: Sequence[Pick]) -> np.ndarray:
    """No plan of a candidate with its axes in this order is faster."""
    cells: list[Cell] = []
    starts, spare = [], []
    for at, pick in enumerate(picks):
        cut = leaf.grid.cuts[pick.candidate]
        starts.append(len(cells))
        kinds = [kinds_of(problem, spans) for spans in cut]
        cells += [Cell(at, s, kinds[s], spans[0][0], size_of(spans)) for s, spans in enumerate(cut)]
    for at, pick in enumerate(picks):  # an inner stage with a block more
        cut = leaf.grid.cuts[pick.candidate]
        stage = min(1, len(cut) - 1)
        blocks = min(size_of(cut[stage]) + 1, problem.profile.num_blocks)
        first = min(cut[stage][0][0], problem.profile.num_blocks - blocks)
        spare.append((starts[at] + stage, len(cells)))
        cells.append(Cell(at, stage, kinds_of(problem, cut[stage]), first, blocks))
    policies = len(policy_fields(leaf))
    each = np.zeros((1 + policies, len(problem.profile.block_layers), policies), dtype=int)
    each[np.arange(policies) + 1, :, np.arange(policies)] = ALL
    rows = PricedRows(problem, leaf, picks, cells, [each] * len(cells))
    memory = least_memory(rows.work, problem.cluster)
    found = _bounds_of_stages(problem, leaf, picks, rows, memory, np.array(starts), np.array(spare), 1 + policies)
    return found * slowest_of(problem.cluster, problem.cluster.num_devices)


def _bounds_of_stages(
    problem: SearchInputs,
    leaf: Leaf,
    picks: Sequence[Pick],
    rows: PricedRows,
    memory: StageMemory,
    starts: np.ndarray,
    spare: np.ndarray,
    ways: int,
) -> np.ndarray:
    def table(value: Num) -> np.ndarray:
        return rows.column(value).reshape(1, -1, ways)

    def column(value: Num) -> np.ndarray:
        return table(value)[0, :, 0]

    cost, timetable = rows.cost, leaf.timetable
    forward, weight = column(cost.seconds("forward")), column(cost.seconds("weight"))
    fast = forward + weight + column(cost.seconds("backward"))
    forced, slope = np.zeros_like(fast), np.zeros_like(fast)
    if ways > 1 and len(problem.profile.block_layers) == 1:
        both = forced_seconds(table, cost, memory, problem.cluster.device.memory_bytes)
        forced, slope = both[0][0], both[1][0]
    tail = table(cost.seconds("step"))[0].min(axis=1)
    count = spare[0, 1]  # rows of stages; those of spare ones come after
    index = np.array([pick.candidate for pick in picks])
    stages, m = (leaf.grid.columns[name][index] for name in ("num_stages", "num_microbatches"))
    if leaf.grid.cutter is None:
        stages = np.ones_like(m)
    # What shows of hidden collectives may be less with another split.
    total = np.add.reduceat((column(cost.bare_seconds()) if leaf.grid.may_choose else fast)[:count], starts)
    apart = weight if timetable.splits_backward else np.zeros_like(weight)
    slowest = np.maximum.reduceat((fast + forced)[:count], starts)
    if leaf.grid.may_choose:
        held = column(memory.in_flight)
        kept, base = column(memory.microbatch_bytes()), column(memory.base_bytes())
        at, more = spare.T
        of = np.repeat(np.arange(len(picks)), np.diff([*starts, count]))
        by_block = np.maximum(fast[more] - fast[at], 1e-30)[of]
        grows = held[:count] * (kept[more] - kept[at])[of] + (base[more] - base[at])[of]
        each = by_block + slope[:count] * np.maximum(grows, 0.0)
        slowest = np.maximum(_least_pace(problem, leaf, picks, (fast + forced)[:count], each, starts), total / stages)
    seconds = np.maximum(fast, 1e-30)[:count]
    own = forward[:count] / seconds
    times = PipelineTimes(
        microbatches=m,
        stages=stages,
        through=total,
        pace=slowest,
        send=np.maximum.reduceat(column(cost.send_seconds)[:count], starts),
        larger=np.minimum.reduceat(np.maximum(own, 1 - own), starts),
        least_forward=np.minimum.reduceat(own, starts),
        most_forward=np.maximum.reduceat(own, starts),
        least_way=np.minimum.reduceat((fast - apart)[:count] / seconds, starts),
        later=np.add.reduceat(apart[:count], starts),
    )
    bound = timetable.step_bound(times)
    if timetable.chunks > 1:
        bound = np.maximum(bound, _after_the_way(leaf, index, forward, fast, forced, apart, starts, count))
    # With another split the stage that ends last may be a smaller one.
    last = np.minimum if leaf.grid.may_choose else np.maximum
    return bound + last.reduceat(tail[:count], starts)


def _least_pace(
    problem: SearchInputs, leaf: Leaf, picks: Sequence[Pick], seconds: np.ndarray, each: np.ndarray, starts: np.ndarray
) -> np.ndarray:
    """The least a slowest stage can take, where a stage with a block more takes `each` longer: the least at which whole
    blocks find room."""
    cuts = [leaf.grid.cuts[pick.candidate] for pick in picks]
    blocks = np.array([size_of(spans) for cut in cuts for spans in cut])
    of = np.repeat(np.arange(len(picks)), [len(cut) for cut in cuts])
    low = np.add.reduceat(seconds / each, starts) / np.add.reduceat(1 / each, starts)
    high = np.maximum(np.maximum.reduceat(seconds, starts), low)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        room = np.floor(blocks + (middle[of] - seconds) / each + 1e-9)
        enough = np.add.reduceat(np.maximum(room, 0), starts) >= problem.profile.num_blocks
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return low


def _after_the_way(
    leaf: Leaf,
    index: np.ndarray,
    forward: np.ndarray,
    fast: np.ndarray,
    forced: np.ndarray,
    apart: np.ndarray,
    starts: np.ndarray,
    count: int,
) -> np.ndarray:
    """A stage waits for the first chunks of those before it, going forward; and they for it, going back, unless it has
    work left for then."""
    chunks, blocks = leaf.timetable.chunks, leaf.grid.profile.num_blocks
    sizes = np.diff([*starts, count])
    of = np.repeat(np.arange(len(starts)), sizes)
    stage = np.arange(count) - starts[of]
    # The smallest chunk there is, as a share of the largest stage's blocks.
    share = ((blocks // (sizes * chunks)) / (chunks * -(-blocks // (sizes * chunks))))[of]
    way_in = stage * np.minimum.reduceat(forward[:count], starts)[of] * share
    way_out = stage * np.minimum.reduceat((fast - forward - apart)[:count], starts)[of] * share
    m = leaf.grid.columns["num_microbatches"][index][of]
    busy = m * (fast + forced)[:count]
    return np.maximum.reduceat(way_in + np.maximum(busy, busy - m * apart[:count] + way_out), starts)


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Columns over all candidates of all leaves."""

    leaf_of: np.ndarray
    index_of: np.ndarray
    least_seconds: np.ndarray
    least_bytes: np.ndarray
    base_bytes: np.ndarray
    runs: np.ndarray
    """Can run samples of this length, on this device, and is no other candidate over again."""
    num_new: int = 0
    parts: tuple[Candidates, ...] = ()

    @classmethod
    def none(cls) -> Candidates:
        names = ("leaf_of", "index_of", "least_seconds", "least_bytes", "base_bytes", "runs")
        return cls(**{name: np.zeros(0, dtype=bool if name == "runs" else float) for name in names})  # type: ignore[arg-type]

    def and_those_of(self, leaf: Leaf, at: int, takes: np.ndarray, slower: float) -> Candidates:
        count = leaf.grid.num_candidates
        more = Candidates(
            leaf_of=np.full(count, at),
            index_of=np.arange(count),
            least_seconds=leaf.least_seconds * slower,
            least_bytes=leaf.least_bytes,
            base_bytes=leaf.base_bytes,
            runs=np.isfinite(leaf.least_seconds) & takes,
            num_new=int(leaf.is_new.sum()),
        )
        return replace(self, parts=(*self.parts, more))

    def joined(self) -> Candidates:
        every = (self, *self.parts)
        names = ("leaf_of", "index_of", "least_seconds", "least_bytes", "base_bytes", "runs")
        columns: dict[str, Any] = {name: np.concatenate([getattr(each, name) for each in every]) for name in names}
        return Candidates(**columns, num_new=sum(each.num_new for each in every))

    def fits(self, memory_bytes: float) -> np.ndarray:
        return self.runs & (self.least_bytes <= memory_bytes)


def floors(asked: SearchInputs, grids: Sequence[Grid], dials: Sequence[Dial], sequence: int) -> list[tuple[str, float]]:
    """(compute dtype, no plan in it is faster than this), the fastest first: all flops at all devices' peak."""
    swaps = [dial for dial in dials if dial.kind.phase == PHASES[0]]
    dtypes = {"fp32"}
    sizes = {"batch": 1, "sequence": sequence, "microbatch": 1, "num_microbatches": 1}
    for ways in itertools.product(*([None, *dial.settings] for dial in swaps)):
        work = base_work(asked.profile, sizes, element_bytes=ELEMENT_BYTES, optimizer=asked.optimizer)
        for dial, settings in zip(swaps, ways, strict=True):
            work = work if settings is None else dial.example(settings).price(work)
        dtypes.add(work.facts.compute_dtype)
    batch = grids[0].batch if grids else 1
    flops = sum(
        batch * layer.repeat * (op.flops(1, sequence) + op.backward_flops(1, sequence))
        for layer in asked.profile.layers
        for op in layer.ops
        if op.kind in ("matmul", "attention") and op.dtype == "compute"
    )
    peaks = asked.cluster.device.flops_per_second
    found = [(dtype, flops / (peaks[dtype] * asked.cluster.num_devices)) for dtype in dtypes if dtype in peaks]
    return sorted(found, key=lambda each: (each[1], each[0]))
