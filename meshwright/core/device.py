"""What one device gives: rates by dtype and shape, memory, the host's part in every op."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from meshwright.core.errors import Problem, nearest

KINDS = ("cpu", "cuda")
DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4")
TierName = Literal["device", "host", "disk"]
TIERS: tuple[TierName, ...] = ("device", "host", "disk")
"""Where tensors can live, nearest to the cores of a device first."""
MOST_OF_PEAK = 1.5
"""Shares of a data sheet's figure: a measurement may pass it a little, never by half."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A matmul of m x k by k x n, in tiles dealt to the processors in waves, reaches

        peak(dtype) x matmul_fraction x (share of the last wave that is used) x k / (k + k_half) / residual(m, n, k)

    unless its bytes take longer. Memory traffic of x bytes reaches bandwidth_fraction x / (x + memory_half_bytes).
    """

    kind: str
    """`cpu` or `cuda`: what torch calls it."""
    memory_bytes: int
    memory_bytes_per_second: float
    flops_per_second: Mapping[str, float]
    """Dense peak by dtype: fp32, bf16, fp8 (never the figure with sparsity)."""
    matmul_fraction: float = 0.7
    """Share of the peak a large matmul reaches."""
    num_processors: int = 0
    """Among which a matmul's tiles are dealt out; 0: not in waves."""
    k_half: float = 0.0
    """Inner size at which a matmul reaches half its rate."""
    residuals: tuple[tuple[float, float, float, float], ...] = ()
    """(m, n, k, measured seconds over those of the formula) where matmuls were timed; between them, interpolated."""
    unaligned_slowdown: float = 1.0
    """Times as long as a matmul takes whose n or k is no multiple of 8."""
    attention_fraction: float = 0.4
    """Share of the peak that causal attention with heads of 128 reaches going forward."""
    attention_backward_fraction: float = 0.0
    """The same going back; 0: as forward."""
    attention_half_tokens: float = 0.0
    """Sequence at which attention reaches half its rate."""
    small_head_fraction: float = 1.0
    """Of attention's rate that heads of 64 reach."""
    bandwidth_fraction: float = 0.8
    """Share of the memory's rate that large traffic reaches."""
    memory_half_bytes: float = 0.0
    """Traffic of one kernel at which it reaches half of that."""
    launch_seconds: float = 5e-6
    """The host's time for one op: on a GPU beside the ones before, on a CPU added to the op's own."""
    kernel_seconds: float = 0.0
    """Least time of a kernel on the device."""
    reserved_bytes: int = 0
    """Taken by the driver and the libraries before a tensor exists."""
    copy_bytes_per_second: Mapping[str, float] = field(default_factory=dict)
    """Between host and device: `in`, `out`, `both` (each way while the other runs)."""
    power_watts: float = 0.0
    """The cap under which it was measured; 0: not known."""

    def problems(self) -> Iterator[Problem]:
        yield from self._wrong_names()
        positive = {
            "memory_bytes": self.memory_bytes,
            "memory_bytes_per_second": self.memory_bytes_per_second,
            **{f"flops_per_second.{name}": rate for name, rate in self.flops_per_second.items()},
            **{f"copy_bytes_per_second.{name}": rate for name, rate in self.copy_bytes_per_second.items()},
            **{f"residuals[{i}]": min(point) for i, point in enumerate(self.residuals)},
        }
        names = (
            "launch_seconds kernel_seconds k_half attention_half_tokens memory_half_bytes num_processors power_watts"
        )
        not_negative = {name: getattr(self, name) for name in names.split()}
        shares = {
            "matmul_fraction": self.matmul_fraction,
            "attention_fraction": self.attention_fraction,
            "attention_backward_fraction": self.attention_backward_fraction or 1.0,
            "small_head_fraction": self.small_head_fraction,
            "bandwidth_fraction": self.bandwidth_fraction,
        }
        yield from wrong_numbers(positive, "above zero", lambda value: value > 0)
        slowdown = {"unaligned_slowdown": self.unaligned_slowdown}
        yield from wrong_numbers(slowdown, "at least 1 and less than 100", lambda value: 1 <= value < 100)
        yield from wrong_numbers(not_negative, "zero or more", lambda value: value >= 0)
        yield from wrong_numbers(shares, f"above zero and at most {MOST_OF_PEAK}", lambda v: 0 < v <= MOST_OF_PEAK)
        wanted = f"zero or more and less than the memory, {self.memory_bytes}"
        most = max(self.memory_bytes, 1)
        yield from wrong_numbers({"reserved_bytes": self.reserved_bytes}, wanted, lambda value: 0 <= value < most)

    def _wrong_names(self) -> Iterator[Problem]:
        if self.kind not in KINDS:
            what = f'no kind of device is called "{self.kind}".'
            yield Problem(where="kind", what=what, fix=nearest(self.kind, KINDS))
        for dtype in self.flops_per_second:
            if dtype not in DTYPES:
                where, what = f"flops_per_second.{dtype}", "no dtype is called so."
                yield Problem(where=where, what=what, fix=nearest(dtype, DTYPES))
        if "fp32" not in self.flops_per_second:
            yield Problem(where="flops_per_second", what="has no fp32 rate.")
        for way in self.copy_bytes_per_second:
            if way not in ("in", "out", "both"):
                yield Problem(
                    where=f"copy_bytes_per_second.{way}", what="no way is called so.", fix="Use in, out, both."
                )


def wrong_numbers(values: Mapping[str, float], wanted: str, is_right: Callable[[float], bool]) -> Iterator[Problem]:
    """A problem for each value that is not as `wanted`; a NaN never is."""
    for where, value in values.items():
        if not is_right(value):
            yield Problem(where=where, what=f"is {value}; it must be {wanted}.")
