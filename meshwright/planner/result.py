"""What a search comes back with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from meshwright.core.codec import decode_into, encode
from meshwright.core.errors import Problem
from meshwright.core.plan import Plan
from meshwright.simulator.forecast import Forecast


class ScoredPlan(NamedTuple):
    """A plan and what the simulator says of it."""

    plan: Plan
    forecast: Forecast

    def encode_self(self) -> dict[str, Any]:
        return {"plan": encode(self.plan), "forecast": encode(self.forecast)}

    @classmethod
    def decode_any(cls, value: Any, where: str, problems: list[Problem]) -> ScoredPlan | None:
        if not isinstance(value, dict) or value.keys() != {"plan", "forecast"}:
            problems.append(Problem(where=where, what="is not a plan with its forecast."))
            return None
        plan = decode_into(Plan, value["plan"], f"{where}.plan", problems)
        return cls(plan, decode_into(Forecast, value["forecast"], f"{where}.forecast", problems))


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """The best plan with a technique the winner lacks, or without one it has."""

    technique: str
    is_used: bool
    scored: ScoredPlan | None
    """None: nothing fits then, or it is far slower."""
    least_seconds: float | None = None
    """Where none was looked for: no such plan is faster than this."""


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
