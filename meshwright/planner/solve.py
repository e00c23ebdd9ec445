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
from typing import Any, NamedTuple

import numpy as np

from meshwright.core.plan import Plan
from meshwright.core.technique import Spans, format_layers
from meshwright.planner.policies import Memo, Option, fronts_of, options_of
from meshwright.planner.rows import BoundedGrid, OrderedCandidate, PricedRows, StageCell, cells_of, kinds_of, size_of
from meshwright.planner.splits import all_splits, fastest_splits, largest_first, smallest_first, widths
from meshwright.planner.wishes import Kinds
from meshwright.schedules import Timetable
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
    def num_blocks(self) -> int:
        return self.forward.shape[1]


def is_small(table: Table) -> bool:
    """Whether all splits are simulated."""
    stages, blocks, widest = table.forward.shape
    return widest >= blocks - stages + 1 and comb(blocks - 1, stages - 1) <= MOST_SPLITS


def step_seconds(table: Table, timetable: Timetable, splits: list[tuple[int, ...]]) -> np.ndarray:
    """Step seconds of every split; infinite where one of its stages is impossible."""
    stages, _, widest = table.forward.shape
    sizes = np.array(splits)
    at = (np.arange(stages)[None, :], np.cumsum(sizes, axis=1) - sizes, np.minimum(sizes, widest) - 1)
    runs = np.all(sizes <= widest, axis=1) & np.all(np.isfinite(table.backward[at]), axis=1)
    result = np.full(len(splits), np.inf)
    if runs.any():
        ways = (table.forward, table.backward, table.weight)
        forward, backward, weight = (list(values[at][runs].T) for values in ways)
        busy = makespan(timetable, forward, backward, weight, table.send_seconds, table.num_microbatches)
        result[runs] = busy + table.tail[at][runs].max(axis=1)
    return result


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
class Solved:
    pick: OrderedCandidate
    plan: Plan | None = None
    """None: nothing fits."""
    seconds: float = np.inf
    """Of a step, as simulated."""
    least_seconds: float = np.inf
    """No plan of this candidate and order is faster."""


class _ChunkedStage(NamedTuple):
    """The choices of a stage that fit, fastest in sum first: seconds by (choice, chunk)."""

    forward: np.ndarray
    backward: np.ndarray
    weight: np.ndarray
    tail: np.ndarray
    choices: np.ndarray


def _solve_chunks(leaf: BoundedGrid, picks: Sequence[OrderedCandidate]) -> list[Solved]:
    cells = [cell for at, pick in enumerate(picks) for cell in cells_of(leaf, at, pick)]
    fronts = fronts_of(leaf, picks, cells)
    looks = [each.first_look(picks[cell.at].memory_bytes) for cell, each in zip(cells, fronts, strict=True)]
    choices = [each.choices if each.is_all else each.choices[look] for look, each in zip(looks, fronts, strict=True)]
    stages, chunks = PricedRows(leaf, picks, cells, choices), range(leaf.timetable.chunks)
    cuts = [leaf.grid.cuts[picks[cell.at].candidate] for cell in cells]
    known: dict[Any, np.ndarray] = {}
    parts: list[np.ndarray] = []
    for cell, cut, each in zip(cells, cuts, choices, strict=True):
        within = tuple(leaf.inputs.kinds(first, last - first) for first, last in cut[cell.stage])
        if (within, id(each)) not in known:
            known[within, id(each)] = _by_chunk(within, each)
        parts.extend(known[within, id(each)])
    every = PricedRows(leaf, picks, [cell for cell in cells for _ in chunks], parts, [*chunks] * len(cells))
    weight = every.column(every.cost.seconds("weight"))
    forward = every.column(every.cost.seconds("forward"))
    columns = forward, every.column(every.cost.seconds("backward")) + weight, weight
    kept, send = every.column(every.memory.microbatch_bytes), every.column(every.cost.send_seconds)
    ends = [*itertools.accumulate(map(len, choices))]
    rows_of = [slice(end - len(each), end) for end, each in zip(ends, choices, strict=True)]

    def by_chunk(values: np.ndarray, rows: slice) -> np.ndarray:
        return values[rows.start * len(chunks) : rows.stop * len(chunks)].reshape(len(chunks), -1)

    held = np.zeros(stages.length)
    for cell, cut, rows in zip(cells, cuts, rows_of, strict=True):
        m = int(leaf.grid.columns["num_microbatches"][picks[cell.at].candidate])
        held[rows] = held_of_chunks(leaf.timetable, cell.stage, len(cut), m, list(by_chunk(kept, rows)))
    peak_bytes = stages.peak_bytes(replace(stages.memory, in_flight=held))
    tails, sends = stages.column(stages.cost.seconds("step")), np.zeros(len(picks))
    result: list[list[_ChunkedStage]] = [[] for _ in picks]
    for cell, each, rows in zip(cells, choices, rows_of, strict=True):
        sends[cell.at] = max(sends[cell.at], float(by_chunk(send, rows).max()))
        fits = np.flatnonzero(peak_bytes[rows] <= picks[cell.at].memory_bytes)
        ways = [by_chunk(column, rows)[:, fits].T for column in columns]
        order = np.lexsort((each.sum(axis=(1, 2))[fits], sum((ways[0] + ways[1]).T)))
        mine = [way[order] for way in ways]
        result[cell.at].append(_ChunkedStage._make((*mine, tails[rows][fits[order]], each[fits[order]])))
    return [
        _best_combination(leaf, pick, mine, send)
        for pick, mine, send in zip(picks, result, sends.tolist(), strict=True)
    ]


