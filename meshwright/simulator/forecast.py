"""The few numbers people ask of a plan, before it runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

from meshwright.core.cluster import Cluster, Device
from meshwright.core.codec import encode
from meshwright.core.errors import MeshwrightError, Problem
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.work import ADAM, Updating
from meshwright.simulator.allocator import Replayed, replay
from meshwright.simulator.makespan import makespan
from meshwright.simulator.pricing import Stage, Staged, cutter_of, stage_plan
from meshwright.simulator.stage_seconds import LAUNCH

COMPUTE = "compute"
"""What the model's own work is called among the origins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """What a step of a plan will take: seconds with an interval, memory of the fullest rank, and where it goes."""

    step_seconds: float
    step_seconds_low: float
    step_seconds_high: float
    tokens_per_second: float
    mfu: float
    """(6 N + 12 L d s) x tokens/s over the dense peak of the dtype the plan computes in, all ranks."""
    peak_bytes: int
    """Of the fullest rank: what torch has allocated, and what it does not know of (`non_torch`)."""
    peak_bytes_by_category: Mapping[str, int]
    peak_reserved_bytes: int
    """What torch's allocator has reserved on the fullest rank, most of it allocated, the rest in pieces between."""
    bottleneck: str
    fits: bool
    memory_bytes: int
    """What a device has."""
    seconds_by_origin: Mapping[str, float]
    """How the slowest stage's step is spent, by technique; adds up to step_seconds."""
    seconds_by_cause: Mapping[str, float]
    """The same by whose error it has, a field of `Errors`: what runs teach about a machine."""
    worst_stage: int
    """The stage with the fullest rank."""
    peak_bytes_by_tier: Mapping[str, int] = field(default_factory=dict)
    """Of the fullest rank, in memory other than its device's."""
    counts: Literal["tokens", "samples"] = "tokens"
    """What `tokens_per_second` counts: samples where they have no sequence."""

    @property
    def peak_allocated_bytes(self) -> int:
        """As torch counts."""
        return self.peak_bytes - self.peak_bytes_by_category.get("non_torch", 0)

    def encode_self(self) -> dict[str, Any]:
        """Other tiers are only told of where a plan uses them."""
        data = {each.name: encode(getattr(self, each.name)) for each in fields(self)}
        return {name: value for name, value in data.items() if value or name != "peak_bytes_by_tier"}


def forecast(
    profile: Profile, plan: Plan, cluster: Cluster, *, sequence: int, optimizer: Updating = ADAM, replays: bool = True
) -> Forecast:
    """`replays`: tensor by tensor through the allocator; without, reserved is what is allocated, in a tenth of the
    time."""
    if cluster.others:
        from meshwright.simulator.mixed_groups import forecast_mixed

        return forecast_mixed(profile, plan, cluster, sequence=sequence, optimizer=optimizer, replays=replays)
    staged = stage_plan(profile, plan, cluster, sequence=sequence, optimizer=optimizer)
    return forecast_of(staged, profile, plan, cluster, sequence=sequence, replays=replays)


def forecast_of(
    staged: Staged, profile: Profile, plan: Plan, cluster: Cluster, *, sequence: int, replays: bool = True
) -> Forecast:
    count = plan.num_microbatches
    # A step ends for all ranks at once: the gradient's norm, which clips the update, is global.
    tail_seconds = max(stage.tail_seconds for stage in staged.stages)
    step = float(makespan(staged.timetable, *staged.columns, staged.send_seconds, count)) + tail_seconds
    fullest = max(staged.stages, key=lambda stage: float(stage.memory.peak_bytes()))
    return told(
        staged,
        profile,
        plan,
        cluster,
        sequence=sequence,
        step=step * slowest_of(cluster, plan.num_ranks),
        fullest=fullest,
        reserved=reserved_by(fullest, staged, cluster, replays=replays),
        lying=[(stage, cluster) for stage in staged.stages],
        devices=((cluster.device, plan.num_ranks),),
    )


