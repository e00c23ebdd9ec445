"""The best plan of a candidate: which blocks each stage has, and which policy each of them follows.

A stage's time and memory depend on its own blocks and policies alone, and a step never gets faster because a stage gets
slower. So each stage, for each number of blocks it may have, takes the fastest policies that fit; then blocks are dealt
out. All of it is priced as one array of rows: (candidate, stage, blocks, choice of policies).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import comb

import numpy as np

from meshwright.core.block_ranges import written
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Spans, Technique
from meshwright.planner.bounds import Leaf
from meshwright.planner.chunked import deal
from meshwright.planner.policies import Kinds
from meshwright.planner.priced_rows import Cell, Pick, SearchInputs, kinds_of, policy_fields, size_of
from meshwright.planner.stage_policies import Option, fronts_of, options_of
from meshwright.planner.stage_split import Table, all_splits, is_small, least_bound, step_seconds
from meshwright.simulator.forecast import slowest_of
from meshwright.simulator.makespan import makespan
from meshwright.simulator.priced_stages import straight

REACH = 3
"""Blocks more or fewer than an even share that a stage may have; with few blocks, any number."""
FEW_BLOCKS, FEW_SPLITS = 12, 64


@dataclass(frozen=True, kw_only=True)
class Solved:
    pick: Pick
    plan: Plan | None
    """None: nothing fits."""
    seconds: float
    """Of a step, as simulated."""
    least_seconds: float
    """No plan of this candidate and order is faster."""


def solve(problem: SearchInputs, leaf: Leaf, picks: Sequence[Pick], limit_seconds: float = np.inf) -> list[Solved]:
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


def _solve_chunks(problem: SearchInputs, leaf: Leaf, picks: Sequence[Pick]) -> list[Solved]:
    profile = problem.profile
    cells = [cell for at, pick in enumerate(picks) for cell in _cells(problem, leaf, at, pick)]
    listed_by: list[list[np.ndarray]] = [[] for _ in picks]
    for cell, each in zip(cells, fronts_of(problem, leaf, picks, cells), strict=True):
        listed_by[cell.at].append(each.choices[each.first_look()])
    slower = slowest_of(problem.cluster, problem.cluster.num_devices)
    found = []
    for pick, dealt in zip(picks, deal(problem, leaf, picks, listed_by), strict=True):
        plan = None
        if dealt.choices is not None:
            plan = _plan(profile, leaf, pick, leaf.grid.cuts[pick.candidate], dealt.choices)
        seconds, least = dealt.seconds * slower, dealt.least_seconds * slower
        found.append(Solved(pick=pick, plan=plan, seconds=seconds, least_seconds=least))
    return found


def _cells(problem: SearchInputs, leaf: Leaf, at: int, pick: Pick) -> list[Cell]:
    cut = leaf.grid.cuts[pick.candidate]
    if not leaf.grid.may_choose:
        return [
            Cell(at, stage, kinds_of(problem, spans), spans[0][0], size_of(spans)) for stage, spans in enumerate(cut)
        ]
    found = []
    for stage, width, firsts in _places_of(leaf, pick):
        seen = set()
        for first in firsts[:1] if problem.is_one_kind else firsts:
            kinds = problem.kinds(first, width)
            if kinds not in seen:
                seen.add(kinds)
                found.append(Cell(at, stage, kinds, first, width))
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


def _places_of(leaf: Leaf, pick: Pick) -> tuple[tuple[int, int, range], ...]:
    sizes = tuple(size_of(spans) for spans in leaf.grid.cuts[pick.candidate])
    return _places(leaf.grid.profile.num_blocks, sizes)


def _solved(
    problem: SearchInputs,
    leaf: Leaf,
    pick: Pick,
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
        splits = all_splits(table)
        least = np.inf
    else:
        least, splits = least_bound(table, leaf.timetable)
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
    leaf: Leaf,
    pick: Pick,
    options: Mapping[tuple[int, Kinds], Option],
    send: float,
    slower: float,
) -> Solved:
    """Where blocks are dealt out already."""
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
    problem: SearchInputs, leaf: Leaf, pick: Pick, options: Mapping[tuple[int, Kinds], Option], send: float
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


def _plan(profile: Profile, leaf: Leaf, pick: Pick, cut: tuple[Spans, ...], chosen: Sequence[np.ndarray]) -> Plan:
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
            technique = replace(technique, **named)
        techniques.append(technique)
    return leaf.grid.plan(techniques, pick.candidate, cut, pick.axis_order or leaf.grid.axis_order)


def smallest_plan(problem: SearchInputs, leaf: Leaf, index: int, axis_order: tuple[str, ...]) -> Plan:
    """All blocks following the policies that keep least, blocks dealt out about evenly."""
    cut = leaf.grid.cuts[index]
    policies = sum(map(len, leaf.policies.values()))
    chosen = []
    for spans in cut:
        choice = np.zeros((len(problem.profile.block_layers), policies), dtype=int)
        choice[:, :1] = np.array(kinds_of(problem, spans))[:, None]
        chosen.append(choice)
    return _plan(problem.profile, leaf, Pick(index, axis_order, np.inf), cut, chosen)


def _named(technique: Technique, field: str, profile: Profile, blocks: list[int]) -> int | str | None:
    """As short as it can be said."""
    default = next(f.default for f in fields(technique) if f.name == field)
    if len(blocks) == profile.num_blocks and default is None:
        return None
    return written(blocks) if blocks else 0
