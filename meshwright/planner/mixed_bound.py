"""How fast devices of each kind are at best, and so a time that no plan on a mixed cluster can beat.

A device is never faster than alone, with all the memory it wants, nobody to talk to and products that fit its
processors: what the search for clusters of one kind certifies for that is its least seconds for a batch. Devices that
share a batch, or the layers, then need at least

    1 / sum over devices (1 / least seconds)

A loose bound, since nothing is said in it of memory, messages or waiting; but a certain one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from meshwright.core.cluster import Cluster
from meshwright.core.device import Device
from meshwright.core.profile import Profile
from meshwright.core.work import Updating
from meshwright.planner.device_groups import Side
from meshwright.planner.search import SearchResult
from meshwright.simulator.priced_stages import stage_plan

ENOUGH_BYTES = 1 << 52

Search = Callable[[Cluster], SearchResult | None]
"""What is best there for the whole batch."""


def alone_seconds(
    profile: Profile, side: Side, batch: int, sequence: int, optimizer: Updating, search: Search
) -> float:
    """Least seconds of one of its devices for the forward and backward passes of a batch."""
    machine = replace(side.cluster.resized(1), device=at_best(side.cluster.device))
    found = search(machine)
    if found is None or found.best is None or found.gap_fraction is None:
        return _least_by_flops(profile, machine.device, batch, sequence)
    plan, told = found.best
    # All plans for one device update the same parameters; several devices may share that out.
    staged = stage_plan(profile, plan, machine, sequence=sequence, optimizer=optimizer)
    return told.step_seconds * (1 - found.gap_fraction) - staged.stages[0].tail_seconds


def together_seconds(alone: Sequence[float], counts: Sequence[int]) -> float:
    """Least seconds of so many devices of each kind together."""
    return 1 / sum(count / seconds for count, seconds in zip(counts, alone, strict=True))


def at_best(device: Device) -> Device:
    """Without what makes some shapes slower than others: pieces of a product may fit better than all of it."""
    faster = max((1 / residual for *_, residual in device.residuals), default=1.0)
    return replace(
        device,
        memory_bytes=ENOUGH_BYTES,
        reserved_bytes=0,
        flops_per_second={dtype: max(1.0, faster) * rate for dtype, rate in device.flops_per_second.items()},
        residuals=(),
        num_processors=0,
        unaligned_slowdown=1.0,
    )


def _least_by_flops(profile: Profile, device: Device, batch: int, sequence: int) -> float:
    """As if all of it were products at the best rate."""
    flops = sum(
        layer.repeat * float(op.flops(1, sequence) + op.backward_flops(1, sequence))
        for layer in profile.layers
        for op in layer.ops
    )
    fraction = max(device.matmul_fraction, device.attention_fraction, device.attention_backward_fraction)
    return batch * flops / (max(device.flops_per_second.values()) * fraction)
