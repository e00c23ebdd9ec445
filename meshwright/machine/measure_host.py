"""What lies around the device: copies to it and beside its compute, the host's memory and optimizer, the disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.core.units import GIB, MIB
from meshwright.machine.timing import Bench

_CHUNK_BYTES = 32 * MIB
_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=power.limit,driver_version", "--format=csv,noheader,nounits")


def versions(bench: Bench) -> dict[str, str]:
    found = {"torch": torch.__version__}
    if bench.on_gpu:
        found["cuda"] = str(torch.version.cuda or torch.version.hip or "")
        found["cudnn"] = str(torch.backends.cudnn.version() or "")
        if dist.is_available() and dist.is_nccl_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        driver = _nvidia_smi(bench)[1]
        found |= {"driver": driver} if driver else {}
    return found


def power_watts(bench: Bench) -> float:
    """The cap; 0 where nobody tells."""
    with contextlib.suppress(ValueError):
        return float(_nvidia_smi(bench)[0]) if bench.on_gpu else 0.0
    return 0.0


def _nvidia_smi(bench: Bench) -> tuple[str, str]:
    with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError, ValueError):
        done = subprocess.run(_NVIDIA_SMI, capture_output=True, text=True, timeout=20, check=True)
        watts, driver = done.stdout.strip().splitlines()[bench.device.index or 0].split(",")
        return watts.strip(), driver.strip()
    return "", ""


def copy_rates(bench: Bench) -> dict[str, float]:
    """Bytes a second between host and device: in, out, and each way while the other runs."""
    if not bench.on_gpu:
        return {}
    size = 256 * MIB
    host_in, host_out = (torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    here_in, here_out = (torch.empty(size, dtype=torch.uint8, device=bench.device) for _ in range(2))
    streams = [torch.cuda.Stream(bench.device) for _ in range(2)]

    def both() -> None:
        with torch.cuda.stream(streams[0]):
            here_in.copy_(host_in, non_blocking=True)
        with torch.cuda.stream(streams[1]):
            host_out.copy_(here_out, non_blocking=True)

    budget = bench.section_seconds / 4
    ways: dict[str, Callable[[], Any]] = {
        "in": lambda: here_in.copy_(host_in, non_blocking=True),
        "out": lambda: host_out.copy_(here_out, non_blocking=True),
        "both": both,
    }
    return {way: size / bench.median_seconds(copy, budget) for way, copy in ways.items()}


def beside(bench: Bench) -> dict[str, float]:
    """How many times as long a thing takes while another runs on the same device, as in `Beside`."""
    if not bench.on_gpu:
        return {}
    pairs = {"copy": _copying(bench)}
    if bench.num_devices > 1:
        pairs["collective"] = _summing(bench)
    matrix = torch.randn(4096, 4096, device=bench.device, dtype=torch.bfloat16)
    out = torch.empty_like(matrix)

    def compute() -> None:
        torch.mm(matrix, matrix, out=out)

    found = {}
    for name, other in pairs.items():
        found[f"compute_by_{name}"] = _slower_beside(bench, compute, other)
        found[f"{name}_by_compute"] = _slower_beside(bench, other, compute)
    if len(pairs) > 1:
        found["collective_by_copy"] = _slower_beside(bench, pairs["collective"], pairs["copy"])
        found["copy_by_collective"] = _slower_beside(bench, pairs["copy"], pairs["collective"])
    return {name: max(1.0, value) for name, value in found.items()}


def _copying(bench: Bench) -> Callable[[], Any]:
    host = torch.empty(16 * MIB, dtype=torch.uint8, pin_memory=True)
    here = torch.empty(16 * MIB, dtype=torch.uint8, device=bench.device)
    return lambda: here.copy_(host, non_blocking=True)


def _summing(bench: Bench) -> Callable[[], Any]:
    message = torch.zeros(4 * MIB, device=bench.device)
    return lambda: dist.all_reduce(message)


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
    """(read, write) bytes a second through a file of up to 1 GiB in `folder`; zeros where none can be written.

    Written to the disk and, as far as the system obeys, dropped from memory before it is read.
    """
    most = _CHUNK_BYTES if bench.is_quick else GIB
    with contextlib.suppress(OSError):
        if shutil.disk_usage(folder).free > 4 * most:
            with _scratch(folder) as file:
                return _disk_rates(file, most, bench.section_seconds)
    return 0.0, 0.0


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[int]:
    file, name = tempfile.mkstemp(prefix=".meshwright-probe-", dir=folder)
    os.unlink(name)  # gone whatever happens to this process
    try:
        yield file
    finally:
        os.close(file)


def _disk_rates(file: int, most: int, budget_seconds: float) -> tuple[float, float]:
    chunk, written = os.urandom(_CHUNK_BYTES), 0
    start = time.perf_counter()
    while written < most and time.perf_counter() - start < budget_seconds:
        written += os.write(file, chunk)
    os.fsync(file)
    write_seconds = time.perf_counter() - start
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(file, 0, os.SEEK_SET)
    start, seen = time.perf_counter(), 0
    while got := len(os.read(file, _CHUNK_BYTES)):
        seen += got
        if time.perf_counter() - start > budget_seconds:
            break
    return seen / (time.perf_counter() - start), written / write_seconds
