"""What one measuring process hands back, and how the readings of all of them become a Cluster. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.core.cluster import Cluster, Errors, Link
from meshwright.core.device import Device
from meshwright.core.errors import MeshwrightError, Problem
from meshwright.core.units import GIB
from meshwright.probe.link_fit import fit_link
from meshwright.probe.names import preset, preset_of_device

MEASURED = Errors(compute=0.1, launch=0.25, inner=0.2, outer=0.4, idle=0.15)
# A card may boost a little past its data sheet; a quarter past it is a broken clock or a wrong preset.
_LARGEST_SHARE_OF_PEAK = 1.25
# NCCL's buffers and the allocator's slack, which a process without ranks does not see (nccl#964).
_NCCL_BYTES = GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    kind: str
    device_name: str
    torch_version: str
    num_threads: int
    isa_limit: str
    """ONEDNN_MAX_CPU_ISA as bf16 needed it, or nothing (see `cpu_bf16`)."""
    flops_per_second: Mapping[str, float]
    """bf16 is absent on a CPU where it does not run at all."""
    attention_flops_per_second: float
    """Forward and backward of causal attention, only the lower triangle counted."""
    memory_bytes_per_second: float
    launch_seconds: float
    memory_bytes: int
    """Of the card; zero on a CPU, where the parent divides the machine's."""
    reserved_bytes: int
    all_reduce: tuple[tuple[int, float], ...]
    """(message bytes, seconds); empty on one device."""


def assemble(readings: Sequence[Reading], *, host_bytes: int) -> Cluster:
    """One Cluster named `this machine`. Devices are taken as equal: the median, the slower of two."""
    problems = [problem for rank, reading in enumerate(readings) for problem in _implausible(rank, reading)]
    if problems:
        raise MeshwrightError(problems)
    first, num_devices = readings[0], len(readings)
    sheet = preset_of_device(first.device_name) if first.kind == "cuda" else preset("laptop")
    flops = {name: _typical([r.flops_per_second[name] for r in readings]) for name in first.flops_per_second}
    attention = _typical([r.attention_flops_per_second for r in readings])
    bandwidth = _typical([r.memory_bytes_per_second for r in readings])
    on_gpu = first.kind == "cuda"
    device = Device(
        kind=first.kind,
        memory_bytes=min(r.memory_bytes for r in readings) if on_gpu else host_bytes // num_devices,
        memory_bytes_per_second=bandwidth,
        flops_per_second=flops,
        matmul_fraction=1.0,
        attention_fraction=min(1.0, attention / flops["bf16" if on_gpu else "fp32"]),
        bandwidth_fraction=1.0,
        launch_seconds=statistics.median_high([r.launch_seconds for r in readings]),
        reserved_bytes=max(r.reserved_bytes for r in readings) + (_NCCL_BYTES if on_gpu else 0),
    )
    if on_gpu and sheet is not None:
        device = _against_sheet(device, attention, sheet.device)
    inner, inner_source = _inner(readings, sheet)
    outer, outer_source = _outer(sheet)
    return Cluster(
        name="this machine",
        device=device,
        inner=inner,
        outer=outer,
        devices_per_node=num_devices,
        sources=_sources(first, device, sheet) | {"inner": inner_source, "outer": outer_source},
        errors=MEASURED,
    )


def _typical(rates: Sequence[float]) -> float:
    return statistics.median_low(rates)


def _implausible(rank: int, reading: Reading) -> list[Problem]:
    """Everything is divided by these later: a zero here is a broken clock, not a slow machine."""
    rates = {f"flops_per_second.{name}": rate for name, rate in reading.flops_per_second.items()} | {
        "attention_flops_per_second": reading.attention_flops_per_second,
        "memory_bytes_per_second": reading.memory_bytes_per_second,
    }
    problems = [
        Problem(where=f"probe.device {rank}.{name}", what=f"measured {rate:.3g}, which is no machine's rate.")
        for name, rate in rates.items()
        if not 1e6 < rate < 1e17
    ]
    if not 1e-8 < reading.launch_seconds < 1.0:
        what = f"measured {reading.launch_seconds:.3g} s for one op."
        problems.append(Problem(where=f"probe.device {rank}.launch_seconds", what=what))
    return problems


