"""What follows an answer of `mw plan`, for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.ask.batch_goal import BatchGoals, BatchRun
from meshwright.ask.device_counts import DeviceCounts
from meshwright.ask.explain import differences
from meshwright.ask.memory_front import MemoryFront
from meshwright.ask.question import AskedOutcome
from meshwright.ask.ways_out import WayOut
from meshwright.ask.what_if import ComparedPlans
from meshwright.ask.why import Why
from meshwright.core.codec import encode
from meshwright.planner.search import Scored


def _scored(scored: Scored | None) -> dict[str, Any]:
    if scored is None:
        return {"plan": None, "forecast": None}
    return {"plan": encode(scored[0]), "forecast": encode(scored[1])}


def _outcome(outcome: AskedOutcome) -> dict[str, Any]:
    return {"words": outcome.words, **_scored(outcome.best), "reason": outcome.reason}


def why_as_json(why: Why) -> dict[str, Any]:
    return {
        "knob": str(why.knob),
        "value": why.value,
        "wished": why.wished,
        "others": [_outcome(other) for other in why.others],
        "notes": list(why.notes),
    }


def what_if_as_json(compared: ComparedPlans) -> dict[str, Any]:
    before, best = compared.before, compared.after.best
    return {
        **_outcome(compared.after),
        "differences": list(differences(before[0], best[0])) if before and best else [],
        "times_tokens_per_second": compared.rate_ratio,
        "times_devices": compared.device_ratio,
    }


def front_as_json(front: MemoryFront) -> list[dict[str, Any]]:
    return [{"budget_bytes": point.budget_bytes, **_scored(point.scored)} for point in front.points]


def sizes_as_json(sizes: DeviceCounts, tokens: float) -> dict[str, Any]:
    return {
        "tokens": tokens,
        "tried": [
            {
                "devices": size.devices,
                **_outcome(size.outcome),
                "device_hours": size.device_hours(tokens) if size.rate else None,
            }
            for size in sizes.tried
        ],
        "fastest": sizes.fastest.devices if sizes.fastest else None,
        "cheapest": sizes.cheapest.devices if sizes.cheapest else None,
        "is_interrupted": sizes.is_interrupted,
    }


def goals_as_json(goals: BatchGoals) -> dict[str, Any]:
    def run(each: BatchRun | None) -> dict[str, Any] | None:
        if each is None:
            return None
        told = {"batch": each.batch, "devices": each.devices, "steps": each.steps, **_outcome(each.outcome)}
        ends = each.outcome.best is not None
        return told | {"seconds": each.seconds if ends else None, "device_hours": each.device_hours if ends else None}

    return {
        "critical_batch": goals.goal.critical_batch,
        "least_steps": goals.goal.least_steps,
        "sources": list(goals.goal.sources),
        "tried": [run(each) for each in goals.runs],
        "soonest": run(goals.soonest),
        "cheapest": run(goals.cheapest),
        "is_interrupted": goals.is_interrupted,
    }


def ways_out_as_json(ways: Sequence[WayOut], closed: Sequence[str]) -> dict[str, Any]:
    return {
        "open": [{"what": way.what, "way": way.words, **_outcome(way.outcome)} for way in ways],
        "closed": list(closed),
    }
