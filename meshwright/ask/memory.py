"""What memory buys: the fastest plan for each memory.

seconds
  |*                each search with a budget finds the fastest plan that fits in it; its peak is a point, and no
  |   *             plan between that peak and the budget is faster. The widest stretch not yet known is next.
  |       *    *
  +-----------------> bytes of the fullest rank
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from meshwright.ask.question import Question, Tell, outcome
from meshwright.core.units import MIB
from meshwright.planner.search import Bounds, ScoredPlan
from meshwright.simulator.forecast import forecast

MOST_POINTS = 10
_MOST_SEARCHES = 24
_UNLIMITED_BYTES = 1 << 50
_WORTH = 0.002
"""Less of the step than this is not looked for between two points."""
_NARROW = 1.01
"""Budgets this near are one."""


@dataclass(frozen=True, kw_only=True)
class Point:
    scored: ScoredPlan
    budget_bytes: int
    """Up to here no plan is faster."""

    @property
    def seconds(self) -> float:
        return self.scored.seconds_to_target

    @property
    def peak_bytes(self) -> int:
        return self.scored.forecast.peak_bytes


@dataclass(frozen=True, kw_only=True)
class MemoryFront:
    points: tuple[Point, ...]
    """Less memory first; each is faster than the one before."""
    is_interrupted: bool = False


def front(question: Question, tell: Tell, best: ScoredPlan | None = None, bounds: Bounds | None = None) -> MemoryFront:
    """`best`: what the question itself has given, if anything fits; it is a point too. `bounds`: from asking it."""
    points: list[Point] = []
    bounds = {} if bounds is None else bounds
    if best is not None:
        points.append(Point(scored=best, budget_bytes=question.machine.device.memory_bytes))
    try:
        tell("searching without a limit of memory")
        fastest = _point(question, _UNLIMITED_BYTES, bounds)
        if fastest is None:
            return MemoryFront(points=())
        tell("searching for the least memory")
        points = _added(_added(points, fastest), _least(question, fastest.budget_bytes, bounds))
        for _ in range(_MOST_SEARCHES):
            # The middle of the stretch with most to find: memory not yet looked into, times the time between its ends.
            stretches = []
            for lower, upper in itertools.pairwise(points):
                room, gain = upper.peak_bytes / lower.budget_bytes, lower.seconds / upper.seconds
                if room > _NARROW and gain > 1 + _WORTH:
                    middle = math.isqrt(lower.budget_bytes * upper.peak_bytes)
                    stretches.append((math.log(room) * math.log(gain), middle))
            if not stretches or len(points) >= MOST_POINTS:
                break
            budget = max(stretches)[1]
            tell(f"searching with {budget / 1024**3:.1f} GiB, {len(points)} points so far")
            points = _added(points, _point(question, budget, bounds))
            # Whatever the search gave, nothing is left to find below: the next stretch begins there.
            below = max(at for at, point in enumerate(points) if point.peak_bytes <= budget)
            points[below] = replace(points[below], budget_bytes=max(points[below].budget_bytes, budget))
    except KeyboardInterrupt:
        return MemoryFront(points=tuple(points), is_interrupted=True)
    return MemoryFront(points=tuple(points))


def _point(question: Question, budget: int, bounds: Bounds) -> Point | None:
    best = outcome("", question.with_memory(budget), bounds).best
    return Point(scored=best, budget_bytes=budget) if best else None


def _least(question: Question, enough_bytes: int, bounds: Bounds) -> Point | None:
    """Where nothing fits, search names the plan that needs least; what an allocator loses in pieces comes on top."""
    taken = max(group.device.reserved_bytes for group in question.cluster.groups)
    nothing = outcome("", question.with_memory(taken + MIB), bounds)
    if nothing.best is not None:
        return Point(scored=nothing.best, budget_bytes=nothing.question.cluster.device.memory_bytes)
    if nothing.result is None or nothing.result.nearest_miss is None:
        return None
    plan, predicted = nothing.result.nearest_miss
    budget = predicted.peak_bytes
    while budget < enough_bytes:
        # What the allocator needs for that very plan is known sooner than a search is over.
        machine = question.with_memory(budget).machine
        predicted = forecast(question.profile, plan, machine, sequence=question.sequence, optimizer=question.optimizer)
        if predicted.fits:
            return _point(question, budget, bounds) or Point(scored=ScoredPlan(plan, predicted), budget_bytes=budget)
        budget = math.ceil(budget * 1.01)
    return None


def _added(points: list[Point], new: Point | None) -> list[Point]:
    """With one more; what it beats in both is gone, and equal plans are one point with the larger budget."""
    if new is None:
        return points
    kept: list[Point] = []
    for point in sorted([*points, new], key=lambda p: (p.peak_bytes, p.seconds, -p.budget_bytes)):
        if not kept or point.seconds < kept[-1].seconds:
            kept.append(point)
        else:
            budget = max(kept[-1].budget_bytes, point.budget_bytes)
            kept[-1] = Point(scored=kept[-1].scored, budget_bytes=budget)
    return kept
