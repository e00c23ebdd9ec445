"""What one measuring process hands back. No torch, and no numpy: a measurement starts without either."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    kind: str
    device_name: str
    versions: Mapping[str, str]
    power_watts: float
    num_threads: int
    isa_limit: str
    """ONEDNN_MAX_CPU_ISA as bf16 needed it, or nothing (see `cpu_bf16`)."""
    num_processors: int
    flops_per_second: Mapping[str, float]
    """Of large matmuls. bf16 is absent on a CPU where it does not run at all."""
    attention: tuple[tuple[float, float, float, float], ...]
    """Head size, tokens, FLOP/s forward and backward; only the lower triangle counts."""
    memory: tuple[tuple[str, float, float], ...]
    """Kernel, bytes, seconds."""
    launch_seconds: float
    memory_bytes: int
    """Of the card; zero on a CPU, where the parent divides the machine's."""
    reserved_bytes: int
    matmuls: tuple[tuple[float, float, float, float], ...] = ()
    """m, n, k, seconds: bf16 on a GPU, fp32 on a CPU."""
    odd_slowdown: float = 1.0
    """Of a matmul with an odd number of outputs."""
    kernel_seconds: float = 0.0
    num_launches: float = 0.0
    """Of the block that `launch_seconds` comes from."""
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
