"""`mw probe`: measure this machine."""

from __future__ import annotations

import shlex
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from meshwright.core.cluster import Cluster, Link
from meshwright.core.errors import MeshwrightError
from meshwright.core.units import pretty_bytes, pretty_rate, pretty_seconds
from meshwright.machine.named_clusters import warnings_of
from meshwright.machine.probe import probe
from meshwright.report.terminal import progress, stdout, unwritable, write_output


def run(arguments: Namespace) -> int:
    if arguments.devices is not None and arguments.devices < 1:
        raise MeshwrightError("--devices must be at least 1.")
    if problems := unwritable({"-o": arguments.output}):
        raise MeshwrightError(problems)
    start = time.monotonic()

    def timed(text: str) -> None:
        progress(f"{time.monotonic() - start:4.0f} s  {text}")

    if arguments.from_runs is not None:
        cluster = _from_runs(arguments)
    else:
        cluster = probe(num_devices=arguments.devices, report=timed, quick=arguments.quick)
    console = stdout()
    for line in (*_device_lines(cluster), *_around_lines(cluster), *_how_lines(cluster)):
        console.print(line, markup=False, soft_wrap=True)
    for line in warnings_of(cluster):
        progress(f"warning: {line}")
    done = f"in {pretty_seconds(time.monotonic() - start)}"
    if arguments.output:
        write_output(arguments.output, cluster.to_json())
        done += f", written to {arguments.output}"
        next_step = shlex.join(["mw", "plan", "--model", "gpt2-124m", "--cluster", arguments.output])
    else:
        next_step = "mw probe -o this.cluster.json keeps it for mw plan --cluster this.cluster.json"
    console.print(f"{done}\nnext: {next_step}", markup=False, soft_wrap=True)
    return 0


def _row(name: str, text: str) -> str:
    return f"  {name:<12}{text}"


def _device_lines(cluster: Cluster) -> Iterator[str]:
    device, sources = cluster.device, cluster.sources
    named = sources.get("device", device.kind)
    yield f"{cluster.num_devices} x {named}, {pretty_bytes(device.memory_bytes)} each"
    # Only one dtype's shapes are timed; the others are taken to reach the same share of their peak.
    rates = [f"{dtype} {pretty_rate(peak, 'FLOP/s')}" for dtype, peak in device.flops_per_second.items()]
    yield _row("peak", ", ".join(rates))
    yield _row("matmul", f"{device.matmul_fraction:.0%} of it where large; {len(device.residuals)} shapes timed")
    if device.unaligned_slowdown > 1:
        yield _row("", f"{device.unaligned_slowdown:.1f} times as long where a size is no multiple of 8")
    backward = device.attention_backward_fraction or device.attention_fraction
    yield _row("attention", f"{device.attention_fraction:.0%} of it forward, {backward:.0%} backward")
    rate = device.memory_bytes_per_second * device.bandwidth_fraction
    yield _row("memory", pretty_rate(rate, "B/s") + " as a step's kernels use it")
    kernel = f", a kernel takes at least {pretty_seconds(device.kernel_seconds)}" if device.kernel_seconds else ""
    yield _row("launch", f"{pretty_seconds(device.launch_seconds)} of the host's time for an op{kernel}")
    if device.copy_bytes_per_second:
        ways = (f"{way} {pretty_rate(rate, 'B/s')}" for way, rate in device.copy_bytes_per_second.items())
        yield _row("copies", ", ".join(ways))


def _around_lines(cluster: Cluster) -> Iterator[str]:
    host = cluster.host
    told = {
        "memory": (host.memory_bytes_per_second, "B/s"),
        "Adam": (host.adam_elements_per_second, "parameters/s"),
        "disk read": (host.disk_read_bytes_per_second, "B/s"),
        "write": (host.disk_write_bytes_per_second, "B/s"),
    }
    known = [f"{name} {pretty_rate(rate, unit)}" for name, (rate, unit) in told.items() if rate]
    if known:
        yield _row("host", ", ".join(known))
    links: dict[str, Link] = {"in a node": cluster.inner, "nodes": cluster.outer}
    for (name, link), source in zip(links.items(), ("inner", "outer"), strict=True):
        assumed = "" if cluster.sources.get(source, "").startswith("measured") else "  (not measured)"
        latency = pretty_seconds(link.latency_seconds)
        yield _row(name, f"{pretty_rate(link.bytes_per_second, 'B/s')} after {latency}{assumed}")


def _how_lines(cluster: Cluster) -> Iterator[str]:
    errors = cluster.errors
    shares = {
        "compute": errors.compute,
        "launch": errors.launch,
        "in a node": errors.inner,
        "between nodes": errors.outer,
    }
    yield _row("error bars", ", ".join(f"{name} ±{share:.0%}" for name, share in shares.items()))
    for name, source in (("measured", "measured"), ("block", "block")):
        if cluster.sources.get(source):
            yield _row(name, cluster.sources[source])


def _from_runs(arguments: Namespace) -> Cluster:
    """What the ledger teaches, and how much better it is."""
    from meshwright.core.ledger import ledger_path, read
    from meshwright.machine.from_runs import learn
    from meshwright.machine.probe import machine_name

    if arguments.quick:
        raise MeshwrightError("--quick is for measuring; --from-runs measures nothing.")
    path = Path(arguments.from_runs) if arguments.from_runs else ledger_path()
    entries, num_bad = read(path)
    if num_bad:
        progress(f"{path}: {num_bad} lines are no entries and were skipped")
    learned = learn(entries, machine_name())
    progress(
        f"learned from {learned.num_runs} runs: median error {learned.error_before:.1%} before, "
        f"{learned.error_after:.1%} after"
    )
    for cause, factor in learned.factors.items():
        progress(f"{cause} takes {factor:.2f} times as long as the newest run's cluster says")
    count = arguments.devices
    return learned.cluster.resized(count) if count else learned.cluster
