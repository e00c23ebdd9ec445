"""The best plan of a candidate: which blocks each stage has, and which policy each of them follows.

A stage's time and memory depend on its own blocks and policies alone, and a step never gets faster because a stage gets
slower. So each stage, for each number of blocks it may have, takes the fastest policies that fit; then blocks are
split. Few splits are all simulated; of many, the one whose slowest stage's bound is least is found exactly
(`splits.py`). Stages of several chunks have equal ones, and one number of seconds for each chunk. All of it is priced
as one array of rows: (candidate, stage, blocks, choice of policies).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import comb, prod
from typing import Any

import numpy as np

from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Spans, Technique, format_blocks
from meshwright.planner.policies import Option, fronts_of, options_of
from meshwright.planner.rows import (
    BoundedGrid,
    Kinds,
    OrderedCandidate,
    PricedRows,
    SearchInputs,
    StageCell,
    kinds_of,
    policy_fields,
    size_of,
)
from meshwright.planner.splits import all_splits, fastest_splits, largest_first, smallest_first
from meshwright.schedules import Timetable
from meshwright.simulator.forecast import slowest_of
from meshwright.simulator.makespan import makespan, stage_bound
from meshwright.simulator.pricing import held_of_chunks, straight

MOST_SPLITS = 200
"""Splits that are all simulated."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Seconds by (stage, first block, blocks - 1); infinite where the stage cannot be so, or does not fit."""

    forward: np.ndarray
    backward: np.ndarray
    """Whole."""
    weight: np.ndarray
    tail: np.ndarray
    least_forward: np.ndarray
    """The same of a stage whose blocks follow no policy, and so whether it fits or not."""
    least_backward: np.ndarray
    """Without the weights' half where that is apart: nobody waits for it."""
    lower: np.ndarray
    """Seconds of forward and backward that no policy of it beats and fits."""
    send_seconds: float
    num_microbatches: int

    @property
    def num_stages(self) -> int:
        return self.forward.shape[0]

    @property
    def num_blocks(self) -> int:
        return self.forward.shape[1]

    @property
    def widest(self) -> int:
        return self.forward.shape[2]


def is_small(table: Table) -> bool:
    """Whether all splits are simulated."""
    room = table.num_blocks - table.num_stages + 1
    return table.widest >= room and comb(table.num_blocks - 1, table.num_stages - 1) <= MOST_SPLITS


def step_seconds(table: Table, timetable: Timetable, splits: list[tuple[int, ...]]) -> np.ndarray:
    """Of every split; infinite where a stage of it cannot be."""
    sizes = np.array(splits)
    firsts = np.cumsum(sizes, axis=1) - sizes
    found = np.full(len(splits), np.inf)
    inside = np.all(sizes <= table.widest, axis=1)
    stage = np.arange(table.num_stages)
    at = (stage[None, :], firsts, np.minimum(sizes, table.widest) - 1)
    columns = [values[at] for values in (table.forward, table.backward, table.weight, table.tail)]
    runs = inside & np.all(np.isfinite(columns[1]), axis=1)
    if not runs.any():
        return found
    forward, backward, weight, tail = (values[runs] for values in columns)
    forward, backward, weight = (list(values.T) for values in (forward, backward, weight))
    busy = makespan(timetable, forward, backward, weight, table.send_seconds, table.num_microbatches)
    found[runs] = busy + tail.max(axis=1)
    return found


