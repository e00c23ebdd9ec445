"""Every candidate's least bytes and a time it cannot beat, thousands at once; then closer, for one order of its axes.

The techniques' settings form a tree in the order of their phases; candidates below a node share its priced work, and
the numbers in it are arrays over the grid. Blocks that may follow policies are priced following none, and all following
each; axes as if each lay innermost. So a bound holds for every order of the axes, every policy of every block, and
every way to split blocks into stages. `order_bounds` then prices every stage by itself, with its axes in one order and
with what its memory forces on it. docs/search.md derives the bounds.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from meshwright.core.cluster import Cluster
from meshwright.core.technique import PHASES, Technique
from meshwright.core.work import Num, Work, base_work, settle
from meshwright.planner.rows import (
    BoundedGrid,
    OrderedCandidate,
    PricedRows,
    cells_of,
    extreme_choices,
    row_sizes,
    size_of,
)
from meshwright.planner.space import Dial, Grid
from meshwright.planner.splits import widths
from meshwright.planner.wishes import SearchInputs
from meshwright.schedules import PipelineTimes, Timetable
from meshwright.simulator.peak_memory import StageMemory, stage_memory, timetable_of
from meshwright.simulator.pricing import ELEMENT_BYTES
from meshwright.simulator.stage_seconds import (
    LAUNCH,
    Charge,
    Known,
    Roads,
    Route,
    StageCost,
    TaskTally,
    route,
    routes,
    stage_cost,
    tally,
)


class Held:
    """What a stage keeps for its microbatches at one moment, at least, as far as that depends on policies. Which of its
    chunks hold most depends on the policies of its blocks. Arrays are (candidates, runs, policies).

    `place`: its number, the number of stages and of microbatches; `share`: of its blocks, those of the smallest chunk.
    """

    def __init__(
        self,
        table: Callable[[Num], np.ndarray],
        memory: StageMemory,
        timetable: Timetable,
        place: tuple[Num, Num, Num],
        share: np.ndarray,
    ):
        counts = (memory.in_flight,) if timetable.chunks == 1 else timetable.least_held(*place)
        least = table(counts[-1])
        if timetable.chunks > 1:
            memory = replace(memory, in_flight=np.minimum(counts[-1], memory.in_flight))
        self.memory, self.base, self.each = memory, table(memory.base_bytes), table(memory.microbatch_bytes)
        others = {id(count): (count, sum(each is count for each in counts[:-1])) for count in counts[:-1]}.values()
        self.parts = [(times * share, table(count)) for count, times in others]
        self.parts.append((1 - (len(counts) - 1) * share, least))
        """(share of the blocks, microbatches held of them), the least held last."""
        self.least_kept = self.base + least * self.each
        """As if all were held as the least held are."""
        self.kept, self.late = self.least_kept, table(memory.late_bytes)
        if len(counts) > 1:
            places = timetable.places(place[1])
            # What the last layer keeps, whatever policies say, is held least.
            has_last = table(places.span(place[0], timetable.chunks - 1) == places.num_spans - 1)
            more = sum(part * (count - least) for part, count in self.parts[:-1])
            self.kept = self.kept + more * (self.each - has_last * self.each.min(axis=2, keepdims=True))

    def without_tasks(self) -> Held:
        """What seconds follow from alone: a front keeps it of thousands of leaves."""
        result = copy.copy(self)
        del result.memory
        return result


def best_roads(cluster: Cluster, mesh: Mapping[str, Num]) -> Roads:
    """Each axis's route as if it were the innermost, and no worse than outside of all others."""

    def best(size: Num) -> Route:
        near, far = route(cluster, size, 1), route(cluster, size, cluster.devices_per_node)
        choose: dict[str, Callable[..., Num]] = {
            **dict.fromkeys(("ring_bytes_per_second", "direct_bytes_per_second"), np.maximum),
            **dict.fromkeys(("latency_seconds", "latency_growth", "half_bytes", "crossing", "shared"), np.minimum),
        }
        chosen = {name: each(getattr(near, name), getattr(far, name)) for name, each in choose.items()}
        fractions = {kind: np.maximum(share, far.fractions[kind]) for kind, share in near.fractions.items()}
        return replace(near, **chosen, fractions=fractions, per_node=size)

    result = Roads(lambda axis, count: best(count))
    result.update((axis, best(size)) for axis, size in mesh.items())
    return result


