"""The best plan of a candidate: which blocks each stage has, and which policy each of them follows.

A stage's time and memory depend on its own blocks and policies alone, and a step never gets faster because a stage gets
slower. So each stage, for each number of blocks it may have, takes the fastest policies that fit; then blocks are dealt
out. All of it is priced as one array of rows: (candidate, stage, blocks, choice of policies).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.ranges import written
from meshwright.core.technique import Spans, Technique
from meshwright.search.bounds import Leaf
from meshwright.search.policies import MOST, Kinds, front, is_listed, listed, unit_choices
from meshwright.search.rows import Cell, Pick, Priced, Problem, Rows, kinds_of, policy_fields, size_of
from meshwright.search.stages import Table, all_splits, is_small, least_bound, step_seconds
from meshwright.simulate.forecast import slowest_of
from meshwright.simulate.stages import straight

REACH = 3
"""Blocks more or fewer than an even share that a stage may have; with few blocks, any number."""
FEW_BLOCKS = 12


@dataclass(frozen=True, kw_only=True)
class Solved:
    pick: Pick
    plan: Plan | None
    """None: nothing fits."""
    seconds: float
    """Of a step, as simulated."""
    least_seconds: float
    """No plan of this candidate and order is faster."""
    is_bound: bool = False
    """Not simulated: `seconds` is a bound of this plan, and `least_seconds` lower by what its policies leave open."""


class _Option(NamedTuple):
    """The fastest way a stage can follow policies and fit; seconds are infinite where none fits."""

    forward: float
    backward: float
    weight: float
    tail: float
    lower: float
    """Seconds of forward and backward that no choice beats and fits."""
    choice: np.ndarray
    """(kinds, policies): blocks that follow each."""
    fast: tuple[float, float]
    """Forward and backward where no policy is followed."""
    peak_bytes: float


def solve(problem: Problem, leaf: Leaf, picks: Sequence[Pick]) -> list[Solved]:
    cells = [cell for at, pick in enumerate(picks) for cell in _cells(problem.profile, leaf, at, pick)]
    cells = list(dict.fromkeys(cells))
    policies = len(policy_fields(leaf))
    choices = _choices(problem, leaf, picks, cells, policies)
    priced = Rows(problem, leaf, picks, cells, choices).columns()
    options: dict[tuple[int, int, Kinds], _Option] = {}
    sends = np.zeros(len(picks))
    row = 0
    for cell, each in zip(cells, choices, strict=True):
        rows = slice(row, row + len(each))
        m = int(leaf.grid.columns["num_microbatches"][picks[cell.at].candidate])
        is_exact = is_listed(cell.kinds, max(policies, 1))
        options[cell.at, cell.stage, cell.kinds] = _best(priced, rows, each, picks[cell.at].memory_bytes, m, is_exact)
        sends[cell.at] = max(sends[cell.at], priced.send[rows].max())
        row += len(each)
    found = []
    for at, pick in enumerate(picks):
        mine = {(stage, kinds): option for (which, stage, kinds), option in options.items() if which == at}
        found.append(_solved(problem, leaf, pick, mine, float(sends[at])))
    return found


def _cells(profile: Profile, leaf: Leaf, at: int, pick: Pick) -> list[Cell]:
    cut = leaf.grid.cuts[pick.candidate]
    if not leaf.grid.may_choose:
        return [
            Cell(at, stage, kinds_of(profile, spans), spans[0][0], size_of(spans)) for stage, spans in enumerate(cut)
        ]
    found = []
    for stage, widths in enumerate(_widths(profile.num_blocks, cut)):
        lowest, highest = _firsts(profile.num_blocks, cut, stage)
        for width in widths:
            seen = set()
            for first in range(lowest, min(highest, profile.num_blocks - width) + 1):
                kinds = profile.blocks_within(first, width)
                if kinds not in seen:
                    seen.add(kinds)
                    found.append(Cell(at, stage, kinds, first, width))
    return found


def _widths(blocks: int, cut: tuple[Spans, ...]) -> list[range]:
    """How many blocks each stage may have."""
    room = blocks - len(cut) + 1
    if blocks <= FEW_BLOCKS:
        return [range(1, room + 1)] * len(cut)
    widest = min(room, max(size_of(spans) for spans in cut) + REACH)
    return [range(max(1, size_of(spans) - REACH), widest + 1) for spans in cut]


def _firsts(blocks: int, cut: tuple[Spans, ...], stage: int) -> tuple[int, int]:
    """Where a stage may begin."""
    widths = _widths(blocks, cut)
    lowest, highest = sum(w[0] for w in widths[:stage]), sum(w[-1] for w in widths[:stage])
    lowest = max(lowest, blocks - sum(w[-1] for w in widths[stage:]))
    return lowest, min(highest, blocks - sum(w[0] for w in widths[stage:]))


def _choices(
    problem: Problem, leaf: Leaf, picks: Sequence[Pick], cells: Sequence[Cell], policies: int
) -> list[np.ndarray]:
    """What each stage's blocks may follow; of several kinds, found with the help of a first pricing."""
    if not policies:
        return [np.zeros((1, len(cell.kinds), 0), dtype=int) for cell in cells]
    hard = [
        i
        for i, cell in enumerate(cells)
        if not is_listed(cell.kinds, policies) and sum(count > 0 for count in cell.kinds) > 1
    ]
    units = [unit_choices(cells[i].kinds, policies) for i in hard]
    fronts: dict[int, np.ndarray] = {}
    if hard:
        priced = Rows(problem, leaf, picks, [cells[i] for i in hard], units).columns()
        row = 0
        for i, each in zip(hard, units, strict=True):
            cell, rows = cells[i], slice(row, row + len(each))
            counts = np.maximum(np.repeat(cell.kinds, policies), 1).reshape(-1, policies)
            seconds = (priced.backward[rows][1:] - priced.backward[row]).reshape(counts.shape) / counts
            saved = (priced.kept_bytes[row] - priced.kept_bytes[rows][1:]).reshape(counts.shape) / counts
            fronts[i] = np.array(front(cell.kinds, seconds, saved, most=MOST))
            row += len(each)
    return [fronts[i] if i in fronts else listed(cell.kinds, policies) for i, cell in enumerate(cells)]


