"""What the machines give: one class of device, in nodes, joined by links."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from meshwright.core.codec import read_artefact, to_json
from meshwright.core.errors import MeshwrightError, Problem, nearest

KINDS = ("cpu", "cuda")
DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")
MOST_DEVICES = 1 << 20
MOST_OF_PEAK = 1.5
"""Shares of a data sheet's figure: a measurement may pass it a little, never by half."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    kind: str
    """`cpu` or `cuda`: what torch calls it."""
    memory_bytes: int
    memory_bytes_per_second: float
    flops_per_second: Mapping[str, float]
    """Dense peak by dtype: fp32, bf16, fp8 (never the figure with sparsity)."""
    matmul_fraction: float = 0.7
    """Share of the peak a large matmul reaches."""
    attention_fraction: float = 0.4
    bandwidth_fraction: float = 0.8
    launch_seconds: float = 5e-6
    """Least time of one op, whatever its size."""
    reserved_bytes: int = 0
    """Taken by the driver, the libraries and the allocator's slack before a tensor exists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    bytes_per_second: float
    """One device, one direction."""
    latency_seconds: float
    shared: bool = False
    """The devices of a node share it (and their cores): hiding a collective behind compute then gains nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    VERSION: ClassVar[int] = 1

    name: str
    device: Device
    inner: Link
    """Between devices of one node."""
    outer: Link
    """Between nodes, for each device."""
    devices_per_node: int = 1
    num_nodes: int = 1
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where each figure comes from."""
    error_fraction: float = 0.25
    """Half-width of the forecast's interval: narrow after a measurement, wide from a data sheet."""
    version: int = 1

    def __post_init__(self) -> None:
        problems = [*_name_problems(self.device), *_number_problems(self)]
        if self.num_devices > MOST_DEVICES:
            what = f"{self.num_nodes} x {self.devices_per_node} devices are more than can be planned for."
            problems.append(Problem(where="num_nodes", what=what, fix=f"Use at most {MOST_DEVICES} devices."))
        if problems:
            raise MeshwrightError(problems)

    @property
    def num_devices(self) -> int:
        return self.devices_per_node * self.num_nodes

    def resized(self, devices_per_node: int, num_nodes: int = 1, name: str = "") -> Cluster:
        return replace(self, devices_per_node=devices_per_node, num_nodes=num_nodes, name=name or self.name)

    def to_json(self) -> str:
        return to_json(self)

    @classmethod
    def from_json(cls, text: str, source: str = "cluster") -> Cluster:
        return read_artefact(cls, text, source)


def _name_problems(device: Device) -> list[Problem]:
    problems = []
    if device.kind not in KINDS:
        what = f'no kind of device is called "{device.kind}".'
        problems.append(Problem(where="device.kind", what=what, fix=nearest(device.kind, KINDS)))
    for dtype in device.flops_per_second:
        if dtype not in DTYPES:
            where, what = f"device.flops_per_second.{dtype}", "no dtype is called so."
            problems.append(Problem(where=where, what=what, fix=nearest(dtype, DTYPES)))
    if "fp32" not in device.flops_per_second:
        problems.append(Problem(where="device.flops_per_second", what="has no fp32 rate."))
    return problems


def _number_problems(cluster: Cluster) -> list[Problem]:
    device, inner, outer = cluster.device, cluster.inner, cluster.outer
    positive = {
        "device.memory_bytes": device.memory_bytes,
        "device.memory_bytes_per_second": device.memory_bytes_per_second,
        "inner.bytes_per_second": inner.bytes_per_second,
        "outer.bytes_per_second": outer.bytes_per_second,
        "devices_per_node": cluster.devices_per_node,
        "num_nodes": cluster.num_nodes,
    } | {f"device.flops_per_second.{name}": rate for name, rate in device.flops_per_second.items()}
    not_negative = {
        "device.launch_seconds": device.launch_seconds,
        "inner.latency_seconds": inner.latency_seconds,
        "outer.latency_seconds": outer.latency_seconds,
    }
    shares = {
        "device.matmul_fraction": device.matmul_fraction,
        "device.attention_fraction": device.attention_fraction,
        "device.bandwidth_fraction": device.bandwidth_fraction,
    }
    wrong = [(where, value, "above zero") for where, value in positive.items() if not value > 0]
    wrong += [(where, value, "zero or more") for where, value in not_negative.items() if not value >= 0]
    wrong += [
        (where, value, f"above zero and at most {MOST_OF_PEAK}")
        for where, value in shares.items()
        if not 0 < value <= MOST_OF_PEAK
    ]
    if not 0 <= device.reserved_bytes < max(device.memory_bytes, 1):
        wanted = f"zero or more and less than the memory, {device.memory_bytes}"
        wrong.append(("device.reserved_bytes", device.reserved_bytes, wanted))
    if not 0 <= cluster.error_fraction < 1:
        wrong.append(("error_fraction", cluster.error_fraction, "zero or more and less than 1"))
    return [Problem(where=where, what=f"is {value}; it must be {wanted}.") for where, value, wanted in wrong]


_COUNT = "[0-9]{1,18}"
_NAME = re.compile(rf"^(?:({_COUNT})x)?(?:({_COUNT})x)?([a-z][a-z0-9.-]*)$")


def parse_cluster_name(name: str) -> tuple[int, int, str] | None:
    """`64x8xh100` -> (64 nodes, 8 devices, "h100"); `8xh100` -> (1, 8, ...); None if it is no such name."""
    match = _NAME.match(name)
    if match is None:
        return None
    first, second, device = match.groups()
    if second is None:
        return 1, int(first or 1), device
    return int(first), int(second), device
