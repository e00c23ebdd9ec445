"""The few numbers people ask of a plan, before it runs.

The interval of a step comes from rows that were measured: `intervals.json`, made by `python -m benchmarks.intervals`,
has for each domain (kind of device, number of nodes, kind of model) how far forecasts were off. Domains without such
rows have the widened interval of their neighbours, and say so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from meshwright.core.cluster import Cluster, Device
from meshwright.core.codec import encode
from meshwright.core.errors import MeshwrightError, Problem
from meshwright.core.placement import group_of_units
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.units import pretty_bytes
from meshwright.core.work import ADAM, Updating
from meshwright.simulator.allocator import Replayed, replay
from meshwright.simulator.mixed_groups import pipes_of, seen_from, slowest_pipe
from meshwright.simulator.pricing import Stage, Staged, cutter_of
from meshwright.simulator.stage_seconds import LAUNCH

COMPUTE = "compute"
"""What the model's own work is called among the origins."""
SCALES = ("one device", "one node", "up to 16 nodes", "up to 64 nodes", "more than 64 nodes")
OTHER_GPUS, PROBED_GPUS, CPUS, PROBED_CPUS = "other GPUs", "GPUs after mw probe", "CPUs", "CPUs after mw probe"


class Interval(NamedTuple):
    low: float
    """Times the forecast."""
    high: float
    basis: str
    """What it rests on, in words."""