def stage_bounds(table: Table, timetable: Timetable) -> np.ndarray:
    """No step in which a stage is so, by (stage, first block, blocks - 1), is faster: what is before and after it takes
    at least what so many blocks take in the widest stages there are."""
    p, blocks, widest = table.forward.shape
    stage = np.arange(p)[:, None, None]
    first = np.arange(blocks)[None, :, None]
    after = np.minimum(first + np.arange(1, widest + 1)[None, None, :], blocks)
    ways = []
    for values in (table.least_forward, table.least_backward):
        each, at_start, at_end = _least_by_block(values)
        total = np.concatenate([[0.0], np.cumsum(each)])
        before = total[first] + (stage > 0) * at_start
        rest = total[blocks] - total[after] + (stage < p - 1) * at_end
        ways.append((before, rest))
    (before_forward, after_forward), (before_backward, after_backward) = ways
    hops = table.send_seconds
    can_be = np.isfinite(table.lower)
    forward, lower, weight = (np.where(can_be, each, 0.0) for each in (table.forward, table.lower, table.weight))
    apart = weight if timetable.splits_backward else np.zeros_like(weight)
    bound = stage_bound(
        timetable,
        stage=stage,
        num_stages=p,
        num_microbatches=table.num_microbatches,
        forward=forward,
        backward=lower - forward - apart,
        apart=apart,
        before=(before_forward + stage * hops, before_backward + stage * hops),
        after=after_forward + after_backward + 2 * (p - 1 - stage) * hops,
    )
    return np.where(can_be, bound, np.inf)


def _least_by_block(values: np.ndarray) -> tuple[np.ndarray, float, float]:
    """At least what each block adds to its stage, and what the first and the last stage have beside that (which may be
    less than nothing)."""
    p, blocks, widest = values.shape
    middle = values[1:-1].min(axis=0) if p > 2 else np.minimum(values[0], values[-1])
    each = np.full(blocks, np.inf)
    for width in range(1, widest + 1):
        share = middle[:, width - 1] / width
        for offset in range(width):
            reach = blocks - offset
            each[offset:] = np.minimum(each[offset:], share[:reach])
    each = np.where(np.isfinite(each), each, 0.0)
    total = np.concatenate([[0.0], np.cumsum(each)])
    widths = np.arange(1, widest + 1)
    at_start = values[0, 0, :] - total[np.minimum(widths, blocks)]
    starts = np.maximum(blocks - widths, 0)
    at_end = values[-1, starts, widths - 1] - (total[blocks] - total[starts])
    return each, _least(at_start), _least(at_end)


def _least(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.min()) if len(finite) else 0.0


FEW_COMBINATIONS = 256
"""Combinations of stages' choices that are all simulated."""


@dataclass(frozen=True, kw_only=True)
class ChunkedSolution:
    """What came of a candidate: seconds of its step, no faster than, and each stage's choice; None: nothing fits."""

    seconds: float
    least_seconds: float
    choices: list[np.ndarray] | None


@dataclass(frozen=True, kw_only=True)
class _ChunkedStage:
    """The choices of a stage that fit, fastest in sum first: seconds by (choice, chunk)."""

    forward: np.ndarray
    backward: np.ndarray
    weight: np.ndarray
    tail: np.ndarray
    choices: np.ndarray


def solve_chunks(
    problem: SearchInputs, leaf: BoundedGrid, picks: Sequence[OrderedCandidate], listed: Sequence[Sequence[np.ndarray]]
) -> list[ChunkedSolution]:
    """`listed`: of each pick and stage, the choices of policies to be tried."""
    whole: list[StageCell] = []
    for at, pick in enumerate(picks):
        cut = leaf.grid.cuts[pick.candidate]
        whole += [
            StageCell(at, s, kinds_of(problem, spans), spans[0][0], size_of(spans)) for s, spans in enumerate(cut)
        ]
    choices = [each for mine in listed for each in mine]
    stages = PricedRows(problem, leaf, picks, whole, choices)
    chunks = leaf.timetable.chunks
    parts = [
        _by_chunk(problem.profile, leaf.grid.cuts[picks[cell.at].candidate][cell.stage], each)
        for cell, each in zip(whole, choices, strict=True)
    ]
    by_chunk = [
        PricedRows(problem, leaf, picks, whole, [part[:, chunk] for part in parts], chunk=chunk)
        for chunk in range(chunks)
    ]
    columns = [rows.columns() for rows in by_chunk]
    kept = np.stack([rows.column(rows.memory.microbatch_bytes()) for rows in by_chunk])
    held = _held_rows(leaf, picks, whole, [len(each) for each in choices], kept)
    peak_bytes = stages.peak_bytes(replace(stages.memory, in_flight=held))
    totals, sends = stages.columns(), np.zeros(len(picks))
    found: list[list[_ChunkedStage | None]] = [[] for _ in picks]
    row = 0
    for cell, each in zip(whole, choices, strict=True):
        rows = np.arange(row, row + len(each))
        row += len(each)
        sends[cell.at] = max(sends[cell.at], *(float(c.send[rows].max()) for c in columns))
        rows = rows[peak_bytes[rows] <= picks[cell.at].memory_bytes]
        if not len(rows):
            found[cell.at].append(None)
            continue
        seconds = np.stack([[c.forward[rows] + c.backward[rows]] for c in columns]).sum(axis=(0, 1))
        rows = rows[np.lexsort((each.sum(axis=(1, 2))[rows - (row - len(each))], seconds))]
        found[cell.at].append(
            _ChunkedStage(
                forward=np.stack([c.forward[rows] for c in columns], axis=1),
                backward=np.stack([c.backward[rows] for c in columns], axis=1),
                weight=np.stack([c.weight[rows] for c in columns], axis=1),
                tail=totals.tail[rows],
                choices=each[rows - (row - len(each))],
            )
        )
    every = zip(picks, found, sends.tolist(), strict=True)
    return [_best_combination(leaf, pick, mine, send) for pick, mine, send in every]


