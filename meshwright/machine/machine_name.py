"""What this machine is called, well enough to know it again. No torch."""

from __future__ import annotations

import os
from pathlib import Path


def machine_name(root: Path = Path("/")) -> str:
    """`AMD EPYC 9654; 96 cores; 8 x NVIDIA H100 80GB HBM3`; without its driver's word a GPU has no name."""
    num_gpus = len(list((root / "dev").glob("nvidia[0-9]*")))
    names = sorted(set(_gpu_names(root)))
    gpus = f"{num_gpus} x {', '.join(names)}" if names else f"{num_gpus} GPUs"
    return f"{', '.join(cpu_names(root))}; {os.cpu_count()} cores; {gpus}"


def cpu_names(root: Path = Path("/")) -> list[str]:
    """As the kernel calls its processors."""
    info = root / "proc/cpuinfo"
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return sorted({line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")})


def _gpu_names(root: Path) -> list[str]:
    texts = [path.read_text(encoding="utf-8") for path in (root / "proc/driver/nvidia/gpus").glob("*/information")]
    lines = [line for text in texts for line in text.splitlines() if line.startswith("Model:")]
    return [line.partition(":")[2].strip() for line in lines]