def told(
    staged: Staged,
    profile: Profile,
    plan: Plan,
    cluster: Cluster,
    *,
    sequence: int,
    step: float,
    fullest: Stage,
    reserved: Replayed,
    lying: Sequence[tuple[Stage, Cluster]],
    devices: Sequence[tuple[Device, int]],
) -> Forecast:
    """What was simulated, as people ask for it. `cluster` has the device of the fullest stage; `lying`: every stage, on
    the cluster as its ranks see it; `devices`: of how many ranks each."""
    if not math.isfinite(step):
        what = f"a step of {plan} never ends: the device has no {staged.compute_dtype} rate, or one near zero."
        raise MeshwrightError([Problem(where=cluster.name, what=what)])
    tokens = plan.batch * sequence
    peak_flops = sum((device.peak(staged.compute_dtype) or 0.0) * ranks for device, ranks in devices)
    spent = _spent(staged, plan, step, cluster)
    causes, origins = _summed(spent, "cause"), _summed(spent, "origin")
    # Parts of one cause are off together, causes each by themselves.
    off = math.hypot(*(getattr(cluster.errors, cause) * (seconds / step) for cause, seconds in causes.items()))
    words, most = max(_summed(spent, "words").items(), key=lambda item: item[1])
    tiers: dict[str, int] = {}
    for stage, _ in lying:
        for tier, size in stage.memory.tier_bytes().items():
            tiers[tier] = max(tiers.get(tier, 0), math.ceil(size))
    return Forecast(
        step_seconds=step,
        step_seconds_low=step / (1 + off),
        step_seconds_high=step * (1 + off),
        tokens_per_second=tokens / step,
        mfu=profile.model_flops(tokens, sequence) / step / peak_flops,
        peak_bytes=int(fullest.memory.peak_bytes()),
        peak_bytes_by_category=fullest.memory.by_category(),
        peak_reserved_bytes=reserved.reserved_bytes,
        bottleneck=f"{words}: {most / step:.0%} of the step".replace("%", " %"),
        fits=reserved.fits and not any(stage.memory.overflows(place) for stage, place in lying),
        memory_bytes=cluster.device.memory_bytes,
        seconds_by_origin={origin: seconds for origin, seconds in sorted(origins.items()) if seconds > 0},
        seconds_by_cause=causes,
        worst_stage=fullest.run.start,
        peak_bytes_by_tier=tiers,
        counts=profile.counts,
    )


def reserved_by(stage: Stage, staged: Staged, cluster: Cluster, *, replays: bool = True) -> Replayed:
    """What the allocator makes of a stage's tensors.

    Before it fails it gives back what it caches, so a plan fits if the replay ends within the memory: that it would
    like to reserve more is no reason to refuse it.
    """
    memory, device = stage.memory, cluster.device
    allocated, fits = int(memory.allocated_bytes()), bool(memory.peak_bytes() <= device.memory_bytes)
    if device.kind != "cuda" or not replays:  # others allocate as they are asked
        return Replayed(allocated_bytes=allocated, reserved_bytes=allocated, fits=fits)
    found = replay(memory, staged.timetable, stage.run.start, len(staged.unfolded), memory_bytes=device.memory_bytes)
    return replace(found, fits=found.fits and fits)


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
            name = slowest.cost.roads[charge.axis].name or getattr(cluster, link).name or f"the {link} link"
            found.append(_Spent(origin, f"{origin} collectives over {name}", link, total))
        elif charge.tier:
            found.append(_Spent(origin, f"{origin} copies to and from the {charge.tier}", "copy", total))
        elif origin == LAUNCH:
            found.append(_Spent(origin, "devices waiting for the host to launch", LAUNCH, total))
        else:
            found.append(_Spent(origin, origin, COMPUTE, total))
    idle = max(0.0, step_seconds - busy_seconds(slowest))
    cutter = cutter_of(plan)
    waiting = (cutter.name, f"{cutter.name}, stages waiting") if cutter is not None else ("jitter", "the slowest rank")
    return [*found, _Spent(*waiting, "idle", idle)]


def _summed(spent: list[_Spent], name: Literal["origin", "words", "cause"]) -> dict[str, float]:
    """Seconds by what each part says of itself."""
    totals: dict[str, float] = {}
    for each in spent:
        key = getattr(each, name)
        totals[key] = totals.get(key, 0.0) + each.seconds
    return totals