def _by_chunk(profile: Profile, spans: Spans, choices: np.ndarray) -> np.ndarray:
    """(choices, chunks, kinds, policies): of a stage's counts those in each chunk, which come one after the other."""
    left = choices.copy()
    found = np.zeros((len(choices), len(spans), *choices.shape[1:]), dtype=int)
    for chunk, (first, last) in enumerate(spans):
        room = np.repeat(np.array(profile.blocks_within(first, last - first))[None, :], len(choices), axis=0)
        for policy in range(choices.shape[2]):
            taken = np.minimum(left[:, :, policy], room)
            found[:, chunk, :, policy] = taken
            left[:, :, policy] -= taken
            room = room - taken
    return found


def _held_rows(
    leaf: BoundedGrid,
    picks: Sequence[OrderedCandidate],
    cells: Sequence[StageCell],
    counts: Sequence[int],
    kept: np.ndarray,
) -> np.ndarray:
    """Microbatches in flight, of all the stage's layers: as many bytes as are held at most."""
    found = np.zeros(kept.shape[1])
    row = 0
    for cell, count in zip(cells, counts, strict=True):
        stages, m = (int(leaf.grid.columns[n][picks[cell.at].candidate]) for n in ("num_stages", "num_microbatches"))
        rows = slice(row, row + count)
        row += count
        found[rows] = held_of_chunks(leaf.timetable, cell.stage, stages, m, list(kept[:, rows]))
    return found


def _best_combination(
    leaf: BoundedGrid, pick: OrderedCandidate, stages: list[_ChunkedStage | None], send: float
) -> ChunkedSolution:
    options = [stage for stage in stages if stage is not None]
    if len(options) < len(stages):
        return ChunkedSolution(seconds=np.inf, least_seconds=np.inf, choices=None)
    m = int(leaf.grid.columns["num_microbatches"][pick.candidate])
    combinations = _combinations(options)
    tried = combinations or [tuple(0 for _ in options)]
    chosen = [
        {name: np.stack([getattr(s, name)[way[i]] for way in tried]) for name in ("forward", "backward", "weight")}
        for i, s in enumerate(options)
    ]
    tails = [max(float(s.tail[way[i]]) for i, s in enumerate(options)) for way in tried]
    if not combinations:  # beside it, every chunk at its fastest: no combination is faster
        for columns, s in zip(chosen, options, strict=True):
            for name, values in columns.items():
                least = getattr(s, name).max(axis=0) if name == "weight" else getattr(s, name).min(axis=0)
                columns[name] = np.concatenate([values, least[None]])
        tails.append(max(float(s.tail.min()) for s in options))
    seconds = _simulated(leaf.timetable, chosen, send, m) + np.array(tails)
    best = int(np.argmin(seconds[: len(tried)]))
    return ChunkedSolution(
        seconds=float(seconds[best]),
        least_seconds=float(seconds.min()),
        choices=[s.choices[tried[best][i]] for i, s in enumerate(options)],
    )


