"""Which exchange of gradients or parameters leads to a loss soonest, and at which bandwidth between nodes another would.

A technique with a statistical price (`Technique.steps_factor`) needs more steps than one that sums every gradient. The
best plan with such a technique, and the best without, are compared by seconds of a step times that factor. Any technique
that says so and has `options` is asked about.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from meshwright.ask.question import Question, Tell, outcome
from meshwright.core.cluster import MOST_LINK, Cluster, Link
from meshwright.core.plan import Plan
from meshwright.core.technique import Technique, technique_named, technique_names
from meshwright.core.units import pretty_rate, pretty_seconds
from meshwright.planner.search import ScoredPlan
from meshwright.simulator.forecast import forecast

SYNCHRONOUS = "gradients summed every step"
LEAST_LINK = 1.0
"""Bytes a second below which no link is looked for."""
_NEAR = 1e-4


@dataclass(frozen=True, kw_only=True)
class ExchangeAdvice:
    best: ScoredPlan
    other: ScoredPlan | None
    """The best plan of the other kind: without what has a statistical price, or with it."""
    bytes_per_second: float
    """Between nodes, of each device."""
    break_even_bytes_per_second: float | None
    """Where both plans reach a loss at the same time; None: at no bandwidth."""

    def lines(self) -> list[str]:
        lines = [f"exchange: {_words(self.best)}"]
        if self.best.plan.steps_factor.source:
            lines.append(f"  steps factor: {self.best.plan.steps_factor.source}")
        if self.other is None:
            return [*lines, "  nothing fits or runs with another exchange"]
        lines.append(f"  else: {_words(self.other)}")
        if self.other.plan.steps_factor.source:
            lines.append(f"  steps factor: {self.other.plan.steps_factor.source}")
        name, is_other_synchronous = exchange_of(self.other.plan), not priced_techniques(self.other.plan)
        if self.break_even_bytes_per_second is None:
            return [*lines, f"  break-even: with these two plans {name} is slower at any bandwidth between nodes"]
        rate, now = pretty_rate(self.break_even_bytes_per_second), pretty_rate(self.bytes_per_second)
        where = f"{'above' if is_other_synchronous else 'below'} {rate} between nodes for each device (now {now})"
        return [*lines, f"  break-even: with these two plans {name} would be faster {where}"]

    def as_json(self) -> dict[str, Any]:
        return {
            "best": _as_json(self.best),
            "other": None if self.other is None else _as_json(self.other),
            "bytes_per_second": self.bytes_per_second,
            "break_even_bytes_per_second": self.break_even_bytes_per_second,
            "lines": self.lines(),
        }


def priced_techniques(plan: Plan) -> list[Technique]:
    """Those in effect that have a statistical price."""
    return [each for each in plan.techniques if each.steps_factor.source and plan.mesh.get(each.axis, 2) > 1]


def exchange_of(plan: Plan) -> str:
    return " + ".join(map(str, priced_techniques(plan))) or SYNCHRONOUS


def seconds_to_target(scored: ScoredPlan) -> tuple[float, float, float]:
    """(low, mid, high) for what a step that sums every gradient teaches: both intervals at their ends."""
    told, factor = scored.forecast, scored.plan.steps_factor
    return told.step_seconds_low * factor.low, scored.seconds_to_target, told.step_seconds_high * factor.high


def _words(scored: ScoredPlan) -> str:
    factor, step = scored.plan.steps_factor, pretty_seconds(scored.forecast.step_seconds)
    low, mid, high = map(pretty_seconds, seconds_to_target(scored))
    times = f" x {factor.mid:.2f} steps ({factor.low:.2f} to {factor.high:.2f})" if factor.source else ""
    return f"{exchange_of(scored.plan)}: {step} a step{times}: {mid} to target ({low} to {high}); " + (
        scored.forecast.bottleneck
    )


def _as_json(scored: ScoredPlan) -> dict[str, Any]:
    names = ("low", "mid", "high")
    return {
        **scored.encode_self(),
        "exchange": exchange_of(scored.plan),
        "steps_factor": scored.plan.steps_factor._asdict(),
        "seconds_to_target": dict(zip(names, seconds_to_target(scored), strict=True)),
    }


def advise_exchange(question: Question, best: ScoredPlan, tell: Tell) -> ExchangeAdvice | None:
    """None where there is nothing to choose: no technique with a statistical price makes sense here."""
    used = [each.name for each in priced_techniques(best.plan)]

    def asked(words: str, **changes: Any) -> ScoredPlan | None:
        tell(f"searching {words}")
        return outcome(words, replace(question, **changes)).best

    if used:
        pin = tuple(text for text in question.pin if text.partition("=")[0].partition(".")[0].strip() not in used)
        other = asked(f"without {' and '.join(used)}", pin=pin, ban=(*question.ban, *used))
    else:
        kinds = [kind for kind in map(technique_named, technique_names()) if kind.name not in question.ban]
        priced = [kind for kind in kinds if kind.steps_factor is not Technique.steps_factor]
        possible = [kind.name for kind in priced if kind.options(question.profile, question.cluster)]
        if not possible:
            return None
        found = [asked(f"with {name}", pin=(*question.pin, name)) for name in possible]
        other = min((each for each in found if each is not None), key=lambda each: each.rank, default=None)
    now = _outer_links(question.cluster)[0].bytes_per_second
    at = None if other is None else break_even(question, best.plan, other.plan, now)
    return ExchangeAdvice(best=best, other=other, bytes_per_second=now, break_even_bytes_per_second=at)


def _outer_links(cluster: Cluster) -> tuple[Link, ...]:
    return (*([cluster.between] if cluster.between is not None else []), *(group.outer for group in cluster.groups))


def with_bandwidth(cluster: Cluster, bytes_per_second: float) -> Cluster:
    """The same with this rate of all links that leave a node."""

    def changed(link: Link) -> Link:
        return replace(link, bytes_per_second=bytes_per_second)

    others = tuple(replace(group, outer=changed(group.outer)) for group in cluster.others)
    between = None if cluster.between is None else changed(cluster.between)
    return replace(cluster, outer=changed(cluster.outer), others=others, between=between)


def break_even(question: Question, best: Plan, other: Plan, now: float) -> float | None:
    """Bytes a second between nodes at which two plans reach a loss at the same time, where `best` is the faster `now`."""

    def lead(rate: float) -> float:
        cluster = with_bandwidth(question.machine, rate)
        seconds = [
            forecast(
                question.profile,
                plan,
                cluster,
                sequence=question.sequence,
                optimizer=question.optimizer,
                replays=False,
            ).step_seconds
            * plan.steps_factor.mid
            for plan in (best, other)
        ]
        return seconds[1] - seconds[0]

    # What needs more steps gains from a slow link.
    times = 4.0 if best.steps_factor.mid > other.steps_factor.mid else 0.25
    return _crossing(lead, now, times)


def _crossing(lead: Callable[[float], float], near: float, times: float) -> float | None:
    """Where `lead`, above zero at `near`, falls to zero: `times` as far again and again, then between the last two."""
    far = near
    while lead(far) > 0:
        near, far = far, far * times
        if not LEAST_LINK <= far <= MOST_LINK:
            return None
    while abs(math.log(far / near)) > _NEAR:
        middle = math.sqrt(near * far)
        near, far = (middle, far) if lead(middle) > 0 else (near, middle)
    return math.sqrt(near * far)
