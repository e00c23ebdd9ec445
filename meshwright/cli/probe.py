"""`mw probe`: measure this machine."""

from __future__ import annotations

import shlex
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from meshwright.core.cluster import Cluster
from meshwright.core.errors import MeshwrightError, raise_problems
from meshwright.core.units import pretty_bytes, pretty_rate, pretty_seconds
from meshwright.machine.named_clusters import warnings_of
from meshwright.machine.probe import probe
from meshwright.report.terminal import progress, stdout, unwritable, write_output


def run(arguments: Namespace) -> int:
    if arguments.devices is not None and arguments.devices < 1:
        raise MeshwrightError("--devices must be at least 1.")
    raise_problems(unwritable({"-o": arguments.output}))
    start = time.monotonic()

    def timed(text: str) -> None:
        progress(f"{time.monotonic() - start:4.0f} s  {text}")

    if arguments.from_runs is not None:
        cluster = _from_runs(arguments)
    else:
        cluster = probe(num_devices=arguments.devices, report=timed, quick=arguments.quick)
    console = stdout()
    named, memory = cluster.sources.get("device", cluster.device.kind), pretty_bytes(cluster.device.memory_bytes)
    console.print(f"{cluster.num_devices} x {named}, {memory} each")
    for name, text in _figures(cluster):
        console.print(f"  {name:<12}{text}")
    for line in warnings_of(cluster):
        progress(f"warning: {line}")
    done = f"in {pretty_seconds(time.monotonic() - start)}"
    if arguments.output:
        write_output(arguments.output, cluster.to_json())
        done += f", written to {arguments.output}"
        next_step = shlex.join(["mw", "plan", "--model", "gpt2-124m", "--cluster", arguments.output])
    else:
        next_step = "mw probe -o this.cluster.json keeps it for mw plan --cluster this.cluster.json"
    console.print(f"{done}\nnext: {next_step}")
    return 0


def _figures(cluster: Cluster) -> Iterator[tuple[str, str]]:
    device, host, errors, sources = cluster.device, cluster.host, cluster.errors, cluster.sources
    # Only one dtype's shapes are timed; the others are taken to reach the same share of their peak.
    rates = [f"{dtype} {pretty_rate(peak, 'FLOP/s')}" for dtype, peak in device.flops_per_second.items()]
    yield "peak", ", ".join(rates)
    yield "matmul", f"{device.matmul_fraction:.0%} of it where large; {len(device.residuals)} shapes timed"
    if device.unaligned_slowdown > 1:
        yield "", f"{device.unaligned_slowdown:.1f} times as long where a size is no multiple of 8"
    backward = device.attention_backward_fraction or device.attention_fraction
    yield "attention", f"{device.attention_fraction:.0%} of it forward, {backward:.0%} backward"
    rate = device.memory_bytes_per_second * device.bandwidth_fraction
    yield "memory", pretty_rate(rate, "B/s") + " as a step's kernels use it"
    kernel = f", a kernel takes at least {pretty_seconds(device.kernel_seconds)}" if device.kernel_seconds else ""
    yield "launch", f"{pretty_seconds(device.launch_seconds)} of the host's time for an op{kernel}"
    if device.copy_bytes_per_second:
        ways = (f"{way} {pretty_rate(rate, 'B/s')}" for way, rate in device.copy_bytes_per_second.items())
        yield "copies", ", ".join(ways)
    figures = {
        "memory": (host.memory_bytes_per_second, "B/s"),
        "Adam": (host.adam_elements_per_second, "parameters/s"),
        "disk read": (host.disk_read_bytes_per_second, "B/s"),
        "write": (host.disk_write_bytes_per_second, "B/s"),
    }
    known = [f"{name} {pretty_rate(rate, unit)}" for name, (rate, unit) in figures.items() if rate]
    if known:
        yield "host", ", ".join(known)
    for name, source, link in (("in a node", "inner", cluster.inner), ("nodes", "outer", cluster.outer)):
        assumed = "" if sources.get(source, "").startswith("measured") else "  (not measured)"
        latency = pretty_seconds(link.latency_seconds)
        yield name, f"{pretty_rate(link.bytes_per_second, 'B/s')} after {latency}{assumed}"
    shares = {"compute": errors.compute, "launch": errors.launch}
    shares |= {"in a node": errors.inner, "between nodes": errors.outer}
    yield "error bars", ", ".join(f"{name} ±{share:.0%}" for name, share in shares.items())
    yield from ((name, sources[name]) for name in ("measured", "block") if sources.get(name))


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
