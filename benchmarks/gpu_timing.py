"""What measurements of pieces on one GPU share: their sizes, its clock, and relative errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from meshwright.models.presets import DecoderConfig, preset

BOUNDS = {torch.bfloat16: 2e-2, torch.float32: 1e-4, torch.float64: 1e-12}
"""Of the largest relative error (norm of the difference over norm), by dtype."""
QUEUE_CYCLES = 50_000_000
"""The GPU waits so long (25 ms) that launches get ahead of it: what is timed is then its own work."""

Row = dict[str, Any]
Run = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    config: DecoderConfig
    num_tokens: int
    sequence: int
    """Of attention."""
    expert_ffn: int
    num_exact_tokens: int
    """Of a block whose gradients are compared in float64."""
    device: str
    dtypes: tuple[torch.dtype, ...]
    """In which attention is compared and timed."""


LLAMA_8B = cast(DecoderConfig, preset("llama3-8b"))
FULL = Sizes(
    config=LLAMA_8B,
    num_tokens=8192,
    sequence=16384,
    expert_ffn=7168,
    num_exact_tokens=512,
    device="cuda",
    dtypes=(torch.bfloat16, torch.float32),
)
TINY = Sizes(
    config=replace(LLAMA_8B, hidden_size=64, num_heads=16, num_kv_heads=8, ffn_size=128),
    num_tokens=64,
    sequence=64,
    expert_ffn=32,
    num_exact_tokens=16,
    device="cpu",
    dtypes=(torch.bfloat16, torch.float64),
)
"""Proves the script itself, where there is no GPU."""


class Timing(NamedTuple):
    ms: float
    host_ms: float
    """To launch it. Where it is more than `ms`, the GPU waits for Python unless something else keeps it busy."""


def timed(run: Run, samples: int = 12, before: Run = lambda: None) -> Timing:
    """Median of `run`; `before` each, untimed."""
    for _ in range(3):
        before()
        run()
    if not torch.cuda.is_available():
        before()
        ms = _host_ms(run)
        return Timing(ms, ms)
    torch.cuda.synchronize()
    torch.cuda._sleep(QUEUE_CYCLES)
    starts = [torch.cuda.Event(enable_timing=True) for _ in range(samples)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(samples)]
    host = []
    for start, end in zip(starts, ends, strict=True):
        before()
        start.record()
        host.append(_host_ms(run))
        end.record()
    torch.cuda.synchronize()
    return Timing(median(start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)), min(host))


def _host_ms(run: Run) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def error_of(got: Iterable[Tensor], wanted: Iterable[Tensor]) -> float:
    """The largest of several tensors' relative errors."""
    pairs = [
        (ours, whole.to(torch.promote_types(whole.dtype, torch.float32)))
        for ours, whole in zip(got, wanted, strict=True)
    ]
    return max(float((ours.to(whole.dtype) - whole).norm() / whole.norm()) for ours, whole in pairs)


def drawn(*shape: int, sizes: Sizes, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=sizes.device, dtype=torch.float32).to(dtype)