def _combinations(options: list[_ChunkedStage]) -> list[tuple[int, ...]]:
    """All that may be best, where they are few."""
    if sum(len(stage.choices) > 1 for stage in options) > FEW_COMBINATIONS.bit_length():
        return []
    useful = [_useful(stage) for stage in options]
    return list(itertools.product(*useful)) if prod(len(each) for each in useful) <= FEW_COMBINATIONS else []


def _useful(stage: _ChunkedStage) -> list[int]:
    """Choices that no other beats in every chunk and at the end."""
    values = np.column_stack([stage.forward, stage.backward, stage.tail])
    return [
        i
        for i, own in enumerate(values)
        if not any(np.all(other <= own) and (np.any(other < own) or j < i) for j, other in enumerate(values) if j != i)
    ]


def _simulated(timetable: Timetable, stages: list[dict[str, np.ndarray]], send: float, microbatches: int) -> np.ndarray:
    places = timetable.places(len(stages))
    spans: dict[str, list[Any]] = {name: [] for name in ("forward", "backward", "weight")}
    for span in range(places.num_spans):
        for name, values in spans.items():
            values.append(stages[places.stage(span)][name][:, places.chunk(span)])
    return np.asarray(makespan(timetable, spans["forward"], spans["backward"], spans["weight"], send, microbatches))


REACH = 3
"""Blocks more or fewer than an even share that a stage may have; with few blocks, any number."""
FEW_BLOCKS, FEW_SPLITS = 12, 64


@dataclass(frozen=True, kw_only=True)
class Solved:
    pick: OrderedCandidate
    plan: Plan | None
    """None: nothing fits."""
    seconds: float
    """Of a step, as simulated."""
    least_seconds: float
    """No plan of this candidate and order is faster."""


def solve(
    problem: SearchInputs, leaf: BoundedGrid, picks: Sequence[OrderedCandidate], limit_seconds: float = np.inf
) -> list[Solved]:
    """What is bound to be above the limit is not simulated."""
    if leaf.timetable.chunks > 1:
        return _solve_chunks(problem, leaf, picks)
    cells = [cell for at, pick in enumerate(picks) for cell in _cells(problem, leaf, at, pick)]
    options, sends = options_of(problem, leaf, picks, list(dict.fromkeys(cells)))
    found = []
    for at, pick in enumerate(picks):
        mine = {(cell.stage, cell.kinds): option for cell, option in options.items() if cell.at == at}
        found.append(_solved(problem, leaf, pick, mine, float(sends[at]), limit_seconds))
    return found


def _solve_chunks(problem: SearchInputs, leaf: BoundedGrid, picks: Sequence[OrderedCandidate]) -> list[Solved]:
    profile = problem.profile
    cells = [cell for at, pick in enumerate(picks) for cell in _cells(problem, leaf, at, pick)]
    listed_by: list[list[np.ndarray]] = [[] for _ in picks]
    for cell, each in zip(cells, fronts_of(problem, leaf, picks, cells), strict=True):
        listed_by[cell.at].append(each.choices[each.first_look()])
    slower = slowest_of(problem.cluster, problem.cluster.num_devices)
    found = []
    for pick, solution in zip(picks, solve_chunks(problem, leaf, picks, listed_by), strict=True):
        plan = None
        if solution.choices is not None:
            plan = _plan(profile, leaf, pick, leaf.grid.cuts[pick.candidate], solution.choices)
        seconds, least = solution.seconds * slower, solution.least_seconds * slower
        found.append(Solved(pick=pick, plan=plan, seconds=seconds, least_seconds=least))
    return found


def _cells(problem: SearchInputs, leaf: BoundedGrid, at: int, pick: OrderedCandidate) -> list[StageCell]:
    cut = leaf.grid.cuts[pick.candidate]
    if not leaf.grid.may_choose:
        return [
            StageCell(at, stage, kinds_of(problem, spans), spans[0][0], size_of(spans))
            for stage, spans in enumerate(cut)
        ]
    found = []
    for stage, width, firsts in _places_of(leaf, pick):
        seen = set()
        for first in firsts[:1] if problem.is_one_kind else firsts:
            kinds = problem.kinds(first, width)
            if kinds not in seen:
                seen.add(kinds)
                found.append(StageCell(at, stage, kinds, first, width))
    return found


