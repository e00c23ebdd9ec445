"""What the machines give: one class of device, in nodes, joined by links."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import ClassVar

from meshwright.core.codec import read_artefact, to_json
from meshwright.core.device import Device, wrong_numbers
from meshwright.core.errors import MeshwrightError, Problem

MOST_DEVICES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A collective in which each rank passes x bytes on takes latency + (x + half_bytes) / (rate x its fraction)."""

    bytes_per_second: float
    """One device, one direction."""
    latency_seconds: float
    name: str = ""
    """As people call it: NVLink, InfiniBand."""
    shared: bool = False
    """The devices of a node share it (and their cores): hiding a collective behind compute then gains nothing."""
    half_bytes: float = 0.0
    """What a rank passes on when the link reaches half its rate."""
    fractions: Mapping[str, float] = field(default_factory=dict)
    """Of the rate that a kind of collective reaches: all_reduce, all_gather, reduce_scatter, all_to_all, send; 1 where
    nothing is said."""
    by_nodes: tuple[tuple[int, float], ...] = ()
    """(nodes, share of the rate left when so many talk at once), between them by logarithms; empty: all of it."""

    def problems(self) -> Iterator[Problem]:
        yield from wrong_numbers({"bytes_per_second": self.bytes_per_second}, "above zero", lambda value: value > 0)
        not_negative = {"latency_seconds": self.latency_seconds, "half_bytes": self.half_bytes}
        yield from wrong_numbers(not_negative, "zero or more", lambda value: value >= 0)
        shares = {f"fractions.{kind}": share for kind, share in self.fractions.items()}
        shares |= {f"by_nodes.{nodes}": share for nodes, share in self.by_nodes}
        yield from wrong_numbers(shares, "above zero and at most 1.5", lambda value: 0 < value <= 1.5)
        if list(self.by_nodes) != sorted(self.by_nodes) or any(nodes < 1 for nodes, _ in self.by_nodes):
            yield Problem(where="by_nodes", what="numbers of nodes must grow from entry to entry, from 1 on.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """What a node has beside its devices, for all of them together; 0: not known."""

    memory_bytes: int = 0
    memory_bytes_per_second: float = 0.0
    adam_elements_per_second: float = 0.0
    """Parameters updated on the CPU."""
    disk_read_bytes_per_second: float = 0.0
    disk_write_bytes_per_second: float = 0.0

    def problems(self) -> Iterator[Problem]:
        yield from wrong_numbers(asdict(self), "zero or more", lambda value: value >= 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """How many times as long things take while another kind runs on the same device."""

    compute_by_collective: float = 1.15
    """Calculon charges 15 % of the cores; Mist measured 1.04 to 1.29 beside NCCL on A100s."""
    collective_by_compute: float = 1.04
    compute_by_copy: float = 1.02
    copy_by_compute: float = 1.02
    collective_by_copy: float = 1.3
    copy_by_collective: float = 1.2

    def problems(self) -> Iterator[Problem]:
        yield from wrong_numbers(asdict(self), "at least 1 and less than 10", lambda value: 1 <= value < 10)


@dataclass(frozen=True, kw_only=True, slots=True)
class Errors:
    """How far a forecast's parts may be off: nine times in ten by less than this share of themselves."""

    compute: float = 0.15
    launch: float = 0.4
    """Where the host cannot keep up."""
    inner: float = 0.3
    outer: float = 0.4
    idle: float = 0.2
    """Stages waiting, and whatever else no rate stands behind."""

    def problems(self) -> Iterator[Problem]:
        yield from wrong_numbers(asdict(self), "zero or more and less than 3", lambda value: 0 <= value < 3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    VERSION: ClassVar[int] = 2
    OLDEST: ClassVar[int] = 2

    name: str
    device: Device
    inner: Link
    """Between devices of one node."""
    outer: Link
    """Between nodes, for each device."""
    devices_per_node: int = 1
    num_nodes: int = 1
    host: Host = Host()
    beside: Beside = Beside()
    jitter_fraction: float = 0.0
    """Of a step by which one rank's varies: the slowest of n ranks takes sqrt(2 ln n) times that longer."""
    errors: Errors = Errors()
    """Narrow after a measurement, wide from a data sheet."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where each figure comes from; versions of what measured it."""
    version: int = 2

    def __post_init__(self) -> None:
        parts = {name: getattr(self, name) for name in ("device", "inner", "outer", "host", "beside", "errors")}
        problems = [replace(p, where=f"{name}.{p.where}") for name, part in parts.items() for p in part.problems()]
        counts = {"devices_per_node": self.devices_per_node, "num_nodes": self.num_nodes}
        problems += wrong_numbers(counts, "above zero", lambda value: value > 0)
        jitter = {"jitter_fraction": self.jitter_fraction}
        problems += wrong_numbers(jitter, "zero or more and less than 1", lambda value: 0 <= value < 1)
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