def _by_chunk(within: Sequence[Kinds], choices: np.ndarray) -> np.ndarray:
    """(chunks, choices, kinds, policies): of a stage's counts those in each chunk, which come one after the other;
    `within`: the blocks of each kind in a chunk."""
    left = choices.copy()
    result = np.zeros((len(within), *choices.shape), dtype=int)
    for chunk, kinds in enumerate(within):
        room = np.repeat(np.array(kinds)[None, :], len(choices), axis=0)
        for policy in range(choices.shape[2]):
            taken = np.minimum(left[:, :, policy], room)
            result[chunk, :, :, policy] = taken
            left[:, :, policy] -= taken
            room = room - taken
    return result


def _best_combination(leaf: BoundedGrid, pick: OrderedCandidate, stages: list[_ChunkedStage], send: float) -> Solved:
    if not all(len(stage.choices) for stage in stages):
        return Solved(pick=pick)
    m = int(leaf.grid.columns["num_microbatches"][pick.candidate])
    combinations = list[tuple[int, ...]]()  # all that may be best, where they are few
    if sum(len(stage.choices) > 1 for stage in stages) <= FEW_COMBINATIONS.bit_length():
        useful = [_useful(stage) for stage in stages]
        combinations += itertools.product(*useful) if prod(map(len, useful)) <= FEW_COMBINATIONS else ()
    tried = combinations or [tuple(0 for _ in stages)]
    chosen = [[np.stack([values[way[i]] for way in tried]) for values in stage[:3]] for i, stage in enumerate(stages)]
    tails = [max(float(stage.tail[way[i]]) for i, stage in enumerate(stages)) for way in tried]
    # Beside it, each choice of one stage with every chunk of the others at its fastest: no combination is faster than
    # the fastest of these, whichever stage it is. The slowest stages say most.
    alone: dict[int, list[int]] = {}
    slowest = sorted(range(len(stages)), key=lambda i: -float((stages[i].forward + stages[i].backward)[0].sum()))
    for i in slowest if not combinations else ():
        if sum(map(len, alone.values())) < FEW_COMBINATIONS:
            alone[i] = _useful(stages[i])
    for i, stage in enumerate(stages if alone else ()):
        least = stage.forward.min(axis=0), stage.backward.min(axis=0), stage.weight.max(axis=0)
        for way, (values, row) in enumerate(zip(stage[:3], least, strict=True)):
            more = [values[own] if at == i else np.tile(row, (len(own), 1)) for at, own in alone.items()]
            chosen[i][way] = np.concatenate([chosen[i][way], *more])
    for i, own in alone.items():
        others = max([float(stage.tail.min()) for at, stage in enumerate(stages) if at != i], default=0.0)
        tails += np.maximum(stages[i].tail[own], others).tolist()
    places = leaf.timetable.places(len(stages))
    at = [(places.stage(span), places.chunk(span)) for span in range(places.num_spans)]
    forward, backward, weight = ([chosen[stage][way][:, chunk] for stage, chunk in at] for way in range(3))
    seconds = np.asarray(makespan(leaf.timetable, forward, backward, weight, send, m)) + np.array(tails)
    best, ends = int(np.argmin(seconds[: len(tried)])), len(tried) + np.cumsum([0, *map(len, alone.values())])
    least_seconds = max((seconds[low:high].min() for low, high in itertools.pairwise(ends)), default=seconds[best])
    choices = [stage.choices[tried[best][i]] for i, stage in enumerate(stages)]
    slower = leaf.slower(pick.candidate)
    return Solved(
        pick=pick,
        plan=_plan(leaf, pick, leaf.grid.cuts[pick.candidate], choices),
        seconds=float(seconds[best]) * slower,
        least_seconds=float(min(seconds[best], least_seconds)) * slower,
    )


