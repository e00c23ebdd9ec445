"""This machine as a Cluster, measured. The parent imports neither torch nor numpy: it starts a process a device.

The processes write to files in a temporary folder, not to pipes: nobody blocks on a full one, and what a
dying process said is still there to be shown.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.core.cluster import Cluster
from meshwright.core.codec import decode
from meshwright.core.errors import MeshwrightError, error_at
from meshwright.core.files import memory_file
from meshwright.core.process import Child, child_command, child_environment, start_child

Files = Mapping[str, Path]
"""Where the processes meet (`store`), and what each one prints (`0.out`, `0.err`)."""
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
    with contextlib.ExitStack() as held:
        names = ("store", *(f"{rank}.{stream}" for rank in range(count) for stream in ("out", "err")))
        files = {name: Path(held.enter_context(memory_file())) for name in names}
        section_seconds = _QUICK_SECTION_SECONDS if quick else _SECTION_SECONDS
        arguments = [
            *("--kind", kind, "--num-devices", str(count)),
            *("--store", str(files["store"]), "--section-seconds", str(section_seconds)),
            *("--folder", str(Path.cwd())),
        ]
        children: list[Child] = []
        try:
            for rank in range(count):
                with files[f"{rank}.out"].open("wb") as out, files[f"{rank}.err"].open("wb") as err:
                    words, variables = (_MODULE, *arguments, "--rank", str(rank)), _environment(num_threads)
                    children.append(start_child(rank, words, environment=variables, stdout=out, stderr=err))
            _wait(children, files, report)
        finally:
            for child in children:
                child.end()
        readings = []
        for rank in range(count):
            last = next((line for line in reversed(_lines(files, rank)) if "reading" in line), None)
            if last is None:
                raise _failure(files, rank, "ended without a reading")
            readings.append(decode(Reading, last["reading"], f"probe.device {rank}"))
        return readings


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
    command = child_command(_MODULE, "--count")
    done = subprocess.run(command, env=_environment(1), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise error_at("probe", f"torch could not be asked for its GPUs:\n{done.stderr[-_TAIL_CHARACTERS:].strip()}")
    return int(json.loads(done.stdout.splitlines()[-1])["num_gpus"])


def _environment(num_threads: int) -> dict[str, str]:
    # gloo looks its own host name up unless told the interface, which fails or takes seconds in containers.
    own = {"OMP_NUM_THREADS": str(num_threads), "GLOO_SOCKET_IFNAME": "lo"}
    return {**os.environ, **own, **child_environment()}


def _wait(children: Sequence[Child], files: Files, report: Callable[[str], None]) -> None:
    """Until all have ended well, one has failed, or the deadline; passes rank 0's progress on."""
    deadline = time.monotonic() + _DEADLINE_SECONDS
    num_shown = 0
    while True:
        codes = [child.exit_code for child in children]
        lines = _lines(files, 0)
        for line in lines[num_shown:]:
            if "progress" in line:
                report(str(line["progress"]))
        num_shown = len(lines)
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            raise _failure(files, failed[0], f"ended with code {codes[failed[0]]}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            rank = codes.index(None)
            raise _failure(files, rank, f"did not end within {_DEADLINE_SECONDS:.0f} s")
        time.sleep(0.02)


def _lines(files: Files, rank: int) -> list[dict[str, object]]:
    """The whole JSON lines so far; anything else a library printed is not ours."""
    text = files[f"{rank}.out"].read_text(encoding="utf-8", errors="replace")
    return [json.loads(line) for line in text.split("\n")[:-1] if line.startswith('{"')]


def _failure(files: Files, rank: int, what: str) -> MeshwrightError:
    tail = files[f"{rank}.err"].read_text(encoding="utf-8", errors="replace")[-_TAIL_CHARACTERS:].strip()
    said = f" It said:\n{tail}" if tail else " It said nothing."
    return error_at("probe", f"the process measuring device {rank} {what}.{said}")


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
