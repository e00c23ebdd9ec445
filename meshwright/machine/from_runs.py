"""A cluster as runs on it have shown it to be: the probed one, corrected by what forecasts were off by. No torch.

A forecast says how much of a step it owes to compute, to launching, to links (`seconds_by_cause`). One factor for each
cause is sought that brings all runs closest: least squares of logarithms, far-off runs counting less (a machine that
was busy with other things), factors held near 1 where the runs do not tell them apart. Waiting for other stages is as
long as their compute makes it.

    measured step  =  sum over causes of  factor(cause) x seconds(cause)

Of one run causes are told apart by what its profiled steps were busy with, as far as that goes; the rest of what it was
off by is shared out by how wide each cause's error bar is and how much of the step it has. The bars shrink to what the
run leaves open (`learn_one`, a Gaussian update).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwright.core.cluster import MOST_OF_PEAK, Cluster
from meshwright.core.errors import error_at
from meshwright.core.ledger import NOT_KNOWN, Entry
from meshwright.core.units import counted

LEAST_RUNS = 3
LEAST_SHARE = 0.02
"""Of some run's step that a cause must have to be learned of."""
FASTEST = 1.25
"""Times the probed rate that a learned one may be: a probe is not off by more, so the runs must be."""
SLOWEST = 10.0
FAR_OFF = 1.1
"""Times that a typical run may be off although rates were learned as far as they go."""
CONTRADICTION = 3.0
"""Times that a run may differ from the forecast of a measured machine: beyond, one of the two was disturbed."""
_PRIOR = 0.5
"""How far from 1 (its logarithm) a factor is expected to be before any run is seen."""
_NOISE = 0.05
"""By which one run's median scatters at least: what the prior is weighed against."""
_PROFILED_NOISE = 0.2
"""By which a part of a step scatters that the profiler has looked at: it slows some things more than others."""
_PARTS = {"compute": ("compute", "launch"), "collective": ("inner", "outer")}
"""What of a profiled step is which cause's."""
_SMALLEST_ERROR = 0.02
_LEARNED = "learned from {runs}: {factor:.3f} times as long as probed"
_FACTOR = re.compile(r"(\d+\.\d+) times as long as probed")
_MESSAGE_BYTES = 1 << 20
"""By which two links are compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnedCluster:
    cluster: Cluster
    factors: Mapping[str, float]
    """Cause -> times as long as the newest run's cluster says."""
    num_runs: int
    error_before: float
    """Median distance of forecasts from measured steps, as a fraction."""
    error_after: float


