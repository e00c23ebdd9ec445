"""Which exchange of gradients or parameters leads to a loss soonest, and from which bandwidth on.

A technique with a statistical price (`Technique.steps_factor`) needs more steps than one that sums every gradient. The
best plan with such a technique, and the best without, are compared by seconds of a step times that factor. Any
technique that has a price and `options` is asked about.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.ask.question import Question, Tell, outcome
from meshwright.core.cluster import MOST_LINK, Cluster, Link
from meshwright.core.plan import Plan
from meshwright.core.technique import EXACTNESS, Technique, technique_named, technique_names
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
    """Where the best plans of both kinds reach a loss at the same time; None: at no bandwidth."""

    def lines(self) -> list[str]:
        lines: list[str] = []
        for title, scored in (("exchange", self.best), ("  else", self.other)):
            if scored is None:
                return [*lines, "  nothing fits or runs with another exchange"]
            factor, step = scored.plan.steps_factor, pretty_seconds(scored.forecast.step_seconds)
            low, mid, high = map(pretty_seconds, interval_to_target(scored))
            times = f" x {factor.mid:.2f} steps ({factor.low:.2f} to {factor.high:.2f})" if factor.source else ""
            words = f"{exchange_of(scored.plan)}: {step} a step{times}: {mid} to target ({low} to {high})"
            lines.append(f"{title}: {words}; {scored.forecast.bottleneck}")
            lines += [f"  steps factor: {factor.source}"] if factor.source else []
        assert scored is not None, "the last of them is a plan"
        name = exchange_of(scored.plan)
        if self.break_even_bytes_per_second is None:
            verdict = "slower" if self.best.seconds_to_target <= scored.seconds_to_target else "faster"
            return [*lines, f"  break-even: {name} is {verdict} at any bandwidth between nodes"]
        rate, now = (pretty_rate(each, "B/s") for each in (self.break_even_bytes_per_second, self.bytes_per_second))
        side = "above" if name == SYNCHRONOUS else "below"
        return [*lines, f"  break-even: {name} would be faster {side} {rate} between nodes for each device (now {now})"]

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


def interval_to_target(scored: ScoredPlan) -> tuple[float, float, float]:
    """(low, mid, high) for what a step that sums every gradient teaches: both intervals at their ends."""
    step, factor = scored.forecast, scored.plan.steps_factor
    return step.step_seconds_low * factor.low, scored.seconds_to_target, step.step_seconds_high * factor.high


def _as_json(scored: ScoredPlan) -> dict[str, Any]:
    seconds = dict(zip(("low", "mid", "high"), interval_to_target(scored), strict=True))
    about = {"exchange": exchange_of(scored.plan), "steps_factor": scored.plan.steps_factor._asdict()}
    return {**scored.encode_self(), **about, "seconds_to_target": seconds}


def advise_exchange(question: Question, best: ScoredPlan, tell: Tell) -> ExchangeAdvice | None:
    """None where there is nothing to choose: on one node, where no technique with a statistical price makes sense, or
    where the plan has an approximate one whose statistical price nobody knows."""
    is_known = all(each.exactness != EXACTNESS[-1] or each.steps_factor.source for each in best.plan.techniques)
    if not is_known or (question.cluster.num_nodes == 1 and not question.cluster.others):
        return None
    names, groups = [each.name for each in priced_techniques(best.plan)], range(len(question.cluster.groups))
    is_priced, now = bool(names), question.cluster.link_between(groups).bytes_per_second
    if not names:
        kinds = [kind for kind in map(technique_named, technique_names()) if kind.name not in question.ban]
        kinds = [kind for kind in kinds if kind.steps_factor is not Technique.steps_factor]
        names = [kind.name for kind in kinds if kind.options(question.profile, question.cluster)]
        if not names:
            return None
    free = tuple(text for text in question.pin if text.partition("=")[0].partition(".")[0].strip() not in names)
    without = replace(question, pin=free, ban=(*question.ban, *names))
    having = [replace(question, pin=(*question.pin, name)) for name in (names[:1] if is_priced else names)]

    def asked(with_price: bool, rate: float) -> list[ScoredPlan]:
        """The best plan with a statistical price, or without, at a bandwidth."""
        tell(f"searching {'with' if with_price else 'without'} {', '.join(names)} at {pretty_rate(rate, 'B/s')}")
        questions = having if with_price else [without]
        found = [outcome("", replace(each, cluster=with_bandwidth(each.cluster, rate))).best for each in questions]
        return sorted((each for each in found if each is not None), key=lambda each: each.rank)[:1]

    others, at = asked(not is_priced, now), None
    plans = {is_priced: [best.plan], not is_priced: [each.plan for each in others]}
    if others:  # at another bandwidth other plans may be the best of their kind
        edge = question.cluster.inner.bytes_per_second if is_priced else now / 1000
        at = break_even(question, plans[True], plans[False], now)
        for kind in (True, False):
            plans[kind] += [each.plan for each in asked(kind, at or edge)]
        at = break_even(question, plans[True], plans[False], now)
    other = others[0] if others else None
    return ExchangeAdvice(best=best, other=other, bytes_per_second=now, break_even_bytes_per_second=at)


def with_bandwidth(cluster: Cluster, bytes_per_second: float) -> Cluster:
    """The same with this rate of all links that leave a node."""

    def changed(link: Link) -> Link:
        return replace(link, bytes_per_second=bytes_per_second)

    others = tuple(replace(group, outer=changed(group.outer)) for group in cluster.others)
    between = None if cluster.between is None else changed(cluster.between)
    return replace(cluster, outer=changed(cluster.outer), others=others, between=between)


def break_even(question: Question, priced: Sequence[Plan], others: Sequence[Plan], now: float) -> float | None:
    """Bytes a second between nodes at which the best of plans with a statistical price, which gain from slow links, and
    the best of others reach a loss at the same time; None: at no bandwidth."""

    def seconds(plan: Plan, cluster: Cluster) -> float:
        settings: dict[str, Any] = {"sequence": question.sequence, "optimizer": question.optimizer, "replays": False}
        return ScoredPlan(plan, forecast(question.profile, plan, cluster, **settings)).seconds_to_target

    def gain(rate: float) -> float:
        """Of those with a price."""
        cluster = with_bandwidth(question.machine, rate)
        with_price, without = (min(seconds(plan, cluster) for plan in plans) for plans in (priced, others))
        return without - with_price

    if gain(now) > 0:
        return _crossing(gain, now, 4.0)
    return _crossing(lambda rate: -gain(rate), now, 0.25)


def _crossing(lead: Callable[[float], float], near: float, times: float) -> float | None:
    """Where `lead`, not below zero at `near`, falls below: `times` as far on and on, then between."""
    far = near
    while lead(far) >= 0:
        near, far = far, far * times
        if not LEAST_LINK <= far <= MOST_LINK:
            return None
    while abs(math.log(far / near)) > _NEAR:
        middle = math.sqrt(near * far)
        near, far = (middle, far) if lead(middle) >= 0 else (near, middle)
    return math.sqrt(near * far)
