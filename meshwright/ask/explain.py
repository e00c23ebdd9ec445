"""Why the best plan won and what others would cost, in a few lines; where nothing fits, how far off."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from meshwright.core.cluster import Cluster
from meshwright.core.codec import decode
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.units import pretty_bytes, pretty_seconds
from meshwright.planner.scoreboard import AS_FAST, Alternative, ScoredPlan, SearchResult
from meshwright.simulator.forecast import Forecast


def explain(result: SearchResult, cluster: Cluster) -> list[str]:
    best, miss = result.best, result.nearest_miss
    if best is None and miss is not None:
        plan, forecast = miss
        kept = forecast.peak_bytes_by_category
        largest = max(kept, key=lambda category: kept[category])
        return [
            f"Nothing fits in {pretty_bytes(forecast.memory_bytes)}. Nearest: {plan}",
            f"It needs {pretty_bytes(forecast.peak_bytes)}, {missing_words(miss)}; most of it {largest} "
            f"({pretty_bytes(kept[largest])}). It would take {pretty_seconds(forecast.step_seconds)} a step.",
        ]
    if best is not None:
        lines = [f"bottleneck: {best.forecast.bottleneck}", f"proof: {gap_words(result)}"]
        if (second := runner_up(result)) is not None:
            lines.append(f"runner-up: {_slower(second, best)} with {'; '.join(differences(best.plan, second.plan))}")
        if (unfit := faster_unfit(result)) is not None:
            gain = 1 - unfit.seconds_to_target / best.seconds_to_target
            changes = "; ".join(differences(best.plan, unfit.plan))
            lines.append(f"faster but too large: {percent(gain)} faster with {changes}; {missing_words(unfit)}")
        # What the winner's techniques are worth, and what the others would cost.
        for is_used, words in ((True, "without"), (False, "with")):
            chosen = [each for each in result.alternatives if each.is_used is is_used]
            worths = [f"{each.technique} {_worth(each, best)}" for each in chosen]
            lines += [f"{words}: {', '.join(worths)}"] if worths else []
        return [*lines, *explain_groups(result, cluster)]
    lines = [f"No plan uses all {cluster.num_devices} devices of {cluster.name} for this batch."]
    lines += [f"{count} x {reason}" for reason, count in result.rejected.items()]
    return [*lines, "Try a batch with more divisors, another number of devices, or fewer pins and bans."]


def runner_up(result: SearchResult) -> ScoredPlan | None:
    """The fastest plan after the best."""
    return next((scored for scored in result.ranked if result.best and scored.plan != result.best.plan), None)


def differences(plan: Plan, other: Plan) -> tuple[str, ...]:
    """What changes from one to the other; the order of other axes is another one, which goes without saying."""
    has_same_axes = set(plan.axis_order) == set(other.axis_order)
    return tuple(line for line in plan.diff(other) if has_same_axes or not line.startswith("axis_order"))


def gap_words(result: SearchResult) -> str:
    """What the certificate says."""
    count = f"{result.evaluated:,} plan{'s' if result.evaluated != 1 else ''}"
    if result.gap_fraction is None:
        return f"none for {count}"
    if result.gap_fraction == 0:
        return f"none of {count} is faster in the model's seconds"
    return f"none of {count} is more than {percent(result.gap_fraction)} faster in the model's seconds"


def faster_unfit(result: SearchResult) -> ScoredPlan | None:
    """The fastest plan that does not fit, where it would beat the best."""
    unfit = result.faster_unfit
    if unfit is None or result.best is None or unfit.seconds_to_target >= result.best.seconds_to_target:
        return None
    return unfit


def missing_bytes(scored: ScoredPlan) -> int:
    """What a plan that does not fit has too much; 0 where only the pieces between its tensors are too much."""
    return max(0, scored.forecast.peak_bytes - scored.forecast.memory_bytes)


def missing_words(scored: ScoredPlan) -> str:
    over = missing_bytes(scored)
    return f"{pretty_bytes(over)} of memory too much" if over else scored.forecast.missing_words


def _worth(alternative: Alternative, best: ScoredPlan) -> str:
    """What a search with the technique banned or pinned would find, or between which limits."""
    other, least = alternative.scored, alternative.least_seconds
    if least is None:
        return "nothing fits"
    if other is not None and alternative.is_settled:
        return _slower(other, best)
    low = least / best.seconds_to_target
    if other is None:
        return "not settled" if low < 1 + AS_FAST else f"at least {_times(low)} slower"
    high = f"at most {_slower(other, best)}"
    return high if low < 1 + AS_FAST else f"at least {_times(low)}, {high}"


def _slower(other: ScoredPlan, best: ScoredPlan) -> str:
    ratio = other.seconds_to_target / best.seconds_to_target
    return "as fast" if ratio < 1 + AS_FAST else f"{_times(ratio)} slower"


RESERVED_OVER = (
    *(0.399, 0.183, 0.156, 0.146, 0.137, 0.114, 0.052, 0.048, 0.037, 0.028, 0.024, 0.018, 0.017, 0.017),
    *(0.017, 0.012, 0.01, 0.01, 0.005, 0.005, 0.002),
)
ALLOCATED_OVER = (*(0.171, 0.141, 0.095, 0.024, 0.019, 0.018, 0.018, 0.016, 0.008, 0.003, 0.002, 0.001, 0.001),)
MEASURED = 35
"""Runs on an H200 (benchmarks/results/gpu_frozen_h200.json), and of those that took more than their forecast by how
much: what torch reserved, and what it had allocated."""


def running_out(forecast: Forecast, memory_bytes: int) -> tuple[float, float]:
    """The likelihood that a GPU of so much memory runs out, from and to: the share of measured runs that allocated, and
    that reserved, as much more than their forecast; half a run is added to none. What torch has reserved and does not
    use it gives back before it fails."""
    room = memory_bytes - forecast.peak_bytes_by_category.get("non_torch", 0)

    def share(errors: tuple[float, ...], size: int) -> float:
        return (sum(size * (1 + error) > room for error in errors) + 0.5) / (MEASURED + 1)

    low = share(ALLOCATED_OVER, forecast.peak_allocated_bytes)
    return low, max(low, share(RESERVED_OVER, forecast.peak_reserved_bytes))


def running_out_words(forecast: Forecast, memory_bytes: int) -> str:
    low, high = (f"{100 * each:.0f}" for each in running_out(forecast, memory_bytes))
    return f"likelihood of running out {low if low == high else f'{low} to {high}'} %, by {MEASURED} measured runs"


def headroom_warning(forecast: Forecast, headroom: float) -> str:
    """Where a plan fits, but with less free memory than a search would leave; else empty."""
    free = forecast.memory_bytes - forecast.peak_bytes - forecast.peak_reserved_bytes + forecast.peak_allocated_bytes
    if not forecast.fits or free >= forecast.memory_bytes * headroom / 100:
        return ""
    words = f"{pretty_bytes(max(0, free))} ({percent(max(0, free) / forecast.memory_bytes)}) of memory stay free"
    return f"warning: {words}, less than the headroom of {headroom:g} %: forecasts of memory err by more"


def _times(ratio: float) -> str:
    return percent(ratio - 1) if ratio < 2 else f"{ratio:.1f} x"


def percent(fraction: float) -> str:
    """`0.8 %`, `12 %`: two figures, or whole ones."""
    return f"{100 * fraction:.2g} %" if abs(fraction) < 0.1 else f"{100 * fraction:.0f} %"


def explain_groups(result: SearchResult, cluster: Cluster) -> list[str]:
    """For a mixed cluster: which groups the plan uses, and what other ways to use them would take."""
    if result.best is None or not cluster.merged().others:
        return []
    plan, predicted = result.best
    names = cluster.group_names
    used = plan.groups or tuple(range(len(names)))
    idle = [name for at, name in enumerate(names) if at not in used]
    lines = [f"Its ranks take {', then '.join(names[at] for at in used)}."]
    if idle:
        others = (each for other, each in result.ranked if set(other.groups or range(len(names))) > set(used))
        ratios = [each.step_seconds / predicted.step_seconds for each in others]
        worse = f"; with them a step takes {ratios[0]:.2f} x as long" if ratios else ""
        lines.append(f"It leaves {' and '.join(idle)} idle{worse}.")
    if len(set(plan.shares)) > 1:
        words = ", ".join(f"{len(list(run))} x {share}" for share, run in itertools.groupby(plan.shares))
        lines.append(f"Replicas run {words} microbatches of {plan.microbatch}, so that all end at about the same time.")
    lines.append("The gap is against devices that need no memory and send nothing, so it is wide.")
    return lines


SCALES = (8, 64, 512, 1 << 20)
"""Devices up to which a run is of one kind."""
_GENERATIONS = {"a100": r"a[18]00", "h100": r"g?h[128]00", "b200": r"g?b[23]00"}
"""GPUs by their names, as presets and torch have them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRun:
    """The run with the highest MFU of its kind; `benchmarks/published_best.py` makes the table."""

    family: str
    """dense or experts."""
    generation: str
    scale: int
    """One of `SCALES`."""
    dtype: str
    mfu: float
    """By our definition (`ModelFlops.published`), from the published step time or rate."""
    model: str
    devices: int
    source: str
    url: str
    row: str