class Domain(NamedTuple):
    """Whose forecasts are off alike."""

    devices: str
    scale: int
    """Place in `SCALES`."""
    models: str

    def __str__(self) -> str:
        return f"{self.models} on {self.devices}, {SCALES[self.scale]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """What a step of a plan will take: seconds with an interval, memory of the fullest rank, and where it goes."""

    step_seconds: float
    step_seconds_low: float
    step_seconds_high: float
    tokens_per_second: float
    mfu: float
    """`ModelFlops.published` a second over the dense peak of the dtype the plan computes in, all ranks."""
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
    missing_bytes_by_tier: Mapping[str, int] = field(default_factory=dict)
    """What such memory lacks for a rank."""
    counts: Literal["tokens", "samples"] = "tokens"
    """What `tokens_per_second` counts: samples where they have no sequence."""
    interval_basis: str = ""
    """What the interval rests on: how many measured runs of which domain."""
    needed_fraction: float = 0.0
    """As `mfu`, of `ModelFlops.needed`: how near the step is to what the devices could do."""
    dtype: str = ""
    """Whose peak they are shares of: what the plan computes in."""

    def mfu_at(self, tokens_per_second: float) -> float:
        """MFU at another rate of the same model on the same devices, such as a measured one."""
        return self.mfu * tokens_per_second / self.tokens_per_second

    @property
    def peak_allocated_bytes(self) -> int:
        """As torch counts."""
        return self.peak_bytes - self.peak_bytes_by_category.get("non_torch", 0)

    @property
    def missing_words(self) -> str:
        """What a plan that does not fit has too much of."""
        missing = {"": self.peak_bytes - self.memory_bytes, **self.missing_bytes_by_tier}
        words = [f"{pretty_bytes(size)} too much{f' on the {tier}' * bool(tier)}" for tier, size in missing.items()]
        return ", ".join(words[missing[""] <= 0 :]) or "too much in pieces"

    def encode_self(self) -> dict[str, Any]:
        """Other tiers are only told of where a plan uses them."""
        data = {each.name: encode(getattr(self, each.name)) for each in fields(self)}
        return {name: value for name, value in data.items() if value or not name.endswith("_bytes_by_tier")}


def forecast(
    profile: Profile, plan: Plan, cluster: Cluster, *, sequence: int, optimizer: Updating = ADAM, replays: bool = True
) -> Forecast:
    """`replays`: tensor by tensor through the allocator; without, reserved is what is allocated, in a tenth of the
    time."""
    here, pipes = pipes_of(profile, plan, cluster, sequence, optimizer)
    return forecast_of(pipes, profile, plan, here, sequence=sequence, replays=replays)


def forecast_of(
    pipes: list[Staged], profile: Profile, plan: Plan, cluster: Cluster, *, sequence: int, replays: bool = True
) -> Forecast:
    """`cluster`: the groups that the plan's ranks take."""
    # A step ends for all ranks at once: the gradient's norm, which clips the update, is global.
    step, slowest = slowest_pipe(pipes)
    step *= slowest_of(cluster, plan.num_ranks)
    units = group_of_units(plan, cluster) if cluster.others else (0,)
    seen = {group: seen_from(cluster, group) if cluster.others else cluster for group in set(units)}
    lying = [(pipe, *each) for pipe in pipes for each in zip(pipe.stages, pipe.groups, strict=True)]

    def room(each: tuple[Staged, Stage, int]) -> float:
        return seen[each[2]].device.memory_bytes - float(each[1].memory.peak_bytes())

    # Of each group the tightest rank is looked at tensor by tensor; all of them must fit.
    tightest: dict[int, tuple[Staged, Stage, int]] = {}
    for each in sorted(lying, key=room):
        tightest.setdefault(each[2], each)
    reserved = {
        group: reserved_by(stage, pipe, seen[group].device, replays=replays)
        for group, (pipe, stage, _) in tightest.items()
    }
    _, fullest, group = min(tightest.values(), key=room)
    place = seen[group]
    if not math.isfinite(step):
        what = f"a step of {plan} never ends: the device has no {slowest.compute_dtype} rate, or one near zero."
        raise MeshwrightError([Problem(where=place.name, what=what)])
    tokens, ranks_each = plan.batch * sequence, plan.num_ranks // len(units)
    role = "convolution" if any(op.role == "convolution" for each in profile.layers for op in each.ops) else ""
    peaks = {group: each.device.peak(slowest.compute_dtype, role) or 0.0 for group, each in seen.items()}
    peak_flops, flops = sum(peaks[unit] * ranks_each for unit in units), profile.model_flops(tokens, sequence)
    spent = _spent(slowest, step, place)
    causes, origins = _summed(spent, "cause"), _summed(spent, "origin")
    interval = interval_of(domain_of(profile, place, plan.num_ranks))
    if any(name.startswith("learned.") for name in cluster.sources):
        # Runs have shown how far each cause is off; parts of one are off together, causes each by themselves.
        off = math.hypot(*(getattr(place.errors, cause) * (seconds / step) for cause, seconds in causes.items()))
        interval = Interval(1 / (1 + off), 1 + off, "what runs on this machine leave open")
    words, most = max(_summed(spent, "words").items(), key=lambda item: item[1])
    tiers: dict[str, int] = {}
    missing: dict[str, int] = {}
    for _, stage, at in lying:
        for tier, size in stage.memory.tier_bytes().items():
            tiers[tier] = max(tiers.get(tier, 0), math.ceil(size))
            over = math.ceil(size - seen[at].tiers[tier].bytes_each)
            missing |= {tier: max(missing.get(tier, 0), over)} if over > 0 else {}
    return Forecast(
        step_seconds=step,
        step_seconds_low=step * interval.low,
        step_seconds_high=step * interval.high,
        tokens_per_second=tokens / step,
        mfu=flops.published / step / peak_flops,
        needed_fraction=flops.needed / step / peak_flops,
        peak_bytes=int(fullest.memory.peak_bytes()),
        peak_bytes_by_category=fullest.memory.by_category(),
        peak_reserved_bytes=reserved[group].reserved_bytes,
        bottleneck=f"{words}: {most / step:.0%} of the step".replace("%", " %"),
        fits=all(each.fits for each in reserved.values()) and not missing,
        memory_bytes=place.device.memory_bytes,
        seconds_by_origin={origin: seconds for origin, seconds in sorted(origins.items()) if seconds > 0},
        seconds_by_cause=causes,
        worst_stage=fullest.run.start,
        peak_bytes_by_tier=tiers,
        missing_bytes_by_tier=missing,
        counts=profile.counts,
        dtype=slowest.compute_dtype,
        interval_basis=interval.basis,
    )


def reserved_by(stage: Stage, staged: Staged, device: Device, *, replays: bool) -> Replayed:
    """What the allocator makes of a stage's tensors.

    Before it fails it gives back what it caches, so a plan fits if the replay ends within the memory: that it would
    like to reserve more is no reason to refuse it.
    """
    memory = stage.memory
    allocated, fits = int(memory.allocated_bytes()), bool(memory.peak_bytes() <= device.memory_bytes)
    if device.kind != "cuda" or not replays:  # others allocate as they are asked
        return Replayed(allocated_bytes=allocated, reserved_bytes=allocated, fits=fits)
    result = replay(memory, staged.timetable, stage.run.start, len(staged.unfolded), memory_bytes=device.memory_bytes)
    return replace(result, fits=result.fits and fits)


