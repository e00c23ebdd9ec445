"""Every candidate's peak bytes and a time it cannot beat, thousands at once.

The techniques' settings form a tree in the order of their phases; candidates below a node share its priced work, and
the numbers in it are arrays over the grid. The bound is exact for plans of one stage; with stages it leaves out only
what a schedule adds to its slowest stage (see `simulate.makespan.lower_bound`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problem
from meshwright.core.profile import Profile
from meshwright.core.settle import settle
from meshwright.core.technique import PHASES, Technique
from meshwright.core.work import Num, Updating, Work, base_work
from meshwright.schedules import Timetable
from meshwright.search.dials import Dial
from meshwright.search.space import Grid
from meshwright.simulate.cost import StageCost, Tally, stage_cost, tally
from meshwright.simulate.links import routes
from meshwright.simulate.memory import stage_memory, timetable_of
from meshwright.simulate.price import ELEMENT_BYTES


@dataclass(frozen=True, kw_only=True)
class Bounded:
    """A grid with one way to set everything that is not a number."""

    grid: Grid
    techniques: tuple[Technique, ...]
    least_seconds: np.ndarray
    """No plan of the candidate is faster; infinite where the device cannot run it."""
    peak_bytes: np.ndarray
    is_new: np.ndarray
    """False where a technique is not used after all (its size is 1, its count 0) and another table, with its other
    settings, has the same plan."""

    def has(self, name: str) -> np.ndarray:
        """Which candidates use the technique."""
        if not any(technique.name == name for technique in self.techniques):
            return np.zeros(self.grid.num_candidates, dtype=bool)
        return self.grid.uses(name)

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


def bound_all(
    profile: Profile, cluster: Cluster, grid: Grid, dials: tuple[Dial, ...], *, optimizer: Updating
) -> Iterator[Bounded]:
    free = [dial for dial in dials if not dial.axis_field and not dial.count_field]
    ordered = sorted(
        (*grid.axis_dials, *grid.count_dials, *free),
        key=lambda dial: (PHASES.index(dial.kind.phase), dial.kind.name),
    )
    may_skip = {dial.kind.name for dial in free if not dial.required}
    roads = routes(cluster, {axis: grid.sizes[axis] for axis in grid.axis_order})
    default = {dial.kind.name: dial.settings[0] for dial in ordered if dial.settings}

    def is_new(chosen: tuple[Technique, ...]) -> np.ndarray:
        new = np.ones(grid.num_candidates, dtype=bool)
        for technique in chosen:
            if any(getattr(technique, f) != value for f, value in default[technique.name].items()):
                new &= grid.uses(technique.name)
        return new

    def walk(depth: int, work: Work, chosen: tuple[Technique, ...], done: Tally) -> Iterator[Bounded]:
        if depth == len(ordered):
            forbidden = _table(grid, work.facts.get("forbidden", False)).max(axis=1) > 0
            cost = stage_cost(settled := settle(work), cluster, roads, done)
            peak_bytes = _table(grid, stage_memory(settled, cluster.device).peak_bytes()).max(axis=1)
            yield Bounded(
                grid=grid,
                techniques=chosen,
                least_seconds=_least_seconds(grid, cost, timetable_of(settled)),
                peak_bytes=peak_bytes,
                is_new=is_new(chosen) & ~forbidden,
            )
            return
        dial = ordered[depth]
        priced = [(technique, technique.price(work)) for technique in map(dial.example, dial.settings)]
        # Where these techniques only add tasks, those before them are gone through once for all below.
        if len(priced) > 1 and all(len(after.tasks) > len(work.tasks) for _, after in priced):
            here = Tally(tasks=work.tasks)
            if all(here.begins(after.tasks) for _, after in priced):
                done = tally(work, cluster.device, roads, done)
        if dial.kind.name in may_skip:
            yield from walk(depth + 1, work, chosen, done)
        for technique, after in priced:
            if not np.all(after.facts.get("forbidden", False)):
                yield from walk(depth + 1, after, (*chosen, technique), done)

    start = base_work(profile, grid.sizes, element_bytes=ELEMENT_BYTES, optimizer=optimizer)
    yield from walk(0, start, (), Tally())


def _table(grid: Grid, value: Num) -> np.ndarray:
    """(candidates, runs) of one number per row."""
    shape = grid.counts.shape
    return np.broadcast_to(np.asarray(value, dtype=float), (shape[0] * shape[1],)).reshape(shape)


def _least_seconds(grid: Grid, cost: StageCost, timetable: Timetable) -> np.ndarray:
    """As `simulate.makespan.lower_bound`, with a column for each run of stages."""
    weight = _table(grid, cost.seconds("weight"))
    each = _table(grid, cost.seconds("forward")) + _table(grid, cost.seconds("backward")) + weight
    tail = _table(grid, cost.seconds("step")).max(axis=1)
    microbatches = grid.columns["num_microbatches"]
    if each.shape[1] == 1:
        return microbatches * each[:, 0] + tail
    send = _table(grid, cost.send_seconds).max(axis=1)
    forward, counts = _table(grid, cost.seconds("forward")), grid.counts
    apart = weight if timetable.splits_backward else 0.0 * weight
    back = each - forward - apart
    bound = microbatches[:, None] * each
    has_ways = timetable.chunks == 1 and not timetable.overlaps_steps
    if has_ways:
        # The last stage of each run has the longest way in and out.
        hops = np.maximum(grid.starts + counts - 1, 0) * send[:, None]
        way_in = np.cumsum(counts * forward, axis=1) - forward * (counts > 0) + hops
        way_out = np.cumsum(counts * back, axis=1) - back * (counts > 0) + hops
        bound = way_in + np.maximum(bound, bound - microbatches[:, None] * apart + way_out)
    bound = np.where(counts > 0, bound, 0.0).max(axis=1)
    # With several chunks the stage that stands for a run need not be the lightest: only what all have is certain.
    if has_ways:
        through = (counts * (forward + back)).sum(axis=1)
        bound = np.maximum(bound, through + 2 * (grid.columns["num_stages"] - 1) * send)
    return bound + tail
