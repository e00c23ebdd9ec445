"""The few numbers people ask of a plan, before it runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from meshwright.core.cluster import Cluster
from meshwright.core.errors import MeshwrightError, Problem
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.work import ADAM, Updating
from meshwright.simulate.cost import LAUNCH
from meshwright.simulate.makespan import makespan
from meshwright.simulate.stage import Stage, Staged, cutter_of, stage_plan

COMPUTE = "compute"
"""What the model's own work is called among the origins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    step_seconds: float
    step_seconds_low: float
    step_seconds_high: float
    tokens_per_second: float
    mfu: float
    """(6 N + 12 L d s) x tokens/s over the dense peak of the dtype the plan computes in, all ranks."""
    peak_bytes: int
    """Of the fullest rank, what is reserved included."""
    peak_bytes_by_category: Mapping[str, int]
    bottleneck: str
    fits: bool
    memory_bytes: int
    """What a device has."""
    seconds_by_origin: Mapping[str, float]
    """How the slowest stage's step is spent, by technique; adds up to step_seconds."""
    worst_stage: int
    """The stage with the fullest rank."""
    counts: Literal["tokens", "samples"] = "tokens"
    """What `tokens_per_second` counts: samples where they have no sequence."""


def forecast(profile: Profile, plan: Plan, cluster: Cluster, *, sequence: int, optimizer: Updating = ADAM) -> Forecast:
    staged = stage_plan(profile, plan, cluster, sequence=sequence, optimizer=optimizer)
    return forecast_of(staged, profile, plan, cluster, sequence=sequence)


def forecast_of(staged: Staged, profile: Profile, plan: Plan, cluster: Cluster, *, sequence: int) -> Forecast:
    count = plan.num_microbatches
    # A step ends for all ranks at once: the gradient's norm, which clips the update, is global.
    tail_seconds = max(stage.tail_seconds for stage in staged.stages)
    step = float(makespan(staged.timetable, *staged.columns, staged.send_seconds, count)) + tail_seconds
    step *= slowest_of(cluster, plan.num_ranks)
    if not math.isfinite(step):
        what = f"a step of {plan} never ends: the device has no {staged.compute_dtype} rate, or one near zero."
        raise MeshwrightError([Problem(where=cluster.name, what=what)])
    tokens = plan.batch * sequence
    peak_flops = cluster.device.flops_per_second[staged.compute_dtype] * plan.num_ranks
    spent = _spent(staged, plan, step, cluster)
    off = _error_fraction(spent, step, cluster)
    fullest = max(staged.stages, key=lambda stage: float(stage.memory.peak_bytes()))
    peak_bytes = int(fullest.memory.peak_bytes())
    return Forecast(
        step_seconds=step,
        step_seconds_low=step / (1 + off),
        step_seconds_high=step * (1 + off),
        tokens_per_second=tokens / step,
        mfu=profile.model_flops(tokens, sequence) / step / peak_flops,
        peak_bytes=peak_bytes,
        peak_bytes_by_category=fullest.memory.by_category(),
        bottleneck=_bottleneck(spent, step),
        fits=peak_bytes <= cluster.device.memory_bytes,
        memory_bytes=cluster.device.memory_bytes,
        seconds_by_origin=_by_origin(spent),
        worst_stage=fullest.run.start,
        counts=profile.counts,
    )


def slowest_of(cluster: Cluster, num_ranks: int) -> float:
    """Times a step of one rank that the slowest of many takes (the largest of n normal deviations)."""
    return 1 + cluster.jitter_fraction * math.sqrt(2 * math.log(num_ranks))


class _Spent(NamedTuple):
    origin: str
    words: str
    cause: str
    """Whose error it has: a field of `Errors`."""
    seconds: float


def _spent(staged: Staged, plan: Plan, step_seconds: float, cluster: Cluster) -> list[_Spent]:
    """The slowest stage's step, part by part."""
    count = plan.num_microbatches

    def busy_seconds(stage: Stage) -> float:
        return count * (stage.all_seconds.forward + stage.all_seconds.backward) + stage.tail_seconds

    slowest = max(staged.stages, key=busy_seconds)
    found: list[_Spent] = []
    for charge, seconds in slowest.cost.charges.items():
        total = float(seconds) * (1 if charge.part == "step" else count)
        origin = charge.origin or COMPUTE
        if charge.axis:
            link = "inner" if slowest.cost.roads[charge.axis].is_inner else "outer"
            name = getattr(cluster, link).name or f"the {link} link"
            found.append(_Spent(origin, f"{origin} collectives over {name}", link, total))
        elif origin == LAUNCH:
            found.append(_Spent(origin, "devices waiting for the host to launch", LAUNCH, total))
        else:
            found.append(_Spent(origin, origin, COMPUTE, total))
    idle = max(0.0, step_seconds - busy_seconds(slowest))
    cutter = cutter_of(plan)
    waiting = (cutter.name, f"{cutter.name}, stages waiting") if cutter is not None else ("jitter", "the slowest rank")
    return [*found, _Spent(*waiting, "idle", idle)]


def _error_fraction(spent: list[_Spent], step_seconds: float, cluster: Cluster) -> float:
    """Parts of one cause are off together, causes each by themselves."""
    by_cause: dict[str, float] = {}
    for each in spent:
        by_cause[each.cause] = by_cause.get(each.cause, 0.0) + each.seconds
    return math.hypot(*(getattr(cluster.errors, cause) * s / step_seconds for cause, s in by_cause.items()))


def _by_origin(spent: list[_Spent]) -> dict[str, float]:
    found: dict[str, float] = {}
    for each in spent:
        found[each.origin] = found.get(each.origin, 0.0) + each.seconds
    return {origin: seconds for origin, seconds in sorted(found.items()) if seconds > 0}


def _bottleneck(spent: list[_Spent], step_seconds: float) -> str:
    """The largest part, in words."""
    said: dict[str, float] = {}
    for each in spent:
        said[each.words] = said.get(each.words, 0.0) + each.seconds
    words, most = max(said.items(), key=lambda item: item[1])
    share = f"{most / step_seconds:.0%}".replace("%", " %")
    return f"{words}: {share} of the step"
