"""How the readings of all measuring processes become a Cluster, with the source of each figure in words. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.core.cluster import Beside, Cluster, Device, Errors, HostResources, Link
from meshwright.core.errors import Problem, raise_problems
from meshwright.core.profile import Layer
from meshwright.core.work import ADAM, Compute, Phase, base_work
from meshwright.machine.fits import fit_attention, fit_links, fit_matmuls, fit_traffic, link_seconds, nine_in_ten
from meshwright.machine.named_clusters import preset, preset_of_device
from meshwright.machine.probe import Reading
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.dimensions import DecoderConfig
from meshwright.simulator.stage_seconds import compute_seconds

MEASURED = Errors(compute=0.15, launch=0.5, inner=0.2, outer=0.4, idle=0.15)
_LEAST_ERROR = 0.03
"""Nothing is known better: clocks drift by as much from minute to minute."""
_LEAST_COMPUTE_ERROR, _MOST_COMPUTE_ERROR = 0.15, 0.3
_MOST_TRAFFIC_SLOWDOWN = 2.0
"""Largest correction of the memory rate by a block: a larger difference is not a matter of rates."""
_AS_MEASURED = ("kind", "num_processors", "launch_seconds", "kernel_seconds", "reserved_bytes", "power_watts")
"""Fields of a Reading that a Device has too."""
# A card may boost a little past its data sheet; a quarter past it is a broken clock or a wrong preset.
_LARGEST_SHARE_OF_PEAK = 1.25


def assemble(readings: Sequence[Reading], *, host_bytes: int) -> Cluster:
    """One Cluster named `this machine`. Devices are taken as equal: the median, the slower of two."""
    problems = [problem for rank, reading in enumerate(readings) for problem in _implausible(rank, reading)]
    raise_problems(problems)
    figures = {name: _combined([getattr(r, name) for r in readings], pick) for name, pick in _TYPICAL.items()}
    typical, num_devices = replace(readings[0], **figures), len(readings)
    on_gpu = typical.kind == "cuda"
    sheet = preset_of_device(typical.device_name) if on_gpu else preset("laptop")
    if on_gpu and sheet is not None:
        peaks = sheet.device.flops_per_second
        shares = {f"{n} matmul": rate / peaks[n] for n, rate in typical.flops_per_second.items() if n in peaks}
        # Small tensors may come from the cache.
        largest = max(num_bytes for _, num_bytes, _ in typical.memory)
        rates = [num_bytes / seconds for _, num_bytes, seconds in typical.memory if num_bytes > largest / 4]
        shares["memory"] = statistics.median(rates) / sheet.device.memory_bytes_per_second
        _refuse_too_fast(shares)
    device, scatter = _fitted_device(typical, sheet, host_bytes // num_devices)
    inner, inner_error, inner_source = _inner(typical, num_devices, sheet)
    known = sheet or preset("l40s")
    ratio, slowdown = _compare_block(device, typical)
    device = replace(device, bandwidth_fraction=min(1.0, device.bandwidth_fraction / slowdown))
    # A step is a sum of hundreds of ops: errors of single shapes average out, and what is left is how far the sum of a
    # block's parts was from the whole.
    compute_error, compute_source = MEASURED.compute, "assumed: no block was measured"
    if ratio is not None:
        compute_error = round(min(_MOST_COMPUTE_ERROR, max(_LEAST_COMPUTE_ERROR, abs(ratio - 1))), 3)
        limits = f"at least {_LEAST_COMPUTE_ERROR:.0%} and at most {_MOST_COMPUTE_ERROR:.0%}"
        compute_source = f"how far a block was from the sum of its parts, {limits}"

    def total(name: str) -> float:
        return math.fsum(getattr(reading, name) for reading in readings)

    more_sources = {
        "errors.compute": compute_source,
        "inner": inner_source,
        "outer": f'one node: not measured, from the preset "{known.name}"',
    }
    return Cluster(
        name="this machine",
        device=device,
        inner=inner,
        outer=known.outer,
        devices_per_node=num_devices,
        host=HostResources(
            memory_bytes=host_bytes,
            memory_bytes_per_second=total("host_memory_bytes_per_second"),
            adam_elements_per_second=total("adam_elements_per_second"),
            disk_read_bytes_per_second=total("disk_read_bytes_per_second"),
            disk_write_bytes_per_second=total("disk_write_bytes_per_second"),
        ),
        beside=replace(known.beside if sheet is not None else Beside(), **typical.beside),
        sources=sources_of(typical, device, sheet, scatter, ratio, slowdown) | more_sources,
        errors=replace(MEASURED, compute=compute_error, inner=inner_error),
    )


_TYPICAL: dict[str, Callable[[Sequence[Any]], Any]] = {
    **dict.fromkeys(("flops_per_second", "copies", "attention"), statistics.median_low),
    **dict.fromkeys(("beside", "blocks", "matmuls", "odd_slowdown", "memory"), statistics.median_high),
    **dict.fromkeys(("launch_seconds", "kernel_seconds"), statistics.median_high),
    "links": statistics.median,
    "memory_bytes": min,
    "reserved_bytes": max,
}
"""What stands for all devices: of times the median or the slower of two, of rates the lower, of memory the least."""


def _combined(values: Sequence[Any], pick: Callable[[Sequence[Any]], Any]) -> Any:
    """One value of many, number by number; names and sizes, which all have, stay as they are."""
    first = values[0]
    if isinstance(first, Mapping):
        shared = [key for key in first if all(key in each for each in values)]
        return {key: _combined([each[key] for each in values], pick) for key in shared}
    if isinstance(first, tuple):
        return tuple(_combined(each, pick) for each in zip(*values, strict=True))
    return first if all(each == first for each in values) else pick(values)


def _implausible(rank: int, reading: Reading) -> Iterator[Problem]:
    """Everything is divided by these later: a zero here is a broken clock, not a slow machine."""
    rates = {f"flops_per_second.{name}": rate for name, rate in reading.flops_per_second.items()}
    rates |= {f"copies.{way}": rate for way, rate in reading.copies.items()}
    for size, tokens, forward, backward in reading.attention:
        where = f"attention of heads of {size:.0f} over {tokens:.0f} tokens"
        rates |= {where: forward, f"{where}, backward": backward}
    for name, num_bytes, seconds in reading.memory:
        rates[f"memory.{name} of {num_bytes:.0f} bytes"] = num_bytes / seconds if seconds > 0 else 0.0
    for m, n, k, seconds in reading.matmuls:
        rates[f"matmul of {m:.0f} x {n:.0f} x {k:.0f}"] = 2 * m * n * k / seconds if seconds > 0 else 0.0
    for name, rate in rates.items():
        if not 1e6 < rate < 1e17:
            yield Problem(where=f"probe.device {rank}.{name}", what=f"measured {rate:.3g}, which is no machine's rate.")
    times = {"launch_seconds": reading.launch_seconds}
    times |= {f"blocks.{mode}": seconds for mode, seconds in reading.blocks.items()}
    for name, seconds in times.items():
        if not 1e-8 < seconds < 60.0:
            yield Problem(where=f"probe.device {rank}.{name}", what=f"measured {seconds:.3g} s.")
    if not 0.1 < reading.odd_slowdown < 100:
        what = f"measured {reading.odd_slowdown:.3g}, which is no machine's."
        yield Problem(where=f"probe.device {rank}.odd_slowdown", what=what)
    for needed in ("attention", "memory"):
        if not getattr(reading, needed):
            yield Problem(where=f"probe.device {rank}.{needed}", what="was not measured.")


def _refuse_too_fast(shares: Mapping[str, float]) -> None:
    """`shares`: what was measured over the data sheet's figure, by name."""
    raise_problems(
        Problem(where=f"probe.{name}", what=f"measured {share:.0%} of the data sheet's figure.")
        for name, share in shares.items()
        if share > _LARGEST_SHARE_OF_PEAK
    )