def _useful(stage: _ChunkedStage) -> list[int]:
    """Choices that no other beats in every chunk and at the end; of equal ones the first."""
    values = np.column_stack([stage.forward, stage.backward, stage.tail])
    no_worse = (values[:, None] <= values[None]).all(axis=2)
    number = np.arange(len(values))
    is_beaten = no_worse & (~no_worse.T | (number[:, None] < number)) & (number[:, None] != number)
    return np.flatnonzero(~is_beaten.any(axis=0)).tolist()


def solve(
    leaf: BoundedGrid, picks: Sequence[OrderedCandidate], limit_seconds: float = np.inf, memo: Memo | None = None
) -> list[Solved]:
    """What is bound to be above the limit is not simulated. `memo`: from the same picks with other memory."""
    if leaf.timetable.chunks > 1:
        return _solve_chunks(leaf, picks)
    cells = [cell for at, pick in enumerate(picks) for cell in _cells(leaf, at, pick)]
    options, sends = options_of(leaf, picks, list(dict.fromkeys(cells)), memo)
    result = []
    for at, pick in enumerate(picks):
        mine = {(cell.stage, cell.kinds): option for cell, option in options.items() if cell.at == at}
        result.append(_solved(leaf, pick, mine, float(sends[at]), limit_seconds))
    return result


def _cells(leaf: BoundedGrid, at: int, pick: OrderedCandidate) -> list[StageCell]:
    if not leaf.grid.may_choose:
        return cells_of(leaf, at, pick)
    result: dict[tuple[int, Kinds], StageCell] = {}
    for stage, width, firsts in _places_of(leaf, pick):
        for first in firsts[:1] if leaf.inputs.is_one_kind else firsts:
            kinds = leaf.inputs.kinds(first, width)
            result.setdefault((stage, kinds), StageCell(at, stage, kinds, first, width))
    return list(result.values())


@lru_cache(maxsize=256)
def _places(blocks: int, sizes: tuple[int, ...]) -> tuple[tuple[int, int, range], ...]:
    """(stage, how many blocks it may have, where it may begin), given about how many each has."""
    lowest, widest = widths(blocks, sizes)
    result = []
    for stage in range(len(sizes)):
        before, after = sum(lowest[:stage]), sum(lowest[stage + 1 :])
        for width in range(lowest[stage], widest + 1):
            first = max(before, blocks - width - widest * (len(sizes) - 1 - stage))
            last = min(widest * stage, blocks - width - after)
            if first <= last:
                result.append((stage, width, range(first, last + 1)))
    return tuple(result)


def _places_of(leaf: BoundedGrid, pick: OrderedCandidate) -> tuple[tuple[int, int, range], ...]:
    return _places(leaf.inputs.profile.num_blocks, tuple(map(size_of, leaf.grid.cuts[pick.candidate])))


