"""Why the best plan won and what others would cost, in a few lines; where nothing fits, how far off."""

from __future__ import annotations

from typing import Any

from meshwright.core.cluster import Cluster
from meshwright.core.codec import encode
from meshwright.core.plan import Plan
from meshwright.core.units import pretty_bytes, pretty_seconds
from meshwright.planner.mixed_words import explain_mixed
from meshwright.planner.search import Alternative, Scored, SearchResult

_AS_FAST = 1.005
"""Below, nobody could tell the difference."""


def explain(found: SearchResult, cluster: Cluster) -> list[str]:
    if found.best is not None:
        return [*_why_it_won(found, found.best), *explain_mixed(found, cluster)]
    if found.nearest_miss is not None:
        return _why_nothing_fits(found.nearest_miss)
    lines = [f"No plan uses all {cluster.num_devices} devices of {cluster.name} for this batch."]
    lines += [f"{count} x {reason}" for reason, count in found.rejected.items()]
    return [*lines, "Try a batch with more divisors, another number of devices, or fewer pins and bans."]


def _why_it_won(found: SearchResult, best: Scored) -> list[str]:
    lines = [f"bottleneck: {best[1].bottleneck}", f"proof: {gap_words(found)}"]
    runner_up = next((scored for scored in found.ranked if scored[0] != best[0]), None)
    if runner_up is not None:
        lines.append(f"runner-up: {_slower(runner_up, best)} with {'; '.join(differences(best[0], runner_up[0]))}")
    unfit = faster_unfit(found)
    if unfit is not None:
        gain = 1 - unfit[1].step_seconds / best[1].step_seconds
        changes = "; ".join(differences(best[0], unfit[0]))
        lines.append(f"faster but too large: {percent(gain)} faster with {changes}; {missing_words(unfit)}")
    return lines + _worths(found, best)


def differences(plan: Plan, other: Plan) -> tuple[str, ...]:
    """What changes from one to the other; the order of other axes is another one, which goes without saying."""
    has_same_axes = set(plan.axis_order) == set(other.axis_order)
    return tuple(line for line in plan.diff(other) if has_same_axes or not line.startswith("axis_order"))


def gap_words(found: SearchResult) -> str:
    """What the certificate says."""
    count = f"{found.evaluated:,} plan{'s' if found.evaluated != 1 else ''}"
    if found.gap_fraction is None:
        return f"none for {count}"
    if found.gap_fraction == 0:
        return f"none of {count} is faster"
    return f"none of {count} is more than {percent(found.gap_fraction)} faster"


def faster_unfit(found: SearchResult) -> Scored | None:
    """The fastest plan that does not fit, where it would beat the best."""
    unfit = found.faster_unfit
    if unfit is None or found.best is None or unfit[1].step_seconds >= found.best[1].step_seconds:
        return None
    return unfit


def missing_bytes(scored: Scored) -> int:
    """What a plan that does not fit has too much; 0 where only the pieces between its tensors are too much."""
    return max(0, scored[1].peak_bytes - scored[1].memory_bytes)


def missing_words(scored: Scored) -> str:
    over = missing_bytes(scored)
    return f"{pretty_bytes(over)} of memory too much" if over else "too much in pieces"


def _worths(found: SearchResult, best: Scored) -> list[str]:
    """Two lines: what the winner's techniques are worth, and what the others would cost."""
    lines = []
    for is_used, words in ((True, "without"), (False, "with")):
        asked = [each for each in found.alternatives if each.is_used is is_used]
        told = [f"{each.technique} {_worth(each, found, best)}" for each in asked]
        if told:
            lines.append(f"{words}: {', '.join(told)}")
    return lines


def _worth(alternative: Alternative, found: SearchResult, best: Scored) -> str:
    other = alternative_of(alternative, found)
    if other is not None:
        return _slower(other, best)
    if alternative.least_seconds is None:
        return "nothing fits"
    ratio = alternative.least_seconds / best[1].step_seconds
    return "not looked for" if ratio < _AS_FAST else f"at least {percent(ratio - 1)} slower"


def alternative_of(alternative: Alternative, found: SearchResult) -> Scored | None:
    """The best plan that decides otherwise: what search gave for it, or one that is ranked."""
    others = [
        scored
        for scored in found.ranked
        if (scored[0].technique(alternative.technique) is not None) is not alternative.is_used
    ]
    others += [alternative.found] if alternative.found is not None else []
    return min(others, key=lambda scored: scored[1].step_seconds, default=None)


def _slower(other: Scored, best: Scored) -> str:
    ratio = other[1].step_seconds / best[1].step_seconds
    if ratio < _AS_FAST:
        return "as fast"
    return f"{percent(ratio - 1)} slower" if ratio < 2 else f"{ratio:.1f} x slower"


def percent(fraction: float) -> str:
    """`0.8 %`, `12 %`: two figures, or whole ones."""
    return f"{100 * fraction:.2g} %" if abs(fraction) < 0.1 else f"{100 * fraction:.0f} %"


def _why_nothing_fits(miss: Scored) -> list[str]:
    plan, forecast = miss
    kept = forecast.peak_bytes_by_category
    largest = max(kept, key=lambda category: kept[category])
    return [
        f"Nothing fits in {pretty_bytes(forecast.memory_bytes)}. Nearest: {plan}",
        f"It needs {pretty_bytes(forecast.peak_bytes)}, {missing_words(miss)}; "
        f"most of it {largest} ({pretty_bytes(kept[largest])}). It would take {pretty_seconds(forecast.step_seconds)} "
        "a step.",
    ]


def explained_as_json(found: SearchResult) -> dict[str, Any]:
    """The same for programs; beside what `found_as_json` says."""
    best = found.best
    if best is None:
        return {}
    runner_up = next((scored for scored in found.ranked if scored[0] != best[0]), None)
    unfit = faster_unfit(found)
    return {
        "bottleneck": best[1].bottleneck,
        "certificate": gap_words(found),
        "runner_up": None if runner_up is None else _beside(runner_up, best),
        "faster_unfit": None if unfit is None else _beside(unfit, best) | {"missing_bytes": missing_bytes(unfit)},
        "alternatives": [
            {
                "technique": each.technique,
                "is_used": each.is_used,
                "step_seconds": None if other is None else other[1].step_seconds,
            }
            for each in found.alternatives
            for other in (alternative_of(each, found),)
        ],
    }


def _beside(other: Scored, best: Scored) -> dict[str, Any]:
    return {
        "plan": encode(other[0]),
        "forecast": encode(other[1]),
        "differences": list(differences(best[0], other[0])),
        "times_step_seconds": other[1].step_seconds / best[1].step_seconds,
    }
