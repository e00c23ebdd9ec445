"""Why the best plan won and what others would cost, in a few lines; where nothing fits, how far off and ways out."""

from __future__ import annotations

import math

from meshwright.core.cluster import Cluster
from meshwright.core.units import pretty_bytes, pretty_seconds
from meshwright.search.search import Alternative, Found, Scored

_LARGEST_KEPT = ("activations", "logits", "working")
"""What a shorter sequence or a smaller microbatch shrinks; the rest follows the model and the devices."""


def explain(found: Found, cluster: Cluster) -> list[str]:
    if found.best is not None:
        return _why_it_won(found, found.best, cluster)
    if found.nearest_miss is not None:
        return _why_nothing_fits(found.nearest_miss, cluster)
    lines = [f"No plan uses all {cluster.num_devices} devices of {cluster.name} for this batch."]
    lines += [f"{count} x {reason}" for reason, count in found.rejected.items()]
    return [*lines, "Try a batch with more divisors, another number of devices, or fewer pins and bans."]


def _why_it_won(found: Found, best: Scored, cluster: Cluster) -> list[str]:
    plan, forecast = best
    room = cluster.device.memory_bytes - forecast.peak_bytes
    lines = [
        f"{plan}",
        f"{pretty_seconds(forecast.step_seconds)} a step; {forecast.bottleneck}.",
        f"Its fullest rank has {pretty_bytes(forecast.peak_bytes)}, {pretty_bytes(room)} to spare.",
    ]
    if found.gap_fraction is not None:
        gap = f"no candidate is more than {found.gap_fraction:.1%} faster"
        lines.append(f"Of {found.evaluated} candidates {'none is faster' if found.gap_fraction == 0 else gap}.")
    return lines + [_worth(alternative, forecast.step_seconds) for alternative in found.alternatives]


def _worth(alternative: Alternative, best_seconds: float) -> str:
    words = f"{'without' if alternative.is_used else 'with'} {alternative.technique}"
    if alternative.found is None:
        return f"{words}: nothing fits"
    ratio = alternative.found[1].step_seconds / best_seconds
    return f"{words}: as fast" if ratio < 1.005 else f"{words}: {ratio:.2f} x slower"


def _why_nothing_fits(miss: Scored, cluster: Cluster) -> list[str]:
    plan, forecast = miss
    over = forecast.peak_bytes - forecast.memory_bytes
    kept = forecast.peak_bytes_by_category
    fixed = kept.get("non_torch", 0)
    shrinking = sum(kept.get(category, 0) for category in _LARGEST_KEPT)
    largest = max(kept, key=lambda category: kept[category])
    lines = [
        f"Nothing fits in {pretty_bytes(forecast.memory_bytes)}. Nearest: {plan}",
        f"It needs {pretty_bytes(forecast.peak_bytes)}, {pretty_bytes(over)} too much; "
        f"most of it {largest} ({pretty_bytes(kept[largest])}).",
    ]
    room = forecast.memory_bytes - fixed
    if room > 0:
        times = (forecast.peak_bytes - fixed) / room
        lines.append(f"Use about {math.ceil(times * cluster.num_devices)} such devices, to share it out.")
    lines.append(f"Or devices with {pretty_bytes(forecast.peak_bytes)} each.")
    if shrinking > over:
        lines.append(f"Or a sequence about {shrinking / (shrinking - over):.1f} times shorter.")
    else:
        lines.append("Or a smaller model, or an optimizer with less state.")
    return lines