def _best(
    priced: Priced, rows: slice, choices: np.ndarray, memory_bytes: float, microbatches: int, is_exact: bool
) -> _Option:
    each = priced.forward[rows] + priced.backward[rows]
    total = microbatches * each + priced.tail[rows]
    fits = priced.peak_bytes[rows] <= memory_bytes
    # Of equally fast ones the one that follows least.
    order = np.lexsort((choices.sum(axis=(1, 2)), total))
    fitting = order[fits[order]]
    row = rows.start
    fast = (float(priced.forward[row]), float(priced.backward[row]))
    if not len(fitting):
        none = np.inf
        return _Option(none, none, none, none, none, choices[0], fast, float(priced.peak_bytes[rows].min()))
    best = int(fitting[0])
    lower = each[best]
    if not is_exact:  # between this choice and the one before it on the path there may be others
        faster = order[: int(np.flatnonzero(order == best)[0])]
        lower = each[faster[-1]] if len(faster) else lower
    at = row + best
    return _Option(
        forward=float(priced.forward[at]),
        backward=float(priced.backward[at]),
        weight=float(priced.weight[at]),
        tail=float(priced.tail[at]),
        lower=float(min(lower, each[best])),
        choice=choices[best],
        fast=fast,
        peak_bytes=float(priced.peak_bytes[at]),
    )


def _solved(
    problem: Problem, leaf: Leaf, pick: Pick, options: Mapping[tuple[int, Kinds], _Option], send: float
) -> Solved:
    profile, cut = problem.profile, leaf.grid.cuts[pick.candidate]
    slower = slowest_of(problem.cluster, problem.cluster.num_devices)
    if not leaf.grid.may_choose:
        return _at_once(problem, leaf, pick, options, slower)
    table = _table(leaf, pick, profile, options, send)
    if is_small(table):
        splits = all_splits(table)
        least = np.inf
    else:
        least, splits = least_bound(table, leaf.timetable)
        splits = list(dict.fromkeys([tuple(size_of(spans) for spans in cut), *splits]))
    seconds = step_seconds(table, leaf.timetable, splits)
    best = int(np.argmin(seconds))
    is_exact = is_small(table) and all(
        o.lower >= o.forward + o.backward or not np.isfinite(o.lower) for o in options.values()
    )
    tail = float(np.min(table.tail))
    least = seconds[best] if is_exact else min(least + tail, seconds[best]) if np.isfinite(least) else seconds[best]
    if not np.isfinite(seconds[best]):
        return Solved(pick=pick, plan=None, seconds=np.inf, least_seconds=np.inf)
    stages = straight(splits[best])
    chosen = [options[stage, kinds_of(profile, spans)] for stage, spans in enumerate(stages)]
    plan = _plan(profile, leaf, pick, stages, [option.choice for option in chosen])
    return Solved(pick=pick, plan=plan, seconds=float(seconds[best]) * slower, least_seconds=float(least) * slower)