def learn(entries: Sequence[Entry], machine: str, base: Cluster | None = None) -> LearnedCluster:
    """From the runs of this machine. `base` is the cluster that is corrected; without one, that of the newest run."""
    own = sorted((entry for entry in entries if entry.machine == machine), key=lambda entry: entry.unix_seconds)
    kinds = {entry.cluster.device.kind for entry in own[-1:]}
    own = [entry for entry in own if entry.cluster.device.kind in kinds]
    if len(own) < LEAST_RUNS:
        elsewhere = len(entries) - len(own)
        what = f"has {len(own)} runs of this machine ({machine}), {elsewhere} of others; {LEAST_RUNS} are needed."
        fix = f"Train {LEAST_RUNS - len(own)} more, for at least ten steps each; or probe without --from-runs."
        raise error_at("the ledger", what, fix)
    base = base or own[-1].cluster
    causes = _causes(own)
    parts = np.array([_converted(entry, base, causes) for entry in own])
    measured = np.array([_own_seconds(entry) for entry in own])
    # Gauss-Newton on logarithms, between limits; runs are weighed by their distance (Huber's weights).
    lowest, highest = np.log(np.array([_limits(base, cause) for cause in causes])).T
    logs = np.zeros(parts.shape[1])
    for _ in range(50):
        left = np.log(measured / (parts * np.exp(logs)).sum(axis=1))
        scale = max(_NOISE, 1.4826 * float(np.median(np.abs(left - np.median(left)))))
        weights = 1.0 / np.maximum(1.0, np.abs(left - np.median(left)) / (1.5 * scale))
        step = np.linalg.solve(*_equations(parts, measured, weights / scale**2, np.full(len(logs), _PRIOR), logs))
        last, logs = logs, np.clip(logs + np.clip(step, -0.5, 0.5), lowest, highest)
        if float(np.abs(logs - last).max()) < 1e-9:
            break
    factors = np.exp(logs)
    _refuse_unphysical(base, parts, factors, measured)
    before, after = _off(parts.sum(axis=1), measured), _off(parts @ factors, measured)
    if np.median(after) > np.median(before):  # never worse on its own runs
        factors, after = np.ones(len(causes)), before
    by_cause = dict(zip(causes, map(float, factors), strict=True))
    # All error bars widen or narrow alike, so that nine of ten of these runs lie inside, more where they are few.
    terms = parts * factors
    total = terms.sum(axis=1)
    widths = np.array([getattr(base.errors, cause) for cause in causes])
    expected = np.sqrt(((widths * terms / total[:, None]) ** 2).sum(axis=1))
    off = np.expm1(_off(total, measured)) / expected
    count = len(own)
    spare = max(count - len(causes), 1)  # runs that the factors did not use up
    # A few runs that agree by chance prove little.
    scale = max(float(np.quantile(off, 0.9)) * math.sqrt(count / spare), 1 / math.sqrt(count))
    bars = {cause: _width(scale * getattr(base.errors, cause)) for cause in (*causes, "idle")}
    return _learned(base, own, by_cause, bars, float(np.median(before)), float(np.median(after)))


def learn_one(entry: Entry, base: Cluster) -> LearnedCluster:
    """From one run on such devices, whoever's machine it was."""
    causes = _causes([entry])
    parts, measured = np.array([_converted(entry, base, causes)]), np.array([_own_seconds(entry)])
    widths = np.array([max(getattr(base.errors, cause), _SMALLEST_ERROR) for cause in causes])
    fastest = FASTEST if "measured" in base.sources else SLOWEST
    limits = np.array([_limits(base, cause, fastest) for cause in causes])
    # (seconds by cause, what was measured of them, how far that may be off): the step, and its parts as profiled.
    steps, seconds = entry.measured, _own_seconds(entry)
    scatter = (steps.step_seconds_p90 - steps.step_seconds_p10) / (2 * steps.step_seconds)
    seen = [(parts[0], seconds, max(_NOISE, scatter))]
    for name, those in _PARTS.items():
        mine, profiled = np.where(np.isin(causes, those), parts[0], 0.0), steps.seconds_by_part.get(name, 0.0)
        if mine.sum() >= LEAST_SHARE * parts[0].sum() and profiled >= LEAST_SHARE * seconds:
            seen.append((mine, profiled, _PROFILED_NOISE))
    # Gauss-Newton on logarithms.
    rows, targets, noises = (np.array(column) for column in zip(*seen, strict=True))
    lowest, highest = np.log(limits).T
    shares = rows[0] / rows[0].sum()
    # A run far outside its interval says that bars were too narrow.
    surprise = abs(math.log(targets[0] / rows[0].sum())) / float(np.hypot.reduce(widths * shares))
    priors = widths * max(1.0, surprise)
    logs = np.zeros(len(widths))
    for _ in range(100):
        normal, wanted = _equations(rows, targets, 1 / noises**2, priors, logs)
        # What a limit holds back, the others take.
        free = ~(((logs <= lowest) & (wanted < 0)) | ((logs >= highest) & (wanted > 0)))
        step = np.zeros(len(logs))
        step[free] = np.linalg.solve(normal[np.ix_(free, free)], wanted[free])
        logs = np.clip(logs + np.clip(step, -0.2, 0.2), lowest, highest)
    factors, left_open = np.exp(logs), np.sqrt(np.diag(np.linalg.inv(normal)))
    _refuse_unphysical(base, parts, factors, measured, fastest)
    before, after = (float(_off(parts @ each, measured)[0]) for each in (np.ones(len(causes)), factors))
    reach = float(np.hypot.reduce(left_open * (parts * factors)[0] / (parts @ factors)[0]))
    # Never wider than before, unless the run itself would lie outside.
    left_open = np.minimum(left_open, widths) * max(1.0, 1.01 * math.expm1(after) / reach)
    by_cause = dict(zip(causes, map(float, factors), strict=True))
    bars = dict(zip(causes, map(_width, left_open), strict=True))
    return _learned(base, [entry], by_cause, bars, before, after)