@lru_cache(maxsize=256)
def _places(blocks: int, sizes: tuple[int, ...]) -> tuple[tuple[int, int, range], ...]:
    """(stage, how many blocks it may have, where it may begin), given about how many each has."""
    room = blocks - len(sizes) + 1
    is_any = blocks <= FEW_BLOCKS or comb(blocks - 1, len(sizes) - 1) <= FEW_SPLITS
    widest = room if is_any else min(room, max(sizes) + REACH)
    lowest = [1 if is_any else max(1, size - REACH) for size in sizes]
    found = []
    for stage in range(len(sizes)):
        before, after = sum(lowest[:stage]), sum(lowest[stage + 1 :])
        for width in range(lowest[stage], widest + 1):
            first = max(before, blocks - width - widest * (len(sizes) - 1 - stage))
            last = min(widest * stage, blocks - width - after)
            if first <= last:
                found.append((stage, width, range(first, last + 1)))
    return tuple(found)


def _places_of(leaf: BoundedGrid, pick: OrderedCandidate) -> tuple[tuple[int, int, range], ...]:
    sizes = tuple(size_of(spans) for spans in leaf.grid.cuts[pick.candidate])
    return _places(leaf.grid.profile.num_blocks, sizes)


def _solved(
    problem: SearchInputs,
    leaf: BoundedGrid,
    pick: OrderedCandidate,
    options: Mapping[tuple[int, Kinds], Option],
    send: float,
    limit_seconds: float,
) -> Solved:
    profile, cut = problem.profile, leaf.grid.cuts[pick.candidate]
    slower = slowest_of(problem.cluster, problem.cluster.num_devices)
    if not leaf.grid.may_choose:
        return _at_once(problem, leaf, pick, options, send, slower)
    table = _table(problem, leaf, pick, options, send)
    if is_small(table):
        splits = all_splits(table.num_blocks, table.num_stages)
        least = np.inf
    else:
        least, splits = fastest_splits(stage_bounds(table, leaf.timetable), smallest_first, largest_first)
        least = least + float(np.min(table.tail))
        if least * slower > limit_seconds:
            return Solved(pick=pick, plan=None, seconds=np.inf, least_seconds=least * slower)
        splits = list(dict.fromkeys([tuple(size_of(spans) for spans in cut), *splits]))
    seconds = step_seconds(table, leaf.timetable, splits)
    best = int(np.argmin(seconds))
    is_exact = is_small(table) and all(
        o.lower >= o.forward + o.backward or not np.isfinite(o.lower) for o in options.values()
    )
    least = min(least, seconds[best]) if np.isfinite(least) and not is_exact else seconds[best]
    if not np.isfinite(seconds[best]):
        return Solved(pick=pick, plan=None, seconds=np.inf, least_seconds=np.inf)
    stages = straight(splits[best])
    chosen = [options[stage, kinds_of(problem, spans)] for stage, spans in enumerate(stages)]
    plan = _plan(profile, leaf, pick, stages, [option.choice for option in chosen])
    return Solved(pick=pick, plan=plan, seconds=float(seconds[best]) * slower, least_seconds=float(least) * slower)


