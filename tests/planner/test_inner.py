"""The problems inside the search, against HiGHS and all there is; what is simulated, between bounds.

Tests of `planner/best_first.py`, `planner/bounds.py`, `planner/policies.py`, `planner/rows.py`, `planner/solve.py`,
`planner/splits.py`.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp
from small_spaces import Draw, Space, bare

from meshwright.core.work import ADAM
from meshwright.planner.best_first import BestFirst
from meshwright.planner.bounds import order_bounds
from meshwright.planner.policies import FEW, front, is_listed, listed
from meshwright.planner.rows import OrderedCandidate
from meshwright.planner.solve import Table, is_small, smallest_plan, solve, stage_bounds, step_seconds
from meshwright.planner.splits import all_splits, fastest_splits, largest_first, most_even, smallest_first
from meshwright.planner.wishes import SearchInputs, read_wishes
from meshwright.schedules import Timetable
from meshwright.schedules.bounds import whole_bound
from meshwright.schedules.events import halves, sweep
from meshwright.simulator.forecast import forecast
from meshwright.simulator.makespan import lower_bound, makespan, stage_bound

ONE_CHUNK = ("1f1b", "gpipe", "zero_bubble_h1", "zero_bubble_h2")
ROUNDING = 1 + 1e-9


# Policies of blocks: a knapsack.


def _by_highs(kinds: tuple[int, ...], seconds: np.ndarray, saved: np.ndarray, needed: float) -> float | None:
    """Least seconds that save so many bytes; None: nothing does."""
    policies = seconds.shape[1]
    each_kind = np.kron(np.eye(len(kinds)), np.ones(policies))
    limits = [LinearConstraint(each_kind, ub=kinds), LinearConstraint(saved.reshape(1, -1), lb=needed)]
    most = np.repeat(kinds, policies)
    found = milp(
        seconds.ravel(),
        constraints=limits,
        integrality=np.ones(most.size),
        bounds=Bounds(0, most),
        options={"mip_rel_gap": 0.0},
    )
    return None if found.x is None else float(np.dot(np.round(found.x), seconds.ravel()))


@pytest.mark.parametrize("seed", range(6))
def test_policies_are_chosen_as_highs_chooses_them(seed: int) -> None:
    draw = np.random.default_rng(seed)
    for _ in range(10):
        kinds = tuple(draw.integers(1, 9, size=draw.integers(1, 4)).tolist())
        shape = (len(kinds), int(draw.integers(2, 4)))
        seconds, saved = draw.integers(1, 40, size=shape), draw.integers(1, 60, size=shape)
        choices = front(kinds, seconds.astype(float), saved.astype(float))
        spent = np.array([(seconds * choice).sum() for choice in choices])
        freed = np.array([(saved * choice).sum() for choice in choices])
        assert np.all(np.diff(spent) > 0)
        assert np.all(np.diff(freed) > 0)
        for needed in draw.integers(0, freed[-1] + 2, size=4):
            enough = spent[freed >= needed]
            best = _by_highs(kinds, seconds, saved, float(needed))
            assert (enough[0] if len(enough) else None) == (None if best is None else round(best))


@pytest.mark.parametrize(("kinds", "policies"), [((4,), 2), ((1, 3), 2), ((2, 2, 1), 1), ((0, 5), 3)])
def test_all_choices_are_listed(kinds: tuple[int, ...], policies: int) -> None:
    """Blocks are given out one by one: every block follows none (0) or one of the policies."""
    owners = [kind for kind, count in enumerate(kinds) for _ in range(count)]
    found = set()
    for ways in itertools.product(range(policies + 1), repeat=len(owners)):
        counts = np.zeros((len(kinds), policies + 1), dtype=int)
        np.add.at(counts, (owners, ways), 1)
        found.add(tuple(counts[:, 1:].ravel().tolist()))
    assert is_listed(kinds, policies) == (len(found) <= FEW)
    assert sorted(found) == sorted(tuple(choice.ravel().tolist()) for choice in listed(kinds, policies))


# Stages: which blocks go where.


def _table(draw: np.random.Generator, *, stages: int, blocks: int, microbatches: int, halves_apart: bool) -> Table:
    """Blocks that differ, stages that have something beside them or are cheaper, policies that cost, and holes."""
    forward, backward = draw.uniform(1, 3, size=blocks), draw.uniform(1, 6, size=blocks)
    shape = (stages, blocks, blocks - stages + 1)
    values = np.full((6, *shape), np.inf)
    beside = draw.uniform(-0.5, 2, size=(stages, 2))
    for stage, first, width in np.ndindex(shape):
        if first + width >= blocks + 0:
            continue
        own = slice(first, first + width + 1)
        fast = forward[own].sum() + beside[stage, 0], backward[own].sum() + beside[stage, 1]
        again = draw.uniform(0, 1) * forward[own].sum() * draw.integers(0, 2)
        weight = draw.uniform(0.1, 0.6) * fast[1] if halves_apart else 0.0
        fits = draw.random() < 0.97
        values[:4, stage, first, width] = (fast[0], fast[1] + again, weight, draw.uniform(0, 1)) if fits else np.inf
        values[4:, stage, first, width] = fast[0], fast[1] - weight
    last = blocks - 1
    for stage, width in itertools.product(range(stages), range(shape[2])):  # stages that end with the last block
        first = last - width
        own = slice(first, blocks)
        fast = forward[own].sum() + beside[stage, 0], backward[own].sum() + beside[stage, 1]
        weight = 0.3 * fast[1] if halves_apart else 0.0
        values[:4, stage, first, width] = (*fast, weight, draw.uniform(0, 1))
        values[4:, stage, first, width] = fast[0], fast[1] - weight
    names = ("forward", "backward", "weight", "tail", "least_forward", "least_backward")
    table = dict(zip(names, values, strict=True))
    return Table(
        **table,
        lower=table["forward"] + table["backward"],
        send_seconds=float(draw.choice([0.0, 0.1, 1.0])),
        num_microbatches=microbatches,
    )


def _one_by_one(table: Table, timetable: Timetable, split: tuple[int, ...]) -> float:
    firsts = np.cumsum((0, *split))[:-1]
    at = [(stage, int(first), count - 1) for stage, (first, count) in enumerate(zip(firsts, split, strict=True))]
    columns = [[float(values[each]) for each in at] for values in (table.forward, table.backward, table.weight)]
    if not np.isfinite(columns[1]).all():
        return np.inf
    busy = makespan(timetable, *columns, table.send_seconds, table.num_microbatches)
    return float(busy) + max(float(table.tail[each]) for each in at)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zero_bubble_h1"])
@pytest.mark.parametrize("seed", range(4))
def test_stages_are_dealt_out_as_well_as_any(name: str, seed: int) -> None:
    draw = np.random.default_rng(seed)
    timetable = Timetable(name)
    for _ in range(6):
        stages = int(draw.integers(2, 5))
        table = _table(
            draw,
            stages=stages,
            blocks=int(draw.integers(stages, 8)),
            microbatches=int(draw.choice([1, 2, 3, 8, 20])),
            halves_apart=timetable.splits_backward,
        )
        every = [
            np.diff((0, *ends, table.num_blocks))
            for ends in itertools.combinations(range(1, table.num_blocks), stages - 1)
        ]
        splits = [tuple(each.tolist()) for each in every]
        assert is_small(table)
        assert sorted(all_splits(table.num_blocks, stages)) == sorted(splits)
        seconds = [_one_by_one(table, timetable, split) for split in splits]
        assert step_seconds(table, timetable, splits) == pytest.approx(seconds, rel=1e-12)
        least, reached = fastest_splits(stage_bounds(table, timetable), smallest_first, largest_first, most_even)
        assert np.isfinite(least) == np.isfinite(min(seconds))
        fastest = min(seconds) - float(np.min(table.tail))
        assert least <= fastest * ROUNDING or not np.isfinite(least)
        assert set(reached) <= set(splits)


# Bounds of a step, below and above.


def _drawn(
    draw: np.random.Generator, stages: int, count: int, *, is_alike: bool
) -> tuple[list[Any], list[Any], list[Any], Any]:
    """Seconds of `count` pipelines: forward, backward and its weight half by stage, and of a message. `is_alike`:
    forward is the same share of every stage."""
    scale = draw.uniform(0.2, 2, size=(stages, count)) * draw.choice([1.0, 1.0, 5.0], size=(stages, count))
    share = draw.uniform(0.1, 0.9, size=count) if is_alike else draw.uniform(0.1, 0.9, size=(stages, count))
    forward, backward = scale * share, scale * (1 - share)
    weight = backward * (draw.uniform(0, 0.9, size=count) if is_alike else draw.uniform(0, 0.9, size=(stages, count)))
    return list(forward), list(backward), list(weight), draw.choice([0.0, 0.05, 0.5], size=count)


SIZES = [(2, 1), (2, 2), (2, 5), (3, 2), (3, 7), (4, 3), (4, 4), (4, 16), (5, 3), (6, 6), (8, 4), (8, 20)]


@pytest.mark.parametrize("name", ONE_CHUNK)
def test_no_step_is_faster_than_the_bound_of_any_of_its_stages(name: str) -> None:
    draw = np.random.default_rng(0)
    timetable = Timetable(name)
    for stages, microbatches in SIZES:
        forward, backward, weight, send = _drawn(draw, stages, 200, is_alike=False)
        apart = weight if timetable.splits_backward else [0.0 * each for each in weight]
        simulated = makespan(timetable, forward, backward, weight, send, microbatches)
        assert np.all(lower_bound(timetable, forward, backward, weight, send, microbatches) <= simulated * ROUNDING)
        for stage in range(stages):
            later = range(stage + 1, stages)
            bound = stage_bound(
                timetable,
                stage=stage,
                num_stages=stages,
                num_microbatches=microbatches,
                forward=forward[stage],
                backward=backward[stage] - apart[stage],
                apart=apart[stage],
                before=(
                    sum(forward[:stage]) + stage * send,
                    sum(b - a for b, a in zip(backward[:stage], apart[:stage], strict=True)) + stage * send,
                ),
                after=sum(forward[s] + backward[s] - apart[s] for s in later) + 2 * len(later) * send,
            )
            assert np.all(bound <= simulated * ROUNDING), (stages, microbatches, stage)


def test_1f1b_is_no_slower_than_its_slowest_circle_lets_it() -> None:
    """Sum of all stages, and (m - 1) times the slowest circle of stages that wait for each other: where forward is the
    same share of each. Where it is not, no slower than if all were the slowest in both."""
    draw = np.random.default_rng(2)
    for (stages, microbatches), is_alike in itertools.product(SIZES, (True, False)):
        forward, backward, weight, send = _drawn(draw, stages, 200, is_alike=is_alike)
        each = [f + b for f, b in zip(forward, backward, strict=True)]
        if not is_alike:
            each = [np.max(forward, axis=0) + np.max(backward, axis=0)] * stages
        circles = [
            (sum(each[first : last + 1]) + 2 * (last - first) * send) / (last - first + 1)
            for first in range(stages)
            for last in range(first, stages)
        ]
        most = sum(each) + 2 * (stages - 1) * send + (microbatches - 1) * np.max(circles, axis=0)
        simulated = makespan(Timetable("1f1b"), forward, backward, weight, send, microbatches)
        assert np.all(simulated <= most * ROUNDING), (stages, microbatches)


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble_h1"])
def test_many_microbatches_are_extended_from_fewer(name: str) -> None:
    draw = np.random.default_rng(3)
    forward, backward, weight, send = _drawn(draw, 4, 20, is_alike=False)
    timetable = Timetable(name)
    _, ended = sweep(timetable.events(4, 1000), halves(forward, backward, weight), send)
    assert makespan(timetable, forward, backward, weight, send, 1000) == pytest.approx(np.max(ended, axis=0), rel=1e-3)


def test_equal_stages_reach_the_bound_of_all_splits() -> None:
    """p equal stages of 1F1B without messages take (m + p - 1) turns: (p - 1) of them idle."""
    for stages, microbatches in ((2, 8), (4, 4), (4, 5), (8, 32)):
        told = makespan(Timetable("1f1b"), [1.0] * stages, [2.0] * stages, [1.0] * stages, 0.0, microbatches)
        assert told == pytest.approx(3.0 * (microbatches + stages - 1))
        bound = whole_bound(microbatches, stages, 3.0 * stages, 3.0, 2 / 3)
        assert bound == pytest.approx(told, rel=1e-6) or microbatches <= stages
        assert bound <= told * ROUNDING


# Bounds of candidates, on models and machines.


def _pooled(space: Space) -> BestFirst:
    wishes = read_wishes((), space.question["ban"], allow="reordered", microbatch=space.microbatch)
    inputs = SearchInputs(
        profile=space.profile,
        cluster=space.machine,
        optimizer=ADAM,
        batch=space.question["batch"],
        sequence=space.sequence,
        wishes=wishes,
        epsilon=0.0,
    )
    pool = BestFirst(inputs, rescues=False)
    pool._add("fp32")
    return pool


SECOND_COPIES = Draw(shapes=("2x2xh100",), names=("shard",), num_axes=(0, 1), most=60, fewest=8)


@pytest.mark.parametrize("seed", range(28))
def test_no_plan_of_a_candidate_beats_its_bounds(seed: int) -> None:
    space, plans = (Draw(most=60) if seed < 24 else SECOND_COPIES).space(9000 + seed)
    told = {plan: forecast(space.profile, plan, space.machine, sequence=space.sequence) for plan in plans}
    limit = random.Random(seed).choice(sorted({each.peak_bytes for each in told.values()}))
    space = space.with_memory(limit)
    pool = _pooled(space)
    candidates = {}
    for number in np.flatnonzero(pool.candidates.runs):
        leaf, index = pool.leaves[int(pool.candidates.leaf_of[number])], int(pool.candidates.index_of[number])
        candidates[bare(smallest_plan(leaf, index, leaf.grid.axis_order))] = (number, leaf, index)
    closer: dict[Any, tuple[float, float]] = {}
    for plan, made in told.items():
        number, leaf, index = candidates[bare(plan)]
        assert pool.candidates.least_bytes[number] <= made.peak_bytes, plan
        if made.peak_bytes > limit:
            continue
        assert pool.candidates.least_seconds[number] <= made.step_seconds, plan
        order = (*(axis for axis in leaf.grid.axis_order if axis not in plan.mesh), *plan.axis_order)
        if (number, order) not in closer:
            pick = OrderedCandidate(index, order, limit)
            (bound,) = order_bounds(leaf, [pick])
            (solved,) = solve(leaf, [pick])
            closer[number, order] = float(bound), solved.least_seconds
        for least in closer[number, order]:
            assert least <= made.step_seconds * ROUNDING, plan
