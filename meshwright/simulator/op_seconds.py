"""One op -> seconds on a device. Numbers may be arrays over candidates.

seconds = the slower of arithmetic and memory traffic, never less than a kernel's least
matmul  = tiles dealt to processors in waves: the last wave is as long as a full one
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from meshwright.core.device import Device
from meshwright.core.work import Compute, Num

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 128, 0.8), (64, 64, 0.6))
"""(rows, columns, share of the best one's rate): what libraries cut an output into, the best for a shape chosen by
them. A smaller tile reads its inputs more often."""
_ROWS, _COLUMNS = (np.array([float(tile[i]) for tile in TILES]) for i in (0, 1))
_SHARES = np.array([share / (rows * columns) for rows, columns, share in TILES])
LEAST_PART, SHARED_TILE = 512, 0.85
"""Of k that a processor takes of a shared tile, and what of the rate is left once the parts are summed."""
ALIGNED, ALIGNED_TO = ("bf16", "fp16", "fp8"), 8
"""Elements that fast kernels read at once."""
SMALL_HEAD, LARGE_HEAD = 64, 128
NEIGHBOURS = 4
"""Measured shapes that a shape between them is interpolated from."""


def compute_seconds(task: Compute, device: Device) -> Num:
    """One layer instance's op, on the device."""
    launched = np.maximum(task.kernels, 1.0)
    traffic = _traffic_seconds(task.moved_bytes, launched, device)
    if isinstance(task.flops, float) and task.flops == 0.0:
        if isinstance(task.moved_bytes, np.ndarray) or task.moved_bytes > 0:
            return np.maximum(traffic, launched * device.kernel_seconds) + _by_host(task, device)
        return _by_host(task, device)
    peak = device.flops_per_second.get(_dtype(task))
    if peak is None:  # the device cannot compute in it: never, rather than a guess
        return task.flops * np.inf
    if task.kind == "attention":
        arithmetic = task.flops / (peak * _attention_fraction(task, device))
    else:
        arithmetic = task.flops / (peak * device.matmul_fraction)
        if task.shape and (device.num_processors or device.k_half or device.residuals):
            arithmetic = arithmetic * _slowdown(task, device)
        if task.shape and device.unaligned_slowdown > 1 and _dtype(task) in ALIGNED:
            is_odd = sum(size % ALIGNED_TO != 0 for size in task.shape) > 0
            arithmetic = arithmetic * np.where(is_odd, device.unaligned_slowdown, 1.0)
    seconds = np.maximum(np.maximum(arithmetic, traffic), launched * device.kernel_seconds)
    return seconds + _by_host(task, device)


def host_seconds(task: Compute, device: Device) -> Num:
    """What the host needs to launch one layer instance's op, beside what the device does."""
    return 0.0 if device.kind == "cpu" else task.kernels * device.launch_seconds


def _by_host(task: Compute, device: Device) -> Num:
    return task.kernels * device.launch_seconds if device.kind == "cpu" else 0.0


def _dtype(task: Compute) -> str:
    return "fp32" if task.dtype in ("compute", "float32") else task.dtype


def _traffic_seconds(moved_bytes: Num, kernels: Num, device: Device) -> Num:
    rate = device.memory_bytes_per_second * device.bandwidth_fraction
    return (moved_bytes + kernels * device.memory_half_bytes) * (1.0 / rate)


def _attention_fraction(task: Compute, device: Device) -> Num:
    fraction: Num = device.attention_fraction
    if not task.is_forward and device.attention_backward_fraction:
        fraction = device.attention_backward_fraction
    if len(task.shape) < 3:
        return fraction
    _, head_size, tokens = task.shape
    # Between heads of 64 and 128 by their logarithm; smaller ones lose as much again.
    small = (np.log2(LARGE_HEAD) - np.log2(np.minimum(head_size, LARGE_HEAD))) / np.log2(LARGE_HEAD / SMALL_HEAD)
    return fraction * device.small_head_fraction**small * tokens / (tokens + device.attention_half_tokens)


def _slowdown(task: Compute, device: Device) -> Num:
    """Of a matmul's products, against a large one."""
    n, k = task.shape
    products, matrices = task.kernels, np.maximum(task.matrices, 1.0)
    rows = task.flops / (2.0 * n * k * matrices * products)
    m = np.maximum(rows, 1.0)
    to_input, to_weight = (m, k, n), (n, k, m)
    if task.is_forward:
        return _slower(m, n, k, matrices, device)
    if task.phase == "weight":
        return _slower(*to_weight, matrices, device)
    if products < 2:  # the other half is apart, or of something that has no gradient
        return _slower(*to_input, matrices, device)
    return (_slower(*to_input, matrices, device) + _slower(*to_weight, matrices, device)) / 2


def _slower(m: Num, n: Num, k: Num, matrices: Num, device: Device) -> Num:
    """Seconds of `matrices` products of m x k by k x n over those at the rate of a large one."""
    found: Num = (k + device.k_half) / k
    if device.num_processors:
        found = found / _used(m, n, k, matrices, device.num_processors)
    if device.residuals:
        found = found * _residual(m, n, k, device.residuals)
    return found


def _used(m: Num, n: Num, k: Num, matrices: Num, processors: int) -> Num:
    """Share of the processors' time in full waves of tiles that goes into the result.

    Where tiles are few and k is long, several processors share a tile, each a part of k. Remembered: plans that differ
    elsewhere ask the same.
    """
    sizes = np.array(np.broadcast_arrays(m, n, k, matrices), dtype=float)
    found = _used_of(sizes.tobytes(), sizes.shape, processors)
    return found if sizes.ndim > 1 else float(found)


@lru_cache(maxsize=2048)
def _used_of(sizes: bytes, shape: tuple[int, ...], processors: int) -> np.ndarray:
    m, n, k, matrices = np.frombuffer(sizes).reshape(*shape, 1)  # against all tiles at once
    tiles = np.ceil(m / _ROWS) * np.ceil(n / _COLUMNS) * matrices
    parts = np.maximum(1.0, np.minimum(processors // tiles, k // LEAST_PART))
    waves = np.ceil(tiles * parts / processors)
    used = m * n * matrices * parts * _SHARES / (waves * processors) * np.where(parts > 1, SHARED_TILE, 1.0)
    return np.asarray(used.max(axis=-1))


def _residual(m: Num, n: Num, k: Num, points: tuple[tuple[float, float, float, float], ...]) -> Num:
    """Measured over formula, from the nearest shapes: by inverse square distance of logarithms."""
    where, ratio = _logged(points)
    asked = np.stack(np.broadcast_arrays(*(np.log2(np.maximum(size, 1.0)) for size in (m, n, k))), axis=-1)
    flat, back = np.unique(asked.reshape(-1, 3), axis=0, return_inverse=True)
    squares = ((flat[:, None, :] - where[None, :, :]) ** 2).sum(axis=-1)
    nearest = np.argsort(squares, axis=1)[:, :NEIGHBOURS]
    weight = 1.0 / (np.take_along_axis(squares, nearest, axis=1) + 1e-3)
    found = np.exp((weight * ratio[nearest]).sum(axis=1) / weight.sum(axis=1))
    shaped = found[back.reshape(-1)].reshape(asked.shape[:-1])
    return shaped if shaped.ndim else float(shaped)


@lru_cache(maxsize=16)
def _logged(points: tuple[tuple[float, float, float, float], ...]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(points, dtype=float)
    return np.log2(table[:, :3]), np.log(table[:, 3])
