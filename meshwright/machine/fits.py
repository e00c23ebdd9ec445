"""From timings to the numbers of a Device and of a Link: asymptotes, ramps, and how far single points lie from them.

Of a collective: seconds = latency + (bus bytes + half bytes) / (rate x fraction). Bus bytes are
what a rank passes on: 2 (n - 1) / n of the message in an all_reduce, (n - 1) / n where it is only gathered, scattered
or swapped, all of it in a send (nccl-tests, PERFORMANCE.md). So one rate serves every kind, and each has a fraction of
it. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from meshwright.core.cluster import Device, Link
from meshwright.core.errors import MeshwrightError, Problem
from meshwright.core.work import Compute
from meshwright.simulator.stage_seconds import LARGE_HEAD, SMALL_HEAD, compute_seconds

Points = Sequence[tuple[float, float]]
"""(message bytes, seconds)."""

# Outside these a fit is not physics: the fastest link sold moves 0.9 TB/s, the slowest we plan for 100 kB/s.
_SLOWEST_BYTES_PER_SECOND = 1e5
_FASTEST_BYTES_PER_SECOND = 1e13
_LEAST_SECONDS = 1e-9


def bus_bytes(kind: str, num_bytes: float, num_devices: int) -> float:
    if kind == "send":
        return num_bytes
    return num_bytes * (2.0 if kind == "all_reduce" else 1.0) * (num_devices - 1) / num_devices


def fit_links(
    kinds: Mapping[str, Points], num_devices: int, *, shared: bool, sheet_bytes_per_second: float = 0.0
) -> Link:
    """Least squares on relative errors, no term below zero.

    Relative, because absolute errors would let the largest message set the latency. Fractions are of the data sheet's
    rate where there is one, else of the fastest kind's.
    """
    problems = []
    for kind, points in kinds.items():
        if num_devices < 2 or len({num_bytes for num_bytes, _ in points}) < 2:
            what = f"{len(points)} timings on {num_devices} devices cannot give a latency and a bandwidth."
            problems.append(_problem(kind, what))
        elif any(not seconds > 0 for _, seconds in points):
            problems.append(_problem(kind, "a collective took no time at all."))
    if problems or not kinds:
        raise MeshwrightError(problems or [_problem("links", "no collective was measured.")])
    lines = {}
    for kind, points in kinds.items():
        start, slope = line([(bus_bytes(kind, num_bytes, num_devices), seconds) for num_bytes, seconds in points])
        if 1 / _FASTEST_BYTES_PER_SECOND < slope < 1 / _SLOWEST_BYTES_PER_SECOND:
            lines[kind] = start, slope
        else:
            shown = ", ".join(f"{num_bytes:.0f} B {seconds * 1e6:.0f} us" for num_bytes, seconds in points)
            problems.append(_problem(kind, f"its time does not grow with its size as a link's would ({shown})."))
    if not lines:
        raise MeshwrightError(problems)
    rate = sheet_bytes_per_second or max(1 / slope for _, slope in lines.values())
    fractions = {kind: 1 / slope / rate for kind, (_, slope) in lines.items()}
    # On a busy machine a kind's times may not grow with its size. It is then taken to be as fast as the others are; the
    # error bar, from all timings, says how well that went.
    fractions |= dict.fromkeys([kind for kind in kinds if kind not in lines], median(fractions.values()))
    # Intercepts are latency + half bytes / (rate x fraction): what grows with a kind's slowness is the half bytes'.
    starts = [(1 / fractions[kind], max(start, _LEAST_SECONDS)) for kind, (start, _) in lines.items()]
    latency, per_slowness = (next(iter(lines.values()))[0], 0.0) if len(lines) < 3 else line(starts)
    return Link(
        bytes_per_second=rate,
        latency_seconds=latency,
        shared=shared,
        half_bytes=per_slowness * rate,
        fractions=fractions,
    )


def link_seconds(link: Link, kind: str, num_bytes: float, num_devices: int) -> float:
    passed = bus_bytes(kind, num_bytes, num_devices)
    return link.latency_seconds + (passed + link.half_bytes) / (link.bytes_per_second * link.fractions.get(kind, 1.0))


def line(points: Points) -> tuple[float, float]:
    """Minimise the sum of ((a + b x - t) / t)^2 with a, b >= 0: solve freely, else on the edge that binds."""
    ones = sum(1 / t**2 for _, t in points)
    xs = sum(x / t**2 for x, t in points)
    squares = sum((x / t) ** 2 for x, t in points)
    ts = sum(1 / t for _, t in points)
    products = sum(x / t for x, t in points)
    determinant = ones * squares - xs * xs
    if determinant <= 1e-12 * ones * squares:  # all at one x
        return ts / ones, 0.0
    intercept = (ts * squares - products * xs) / determinant
    slope = (ones * products - xs * ts) / determinant
    if slope <= 0:
        return ts / ones, 0.0
    if intercept < 0:
        return 0.0, products / squares
    return intercept, slope


def _problem(kind: str, what: str) -> Problem:
    return Problem(where=f"probe.{kind}", what=what, fix="Probe again when the machine is quiet.")


Matmul = tuple[float, float, float, float]
"""m, n, k, seconds."""
_OUTLIER = 1.3
"""Times as long as the formula says: a shape for which the library has no good kernel. The table keeps it, the
asymptote is not drawn through it."""
_ROUNDS = 4
_LEAST_RESIDUAL, _MOST_RESIDUAL = 0.5, 8.0


class DeviceFit(NamedTuple):
    """Fields of a `Device`, and how far nine in ten timings are from them at most."""

    fields: dict[str, Any]
    scatter_fraction: float


class TrafficFit(NamedTuple):
    bytes_per_second: float
    half_bytes: float
    scatter_fraction: float


def nine_in_ten(ratios: Iterable[float]) -> float:
    """How far nine in ten of the ratios are from 1 at most, either way."""
    off = sorted(math.exp(abs(math.log(ratio))) - 1 for ratio in ratios)
    return off[min(len(off) - 1, math.ceil(0.9 * len(off)) - 1)] if off else 0.0


def fit_matmuls(points: Sequence[Matmul], plain: Device, dtype: str, element_bytes: int) -> DeviceFit:
    """`plain` has the peak, the processors and the memory's rates, and neither ramp nor residuals.

    rate = peak x fraction x k / (k + k_half) x (share of the last wave used) / residual: 1 / rate is a line in 1 / k.
    """
    plain = replace(plain, matmul_fraction=1.0, k_half=0.0, residuals=(), kernel_seconds=0.0)
    plain = replace(plain, launch_seconds=0.0, memory_half_bytes=0.0)
    by_memory = plain.memory_bytes_per_second * plain.bandwidth_fraction
    bound = [p for p in points if element_bytes * (p[0] * p[1] + p[1] * p[2] + p[0] * p[2]) < 0.8 * by_memory * p[3]]
    bound = bound or list(points)
    slower = [(1 / k, seconds / _seconds((m, n, k), plain, dtype)) for m, n, k, seconds in bound]
    fraction, k_half, kept = 1.0, 0.0, slower
    if plain.num_processors:
        for _ in range(_ROUNDS):
            start, slope = line(kept)
            kept = [(x, y) for x, y in slower if y < _OUTLIER * (start + slope * x)] or slower
        fraction, k_half = min(1.0, 1 / start), slope / start
    fitted = replace(plain, matmul_fraction=fraction, k_half=k_half)

    def residual(point: Matmul) -> float:
        return min(max(point[3] / _seconds(point[:3], fitted, dtype), _LEAST_RESIDUAL), _MOST_RESIDUAL)

    residuals = tuple((*point[:3], residual(point)) for point in bound)
    # Each shape by what the residuals of all other shapes say of it.
    by_others = (
        _seconds(point[:3], replace(fitted, residuals=tuple(r for r in residuals if r[:3] != point[:3])), dtype)
        / point[3]
        for point in bound
    )
    rounded = tuple((m, n, k, round(ratio, 4)) for m, n, k, ratio in residuals)
    fields = {"matmul_fraction": fraction, "k_half": k_half, "residuals": rounded}
    return DeviceFit(fields, nine_in_ten(by_others) if len(bound) > 4 else 0.0)


def _seconds(shape: tuple[float, ...], device: Device, dtype: str) -> float:
    """Seconds of one matrix product, computed as forecasts do."""
    m, n, k = shape
    task = Compute(
        layer="", name="", kind="matmul", phase="forward", repeat=1, flops=2.0 * m * n * k, dtype=dtype, shape=(n, k)
    )
    return float(compute_seconds(task, device))


def fit_attention(points: Sequence[tuple[float, float, float, float]], peak: float) -> DeviceFit:
    """`points`: head size, tokens, FLOP/s forward and backward; rate = peak x fraction x tokens / (tokens + half)."""
    sizes = {size for size, *_ in points}
    large = [p for p in points if p[0] == LARGE_HEAD] or [p for p in points if p[0] == max(sizes)]
    # One ramp for both ways: of the time of one forward and one backward, which is 2.5 times the work.
    whole = [(1 / tokens, 1 / forward + 2.5 / backward) for _, tokens, forward, backward in large]
    start, slope = line(whole)
    half = slope / start
    lost = [(p, (p[1] + half) / p[1] / peak) for p in large]
    fraction, backward_fraction = (median(p[place] * ramp for p, ramp in lost) for place in (2, 3))
    by_place = {(size, tokens): 1 / forward + 2.5 / backward for size, tokens, forward, backward in points}
    pairs = [
        by_place[LARGE_HEAD, tokens] / by_place[SMALL_HEAD, tokens]
        for size, tokens in by_place
        if size == SMALL_HEAD and (LARGE_HEAD, tokens) in by_place
    ]
    fields = {
        "attention_fraction": min(1.0, fraction),
        "attention_backward_fraction": min(1.0, backward_fraction),
        "attention_half_tokens": half,
        "small_head_fraction": min(1.0, median(pairs)) if pairs else 1.0,
    }
    return DeviceFit(fields, nine_in_ten((start + slope * x) / y for x, y in whole))


def fit_traffic(points: Sequence[tuple[str, float, float]]) -> TrafficFit:
    """`points`: kernel, bytes, seconds; a kernel takes (bytes + half) / rate."""
    start, slope = line([(num_bytes, seconds) for _, num_bytes, seconds in points])
    if slope <= 0:  # one size: no ramp can be told
        return TrafficFit(median(num_bytes / seconds for _, num_bytes, seconds in points), 0.0, 0.0)
    scatter = nine_in_ten((start + slope * num_bytes) / seconds for _, num_bytes, seconds in points)
    return TrafficFit(1 / slope, start / slope, scatter)
