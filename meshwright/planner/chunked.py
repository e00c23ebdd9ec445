"""The best plan of a candidate whose stages have several chunks of layers, dealt out evenly.

Chunks take turns, so a stage's choice of policies is not one number of seconds but one for each chunk. Every stage
takes the choice that is fastest in sum; none is faster than if every chunk had the fastest one that fits. Where few
combinations lie between, all are simulated.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from meshwright.core.profile import Profile
from meshwright.core.technique import Spans
from meshwright.planner.bounds import Leaf
from meshwright.planner.priced_rows import Cell, Pick, PricedRows, SearchInputs, kinds_of, size_of
from meshwright.schedules import Timetable
from meshwright.simulator.makespan import makespan
from meshwright.simulator.priced_stages import held_of_chunks

FEW = 256
"""Combinations of stages' choices that are all simulated."""


@dataclass(frozen=True, kw_only=True)
class Dealt:
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


def deal(
    problem: SearchInputs, leaf: Leaf, picks: Sequence[Pick], listed: Sequence[Sequence[np.ndarray]]
) -> list[Dealt]:
    """`listed`: of each pick and stage, the choices of policies to be tried."""
    whole: list[Cell] = []
    for at, pick in enumerate(picks):
        cut = leaf.grid.cuts[pick.candidate]
        whole += [Cell(at, s, kinds_of(problem, spans), spans[0][0], size_of(spans)) for s, spans in enumerate(cut)]
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
    held = _held(leaf, picks, whole, [len(each) for each in choices], kept)
    peak_bytes = stages.column(replace(stages.memory, in_flight=held).peak_bytes())
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
    return [_best(leaf, pick, mine, send) for pick, mine, send in every]


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


def _held(
    leaf: Leaf, picks: Sequence[Pick], cells: Sequence[Cell], counts: Sequence[int], kept: np.ndarray
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


def _best(leaf: Leaf, pick: Pick, stages: list[_ChunkedStage | None], send: float) -> Dealt:
    options = [stage for stage in stages if stage is not None]
    if len(options) < len(stages):
        return Dealt(seconds=np.inf, least_seconds=np.inf, choices=None)
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
    return Dealt(
        seconds=float(seconds[best]),
        least_seconds=float(seconds.min()),
        choices=[s.choices[tried[best][i]] for i, s in enumerate(options)],
    )


def _combinations(options: list[_ChunkedStage]) -> list[tuple[int, ...]]:
    """All that may be best, where they are few."""
    if sum(len(stage.choices) > 1 for stage in options) > FEW.bit_length():
        return []
    useful = [_useful(stage) for stage in options]
    return list(itertools.product(*useful)) if prod(len(each) for each in useful) <= FEW else []


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