def _fitted_device(typical: Reading, sheet: Cluster | None, host_bytes_each: int) -> tuple[Device, dict[str, float]]:
    """The device, and how far nine in ten timings are from each fit. A known card keeps its dense peak, so that MFU
    means what others mean."""
    on_gpu = typical.kind == "cuda"
    known = sheet.device if on_gpu and sheet is not None else None
    peaks = known.flops_per_second if known else typical.flops_per_second
    dtype = next(name for name in (("bf16", "fp16", "fp32") if on_gpu else ("fp32",)) if name in peaks)
    peak = peaks[dtype]
    traffic, attention = fit_traffic(typical.memory), fit_attention(typical.attention, peak)
    # Without a data sheet what was measured is all there is.
    memory_rate = known.memory_bytes_per_second if known else traffic.bytes_per_second
    device = Device(
        **{name: getattr(typical, name) for name in _AS_MEASURED},
        memory_bytes=typical.memory_bytes if on_gpu else host_bytes_each,
        memory_bytes_per_second=memory_rate,
        flops_per_second=peaks,
        unaligned_slowdown=max(1.0, typical.odd_slowdown),
        matmul_fraction=min(1.0, typical.flops_per_second[dtype] / peak),
        bandwidth_fraction=min(1.0, traffic.bytes_per_second / memory_rate),
        memory_half_bytes=traffic.half_bytes,
        copy_bytes_per_second=typical.copies,
        **attention.fields,
    )
    scatter = {"traffic": traffic.scatter_fraction, "attention": attention.scatter_fraction}
    if typical.matmuls:
        matmuls = fit_matmuls(typical.matmuls, device, dtype, 2 if on_gpu else 4)
        scatter["matmuls"] = matmuls.scatter_fraction
        device = replace(device, **matmuls.fields)
    return device, scatter


