"""Collectives of every kind by size, all devices at once."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.core.units import MIB
from meshwright.machine.timing import Bench
from meshwright.ops.gloo_collectives import all_gather, reduce_scatter

SIZES = (4 * 1024, 32 * 1024, 256 * 1024, 2 * MIB, 8 * MIB)
_CUDA_SIZES = (*SIZES, 64 * MIB, 512 * MIB)
"""Bytes of the whole message: what every rank holds after a gather, or before a sum."""
_MOST_SAMPLES = 100


def collective_points(bench: Bench) -> dict[str, tuple[tuple[int, float], ...]]:
    """Kind -> (bytes, seconds); nothing on one device."""
    found: dict[str, tuple[tuple[int, float], ...]] = {}
    if bench.num_devices == 1:
        return found
    sizes = _CUDA_SIZES if bench.on_gpu and not bench.is_quick else SIZES
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"):
        bench.together(kind)
        found[kind] = tuple((size, _seconds(bench, _call(bench, kind, size), len(sizes))) for size in sizes)
    return found


def _seconds(bench: Bench, op: Callable[[], Any], num_sizes: int) -> float:
    """The number of calls is agreed first: a rank that makes one call less hangs the others."""
    for _ in range(2):
        op()
    guess = bench.agreed(bench.sample_seconds(op, 3))
    budget = bench.section_seconds / num_sizes
    num_samples = max(5, min(_MOST_SAMPLES, int(budget / max(guess, 1e-6))))
    return statistics.median(bench.sample_seconds(op, 1) for _ in range(num_samples))


def _call(bench: Bench, kind: str, num_bytes: int) -> Callable[[], Any]:
    """As our own ranks call it."""
    ranks, rank = bench.num_devices, bench.rank
    each = max(1, num_bytes // 4 // ranks)
    whole = torch.zeros(each * ranks, device=bench.device)
    part = torch.zeros(each, device=bench.device)
    other = torch.empty_like(whole)
    group = dist.group.WORLD
    assert group is not None
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: all_gather(whole, part, group),
        "reduce_scatter": lambda: reduce_scatter(part, whole, group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "send": lambda: _ring(whole, other, (rank + 1) % ranks, (rank - 1) % ranks),
    }
    return calls[kind]


def _ring(given: Tensor, taken: Tensor, to: int, source: int) -> None:
    """Every rank to the next, all at once."""
    ops = [dist.P2POp(dist.isend, given, to), dist.P2POp(dist.irecv, taken, source)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
