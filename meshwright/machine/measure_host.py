"""What lies around the device: copies to it and beside its compute, collectives by size, the host's memory and
optimizer, the disk."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.core.units import GIB, MIB
from meshwright.machine.timing import Bench
from meshwright.ops.collectives import all_gather, reduce_scatter
from meshwright.ops.disk_memory import BLOCK_BYTES, THREADS, nameless_file

_CHUNK_BYTES = 32 * MIB
_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=power.limit,driver_version", "--format=csv,noheader,nounits")


def versions_and_watts(bench: Bench) -> tuple[dict[str, str], float]:
    """Versions by library, and the cap of the card's power; 0 where nobody tells."""
    by_library, watts = {"torch": torch.__version__}, 0.0
    if bench.on_gpu:
        by_library["cuda"] = str(torch.version.cuda or torch.version.hip or "")
        by_library["cudnn"] = str(torch.backends.cudnn.version() or "")
        if dist.is_available() and dist.is_nccl_available():
            by_library["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError, ValueError):
            done = subprocess.run(_NVIDIA_SMI, capture_output=True, text=True, timeout=20, check=True)
            limit, driver = done.stdout.strip().splitlines()[bench.device.index or 0].split(",")
            by_library |= {"driver": driver.strip()} if driver.strip() else {}
            watts = float(limit)
    return by_library, watts


def copy_rates(bench: Bench) -> dict[str, float]:
    """Bytes a second between host and device: in, out, and each way while the other runs."""
    if not bench.on_gpu:
        return {}
    size = 256 * MIB
    host_in, host_out = (torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    here_in, here_out = (torch.empty(size, dtype=torch.uint8, device=bench.device) for _ in range(2))
    streams = [torch.cuda.Stream(bench.device) for _ in range(2)]

    ways: dict[str, Callable[[], Any]] = {
        "in": lambda: here_in.copy_(host_in, non_blocking=True),
        "out": lambda: host_out.copy_(here_out, non_blocking=True),
    }

    def both() -> None:
        for way, stream in zip(("in", "out"), streams, strict=True):
            with torch.cuda.stream(stream):
                ways[way]()

    budget = bench.section_seconds / 4
    return {way: size / bench.median_seconds(copy, budget) for way, copy in {**ways, "both": both}.items()}


def beside(bench: Bench) -> dict[str, float]:
    """How many times as long a thing takes while another runs on the same device, as in `Beside`."""
    if not bench.on_gpu:
        return {}
    host = torch.empty(16 * MIB, dtype=torch.uint8, pin_memory=True)
    here = torch.empty(16 * MIB, dtype=torch.uint8, device=bench.device)
    pairs: dict[str, Callable[[], Any]] = {"copy": lambda: here.copy_(host, non_blocking=True)}
    if bench.num_devices > 1:
        message = torch.zeros(4 * MIB, device=bench.device)
        pairs["collective"] = lambda: dist.all_reduce(message)
    matrix = torch.randn(4096, 4096, device=bench.device, dtype=torch.bfloat16)
    out = torch.empty_like(matrix)

    def compute() -> None:
        torch.mm(matrix, matrix, out=out)

    slowdowns = {}
    for name, other in pairs.items():
        slowdowns[f"compute_by_{name}"] = _slower_beside(bench, compute, other)
        slowdowns[f"{name}_by_compute"] = _slower_beside(bench, other, compute)
    if len(pairs) > 1:
        slowdowns["collective_by_copy"] = _slower_beside(bench, pairs["collective"], pairs["copy"])
        slowdowns["copy_by_collective"] = _slower_beside(bench, pairs["copy"], pairs["collective"])
    return {name: max(1.0, value) for name, value in slowdowns.items()}


def _slower_beside(bench: Bench, op: Callable[[], Any], other: Callable[[], Any]) -> float:
    """Seconds of `op` while `other` runs on a stream of its own, over those of it alone. As often on every rank."""
    alone, others = (bench.agreed(bench.sample_seconds(each, 20)) for each in (op, other))
    num_calls = max(1, min(200, int(0.02 / alone)))
    num_others = min(1000, int(3 * num_calls * alone / others) + 1)
    streams = [torch.cuda.Stream(bench.device) for _ in range(2)]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    ratios = []
    for count in (0, num_others, 0, num_others, 0, num_others):
        with torch.cuda.stream(streams[1]):
            for _ in range(count):
                other()
        with torch.cuda.stream(streams[0]):
            start.record()
            for _ in range(num_calls):
                op()
            end.record()
        bench.finish()
        ratios.append(start.elapsed_time(end))
    return sorted(ratios[1::2])[1] / sorted(ratios[::2])[1]


def host_memory_bytes_per_second(bench: Bench) -> float:
    """Read and written by this process's share of the cores, all ranks at once."""
    source = torch.ones((16 if bench.is_quick else 64) * MIB)
    target = torch.empty_like(source)
    seconds = bench.median_seconds(lambda: target.copy_(source), bench.section_seconds / 8)
    return 2.0 * source.nbytes / seconds


def adam_elements_per_second(bench: Bench) -> float:
    """Parameters that this process's share of the cores updates."""
    weight = torch.nn.Parameter(torch.randn((1 if bench.is_quick else 16) * MIB))
    weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    return weight.numel() / bench.median_seconds(optimizer.step, bench.section_seconds / 8)


def disk_rates(bench: Bench, folder: Path) -> tuple[float, float]:
    """(read, write) bytes a second of a file of up to 1 GiB in `folder`, both ways at once, past the system's cache
    where the file system allows that; zeros where none can be written."""
    half = _CHUNK_BYTES if bench.is_quick else GIB // 2
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        if shutil.disk_usage(folder).free <= 8 * half:
            return 0.0, 0.0
        file = nameless_file(folder)
        stack.callback(os.close, file)
        return both_ways(file, half, bench.section_seconds)
    return 0.0, 0.0


def both_ways(file: int, half: int, seconds: float) -> tuple[float, float]:
    """Bytes a second that are read from the first half of a file while others are written into the second one, in the
    blocks and by as many threads as states on disk are."""
    os.posix_fallocate(file, 0, 2 * half)
    buffer = mmap.mmap(-1, BLOCK_BYTES)
    buffer[:] = os.urandom(MIB) * (BLOCK_BYTES // MIB)
    start = time.perf_counter()
    for place in range(0, half, BLOCK_BYTES):  # what was never written is not read from the disk
        os.pwritev(file, [buffer], place)
        if time.perf_counter() - start > seconds:  # a slow disk
            half = place + BLOCK_BYTES
            break
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    start = time.perf_counter()

    def move(call: Callable[[int, list[mmap.mmap], int], int], begin: int, first: int) -> int:
        own, done = buffer if call is os.pwritev else mmap.mmap(-1, BLOCK_BYTES), 0
        for number in itertools.count(first, THREADS):
            done += call(file, [own], begin + number * BLOCK_BYTES % half)
            if time.perf_counter() - start > seconds:
                return done
        return done

    with ThreadPoolExecutor(2 * THREADS) as pool:
        ways = ((os.preadv, 0), (os.pwritev, half))
        moved = [[pool.submit(move, call, begin, first) for first in range(THREADS)] for call, begin in ways]
        read, written = (sum(each.result() for each in futures) for futures in moved)
    elapsed = time.perf_counter() - start
    return read / elapsed, written / elapsed


SIZES = (4 * 1024, 32 * 1024, 256 * 1024, 2 * MIB, 8 * MIB)
_CUDA_SIZES = (*SIZES, 64 * MIB, 512 * MIB)
"""Bytes of the whole message: what every rank holds after a gather, or before a sum."""
_MOST_SAMPLES = 100


def collective_points(bench: Bench) -> dict[str, tuple[tuple[int, float], ...]]:
    """Kind -> (bytes, seconds); nothing on one device."""
    points: dict[str, tuple[tuple[int, float], ...]] = {}
    if bench.num_devices == 1:
        return points
    sizes = _CUDA_SIZES if bench.on_gpu and not bench.is_quick else SIZES
    ranks, rank, group = bench.num_devices, bench.rank, dist.group.WORLD
    assert group is not None

    def send_to_next(whole: torch.Tensor, part: torch.Tensor, other: torch.Tensor) -> None:
        """Every rank to the next, all at once."""
        there = dist.P2POp(dist.isend, whole, (rank + 1) % ranks)
        here = dist.P2POp(dist.irecv, other, (rank - 1) % ranks)
        for work in dist.batch_isend_irecv([there, here]):
            work.wait()

    calls: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {  # as our own ranks call them
        "all_reduce": lambda whole, part, other: dist.all_reduce(whole),
        "all_gather": lambda whole, part, other: all_gather(whole, part, group),
        "reduce_scatter": lambda whole, part, other: reduce_scatter(part, whole, group),
        "all_to_all": lambda whole, part, other: dist.all_to_all_single(other, whole),
        "send": send_to_next,
    }
    for kind, call in calls.items():
        bench.together(kind)
        for size in sizes:
            part = torch.zeros(max(1, size // 4 // ranks), device=bench.device)
            whole = torch.zeros(len(part) * ranks, device=bench.device)
            op = partial(call, whole, part, torch.empty_like(whole))
            for _ in range(2):
                op()
            # The number of calls is agreed first: a rank that makes one call less hangs the others.
            guess = bench.agreed(bench.sample_seconds(op, 3))
            num_samples = max(5, min(_MOST_SAMPLES, int(bench.section_seconds / len(sizes) / max(guess, 1e-6))))
            seconds = statistics.median(bench.sample_seconds(op, 1) for _ in range(num_samples))
            points[kind] = (*points.get(kind, ()), (size, seconds))
    return points