def _compare_block(device: Device, typical: Reading) -> tuple[float | None, float]:
    """A whole decoder block against its forecast: measured over forecast, before any correction (None: not measured),
    and how many times as long its memory traffic takes as that of the kernels timed alone.

    On a GPU what it takes beyond its forecast is put down to its traffic: its matmuls and its attention were timed at
    shapes like its own, while the kernels timed for traffic are cleaner than many of a step (strided, widening,
    reducing). On a CPU one timing of a block scatters too much to correct others by.
    """
    seconds = typical.blocks.get("eager", 0.0)
    if not seconds:
        return None, 1.0
    arithmetic, traffic = forecast_seconds(WHOLE_BLOCKS[device.kind], device)
    ratio = seconds / (arithmetic + traffic)
    slowdown = (seconds - arithmetic) / traffic if device.kind == "cuda" else 1.0
    return ratio, min(max(slowdown, 1 / _MOST_TRAFFIC_SLOWDOWN), _MOST_TRAFFIC_SLOWDOWN)


def _inner(typical: Reading, num_devices: int, sheet: Cluster | None) -> tuple[Link, float, str]:
    """The link, how far off it may be, and where it comes from."""
    if num_devices == 1:
        if sheet is not None:
            return sheet.inner, sheet.errors.inner, f'one device: not measured, from the preset "{sheet.name}"'
        source = "one device of unknown kind: not measured, PCIe 4.0 x16 assumed"
        return preset("l40s").inner, 1.0, source
    on_cpu = typical.kind == "cpu"
    known = sheet.inner.bytes_per_second if sheet is not None and not on_cpu else 0.0
    link = fit_links(typical.links, num_devices, shared=on_cpu, sheet_bytes_per_second=known)
    _refuse_too_fast(link.fractions)
    # Of sums, as for compute: a step has many collectives of all sizes, and small ones scatter by times themselves.
    ratios = [
        sum(link_seconds(link, kind, size, num_devices) for size, _ in points) / sum(seconds for _, seconds in points)
        for kind, points in typical.links.items()
    ]
    backend = "gloo" if on_cpu else "NCCL"
    link = replace(link, name=sheet.inner.name if sheet is not None else backend)
    count = sum(map(len, typical.links.values()))
    source = f"measured: {backend}, {len(typical.links)} kinds of collective, {count} timings on {num_devices} devices"
    return link, round(min(2.0, max(_LEAST_ERROR, nine_in_ten(ratios))), 3), source


_CACHED_BYTES_PER_SECOND = 8e9
"""Few disks read faster; memory that stands for one does."""


