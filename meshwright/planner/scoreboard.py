"""What a search comes back with, and the board on which it writes down the plans it has looked at."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from meshwright.core.codec import decode_into, encode
from meshwright.core.errors import Problem
from meshwright.core.plan import Plan
from meshwright.planner.wishes import SearchInputs
from meshwright.simulator.forecast import Forecast, forecast

AS_FAST = 0.005
"""Share of a step by which plans differ that are called equally fast in words."""


class ScoredPlan(NamedTuple):
    """A plan and what the simulator says of it."""

    plan: Plan
    forecast: Forecast

    @property
    def seconds_to_target(self) -> float:
        """Seconds until what a step that sums every gradient teaches is learnt: what plans are ranked by."""
        return self.forecast.step_seconds * self.plan.steps_factor.mid

    @property
    def tokens_to_target_per_second(self) -> float:
        """Tokens (or samples) a second, by what is learnt from them."""
        return self.forecast.tokens_per_second / self.plan.steps_factor.mid

    @property
    def rank(self) -> tuple[float, str]:
        """Fastest first; equally fast plans in a fixed order."""
        return self.seconds_to_target, str(self.plan)

    def encode_self(self) -> dict[str, Any]:
        return {"plan": encode(self.plan), "forecast": encode(self.forecast)}

    @classmethod
    def decode_any(cls, value: Any, where: str, problems: list[Problem]) -> ScoredPlan | None:
        if not isinstance(value, dict) or value.keys() != {"plan", "forecast"}:
            problems.append(Problem(where=where, what="is not a plan with its forecast."))
            return None
        plan = decode_into(Plan, value["plan"], f"{where}.plan", problems)
        return cls(plan, decode_into(Forecast, value["forecast"], f"{where}.forecast", problems))

    def simplicity(self, per_node: int) -> tuple[float, int, int, float, int, tuple[float, str]]:
        """Least first: steps it may need, memory beyond the devices', techniques, nodes that the groups of its axes
        span, memory."""
        stride, nodes = 1, 0.0
        for axis in reversed(self.plan.axis_order):
            nodes += max(1.0, self.plan.mesh[axis] * min(stride, per_node) / per_node)
            stride *= self.plan.mesh[axis]
        elsewhere, count = len(self.forecast.peak_bytes_by_tier), len(self.plan.techniques)
        return self.plan.steps_factor.high, elsewhere, count, nodes, self.forecast.peak_bytes, self.rank


TIE = 0.01
"""Share of a step by which plans differ that forecasts cannot tell apart; docs/search.md says from what."""
TABLE = 8
"""Plans among which those that tie are put in order: so many at a time, so that fewer plans are the first of more."""


def simpler_first(ranked: Sequence[ScoredPlan], tie: float, per_node: int) -> list[ScoredPlan]:
    """The same plans, those within `tie` of the fastest of them in the order of their simplicity."""
    result: list[ScoredPlan] = []
    for start in range(0, len(ranked), TABLE):
        rest = list(ranked[start : start + TABLE])
        while rest:
            limit = rest[0].seconds_to_target * (1 + tie)
            tied = [each for each in rest if each.seconds_to_target <= limit]
            result += sorted(tied, key=lambda each: each.simplicity(per_node)) if tie else tied
            rest = rest[len(tied) :]
    return result


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """The best plan with a technique the winner lacks, or without one it has."""

    technique: str
    is_used: bool
    scored: ScoredPlan | None
    """The fastest such plan that was found."""
    least_seconds: float | None = None
    """No such plan is faster than this; None: none fits."""

    @property
    def is_settled(self) -> bool:
        """Whether a search with the technique banned or pinned would find nothing noticeably faster."""
        found = self.scored.seconds_to_target if self.scored is not None else None
        return self.least_seconds is None or (found is not None and self.least_seconds >= found * (1 - AS_FAST))


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    best: ScoredPlan | None
    ranked: tuple[ScoredPlan, ...]
    rejected: dict[str, int]
    """Reason -> candidates."""
    nearest_miss: ScoredPlan | None
    """Where nothing fits, the plan that needs the least memory."""
    evaluated: int
    """Candidates, each with all ways to order its axes, split its blocks into stages and let them follow policies."""
    search_seconds: float
    gap_fraction: float | None
    """No candidate is faster than the best by more than this share, by the cost model; 0: it is the optimum."""
    alternatives: tuple[Alternative, ...] = field(default=())
    faster_unfit: ScoredPlan | None = None
    """The fastest plan that would beat the best if it fitted."""
    is_interrupted: bool = False
    """The user stopped the search: the best plan so far."""


class Scoreboard:
    """Forecasts of plans, each made once; the best that fits; and what was rejected, with the reasons."""

    def __init__(self, inputs: SearchInputs):
        self.inputs = inputs
        self.scored: dict[tuple[Plan, bool], ScoredPlan | None] = {}
        self.best: ScoredPlan | None = None
        self.taken: dict[Plan, ScoredPlan] = {}
        """Plans that fit, in the allocator's pieces too where that was asked."""
        self.rejected: Counter[str] = Counter()
        self.is_interrupted = False

    @property
    def best_seconds(self) -> float:
        return self.best.seconds_to_target if self.best is not None else float("inf")

    def reject(self, reason: str, count: int = 1) -> None:
        if count:
            self.rejected[reason] += count

    def score(self, plan: Plan, *, replays: bool = False) -> ScoredPlan | None:
        """None (and the reason counted) if the plan's own check objects. `replays`: with the allocator, which takes too
        long for all."""
        key, inputs = (plan, replays), self.inputs
        if key not in self.scored:
            problems = plan.check(inputs.profile, inputs.cluster) or plan.check_sequence(inputs.sequence)
            self.scored[key] = None
            if problems:
                self.reject(str(problems[0]))
            else:
                settings: dict[str, Any] = {"sequence": inputs.sequence, "optimizer": inputs.optimizer}
                told = forecast(inputs.profile, plan, inputs.cluster, replays=replays, **settings)
                self.scored[key] = ScoredPlan(plan, told)
        return self.scored[key]

    def record(self, scored: ScoredPlan) -> None:
        """A forecast that was made elsewhere."""
        self.scored[scored.plan, False] = scored
        if scored.forecast.fits:
            self.take(scored)

    def without_replay(self, *, fits: bool) -> list[ScoredPlan]:
        """All plans that fit by their bytes, or all that do not; fastest first."""
        known = (scored for (_, replays), scored in self.scored.items() if scored is not None and not replays)
        return sorted((each for each in known if each.forecast.fits is fits), key=lambda each: each.rank)

    def take(self, scored: ScoredPlan) -> None:
        """As one that fits; as the best, if it is."""
        self.taken[scored.plan] = scored
        if self.best is None or scored.rank < self.best.rank:
            self.best = scored

    def ranked(self, count: int) -> list[ScoredPlan]:
        """The fastest that were taken."""
        return heapq.nsmallest(count, self.taken.values(), key=lambda each: each.rank)