def generation_of(cluster: Cluster) -> str:
    """`a100`, `h100` (H200 and H800 too) or `b200`; empty: none of them, or several."""
    name = f"{cluster.name} {cluster.sources.get('device', '')}".lower()
    if cluster.others:
        return ""
    return next((each for each, form in _GENERATIONS.items() if re.search(rf"(^|\W|\dx){form}\b", name)), "")


@cache
def published_runs() -> tuple[PublishedRun, ...]:
    text = Path(__file__).with_name("published_best.json").read_text(encoding="utf-8")
    return tuple(decode(PublishedRun, each, "published_best.json") for each in json.loads(text))


def beaten_run(profile: Profile, cluster: Cluster, best: ScoredPlan) -> PublishedRun | None:
    """The best published run of this kind, where the forecast is above it: a forecast to be careful with.

    What was reached on more devices counts too, as fewer have less to wait for; where nobody has published a run on so
    many, the largest there are count.
    """
    is_moe = any(param.used < 1 for layer in profile.layers for param in layer.params)
    dtype = "bf16" if best.forecast.dtype == "fp16" else best.forecast.dtype
    kind = ("experts" if is_moe else "dense", generation_of(cluster), dtype)
    same = [run for run in published_runs() if (run.family, run.generation, run.dtype) == kind]
    if not same or profile.counts != "tokens":
        return None
    scale = min(next(each for each in SCALES if best.plan.num_ranks <= each), max(run.scale for run in same))
    highest = max((run for run in same if run.scale >= scale), key=lambda run: run.mfu)
    return highest if best.forecast.mfu > highest.mfu else None
