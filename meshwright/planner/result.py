"""What a search comes back with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from meshwright.core.codec import encode
from meshwright.core.plan import Plan
from meshwright.simulator.forecast import Forecast

Scored = tuple[Plan, Forecast]


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """The best plan with a technique the winner lacks, or without one it has."""

    technique: str
    is_used: bool
    found: Scored | None
    """None: nothing fits then, or it is far slower."""
    least_seconds: float | None = None
    """Where none was looked for: no such plan is faster than this."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    best: Scored | None
    ranked: tuple[Scored, ...]
    rejected: dict[str, int]
    """Reason -> candidates."""
    nearest_miss: Scored | None
    """Where nothing fits, the plan that needs the least memory."""
    evaluated: int
    """Candidates, each with all ways to order its axes, deal out its blocks and let them follow policies."""
    search_seconds: float
    gap_fraction: float | None
    """No candidate is faster than the best by more than this share, by the cost model; 0: it is the optimum."""
    alternatives: tuple[Alternative, ...] = field(default=())
    faster_unfit: Scored | None = None
    """The fastest plan that would beat the best if it fitted."""
    is_interrupted: bool = False
    """Somebody did not want to wait: the best so far."""


def found_as_json(found: SearchResult) -> dict[str, Any]:
    """What `mw plan --json` prints."""

    def scored(item: Scored | None) -> dict[str, Any] | None:
        return None if item is None else {"plan": encode(item[0]), "forecast": encode(item[1])}

    return {
        "best": scored(found.best),
        "ranked": [scored(item) for item in found.ranked],
        "rejected": found.rejected,
        "nearest_miss": scored(found.nearest_miss),
        "evaluated": found.evaluated,
        "search_seconds": found.search_seconds,
        "gap_fraction": found.gap_fraction,
    }