MOST_REMEMBERED = 512
"""Candidates of a grid whose prices are remembered for devices of another memory."""
MOST_BOUNDED, MOST_CELLS = 4096, 1 << 15
"""Candidates of a grid, and stages of candidates with their axes in an order, that are priced at once."""


def _bound_pieces(
    inputs: SearchInputs, grid: Grid, dials: tuple[Dial, ...], dtype: str, without: Collection[tuple[Technique, ...]]
) -> Iterator[BoundedGrid]:
    """As `bound_all`: leaves of the pieces joined. Where a piece has no such leaf, its candidates cannot run so."""
    count = grid.num_candidates
    parts = [slice(start, min(start + MOST_BOUNDED, count)) for start in range(0, count, MOST_BOUNDED)]
    leaves: dict[tuple[Technique, ...], dict[int, BoundedGrid]] = {}
    for at, part in enumerate(parts):
        columns = {name: column[part] for name, column in grid.columns.items()}
        for leaf in bound_all(inputs, replace(grid, columns=columns, cuts=grid.cuts[part]), dials, dtype, without):
            leaves.setdefault(leaf.techniques, {})[at] = leaf
    never = {"least_seconds": np.inf, "least_bytes": np.inf, "base_bytes": np.inf, "is_new": False}
    for mine in leaves.values():
        joined: dict[str, Any] = {
            name: np.concatenate(
                [
                    getattr(mine[at], name) if at in mine else np.full(part.stop - part.start, absent)
                    for at, part in enumerate(parts)
                ]
            )
            for name, absent in never.items()
        }
        yield replace(next(iter(mine.values())), grid=grid, seconds_within=None, **joined)


def bound_all(
    inputs: SearchInputs,
    grid: Grid,
    dials: tuple[Dial, ...],
    dtype: str,
    without: Collection[tuple[Technique, ...]] = (),
) -> Iterator[BoundedGrid]:
    """Leaves that compute in this dtype; of a large grid piece by piece, so that arrays stay small."""
    if grid.num_candidates > MOST_BOUNDED:
        yield from _bound_pieces(inputs, grid, dials, dtype, without)
        return
    cluster, others = inputs.cluster, [dial for dial in dials if not dial.kind.axis]
    ordered = sorted((*grid.axis_dials, *others), key=lambda dial: (PHASES.index(dial.kind.phase), dial.kind.name))
    may_skip = {dial.kind.name for dial in others if not dial.required and not dial.policies}
    policies = tuple((dial.kind.name, policy) for dial in others for policy in dial.policies)
    rows = BoundRows(grid, cluster, [d.example(d.settings[0]) for d in others if d.named and d.settings], policies)
    default = {dial.kind.name: dial.settings[0] for dial in ordered if dial.settings}
    known, swaps = Known(), sum(dial.kind.phase == PHASES[0] for dial in ordered)

    def is_new(chosen: tuple[Technique, ...]) -> np.ndarray:
        """A technique with an axis of one rank counts once, with its first settings."""
        new = np.ones(grid.num_candidates, dtype=bool)
        for technique in chosen:
            if any(getattr(technique, name) != value for name, value in default[technique.name].items()):
                new &= grid.uses(technique)
        return new

    def leaf(chosen: tuple[Technique, ...], work: Work, done: TaskTally) -> Iterator[BoundedGrid]:
        """Also with the schedules that are priced alike."""
        forbidden = rows.table(work.facts.forbidden).max(axis=(1, 2)) > 0
        cost = stage_cost(settled := settle(work), cluster, rows.roads, done, known).without_tasks()
        memory, own = stage_memory(settled, cluster.device), timetable_of(settled)
        new, names = is_new(chosen) & ~forbidden, {own.name, *(each.timetable.name for each in grid.alike)}
        for other in (None, *grid.alike):
            timetable = own if other is None else other.timetable
            techniques = tuple(other if other and type(each) is type(other) else each for each in chosen)
            if techniques in without:
                continue
            held = rows.held(memory if other is None else memory.holding(timetable.held(*rows.place)), timetable)
            seconds = partial(rows.least_seconds, cost, held.without_tasks(), timetable)
            yield BoundedGrid(
                grid=grid,
                techniques=techniques,
                policies=policies,
                required=frozenset(dial.kind.name for dial in others if dial.policies and dial.required),
                timetable=timetable,
                least_seconds=seconds(cluster.device.memory_bytes),
                seconds_within=seconds if grid.num_candidates <= MOST_REMEMBERED else None,
                least_bytes=rows.least_bytes(held),
                base_bytes=rows.base_bytes(held.memory),
                is_new=new & ~rows.overflows(held.memory, cluster) & ~grid.repeats(timetable, names),
            )

    def walk(depth: int, work: Work, chosen: tuple[Technique, ...], done: TaskTally) -> Iterator[BoundedGrid]:
        if depth == swaps and work.facts.compute_dtype != dtype:
            return
        if depth == len(ordered):
            yield from leaf(chosen, work, done)
            return
        dial = ordered[depth]
        priced = [(technique, technique.price(work)) for technique in map(dial.example, grid.ways(dial))]
        # Where these techniques only add tasks, those before them are gone through once for all below.
        if len(priced) > 1 and all(len(after.tasks) > len(work.tasks) for _, after in priced):
            here = TaskTally(tasks=work.tasks)
            if all(here.begins(after.tasks) for _, after in priced):
                done = tally(work, cluster, rows.roads, done, known)
        if dial.kind.name in may_skip:
            yield from walk(depth + 1, work, chosen, done)
        for technique, after in priced:
            if not np.all(after.facts.forbidden):
                count = len(known)
                yield from walk(depth + 1, after, (*chosen, technique), done)
                mine = set(map(id, work.tasks))  # which others may ask of again
                for task in [each for each in itertools.islice(known, count, None) if each not in mine]:
                    del known[task]

    start = base_work(inputs.profile, rows.sizes, element_bytes=ELEMENT_BYTES, optimizer=inputs.optimizer)
    yield from walk(0, start, (), TaskTally())


