"""`mw probe`: measure this machine."""

from __future__ import annotations

from argparse import Namespace

from meshwright.cli.show import progress, stdout, write_output
from meshwright.core.errors import MeshwrightError
from meshwright.core.units import pretty_bytes, pretty_count, pretty_seconds
from meshwright.probe.machine import probe


def run(arguments: Namespace) -> int:
    if arguments.devices is not None and arguments.devices < 1:
        raise MeshwrightError("--devices must be at least 1.")
    cluster = probe(num_devices=arguments.devices, report=progress, quick=arguments.quick)
    console = stdout()
    device = cluster.device
    console.print(f"{cluster.num_devices} x {device.kind}, {pretty_bytes(device.memory_bytes)} each")
    for dtype, rate in device.flops_per_second.items():
        console.print(f"  {dtype} matmul {pretty_count(rate * device.matmul_fraction)}FLOP/s")
    rate = device.memory_bytes_per_second * device.bandwidth_fraction
    console.print(f"  memory {pretty_count(rate)}B/s, smallest op {pretty_seconds(device.launch_seconds)}")
    link = cluster.inner
    console.print(f"  link {pretty_count(link.bytes_per_second)}B/s after {pretty_seconds(link.latency_seconds)}")
    if arguments.output:
        write_output(arguments.output, cluster.to_json())
        console.print(f"next: mw plan --model gpt2-124m --cluster {arguments.output}")
    return 0
