"""An `Answer` for programs: what `mw plan --json` prints."""

from __future__ import annotations

import shlex
from typing import Any

from meshwright.ask.answer import Answer
from meshwright.ask.explain import differences, faster_unfit, gap_words, missing_bytes, runner_up, running_out
from meshwright.ask.question import Outcome
from meshwright.ask.sizes import BatchRun
from meshwright.core.codec import encode
from meshwright.planner.search import ScoredPlan, SearchResult


def answer_as_json(answer: Answer) -> dict[str, Any]:
    """Parts that were not asked for are left out."""
    parts: dict[str, Any] = {}
    if answer.batch_goals is not None:
        goals = answer.batch_goals
        parts["goal"] = {
            **encode(goals.goal),
            "tried": [_batch_run(each) for each in goals.runs],
            "soonest": _batch_run(goals.soonest),
            "cheapest": _batch_run(goals.cheapest),
            "is_interrupted": goals.is_interrupted,
        }
    if answer.device_counts is not None:
        sizes, tokens = answer.device_counts, answer.request.tokens
        tried = []
        for each in sizes.tried:
            hours = each.device_hours(tokens) if each.rate else None
            tried.append({"devices": each.devices, **_outcome(each.outcome), "device_hours": hours})
        parts["sizes"] = {
            "tokens": tokens,
            "tried": tried,
            "fastest": sizes.fastest.devices if sizes.fastest else None,
            "cheapest": sizes.cheapest.devices if sizes.cheapest else None,
            "is_interrupted": sizes.is_interrupted,
        }
    if answer.result is not None:
        parts |= result_as_json(answer.result) | {"explain": explanation_as_json(answer.result)}
        if answer.beaten_run is not None:
            parts["explain"]["beaten_run"] = encode(answer.beaten_run)
    if answer.best is not None:
        forecast, question = answer.best.forecast, answer.question
        whole = question.memory_of(forecast.memory_bytes)
        likelihood = running_out(forecast, whole) if question.cluster.device.kind == "cuda" else None
        parts["headroom"] = {
            "percent": question.headroom,
            "memory_bytes": whole,
            "usable_bytes": forecast.memory_bytes,
            "likelihood_of_running_out": likelihood and list(likelihood),
        }
    if answer.exchange is not None:
        parts["exchange"] = answer.exchange.as_json()
    if answer.ways_out is not None:
        asked, ways = answer.request.command, []
        for way in answer.ways_out.open:
            about = {"what": way.what, "way": shlex.join(way.command(asked)), "cost": way.cost, "at_most": way.is_bound}
            ways.append({**about, **_outcome(way.outcome)})
        parts["ways_out"] = {"open": ways, "closed": list(answer.ways_out.closed)}
    if answer.why:
        parts["why"] = [
            {"knob": str(why.knob), "value": why.value, "wished": why.wished}
            | {"others": [_outcome(other) for other in why.others], "notes": list(why.notes)}
            for why in answer.why
        ]
    if answer.what_if is not None:
        before, best = answer.what_if.before, answer.what_if.after.best
        parts["what_if"] = {
            **_outcome(answer.what_if.after),
            "differences": list(differences(before.plan, best.plan)) if before and best else [],
            "times_tokens_per_second": answer.what_if.rate_ratio,
            "times_devices": answer.what_if.device_ratio,
        }
    if answer.front is not None:
        parts["front"] = [{"budget_bytes": point.budget_bytes, **encode(point.scored)} for point in answer.front.points]
    return parts


def result_as_json(result: SearchResult) -> dict[str, Any]:
    names = ("best", "ranked", "rejected", "nearest_miss", "evaluated", "search_seconds", "gap_fraction")
    return {name: encode(getattr(result, name)) for name in names}


def explanation_as_json(result: SearchResult) -> dict[str, Any]:
    """Why the best plan won; empty where there is none."""
    best = result.best
    if best is None:
        return {}

    def against(other: ScoredPlan) -> dict[str, Any]:
        return {
            **encode(other),
            "differences": list(differences(best.plan, other.plan)),
            "times_step_seconds": other.forecast.step_seconds / best.forecast.step_seconds,
        }

    second, unfit = runner_up(result), faster_unfit(result)
    return {
        "bottleneck": best.forecast.bottleneck,
        "certificate": gap_words(result),
        "runner_up": None if second is None else against(second),
        "faster_unfit": None if unfit is None else against(unfit) | {"missing_bytes": missing_bytes(unfit)},
        "alternatives": [
            {
                "technique": each.technique,
                "is_used": each.is_used,
                "step_seconds": None if each.scored is None else each.scored.forecast.step_seconds,
                "least_seconds": each.least_seconds,
            }
            for each in result.alternatives
        ],
    }


def _batch_run(run: BatchRun | None) -> dict[str, Any] | None:
    if run is None:
        return None
    ends = run.outcome.best is not None
    return {
        "batch": run.batch,
        "devices": run.devices,
        "steps": run.steps,
        **_outcome(run.outcome),
        "seconds": run.seconds if ends else None,
        "device_hours": run.device_hours if ends else None,
    }


def _outcome(outcome: Outcome) -> dict[str, Any]:
    scored = encode(outcome.best) or {"plan": None, "forecast": None}
    return {"words": outcome.words, **scored, "reason": outcome.reason}