def _solved(
    leaf: BoundedGrid,
    pick: OrderedCandidate,
    options: Mapping[tuple[int, Kinds], Option],
    send: float,
    limit_seconds: float,
) -> Solved:
    inputs, timetable, cut = leaf.inputs, leaf.timetable, leaf.grid.cuts[pick.candidate]
    slower = leaf.slower(pick.candidate)
    m = int(leaf.grid.columns["num_microbatches"][pick.candidate])
    if leaf.grid.may_choose:
        table, least = _table(leaf, pick, options, send, m), np.inf
        if is_small(table):
            splits = all_splits(table.num_blocks, len(cut))
        else:
            least, splits = fastest_splits(stage_bounds(table, timetable), smallest_first, largest_first)
            least = least + float(np.min(table.tail))
            if least * slower > limit_seconds:
                return Solved(pick=pick, least_seconds=least * slower)
            splits = list(dict.fromkeys([tuple(map(size_of, cut)), *splits]))
        every = step_seconds(table, timetable, splits)
        best = int(np.argmin(every))
        seconds, cut = float(every[best]), straight(splits[best])
        least = min(least, seconds)
        if not np.isfinite(seconds):
            return Solved(pick=pick)
    chosen = [options[stage, kinds_of(inputs, spans)] for stage, spans in enumerate(cut)]
    if not leaf.grid.may_choose:
        if not all(np.isfinite(option.forward) for option in chosen):
            return Solved(pick=pick)
        forward, backward, weight = (list(way) for way in zip(*(option[:3] for option in chosen), strict=True))
        seconds = float(makespan(timetable, forward, backward, weight, send, m)) + max(each.tail for each in chosen)
        # A step never gets slower by a larger share than its slowest stage.
        least = seconds * min(option.lower / (option.forward + option.backward) for option in chosen)
    plan = _plan(leaf, pick, cut, [option.choice for option in chosen])
    return Solved(pick=pick, plan=plan, seconds=seconds * slower, least_seconds=float(least) * slower)


def _table(
    leaf: BoundedGrid, pick: OrderedCandidate, options: Mapping[tuple[int, Kinds], Option], send: float, m: int
) -> Table:
    inputs, places = leaf.inputs, _places_of(leaf, pick)
    widest = max(width for _, width, _ in places)
    names = Option._fields[:-1]
    values = np.full((len(names), len(leaf.grid.cuts[pick.candidate]), inputs.profile.num_blocks, widest), np.inf)
    for stage, width, firsts in places:
        if inputs.is_one_kind:
            option = options[stage, inputs.kinds(firsts[0], width)]
            values[:, stage, firsts[0] : firsts[-1] + 1, width - 1] = np.array(option[:-1])[:, None]
            continue
        for first in firsts:
            values[:, stage, first, width - 1] = options[stage, inputs.kinds(first, width)][:-1]
    return Table(**dict(zip(names, values, strict=True)), send_seconds=send, num_microbatches=m)


def _plan(leaf: BoundedGrid, pick: OrderedCandidate, cut: tuple[Spans, ...], chosen: Sequence[np.ndarray]) -> Plan:
    """Policies are written down as the numbers of the blocks that follow them."""
    profile, solved = leaf.inputs.profile, leaf.policies
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
        if mine and not any(mine.values()) and technique.needs_blocks:
            continue
        if mine:
            default = {f.name for f in fields(technique) if f.default == "all"}
            named = {
                field: "all" if len(each) == profile.num_blocks and field in default else format_layers(each)
                for field, each in mine.items()
            }
            # No block follows the others, which are pinned to none or banned, whatever their defaults say.
            technique = replace(technique, **dict.fromkeys(technique.policies, "none") | named)
        techniques.append(technique)
    return leaf.grid.plan(techniques, pick.candidate, cut, pick.axis_order or leaf.grid.axis_order)


def smallest_plan(leaf: BoundedGrid, index: int, axis_order: tuple[str, ...]) -> Plan:
    """All blocks following the policies that keep least, blocks split about evenly."""
    cut = leaf.grid.cuts[index]
    chosen = []
    for spans in cut:
        choice = np.zeros((len(leaf.inputs.profile.block_layers), len(leaf.policies)), dtype=int)
        choice[:, :1] = np.array(kinds_of(leaf.inputs, spans))[:, None]
        chosen.append(choice)
    return _plan(leaf, OrderedCandidate(index, axis_order, np.inf), cut, chosen)