def sources_of(
    reading: Reading,
    device: Device,
    sheet: Cluster | None,
    scatter: dict[str, float],
    ratio: float | None,
    slowdown: float,
) -> dict[str, str]:
    """Where each figure of a measured cluster comes from, in words."""
    on_gpu = reading.kind == "cuda"
    # Said once, of all that is called measured.
    how = ", ".join(f"{name} {version}" for name, version in reading.versions.items())
    if reading.power_watts:
        how += f", capped at {reading.power_watts:.0f} W"
    if not on_gpu:
        how += f", {reading.num_threads} threads per device"
    sources = {"device": reading.device_name, "measured": how} | dict.fromkeys(device.flops_per_second, "measured")
    sources["memory_bytes_per_second"] = "measured"
    if on_gpu and sheet is not None:
        for name, peak in device.flops_per_second.items():
            rate = reading.flops_per_second.get(name)
            reached = f"; large matmuls reach {rate / peak:.1%}" if rate else ""
            sources[name] = f'dense peak, from the preset "{sheet.name}"{reached}'
        sources["memory_bytes_per_second"] = f'from the preset "{sheet.name}"'
    if reading.isa_limit:
        sources["bf16"] += f", ONEDNN_MAX_CPU_ISA={reading.isa_limit}: without it a bf16 matmul may end the process"
    num_kernels = len({name for name, *_ in reading.memory})
    available = "MemAvailable (or the container's limit), divided among the devices"
    sources |= {
        "memory_bytes": "the card's" if on_gpu else available,
        "reserved_bytes": "measured before any tensor",
        "bandwidth_fraction": f"measured: {len(reading.memory)} timings of {num_kernels} kernels, nine in ten within "
        f"{scatter['traffic']:.1%}",
        "attention_fraction": f"measured: {len(reading.attention)} lengths and head sizes, nine in ten within "
        f"{scatter['attention']:.1%}",
        "launch_seconds": f"measured: a tiny block forward and backward, {reading.num_launches:.0f} launches",
        "matmul_fraction": "measured",
    }
    if "matmuls" in scatter:
        far, count = scatter["matmuls"], len(device.residuals)
        sources["residuals"] = f"measured: {count} products; nine in ten within {far:.1%} of what the others say"
    if on_gpu:
        sources["unaligned_slowdown"] = "measured: a matmul with an odd number of outputs, forward and backward"
    sources["host"] = "measured: copies and fused AdamW on this host's cores"
    if reading.disk_write_bytes_per_second:
        sources["disk"] = "measured: a file written and read at once, past the cache"
        if reading.disk_read_bytes_per_second > _CACHED_BYTES_PER_SECOND:
            sources["disk"] += "; so fast that it was probably still in memory"
    if reading.copies:
        sources["copy_bytes_per_second"] = "measured: 256 MiB of pinned memory"
    if reading.beside:
        sources["beside"] = f"measured: {', '.join(reading.beside)}; the rest assumed"
    if ratio is not None:
        sources["block"] = f"measured: a decoder block forward and backward takes {ratio:.3f} times its forecast"
        if "compiled" in reading.blocks:
            share = reading.blocks["compiled"] / reading.blocks["eager"]
            sources["block"] += f"; compiled, {share:.3f} of its own time"
        if slowdown != 1.0:
            sources["bandwidth_fraction"] += f"; in a block {slowdown:.2f} times as slow, and taken so"
    return sources


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSize:
    """A decoder block that is measured whole."""

    config: DecoderConfig
    batch: int
    sequence: int


def _config(hidden: int, heads: int, ffn: int) -> DecoderConfig:
    return DecoderConfig(
        num_layers=1, hidden_size=hidden, num_heads=heads, num_kv_heads=max(1, heads // 4), ffn_size=ffn, vocab_size=256
    )


TINY = BlockSize(config=_config(64, 4, 128), batch=1, sequence=16)
"""Nothing but launches."""
WHOLE_BLOCKS = {
    "cuda": BlockSize(config=_config(2048, 32, 8192), batch=4, sequence=4096),
    "cpu": BlockSize(config=_config(512, 8, 1376), batch=1, sequence=512),
}
"""By kind of device."""


def num_kernels(size: BlockSize) -> float:
    """Launches of its forward and backward, as forecasts count them."""
    return float(sum(task.kernels for task in block_tasks(size, on_gpu=False)))


def forecast_seconds(size: BlockSize, device: Device) -> tuple[float, float]:
    """(of matmuls and attention, of everything else), forward and backward, by the same rates as any forecast."""
    arithmetic = traffic = 0.0
    for task in block_tasks(size, on_gpu=device.kind == "cuda"):
        seconds = float(compute_seconds(task, device))
        if task.kind == "memory":
            traffic += seconds
        else:
            arithmetic += seconds
    return arithmetic, traffic


def block_tasks(size: BlockSize, *, on_gpu: bool) -> list[Compute]:
    whole = decoder_profile(size.config, "block")
    layers: tuple[Layer, ...] = whole.block_layers
    sizes = {"microbatch": size.batch, "sequence": size.sequence}
    work = base_work(replace(whole, layers=layers), sizes, element_bytes=4, optimizer=ADAM)
    if not on_gpu:
        return list(work.computes)
    # Its weights are fp32: made bf16 where they are used, their gradients fp32 again.
    weights = [slot.elements for slot in work.slots]
    passes: tuple[Phase, ...] = ("forward", "backward")
    casts = [
        Compute(
            layer="blocks",
            name="cast",
            kind="memory",
            phase=phase,
            repeat=1,
            moved_bytes=6.0 * sum(weights),
            kernels=float(len(weights)),
        )
        for phase in passes
    ]
    return casts + [
        replace(task, dtype="bf16", moved_bytes=task.moved_bytes / 2) if task.dtype == "compute" else task
        for task in work.computes
    ]