def _against_sheet(measured: Device, attention_flops_per_second: float, sheet: Device) -> Device:
    """A known card keeps its dense peak, so that MFU means what others mean; measurement sets the shares."""
    dtype = "bf16" if "bf16" in sheet.flops_per_second else "fp16"
    peak = sheet.flops_per_second[dtype]
    matmul = measured.flops_per_second[dtype] / peak
    bandwidth = measured.memory_bytes_per_second / sheet.memory_bytes_per_second
    problems = [
        Problem(where=f"probe.{name}", what=f"measured {share:.0%} of the data sheet's figure.")
        for name, share in (("matmul", matmul), ("memory", bandwidth))
        if share > _LARGEST_SHARE_OF_PEAK
    ]
    if problems:
        raise MeshwrightError(problems)
    return replace(
        sheet,
        memory_bytes=measured.memory_bytes,
        matmul_fraction=min(1.0, matmul),
        attention_fraction=min(1.0, attention_flops_per_second / peak),
        bandwidth_fraction=min(1.0, bandwidth),
        launch_seconds=measured.launch_seconds,
        reserved_bytes=measured.reserved_bytes,
    )


def _inner(readings: Sequence[Reading], sheet: Cluster | None) -> tuple[Link, str]:
    num_devices, kind = len(readings), readings[0].kind
    if num_devices > 1:
        sizes = [num_bytes for num_bytes, _ in readings[0].all_reduce]
        seconds = [statistics.median([r.all_reduce[i][1] for r in readings]) for i in range(len(sizes))]
        link = fit_link(list(zip(sizes, seconds, strict=True)), num_devices, shared=kind == "cpu")
        backend = "gloo" if kind == "cpu" else "NCCL"
        named = replace(link, name=sheet.inner.name if sheet is not None else backend)
        return named, f"measured: {backend} all_reduce over {num_devices} devices, {len(sizes)} sizes"
    if sheet is not None:
        return sheet.inner, f'one device: not measured, from the preset "{sheet.name}"'
    return preset("l40s").inner, "one device of unknown kind: not measured, PCIe 4.0 x16 assumed"


def _outer(sheet: Cluster | None) -> tuple[Link, str]:
    known = sheet or preset("l40s")
    return known.outer, f'one node: not measured, from the preset "{known.name}"'


def _sources(first: Reading, device: Device, sheet: Cluster | None) -> dict[str, str]:
    how = f"torch {first.torch_version}, {first.device_name}"
    how += f", {first.num_threads} threads per device" if first.kind == "cpu" else ""
    measured = f"measured with {how}"
    sources = dict.fromkeys(device.flops_per_second, measured)
    if first.kind == "cuda" and sheet is not None:
        sources = dict.fromkeys(device.flops_per_second, f'dense peak, from the preset "{sheet.name}"')
        sources["matmul_fraction"] = measured
        sources["bandwidth_fraction"] = measured
        sources["memory_bytes_per_second"] = f'from the preset "{sheet.name}"'
    else:
        sources["memory_bytes_per_second"] = measured
    available = "MemAvailable (or the container's limit), divided among the devices"
    if first.isa_limit:
        sources["bf16"] += f", ONEDNN_MAX_CPU_ISA={first.isa_limit}: without it a bf16 matmul may end the process"
    return sources | {
        "attention_fraction": measured,
        "launch_seconds": measured,
        "memory_bytes": "the card's" if first.kind == "cuda" else available,
        "reserved_bytes": "measured before any tensor" + (", plus 1 GiB for NCCL" * (first.kind == "cuda")),
    }
