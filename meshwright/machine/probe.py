"""This machine as a Cluster, measured by one process a device. The parent imports neither torch nor numpy."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.core.cluster import Cluster
from meshwright.core.codec import decode
from meshwright.core.errors import error_at
from meshwright.core.files import memory_file
from meshwright.launch.failure import cause
from meshwright.launch.rank_pool import RankError, RankPool

MAX_DEFAULT_CPU_DEVICES = 8
_SECTION_SECONDS = 2.0
_QUICK_SECTION_SECONDS = 0.1
_DEADLINE_SECONDS = 300.0
_TAIL_CHARACTERS = 1500
_MODULE = "meshwright.machine.measure"
# Character devices that exist only where torch could find a GPU (NVIDIA, AMD, WSL). Asking torch costs 2 s.
_GPU_DEVICE_FILES = ("nvidia[0-9]*", "kfd", "dxg")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What one measuring process hands back: of one device."""

    kind: str
    device_name: str
    versions: Mapping[str, str]
    power_watts: float
    num_threads: int
    isa_limit: str
    """ONEDNN_MAX_CPU_ISA as bf16 needed it, or nothing (see `cpu_bf16`)."""
    num_processors: int
    flops_per_second: Mapping[str, float]
    """Rate of large matmuls by dtype. bf16 is absent on a CPU that cannot run it."""
    attention: tuple[tuple[float, float, float, float], ...]
    """Head size, tokens, FLOP/s forward and backward; only the lower triangle counts."""
    memory: tuple[tuple[str, float, float], ...]
    """Kernel, bytes, seconds."""
    launch_seconds: float
    memory_bytes: int
    """Memory of the card; zero on a CPU, where the parent divides the machine's memory."""
    reserved_bytes: int
    matmuls: tuple[tuple[float, float, float, float], ...] = ()
    """m, n, k, seconds: bf16 on a GPU, fp32 on a CPU."""
    odd_slowdown: float = 1.0
    """Time of a matmul with an odd number of outputs over that of an aligned one."""
    kernel_seconds: float = 0.0
    num_launches: float = 0.0
    """Launches in the block that `launch_seconds` was measured with."""
    blocks: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a decoder block, forward and backward: `eager`, `compiled`."""
    copies: Mapping[str, float] = field(default_factory=dict)
    beside: Mapping[str, float] = field(default_factory=dict)
    host_memory_bytes_per_second: float = 0.0
    adam_elements_per_second: float = 0.0
    disk_read_bytes_per_second: float = 0.0
    disk_write_bytes_per_second: float = 0.0
    links: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    """Kind -> (message bytes, seconds); empty on one device."""


def probe(*, num_devices: int | None = None, report: Callable[[str], None], quick: bool = False) -> Cluster:
    """Measure compute by shape, memory, launches, host, disk and links, on all devices at once.

    `num_devices` defaults to every GPU, or without one to every usable core (at most 8). `quick` takes a few
    seconds, its figures scatter by a tenth or two; the whole takes a minute on a CPU, three on a GPU.
    """
    from meshwright.machine.assemble import assemble  # needs numpy, which takes longer to import than a error_at

    host_bytes = available_host_bytes()
    return assemble(read_machine(num_devices=num_devices, report=report, quick=quick), host_bytes=host_bytes)


def read_machine(
    *, num_devices: int | None = None, report: Callable[[str], None], quick: bool = False
) -> list[Reading]:
    """What `probe` is made of: one reading a device."""
    if num_devices is not None and num_devices < 1:
        raise error_at("probe", f"{num_devices} devices were asked for; at least 1 is needed.")
    num_gpus = count_gpus()
    num_cores = len(os.sched_getaffinity(0))
    if num_devices is not None and 0 < num_gpus < num_devices:
        raise error_at("probe", f"{num_devices} devices were asked for; torch sees {num_gpus} GPUs.")
    count = num_devices or num_gpus or min(num_cores, MAX_DEFAULT_CPU_DEVICES)
    kind = "cuda" if num_gpus else "cpu"
    num_threads = max(1, num_cores // count)
    threads = f", {num_threads} threads each" if kind == "cpu" else ""
    report(f"measuring {count} {kind} device{'s' if count > 1 else ''}{threads}")
    section_seconds = _QUICK_SECTION_SECONDS if quick else _SECTION_SECONDS
    with memory_file() as sections, RankPool(count, threads_per_rank=num_threads) as pool:
        num_told = 0

        def pass_on() -> None:
            nonlocal num_told
            entered = Path(sections).read_text(encoding="utf-8").split("\n")[:-1]
            for section in entered[num_told:]:
                report(section)
            num_told = len(entered)

        arguments = {"kind": kind, "folder": str(Path.cwd()), "section_seconds": section_seconds, "sections": sections}
        try:
            result = pool.run(f"{_MODULE}:measure", arguments, count, _DEADLINE_SECONDS, meanwhile=pass_on)
        except RankError as error:
            first = cause(error.failures)
            how = f"was {first.message}" if first.kind == "signal" else f"ended with code {first.exit_code}"
            if "starting up" in first.message:
                how = f"gave {first.message}"
            elif "no answer" in first.message:
                how = f"did not end within {_DEADLINE_SECONDS:.0f} s"
            said = first.details[-_TAIL_CHARACTERS:].strip() or "nothing"
            raise error_at("probe", f"the process measuring device {first.rank} {how}. It said:\n{said}") from None
        pass_on()
    return [decode(Reading, reading, f"probe.device {rank}") for rank, reading in enumerate(result)]


def available_host_bytes(
    meminfo: Path = Path("/proc/meminfo"), cgroup_limit: Path = Path("/sys/fs/cgroup/memory.max")
) -> int:
    """MemAvailable, or the container's limit where that is less."""
    try:
        lines = meminfo.read_text().splitlines()
        kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        raise error_at("probe", f"{meminfo} does not say how much memory is available.", "Probe on Linux.") from None
    try:
        return min(kib * 1024, int(cgroup_limit.read_text()))
    except (OSError, ValueError):  # no container, or the limit reads "max"
        return kib * 1024


def count_gpus() -> int:
    """GPUs that torch sees, asked in a child process; 0 at once where the kernel has no device file of one."""
    if not any(True for pattern in _GPU_DEVICE_FILES for _ in Path("/dev").glob(pattern)):
        return 0
    try:
        with RankPool(1) as pool:
            return int(pool.run(f"{_MODULE}:num_gpus", {}, 1)[0])
    except RankError as error:
        raise error_at("probe", f"torch could not be asked for its GPUs:\n{error}") from None


def machine_name(root: Path = Path("/")) -> str:
    """What this machine is called, well enough to know it again: `AMD EPYC 9654; 96 cores; 8 x NVIDIA H100 80GB HBM3`.

    Without its driver's word a GPU has no name.
    """
    num_gpus = len(list((root / "dev").glob("nvidia[0-9]*")))
    texts = [path.read_text(encoding="utf-8") for path in (root / "proc/driver/nvidia/gpus").glob("*/information")]
    lines = [line for text in texts for line in text.splitlines() if line.startswith("Model:")]
    names = sorted({line.partition(":")[2].strip() for line in lines})
    gpus = f"{num_gpus} x {', '.join(names)}" if names else f"{num_gpus} GPUs"
    return f"{', '.join(cpu_names(root))}; {os.cpu_count()} cores; {gpus}"


def cpu_names(root: Path = Path("/")) -> list[str]:
    """As the kernel calls its processors."""
    info = root / "proc/cpuinfo"
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return sorted({line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")})
