"""Where each figure of a measured cluster comes from, in words. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.core.cluster import Cluster
from meshwright.core.device import Device
from meshwright.machine.readings import Reading

if TYPE_CHECKING:
    from meshwright.machine.assemble import Fits, Held

_CACHED_BYTES_PER_SECOND = 8e9
"""Few disks read faster; memory that stands for one does."""


def sources_of(
    reading: Reading, device: Device, sheet: Cluster | None, fits: Fits, block: Held | None
) -> dict[str, str]:
    found = {"device": reading.device_name, "measured": _how(reading)}
    found |= _rates(reading, device, sheet) | _shapes(reading, fits) | _around(reading)
    if block is None:
        return found
    found["block"] = _block(reading, block)
    if block.traffic_slowdown != 1.0:
        found["bandwidth_fraction"] += f"; in a block {block.traffic_slowdown:.2f} times as slow, and taken so"
    return found


def _how(reading: Reading) -> str:
    """Said once, of all that is called measured."""
    how = ", ".join(f"{name} {version}" for name, version in reading.versions.items())
    if reading.power_watts:
        how += f", capped at {reading.power_watts:.0f} W"
    return how + (f", {reading.num_threads} threads per device" if reading.kind == "cpu" else "")


def _rates(reading: Reading, device: Device, sheet: Cluster | None) -> dict[str, str]:
    on_gpu = reading.kind == "cuda"
    sources = dict.fromkeys(device.flops_per_second, "measured")
    sources["memory_bytes_per_second"] = "measured"
    if on_gpu and sheet is not None:
        sources = {
            name: f'dense peak, from the preset "{sheet.name}"' + _share(reading, name, peak)
            for name, peak in device.flops_per_second.items()
        }
        sources["memory_bytes_per_second"] = f'from the preset "{sheet.name}"'
    if reading.isa_limit:
        sources["bf16"] += f", ONEDNN_MAX_CPU_ISA={reading.isa_limit}: without it a bf16 matmul may end the process"
    available = "MemAvailable (or the container's limit), divided among the devices"
    return sources | {
        "memory_bytes": "the card's" if on_gpu else available,
        "reserved_bytes": "measured before any tensor",
    }


def _share(reading: Reading, name: str, peak: float) -> str:
    rate = reading.flops_per_second.get(name)
    return f"; large matmuls reach {rate / peak:.1%}" if rate else ""


def _shapes(reading: Reading, fits: Fits) -> dict[str, str]:
    attention, traffic = fits.attention, fits.traffic
    kernels = len({name for name, *_ in reading.memory})
    found = {
        "bandwidth_fraction": f"measured: {len(reading.memory)} timings of {kernels} kernels, nine in ten within "
        f"{traffic.scatter_fraction:.1%}",
        "attention_fraction": f"measured: {len(reading.attention)} lengths and head sizes, nine in ten within "
        f"{attention.scatter_fraction:.1%}",
        "launch_seconds": f"measured: a tiny block forward and backward, {reading.num_launches:.0f} launches",
        "matmul_fraction": "measured",
    }
    if fits.matmuls is not None:
        count, scatter = len(fits.matmuls.residuals), fits.matmuls.scatter_fraction
        found["residuals"] = f"measured: {count} products; nine in ten within {scatter:.1%} of what the others say"
    if reading.kind == "cuda":
        found["unaligned_slowdown"] = "measured: a matmul with an odd number of outputs, forward and backward"
    return found


def _around(reading: Reading) -> dict[str, str]:
    found = {"host": "measured: copies and fused AdamW on this host's cores"}
    if reading.disk_write_bytes_per_second:
        found["disk"] = "measured: a file written to the disk and read again"
        if reading.disk_read_bytes_per_second > _CACHED_BYTES_PER_SECOND:
            found["disk"] += "; so fast that it was probably still in memory"
    if reading.copies:
        found["copy_bytes_per_second"] = "measured: 256 MiB of pinned memory"
    if reading.beside:
        found["beside"] = f"measured: {', '.join(reading.beside)}; the rest assumed"
    return found


def _block(reading: Reading, block: Held) -> str:
    said = f"measured: a decoder block forward and backward takes {block.ratio:.3f} times its forecast"
    if "compiled" in reading.blocks:
        said += f"; compiled, {reading.blocks['compiled'] / reading.blocks['eager']:.3f} of its own time"
    return said