def _at_once(
    problem: Problem, leaf: Leaf, pick: Pick, options: Mapping[tuple[int, Kinds], _Option], slower: float
) -> Solved:
    """Where blocks are dealt out already."""
    profile, cut = problem.profile, leaf.grid.cuts[pick.candidate]
    chosen = [options[stage, kinds_of(profile, spans)] for stage, spans in enumerate(cut)]
    if not all(np.isfinite(option.forward) for option in chosen):
        return Solved(pick=pick, plan=None, seconds=np.inf, least_seconds=np.inf)
    m = int(leaf.grid.columns["num_microbatches"][pick.candidate])
    seconds = max(m * (option.forward + option.backward) for option in chosen) + max(option.tail for option in chosen)
    # A step never gets slower by a larger share than its slowest stage.
    least = seconds * min(option.lower / (option.forward + option.backward) for option in chosen)
    plan = _plan(profile, leaf, pick, cut, [option.choice for option in chosen])
    return Solved(
        pick=pick, plan=plan, seconds=seconds * slower, least_seconds=least * slower, is_bound=len(cut) > 1
    )


def _table(
    leaf: Leaf, pick: Pick, profile: Profile, options: Mapping[tuple[int, Kinds], _Option], send: float
) -> Table:
    cut = leaf.grid.cuts[pick.candidate]
    widths = _widths(profile.num_blocks, cut)
    widest = max(w[-1] for w in widths)
    shape = (len(cut), profile.num_blocks, widest)
    values = np.full((7, *shape), np.inf)
    kinds = {}
    for stage, each in enumerate(widths):
        lowest, highest = _firsts(profile.num_blocks, cut, stage)
        for width in each:
            for first in range(lowest, min(highest, profile.num_blocks - width) + 1):
                key = (first, width)
                if key not in kinds:
                    kinds[key] = profile.blocks_within(first, width)
                option = options[stage, kinds[key]]
                values[:, stage, first, width - 1] = (
                    option.forward,
                    option.backward,
                    option.weight,
                    option.tail,
                    *option.fast,
                    option.lower,
                )
    names = ("forward", "backward", "weight", "tail", "least_forward", "least_backward", "lower")
    return Table(
        **dict(zip(names, values, strict=True)),
        send_seconds=send,
        num_microbatches=int(leaf.grid.columns["num_microbatches"][pick.candidate]),
    )


def _plan(profile: Profile, leaf: Leaf, pick: Pick, cut: tuple[Spans, ...], chosen: Sequence[np.ndarray]) -> Plan:
    """Policies are written down as the numbers of the blocks that follow them."""
    solved = policy_fields(leaf)
    blocks: dict[tuple[str, str], list[int]] = {each: [] for each in solved}
    for spans, choice in zip(cut, chosen, strict=True):
        left = choice.copy()
        for first, last in spans:
            for block in range(first, last):
                kind = next(i for i, count in enumerate(profile.blocks_within(block, 1)) if count)
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
            technique = replace(technique, **named)
        techniques.append(technique)
    return leaf.grid.plan(techniques, pick.candidate, cut, pick.axis_order)


def smallest_plan(profile: Profile, leaf: Leaf, index: int, axis_order: tuple[str, ...]) -> Plan:
    """All blocks following the policies that keep least, blocks dealt out about evenly."""
    cut = leaf.grid.cuts[index]
    policies = sum(map(len, leaf.policies.values()))
    chosen = []
    for spans in cut:
        choice = np.zeros((len(profile.block_layers), policies), dtype=int)
        choice[:, :1] = np.array(kinds_of(profile, spans))[:, None]
        chosen.append(choice)
    return _plan(profile, leaf, Pick(index, axis_order, np.inf), cut, chosen)


def _named(technique: Technique, field: str, profile: Profile, blocks: list[int]) -> int | str | None:
    """As short as it can be said."""
    default = next(f.default for f in fields(technique) if f.name == field)
    if len(blocks) == profile.num_blocks and default is None:
        return None
    return written(blocks) if blocks else 0