def _at_once(
    problem: SearchInputs,
    leaf: BoundedGrid,
    pick: OrderedCandidate,
    options: Mapping[tuple[int, Kinds], Option],
    send: float,
    slower: float,
) -> Solved:
    """Where the split is given."""
    profile, cut = problem.profile, leaf.grid.cuts[pick.candidate]
    chosen = [options[stage, kinds_of(problem, spans)] for stage, spans in enumerate(cut)]
    if not all(np.isfinite(option.forward) for option in chosen):
        return Solved(pick=pick, plan=None, seconds=np.inf, least_seconds=np.inf)
    m = int(leaf.grid.columns["num_microbatches"][pick.candidate])
    columns = [[getattr(option, name) for option in chosen] for name in ("forward", "backward", "weight")]
    tail = max(option.tail for option in chosen)
    forward, backward, weight = columns
    seconds = float(makespan(leaf.timetable, forward, backward, weight, send, m)) + tail
    # A step never gets slower by a larger share than its slowest stage.
    least = seconds * min(option.lower / (option.forward + option.backward) for option in chosen)
    plan = _plan(profile, leaf, pick, cut, [option.choice for option in chosen])
    return Solved(pick=pick, plan=plan, seconds=seconds * slower, least_seconds=least * slower)


def _table(
    problem: SearchInputs,
    leaf: BoundedGrid,
    pick: OrderedCandidate,
    options: Mapping[tuple[int, Kinds], Option],
    send: float,
) -> Table:
    places = _places_of(leaf, pick)
    widest = max(width for _, width, _ in places)
    stages = len(leaf.grid.cuts[pick.candidate])
    values = np.full((7, stages, problem.profile.num_blocks, widest), np.inf)
    for stage, width, firsts in places:
        if problem.is_one_kind:
            option = options[stage, problem.kinds(firsts[0], width)]
            values[:, stage, firsts[0] : firsts[-1] + 1, width - 1] = np.array(option.columns)[:, None]
            continue
        for first in firsts:
            values[:, stage, first, width - 1] = options[stage, problem.kinds(first, width)].columns
    names = ("forward", "backward", "weight", "tail", "least_forward", "least_backward", "lower")
    return Table(
        **dict(zip(names, values, strict=True)),
        send_seconds=send,
        num_microbatches=int(leaf.grid.columns["num_microbatches"][pick.candidate]),
    )


def _plan(
    profile: Profile, leaf: BoundedGrid, pick: OrderedCandidate, cut: tuple[Spans, ...], chosen: Sequence[np.ndarray]
) -> Plan:
    """Policies are written down as the numbers of the blocks that follow them."""
    solved = policy_fields(leaf)
    blocks: dict[tuple[str, str], list[int]] = {each: [] for each in solved}
    kind_of = [kind for kind, layer in enumerate(profile.block_layers) for _ in range(layer.repeat)]
    for spans, choice in zip(cut, chosen, strict=True):
        left = choice.copy()
        for first, last in spans:
            for block in range(first, last):
                kind = kind_of[block]
                for at, each in enumerate(solved):
                    if left[kind, at]:
                        left[kind, at] -= 1
                        blocks[each].append(block)
                        break
    techniques = []
    for technique in leaf.techniques:
        mine = {field: blocks[name, field] for name, field in solved if name == technique.name}
        if mine and not any(mine.values()):
            continue
        if mine:
            named = {field: _named(technique, field, profile, each) for field, each in mine.items()}
            # No block follows the others, which are pinned to none or banned, whatever their defaults say.
            technique = replace(technique, **dict.fromkeys(technique.policies, 0) | named)
        techniques.append(technique)
    return leaf.grid.plan(techniques, pick.candidate, cut, pick.axis_order or leaf.grid.axis_order)


def smallest_plan(problem: SearchInputs, leaf: BoundedGrid, index: int, axis_order: tuple[str, ...]) -> Plan:
    """All blocks following the policies that keep least, blocks split about evenly."""
    cut = leaf.grid.cuts[index]
    policies = sum(map(len, leaf.policies.values()))
    chosen = []
    for spans in cut:
        choice = np.zeros((len(problem.profile.block_layers), policies), dtype=int)
        choice[:, :1] = np.array(kinds_of(problem, spans))[:, None]
        chosen.append(choice)
    return _plan(problem.profile, leaf, OrderedCandidate(index, axis_order, np.inf), cut, chosen)


def _named(technique: Technique, field: str, profile: Profile, blocks: list[int]) -> int | str | None:
    """As short as it can be said."""
    default = next(f.default for f in fields(technique) if f.name == field)
    if len(blocks) == profile.num_blocks and default is None:
        return None
    return format_blocks(blocks) if blocks else 0
