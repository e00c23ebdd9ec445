"""From timings to the numbers of a Device: asymptotes, ramps, and how far single points lie from them. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from meshwright.core.device import Device
from meshwright.core.work import Compute
from meshwright.machine.link_fit import line
from meshwright.simulator.op_seconds import LARGE_HEAD, SMALL_HEAD, compute_seconds

Matmul = tuple[float, float, float, float]
"""m, n, k, seconds."""
_OUTLIER = 1.3
"""Times as long as the formula says: a shape for which the library has no good kernel. The table keeps it, the
asymptote is not drawn through it."""
_ROUNDS = 4
_LEAST_RESIDUAL, _MOST_RESIDUAL = 0.5, 8.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Matmuls:
    fraction: float
    k_half: float
    residuals: tuple[Matmul, ...]
    scatter_fraction: float
    """Nine in ten shapes are nearer than this to what the others say of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionFit:
    fraction: float
    backward_fraction: float
    half_tokens: float
    small_head_fraction: float
    scatter_fraction: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    bytes_per_second: float
    half_bytes: float
    scatter_fraction: float


def nine_in_ten(ratios: Iterable[float]) -> float:
    """How far nine in ten of the ratios are from 1 at most, either way."""
    off = sorted(math.exp(abs(math.log(ratio))) - 1 for ratio in ratios)
    return off[min(len(off) - 1, math.ceil(0.9 * len(off)) - 1)] if off else 0.0


def fit_matmuls(points: Sequence[Matmul], plain: Device, dtype: str, element_bytes: int) -> Matmuls:
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
    others = (
        _seconds(point[:3], replace(fitted, residuals=_without(residuals, i)), dtype) / point[3]
        for i, point in enumerate(bound)
    )
    scatter = nine_in_ten(others) if len(bound) > 4 else 0.0
    return Matmuls(fraction=fraction, k_half=k_half, residuals=residuals, scatter_fraction=scatter)


def _without(residuals: tuple[Matmul, ...], place: int) -> tuple[Matmul, ...]:
    """All but the one, and those of the same shape."""
    return tuple(each for each in residuals if each[:3] != residuals[place][:3])


def _seconds(shape: tuple[float, ...], device: Device, dtype: str) -> float:
    """Of one product's arithmetic, by the rates of every forecast."""
    m, n, k = shape
    task = Compute(
        layer="", name="", kind="matmul", phase="forward", repeat=1, flops=2.0 * m * n * k, dtype=dtype, shape=(n, k)
    )
    return float(compute_seconds(task, device))


def fit_attention(points: Sequence[tuple[float, float, float, float]], peak: float) -> AttentionFit:
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
    scatter = nine_in_ten((start + slope * x) / y for x, y in whole)
    return AttentionFit(
        fraction=min(1.0, fraction),
        backward_fraction=min(1.0, backward_fraction),
        half_tokens=half,
        small_head_fraction=min(1.0, median(pairs)) if pairs else 1.0,
        scatter_fraction=scatter,
    )


def fit_traffic(points: Sequence[tuple[str, float, float]]) -> Traffic:
    """`points`: kernel, bytes, seconds; a kernel takes (bytes + half) / rate."""
    start, slope = line([(num_bytes, seconds) for _, num_bytes, seconds in points])
    if slope <= 0:  # one size: no ramp can be told
        return Traffic(
            bytes_per_second=median(num_bytes / seconds for _, num_bytes, seconds in points),
            half_bytes=0.0,
            scatter_fraction=0.0,
        )
    scatter = nine_in_ten((start + slope * num_bytes) / seconds for _, num_bytes, seconds in points)
    return Traffic(bytes_per_second=1 / slope, half_bytes=start / slope, scatter_fraction=scatter)
