"""A closer bound of candidates, for one order of their axes: every stage by itself, with what its memory forces on it.

Where blocks may be dealt out, a stage's seconds are at least a line in its number of blocks (they are convex), so the
pace of the best split is at least the stages' seconds, each weighed by how little a block more would add to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.core.work import Num
from meshwright.planner.bounds import ALL, Leaf, forced_seconds, least_memory
from meshwright.planner.priced_rows import Cell, Pick, PricedRows, SearchInputs, kinds_of, policy_fields, size_of
from meshwright.schedules import PipelineTimes
from meshwright.simulator.forecast import slowest_of
from meshwright.simulator.peak_memory import StageMemory

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
    found = _bounds(problem, leaf, picks, rows, memory, np.array(starts), np.array(spare), 1 + policies)
    return found * slowest_of(problem.cluster, problem.cluster.num_devices)


def _bounds(
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
        slowest = np.maximum(_pace(problem, leaf, picks, (fast + forced)[:count], each, starts), total / stages)
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


def _pace(
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