class BoundRows:
    """The rows of a grid's bounds: (candidates, runs of stages, no policy and each policy followed by all blocks)."""

    def __init__(self, grid: Grid, cluster: Cluster, named: Sequence[Technique], policies: Sequence[tuple[str, str]]):
        self.grid = grid
        starts, self.counts, firsts, blocks = grid.runs
        self.blocks = np.maximum(blocks, 1) if grid.inputs.is_one_kind else np.full(blocks.shape, np.inf)
        choices = extreme_choices(grid.inputs.profile, len(policies))
        self.shape = (*self.counts.shape, len(choices))
        # Columns of candidates, runs and choices that are broadcast against each other: what only candidates differ in
        # is priced once for all runs and choices.
        spans = [(cut[stage], None) for cut, mine in zip(grid.cuts, starts.tolist(), strict=True) for stage in mine]
        columns = (each[:, :, None] for each in (starts, firsts, blocks))
        self.sizes = row_sizes(
            grid.sizes(np.arange(grid.num_candidates)[:, None, None], *columns),
            grid.inputs.profile,
            policies,
            named,
            choices,
            spans if named else [],
            lambda column: column.reshape(*blocks.shape, 1),
        )
        mesh = {axis: self.sizes[axis] for axis in grid.axis_order}
        self.roads = routes(cluster, mesh) if cluster.num_nodes == 1 else best_roads(cluster, mesh)

    def table(self, value: Num) -> np.ndarray:
        return np.broadcast_to(np.asarray(value, dtype=float), self.shape)

    def fullest(self, value: np.ndarray) -> np.ndarray:
        """Least value of the stage that has most of it, by candidate: with another split that may be another stage, and
        certain is what the one with least has."""
        if self.grid.may_choose:
            return np.where(self.counts > 0, value, np.inf).min(axis=1)
        return np.where(self.counts > 0, value, 0.0).max(axis=1)

    def even(self, value: np.ndarray) -> np.ndarray:
        """An even share of what all stages together have, whoever has it."""
        return (self.counts * value).sum(axis=1) / self.counts.sum(axis=1)

    @property
    def place(self) -> tuple[Num, Num, Num]:
        return self.sizes["stage"], self.sizes["num_stages"], self.sizes["num_microbatches"]

    def held(self, memory: StageMemory, timetable: Timetable) -> Held:
        return Held(self.table, memory, timetable, self.place, self.chunk_share(timetable)[:, :, None])

    def chunk_share(self, timetable: Timetable) -> np.ndarray:
        """Of a stage's blocks those of the smallest chunk."""
        *_, blocks = self.grid.runs
        spans = self.grid.columns["num_stages"] * timetable.chunks
        return (self.grid.inputs.profile.num_blocks // spans)[:, None] / np.maximum(blocks, 1)

    def least_bytes(self, held: Held) -> np.ndarray:
        kept, runs = least_bytes(held, self.blocks)
        least = self.table(held.memory.peak_bytes())[:, :, 0] if self.shape[2] == 1 else kept + runs
        if not self.grid.may_choose:
            return self.fullest(least)
        return np.maximum(
            self.fullest(least), self.even(held.base[:, :, 0] + held.each.min(axis=2)) + self.fullest(runs)
        )

    def overflows(self, memory: StageMemory, cluster: Cluster) -> np.ndarray:
        """Candidates for which another tier than the device's is too small, whatever blocks follow: a mixture of
        policies has there a mixture of what each of them has."""
        overflows = np.zeros(len(self.counts), dtype=bool)
        for tier, size in memory.tier_bytes().items():
            overflows |= self.fullest(self.table(size).min(axis=2)) > cluster.tiers[tier].bytes_each
        return overflows

    def base_bytes(self, memory: StageMemory) -> np.ndarray:
        """What is always there, of the fullest stage, at least."""
        base = self.table(memory.base_bytes)[:, :, 0]
        return self.even(base) if self.grid.may_choose else self.fullest(base)

    def least_seconds(self, cost: StageCost, held: Held, timetable: Timetable, memory_bytes: float) -> np.ndarray:
        """Least seconds by candidate: its runs of stages with no policy, which is fastest, plus what is forced upon
        them beside."""
        grid, table = self.grid, self.table
        forward, backward, weight = (table(cost.seconds(part))[:, :, 0] for part in ("forward", "backward", "weight"))
        seconds = forward + backward + weight
        if self.shape[2] > 1 and not grid.may_choose and grid.inputs.is_one_kind:
            forced, _, may_fit = forced_seconds(table, cost, held, memory_bytes)
            seconds = seconds + np.where(may_fit, forced, 0.0)
        tails = table(cost.seconds("step")).min(axis=2)
        # With another split the stage that ends last may be a smaller one.
        tail = tails.min(axis=1) if grid.may_choose else tails.max(axis=1)
        if grid.cutter is None:
            return grid.columns["num_microbatches"] * seconds[:, 0] + tail
        starts, counts, _, blocks = grid.runs
        stages, num_blocks = grid.columns["num_stages"], grid.inputs.profile.num_blocks
        pace = np.zeros(len(stages))
        if timetable.chunks > 1:  # the split is even and given
            pace = np.where(counts > 0, seconds, 0.0).max(axis=1)
        elif grid.inputs.is_one_kind and counts.shape[1] > 2:
            # As many blocks as some stage must have, in an inner stage: without ends, and what it has beside its blocks
            # only makes fewer cost more each.
            most = -(-num_blocks // stages)
            is_inner = (stages > 2) & (blocks[:, 1] >= most)
            pace = np.where(is_inner, seconds[:, 1] * most / np.maximum(blocks[:, 1], 1), 0.0)
        bound = pipeline_bound(
            grid,
            timetable,
            cost,
            lambda value: table(value)[:, :, 0].ravel(),
            np.arange(grid.num_candidates) * self.shape[1],
            index=np.arange(grid.num_candidates),
            counts=counts.ravel(),
            before=np.maximum(starts + counts - 1, 0).ravel(),
            seconds=seconds.ravel(),
            unforced=seconds.ravel(),
            pace=pace,
            chunk_share=self.chunk_share(timetable).ravel(),
        )
        return bound + tail


SHORT_STEP = 256
"""Forwards of a step up to which the longest paths through its actions are looked up."""


def pipeline_bound(
    grid: Grid,
    timetable: Timetable,
    cost: StageCost,
    column: Callable[[Num], np.ndarray],
    starts: np.ndarray,
    *,
    index: np.ndarray,
    counts: np.ndarray,
    before: np.ndarray,
    seconds: np.ndarray,
    unforced: np.ndarray,
    pace: np.ndarray,
    chunk_share: np.ndarray,
) -> np.ndarray:
    """Seconds of a step that no way to split blocks into stages beats, from one way that is about even.

    `index`: the candidates, of which `pace` is the slowest stage's seconds for a microbatch, at least. `column` has a
    number of each stage, or run of equal stages, following no policy, and the other arrays have such numbers: candidate
    i has those from `starts[i]` on. `counts`: stages of a run; `before`: stages before its last one; `seconds` of a
    microbatch, of which `unforced` without what memory forces upon it; `chunk_share`: of a stage's blocks the share of
    the smallest chunk.
    """

    def total(value: np.ndarray) -> np.ndarray:
        return np.add.reduceat(counts * value, starts)

    def smallest(value: np.ndarray) -> np.ndarray:
        return np.minimum.reduceat(value, starts)

    forward, weight = column(cost.seconds("forward")), column(cost.seconds("weight"))
    apart = weight if timetable.splits_backward else np.zeros_like(weight)
    # What shows of hidden collectives may be less with another split.
    least = column(cost.bare_seconds) if grid.may_choose else unforced
    microbatches = grid.columns["num_microbatches"][index]
    stages = np.ones_like(microbatches) if grid.cutter is None else grid.columns["num_stages"][index]
    positive = np.maximum(unforced, 1e-30)
    own = forward / positive
    # Of the smallest chunk, going forward and back.
    way_in, way_out = smallest(forward * chunk_share), smallest((unforced - forward - apart) * chunk_share)
    send = np.maximum.reduceat(column(cost.send_seconds), starts)
    bound = timetable.step_bound(
        PipelineTimes(
            microbatches=microbatches,
            stages=stages,
            through=total(least),
            pace=np.maximum(pace, total(least) / stages),
            send=send,
            larger=smallest(np.maximum(own, 1 - own)),
            least_forward=smallest(own),
            most_forward=np.maximum.reduceat(own, starts),
            least_way=smallest((unforced - apart) / positive),
            later=total(apart),
            **({} if timetable.chunks == 1 else {"chunk_forward": way_in, "chunk_backward": way_out}),
        )
    )
    if timetable.chunks == 1:
        return bound
    # A stage waits for the first chunks of those before it, going forward; and they for it, going back, unless it has
    # work left for then.
    of = np.repeat(np.arange(len(starts)), np.diff([*starts, len(forward)]))
    busy = microbatches[of] * seconds
    after = before * way_in[of] + np.maximum(busy, busy - microbatches[of] * apart + before * way_out[of])
    # Of a short step, what follows each other in it: the first and the last span have more than their blocks.
    spans = stages * timetable.chunks
    blocks = grid.inputs.profile.num_blocks // spans  # of the smallest chunk
    whole = np.stack([way_in, way_out, smallest(weight * chunk_share)], axis=1)
    if not timetable.splits_backward:
        whole[:, 1] -= whole[:, 2]
    times = np.column_stack([whole / blocks[:, None], send])
    short = (spans * microbatches <= SHORT_STEP) & (stages > 2)
    for p, m in {*zip(stages[short].tolist(), microbatches[short].tolist(), strict=True)}:
        alike, places = (stages == p) & (microbatches == m), timetable.places(p)
        cut = grid.cuts[index[alike.argmax()]]
        each = (cut[places.stage(span)][places.chunk(span)] for span in range(places.num_spans))
        paths = timetable.paths(p, m, tuple(last - first for first, last in each))
        bound[alike] = np.maximum(bound[alike], (times[alike] @ paths.T).max(axis=1) * (1 - 1e-9))
    return np.maximum(bound, np.maximum.reduceat(after, starts))


def least_bytes(held: Held, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(candidates, runs): of a stage the least that any policies keep, and that running takes beside. `blocks`: how
    many of one kind it has; infinite where they differ.

    Whatever blocks follow, what is kept is a mixture, and the last block runs, and keeps, as one of the policies lets
    it."""
    kept = held.least_kept
    last = (kept - kept.min(axis=2, keepdims=True)) / blocks[:, :, None]
    return held.kept.min(axis=2), (held.late - kept + last).min(axis=2)


def forced_seconds(
    table: Callable[[Num], np.ndarray], cost: StageCost, held: Held, memory_bytes: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Seconds of a microbatch's backward that memory forces a stage to add, (candidates, runs), at least; for each
    further byte; and whether policies can save enough at all.

    Every policy saves bytes and costs time in proportion to the blocks that follow it, but for what hides behind
    compute, of which the least is taken; so the least time is that of a linear programme: of every chunk, which share
    follows each policy. At any price of a byte its dual is no more; one of the prices at which a chunk may change from
    one policy to another makes it as much. That is so of one kind of block only: of several, the kind that saves most
    for its time may go first.
    """
    bare = np.zeros_like(held.kept)
    for charge, seconds in cost.bare.items():
        bare += table(seconds) if charge.part == "backward" else 0.0
    waits = table(cost.charges.get(Charge(LAUNCH, "", "backward"), 0.0))
    shown = table(cost.seconds("backward")) - bare - waits
    more = bare - bare[:, :, :1] + shown.min(axis=2, keepdims=True) - (shown + waits)[:, :, :1]
    more[:, :, 0] = 0.0
    # What runs at the fullest moment may be of a block that follows any of them.
    needed = (held.kept[:, :, 0] + (held.late - held.least_kept).min(axis=2) - memory_bytes)[:, :, None]
    each, base = (own[:, :, :1] - own for own in (held.each, held.base))
    saved = [count * each + base for _, count in held.parts]
    low, high = np.array([*itertools.combinations(range(more.shape[2]), 2)]).T
    dearer, prices = more[:, :, high] - more[:, :, low], [np.zeros_like(needed)]
    for bytes_each in saved:
        span = bytes_each[:, :, high] - bytes_each[:, :, low]
        prices.append(np.where(span * dearer > 0, dearer / np.where(span == 0, 1.0, span), 0.0))
    price = np.concatenate(prices, axis=2)
    dual = price * needed
    for (share, _), bytes_each in zip(held.parts, saved, strict=True):
        dual = dual + share * (more[:, :, None, :] - price[:, :, :, None] * bytes_each[:, :, None, :]).min(axis=3)
    best = dual.argmax(axis=2)[:, :, None]
    result, slope = (np.take_along_axis(each, best, axis=2)[:, :, 0] for each in (dual, price))
    most = sum((part * own).max(axis=2) for (part, _), own in zip(held.parts, saved, strict=True))
    is_forced = result > 0
    return np.where(is_forced, result, 0.0), np.where(is_forced, slope, 0.0), needed[:, :, 0] <= most


_HALVINGS = 16
"""Until the pace is known to a part in ten thousand."""


def order_bounds(leaf: BoundedGrid, picks: Sequence[OrderedCandidate]) -> np.ndarray:
    """No plan of a candidate with its axes in this order is faster; infinite where none can fit."""
    if len(picks) > 1 and sum(len(leaf.grid.cuts[pick.candidate]) for pick in picks) > MOST_CELLS:
        half = len(picks) // 2
        return np.concatenate([order_bounds(leaf, part) for part in (picks[:half], picks[half:])])
    each = [cells_of(leaf, at, pick) for at, pick in enumerate(picks)]
    cells = [cell for mine in each for cell in mine]
    starts = np.cumsum([0, *map(len, each)])[:-1]
    count, wider, inner_row, num_blocks = len(cells), [], [], leaf.inputs.profile.num_blocks
    for at, mine in enumerate(each if leaf.grid.may_choose else ()):  # an inner stage with a block more
        inner = mine[min(1, len(mine) - 1)]
        blocks = min(inner.blocks + 1, num_blocks)
        inner_row.append(starts[at] + inner.stage)
        wider.append(len(cells))
        cells.append(inner._replace(first_block=min(inner.first_block, num_blocks - blocks), blocks=blocks))
    ways, inputs = 1 + len(leaf.policies), leaf.inputs
    rows = PricedRows(leaf, picks, cells, [extreme_choices(inputs.profile, len(leaf.policies))] * len(cells))

    def table(value: Num) -> np.ndarray:
        return rows.column(value).reshape(1, -1, ways)

    def column(value: Num) -> np.ndarray:
        return table(value)[0, :, 0]

    grid, cost, timetable = leaf.grid, rows.cost, leaf.timetable
    sizes = np.diff([*starts, count])
    of = np.repeat(np.arange(len(picks)), sizes)
    chunk_share = (num_blocks // (sizes * timetable.chunks))[of] / np.maximum(
        [cell.blocks for cell in cells[:count]], 1
    )
    shares = np.concatenate([chunk_share, np.ones(len(cells) - count)])[None, :, None]
    held = Held(table, rows.memory, timetable, rows.place, shares)
    fast = column(cost.seconds("forward")) + column(cost.seconds("weight")) + column(cost.seconds("backward"))
    forced, slope = np.zeros_like(fast), np.zeros_like(fast)
    if ways > 1 and inputs.is_one_kind:
        (forced,), (slope,), _ = forced_seconds(table, cost, held, inputs.cluster.device.memory_bytes)
    seconds = (fast + forced)[:count]  # of stages; those with a block more come after
    pace = np.maximum.reduceat(seconds, starts)
    alike = np.array([[cell.blocks if inputs.is_one_kind else np.inf for cell in cells]])
    kept, runs = (each[0, :count] for each in least_bytes(held, alike))
    over = kept + runs - inputs.cluster.device.memory_bytes
    fits = np.maximum.reduceat(over, starts) <= 0
    if grid.may_choose:

        def by_block(value: np.ndarray) -> np.ndarray:
            """What one block more adds."""
            return (value[wider] - value[inner_row])[of]

        in_flight, base = column(held.memory.in_flight)[:count], by_block(held.base[0, :, 0])
        keeps = held.each[0]
        grows = base + in_flight * by_block(keeps[:, 0])
        each = np.maximum(by_block(fast), 1e-30) + slope[:count] * np.maximum(grows, 0.0)
        pace = _least_pace(leaf, picks, seconds, each, starts)
        # Where all microbatches are held at once, gradients come after the fullest moment: of more blocks only what
        # they keep is certain.
        is_long = rows.place[2].reshape(-1, ways)[:count, 0] > in_flight
        adds = base + in_flight * by_block(keeps.min(axis=1))
        saves = adds + np.maximum(by_block(column(held.memory.gradient_bytes())), 0.0)
        fits = _find_room(leaf, picks, np.where(is_long | (over > 0), over, over - runs), adds, saves, starts)
    bound = pipeline_bound(
        grid,
        timetable,
        cost,
        lambda value: column(value)[:count],
        starts,
        index=np.array([pick.candidate for pick in picks]),
        counts=np.ones(count),
        before=np.arange(count) - starts[of],
        seconds=seconds,
        unforced=fast[:count],
        pace=pace,
        chunk_share=chunk_share,
    )
    # With another split the stage that ends last may be a smaller one.
    last = np.minimum if grid.may_choose else np.maximum
    tails = table(cost.seconds("step"))[0].min(axis=1)[:count]
    slower = inputs.slower * leaf.steps_factor[[pick.candidate for pick in picks]]
    return np.where(fits, (bound + last.reduceat(tails, starts)) * slower, np.inf)


def _least_pace(
    leaf: BoundedGrid, picks: Sequence[OrderedCandidate], seconds: np.ndarray, each: np.ndarray, starts: np.ndarray
) -> np.ndarray:
    """The least a slowest stage can take, where a stage with a block more takes `each` longer: the least at which whole
    blocks find room."""
    blocks = np.array([size_of(spans) for pick in picks for spans in leaf.grid.cuts[pick.candidate]])
    of = np.repeat(np.arange(len(picks)), np.diff([*starts, len(blocks)]))
    low = np.add.reduceat(seconds / each, starts) / np.add.reduceat(1 / each, starts)
    high = np.maximum(np.maximum.reduceat(seconds, starts), low)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        room = np.floor(blocks + (middle[of] - seconds) / each + 1e-9)
        enough = np.add.reduceat(np.maximum(room, 0), starts) >= leaf.inputs.profile.num_blocks
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return low


def _find_room(
    leaf: BoundedGrid,
    picks: Sequence[OrderedCandidate],
    over: np.ndarray,
    adds: np.ndarray,
    saves: np.ndarray,
    starts: np.ndarray,
) -> np.ndarray:
    """Whether all blocks may find memory, where a stage with its blocks has at least so many bytes `over`, one block
    more `adds` so many at least, and one fewer `saves` so many at most."""
    if not leaf.inputs.is_one_kind:
        return np.full(len(picks), True)
    num_blocks = leaf.inputs.profile.num_blocks
    sizes = [tuple(map(size_of, leaf.grid.cuts[pick.candidate])) for pick in picks]
    reach = [(least, widest) for each in sizes for lowest, widest in [widths(num_blocks, each)] for least in lowest]
    fewest, widest = np.array(reach).T
    most = np.concatenate(sizes) - np.ceil(over / np.maximum(np.where(over > 0, saves, adds), 1e-30) - 1e-9)
    is_enough = np.add.reduceat(np.minimum(most, widest), starts) >= num_blocks
    return is_enough & (np.minimum.reduceat(most - fewest, starts) >= 0)


class Candidates:
    """Columns over all candidates of all leaves."""

    def __init__(self, leaves: Sequence[BoundedGrid], runs: Sequence[np.ndarray], slower: float):
        """`runs`: of each leaf, what can run samples of this length and is no other candidate over again; `slower`:
        times as long that the slowest of all ranks takes."""

        def joined(columns: Iterable[np.ndarray]) -> np.ndarray:
            return np.concatenate([np.zeros(0), *columns])

        counts = [leaf.grid.num_candidates for leaf in leaves]
        self.leaf_of = joined(np.full(count, at) for at, count in enumerate(counts)).astype(int)
        self.index_of = joined(map(np.arange, counts)).astype(int)
        self.least_seconds = joined(leaf.least_seconds * leaf.steps_factor for leaf in leaves) * slower
        self.least_bytes = joined(leaf.least_bytes for leaf in leaves)
        self.base_bytes = joined(leaf.base_bytes for leaf in leaves)
        self.runs = joined(runs).astype(bool) & np.isfinite(self.least_seconds)
        """Those which the device, too, can run."""

    def fits(self, memory_bytes: float) -> np.ndarray:
        return self.runs & (self.least_bytes <= memory_bytes)


def floors(inputs: SearchInputs, dials: Sequence[Dial]) -> list[tuple[str, float]]:
    """(compute dtype, no plan in it is faster than this), the fastest first: all flops at all devices' peak."""
    sequence, swaps = inputs.sequence, [dial for dial in dials if dial.kind.phase == PHASES[0]]
    dtypes = {"fp32"}
    sizes = {"batch": 1, "sequence": sequence, "microbatch": 1, "num_microbatches": 1}
    for ways in itertools.product(*([None, *dial.settings] for dial in swaps)):
        work = base_work(inputs.profile, sizes, element_bytes=ELEMENT_BYTES, optimizer=inputs.optimizer)
        for dial, settings in zip(swaps, ways, strict=True):
            work = work if settings is None else dial.example(settings).price(work)
        dtypes.add(work.facts.compute_dtype)
    flops: dict[str, float] = {}
    for layer in inputs.profile.layers:
        for op in layer.ops:
            if op.kind in ("matmul", "attention") and op.dtype == "compute":
                each = inputs.batch * layer.repeat * (op.flops(1, sequence) + op.backward_flops(1, sequence))
                flops[op.role] = flops.get(op.role, 0.0) + each
    least = []
    for dtype in dtypes:
        peaks = [inputs.cluster.device.peak(dtype, role) or 0.0 for role in flops]
        if all(peaks):
            seconds = sum(count / peak for count, peak in zip(flops.values(), peaks, strict=True))
            seconds *= min(1.0, *inputs.cluster.device.op_slowdowns.values(), 1.0)
            least.append((dtype, seconds / inputs.cluster.num_devices))
    return sorted(least, key=lambda each: (each[1], each[0]))
