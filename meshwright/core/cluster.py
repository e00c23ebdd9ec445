"""What the machines give: one class of device, in nodes, joined by links."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from meshwright.core.codec import read_artefact, to_json
from meshwright.core.errors import MeshwrightError, Problem


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
        positive = {
            "device.memory_bytes": self.device.memory_bytes,
            "device.memory_bytes_per_second": self.device.memory_bytes_per_second,
            "inner.bytes_per_second": self.inner.bytes_per_second,
            "outer.bytes_per_second": self.outer.bytes_per_second,
            "devices_per_node": self.devices_per_node,
            "num_nodes": self.num_nodes,
        } | {f"device.flops_per_second.{name}": rate for name, rate in self.device.flops_per_second.items()}
        problems = [
            Problem(where=where, what=f"is {value}; it must be above zero.")
            for where, value in positive.items()
            if not value > 0
        ]
        if "fp32" not in self.device.flops_per_second:
            problems.append(Problem(where="device.flops_per_second", what="has no fp32 rate."))
        if problems:
            raise MeshwrightError(problems)

    @property
    def num_devices(self) -> int:
        return self.devices_per_node * self.num_nodes

    def resized(self, devices_per_node: int, num_nodes: int = 1, name: str = "") -> Cluster:
        return replace(self, devices_per_node=devices_per_node, num_nodes=num_nodes, name=name or self.name)

    def link(self, stride: int, size: int) -> Link:
        """The link an axis of `size` ranks, `stride` apart, is bound by."""
        return self.inner if stride * size <= self.devices_per_node else self.outer

    def to_json(self) -> str:
        return to_json(self)

    @classmethod
    def from_json(cls, text: str, source: str = "cluster") -> Cluster:
        return read_artefact(cls, text, source)


_NAME = re.compile(r"^(?:(\d+)x)?(?:(\d+)x)?([a-z][a-z0-9.-]*)$")


def parse_cluster_name(name: str) -> tuple[int, int, str] | None:
    """`64x8xh100` -> (64 nodes, 8 devices, "h100"); `8xh100` -> (1, 8, ...); None if it is no such name."""
    match = _NAME.match(name)
    if match is None:
        return None
    first, second, device = match.groups()
    if second is None:
        return 1, int(first or 1), device
    return int(first), int(second), device