def slowest_of(cluster: Cluster, num_ranks: int) -> float:
    """Times a step of one rank that the slowest of many takes (the largest of n normal deviations)."""
    return 1 + cluster.jitter_fraction * math.sqrt(2 * math.log(num_ranks))


class _TimeShare(NamedTuple):
    origin: str
    words: str
    cause: str
    """Whose error it has: a field of `Errors`."""
    seconds: float


def _spent(staged: Staged, step_seconds: float, cluster: Cluster) -> list[_TimeShare]:
    """The slowest stage's step, part by part."""
    count = staged.plan.num_microbatches

    def busy_seconds(stage: Stage) -> float:
        return count * (stage.all_seconds.forward + stage.all_seconds.backward) + stage.tail_seconds

    slowest = max(staged.stages, key=busy_seconds)
    result: list[_TimeShare] = []
    for charge, seconds in slowest.cost.charges.items():
        total = float(seconds) * (1 if charge.part == "step" else count)
        origin = charge.origin or COMPUTE
        if charge.axis:
            link = "inner" if slowest.cost.roads[charge.axis].is_inner else "outer"
            name = slowest.cost.roads[charge.axis].name or getattr(cluster, link).name or f"the {link} link"
            result.append(_TimeShare(origin, f"{origin} collectives over {name}", link, total))
        elif charge.tier == "cpu":
            result.append(_TimeShare(origin, f"{origin} updates by cores of the host", "copy", total))
        elif charge.tier:
            result.append(_TimeShare(origin, f"{origin} copies to and from the {charge.tier}", "copy", total))
        elif origin == LAUNCH:
            result.append(_TimeShare(origin, "devices waiting for the host to launch", LAUNCH, total))
        else:
            result.append(_TimeShare(origin, origin, COMPUTE, total))
    idle = max(0.0, step_seconds - busy_seconds(slowest))
    cutter = cutter_of(staged.plan)
    waiting = (cutter.name, f"{cutter.name}, stages waiting") if cutter is not None else ("jitter", "the slowest rank")
    return [*result, _TimeShare(*waiting, "idle", idle)]


def _summed(spent: list[_TimeShare], name: Literal["origin", "words", "cause"]) -> dict[str, float]:
    """Seconds by what each part says of itself."""
    totals: dict[str, float] = {}
    for each in spent:
        key = getattr(each, name)
        totals[key] = totals.get(key, 0.0) + each.seconds
    return totals


@cache
def interval_table() -> dict[str, Any]:
    """`devices`: kinds by a word in a cluster's name; `domains`: intervals by `str(Domain)`."""
    return json.loads((Path(__file__).parent / "intervals.json").read_text(encoding="utf-8"))


def domain_of(profile: Profile, cluster: Cluster, num_ranks: int) -> Domain:
    is_probed, kinds = "measured" in cluster.sources, interval_table()["devices"]
    devices = kinds.get(max((word for word in kinds if word in cluster.name), key=len, default=""), OTHER_GPUS)
    if cluster.device.kind == "cpu":
        devices = PROBED_CPUS if is_probed else CPUS
    elif is_probed:
        devices = PROBED_GPUS
    nodes = math.ceil(num_ranks / cluster.devices_per_node)
    scale = 0 if num_ranks == 1 else 1 if nodes == 1 else 2 if nodes <= 16 else 3 if nodes <= 64 else 4
    ops = [op for layer in profile.layers for op in layer.ops]
    causal = [max(op.flops.bss, op.flops.bs) > 0 and not op.sees_all for op in ops if op.kind == "attention"]
    models = "decoders" if causal and all(causal) else "other models"
    return Domain(devices, scale, "experts" if any(op.role == "experts" for op in ops) else models)


def interval_of(domain: Domain) -> Interval:
    entry = interval_table()["domains"][str(domain)]
    basis = f"{entry['measured']} measured runs of {domain}"
    if not entry["measured"]:
        basis = f"nothing measured by anybody of {domain}: from {entry['from']}, widened"
    return Interval(entry["low"], entry["high"], basis)