def _equations(
    rows: np.ndarray, targets: np.ndarray, weights: np.ndarray, priors: np.ndarray, logs: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(matrix, right side) of a step of Gauss-Newton on logarithms. `rows`: seconds by cause of what took `targets`."""
    terms = rows * np.exp(logs)
    totals = terms.sum(axis=1)
    slopes = terms / totals[:, None]
    weighted = slopes * weights[:, None]
    return slopes.T @ weighted + np.diag(1 / priors**2), weighted.T @ np.log(targets / totals) - logs / priors**2


def _own_seconds(entry: Entry) -> float:
    """A step without waiting for data, which is not the machine's."""
    return entry.measured.step_seconds - entry.measured.data_seconds


def _causes(own: Sequence[Entry]) -> list[str]:
    """Those that some run has a part of to speak of; compute always."""
    shares: dict[str, float] = {"compute": 1.0}
    for entry in own:
        for cause, seconds in entry.predicted.seconds_by_cause.items():
            shares[cause] = max(shares.get(cause, 0.0), seconds / entry.predicted.step_seconds)
    return [name for name in ("compute", "launch", "inner", "outer") if shares.get(name, 0.0) >= LEAST_SHARE]


def _converted(entry: Entry, base: Cluster, causes: Sequence[str]) -> list[float]:
    """Seconds of each cause as `base` would have forecast them: runs were planned with probes that scatter."""
    known = entry.predicted.seconds_by_cause
    seconds = {cause: known.get(cause, 0.0) for cause in causes}
    # What is left has no rate of its own, and follows compute: waiting, and causes too small to learn of.
    others = sum(seconds[cause] for cause in causes if cause != "compute")
    seconds["compute"] = max(entry.predicted.step_seconds - others, 1e-3 * entry.predicted.step_seconds)
    return [seconds[cause] * _unit(base, cause) / _unit(entry.cluster, cause) for cause in causes]


def _unit(cluster: Cluster, cause: str) -> float:
    """Seconds of something that only this cause decides."""
    device = cluster.device
    if cause == "compute":
        return 1.0 / (device.flops_per_second["fp32"] * device.matmul_fraction)
    if cause == "launch":
        return max(device.launch_seconds, 1e-9)
    link = cluster.inner if cause == "inner" else cluster.outer
    return link.latency_seconds + (_MESSAGE_BYTES + link.half_bytes) / link.bytes_per_second


def _off(forecast: np.ndarray, measured: np.ndarray) -> np.ndarray:
    return np.abs(np.log(forecast / measured))


def _width(error: float) -> float:
    return float(min(max(error, _SMALLEST_ERROR), 2.0))


def _limits(base: Cluster, cause: str, fastest: float = FASTEST) -> tuple[float, float]:
    """(lowest, highest) factor: learned rates stay near the probed ones and below the data sheet's."""
    earlier = _earlier(base, cause)
    lowest = min(1.0, 1 / fastest / earlier)
    if cause == "compute" and base.device.kind != "cpu":  # whose peak is the data sheet's; a CPU's is what was probed
        lowest = min(1.0, max(lowest, base.device.matmul_fraction, base.device.bandwidth_fraction))
    return lowest, max(1.0, SLOWEST / earlier)


def _refuse_unphysical(
    base: Cluster, parts: np.ndarray, factors: np.ndarray, measured: np.ndarray, fastest: float = FASTEST
) -> None:
    """Where no rates that a machine can have explain the runs, or they contradict the measured ones."""
    ratio, off = (float(np.median(measured / each)) for each in (parts @ factors, parts.sum(axis=1)))
    limit = f"{fastest:g} times as fast as probed (or as its data sheet)" if ratio < 1 else f"{SLOWEST:g} times slower"
    what = f"a typical run took {ratio:.2f} times as long as on a machine {limit}: no rates explain these runs."
    if contradicts(base, off):
        what = (
            f"a typical run took {off:.2f} times as long as by the rates that were measured of {base.name}: the probe "
        )
        what += "and the runs contradict each other, and neither is corrected by the other."
    elif 1 / FAR_OFF <= ratio <= FAR_OFF:
        return
    fix = "Probe again on a quiet machine, and learn from runs that were planned with that."
    raise error_at("the ledger", what, fix)


def contradicts(cluster: Cluster, ratio: float) -> bool:
    """Whether a run of so many times its forecast contradicts what was measured of the machine."""
    return "measured" in cluster.sources and not 1 / CONTRADICTION < ratio < CONTRADICTION


def _earlier(base: Cluster, cause: str) -> float:
    """What was learned of it before: limits are about the probe, however often one learns."""
    match = _FACTOR.search(base.sources.get(f"learned.{cause}", ""))
    return float(match.group(1)) if match else 1.0


def _learned(
    base: Cluster, own: Sequence[Entry], factors: Mapping[str, float], bars: Mapping[str, float], *off: float
) -> LearnedCluster:
    """The cluster corrected. `off`: by which logarithm a typical run's forecast was off, and is now."""
    device, compute = base.device, factors.get("compute", 1.0)
    # On a CPU the host's part of an op is part of its compute.
    launch = compute if device.kind == "cpu" else factors.get("launch", 1.0)
    device = replace(
        device, kernel_seconds=device.kernel_seconds * compute, launch_seconds=device.launch_seconds * launch
    )
    if device.kind == "cpu" and device.matmul_fraction / compute > MOST_OF_PEAK:  # whose peak is no data sheet's
        rates = {dtype: rate / compute for dtype, rate in device.flops_per_second.items()}
        rate = device.memory_bytes_per_second / compute
        device = replace(device, flops_per_second=rates, memory_bytes_per_second=rate)
    else:
        names = ("matmul_fraction", "attention_fraction", "attention_backward_fraction", "bandwidth_fraction")
        device = replace(device, **{name: min(getattr(device, name) / compute, MOST_OF_PEAK) for name in names})
    sources = dict(base.sources)
    # What a rank's process holds beside what is forecast, on a CPU, where all of it is seen.
    known = [entry for entry in own if entry.comparison.get("memory_verdict") != NOT_KNOWN]
    if device.kind == "cpu" and known:
        missed = [entry.measured.peak_bytes - entry.predicted.peak_bytes for entry in known]
        held = [entry.cluster.device.reserved_bytes + more for entry, more in zip(known, missed, strict=True)]
        reserved = int(np.median(held))
        if 0 < reserved < device.memory_bytes:
            device = replace(device, reserved_bytes=reserved)
            sources["reserved_bytes"] = f"learned from {counted(len(known), 'run')}"
    versions = sorted({entry.versions.get("torch", "unknown") for entry in own})
    for cause, factor in factors.items():
        text = _LEARNED.format(runs=counted(len(own), "run"), factor=factor * _earlier(base, cause))
        sources[f"learned.{cause}"] = f"{text} (torch {', '.join(versions)})"
    links: dict[str, Any] = {}
    for name, link in (("inner", base.inner), ("outer", base.outer)):
        rate, latency = link.bytes_per_second, link.latency_seconds
        factor = factors.get(name, 1.0)
        links[name] = replace(link, bytes_per_second=rate / factor, latency_seconds=latency * factor)
    return LearnedCluster(
        cluster=replace(base, device=device, **links, sources=sources, errors=replace(base.errors, **bars)),
        factors=factors,
        num_runs=len(own),
        error_before=math.expm1(off[0]),
        error_after=math.expm1(off[1]),
    )
