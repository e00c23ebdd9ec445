"""What the machines give: devices in nodes, joined by links; of one kind, or in groups that differ.

    8xh100+2x8xa100      group 0: 1 node x 8 h100      group 1: 2 nodes x 8 a100      `between` joins the groups

Ranks are numbered group after group. Two groups of one kind are two islands with a slow link."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Literal

from meshwright.core.codec import Artefact
from meshwright.core.errors import Problem, error_at, nearest, raise_problems, wrong_numbers

KINDS = ("cpu", "cuda")
DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4")
TierName = Literal["device", "host", "disk"]
TIERS: tuple[TierName, ...] = ("device", "host", "disk")
"""Where tensors can live, nearest to the cores of a device first."""
MOST_OF_PEAK = 1.5
"""Shares of a data sheet's figure: a measurement may pass it a little, never by half."""
MOST_RATE, MOST_LINK = 1e18, 1e14
"""Operations or bytes in a second of one device, and bytes of one link: far above any that exist."""
MOST_DEVICES = 1 << 20
HOST_LATENCY, DISK_LATENCY = 1e-5, 1e-4
"""Seconds until a copy begins: a call of the driver; a read from flash."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A matmul of m x k by k x n, in tiles dealt to the processors in waves, reaches

        peak(dtype) x matmul_fraction x (share of the last wave that is used) x k / (k + k_half) / residual(m, n, k)

    unless its bytes take longer. Memory traffic of x bytes reaches bandwidth_fraction x / (x + memory_half_bytes).
    """

    kind: str
    """`cpu` or `cuda`: what torch calls it."""
    memory_bytes: int
    memory_bytes_per_second: float
    flops_per_second: Mapping[str, float]
    """Dense peak by dtype: fp32, bf16, fp8 (never the figure with sparsity)."""
    matmul_fraction: float = 0.7
    """Share of the peak a large matmul reaches."""
    num_processors: int = 0
    """Among which a matmul's tiles are dealt out; 0: not in waves."""
    k_half: float = 0.0
    """Inner size at which a matmul reaches half its rate."""
    residuals: tuple[tuple[float, float, float, float], ...] = ()
    """(m, n, k, measured seconds over those of the formula) where matmuls were timed; between them, interpolated."""
    unaligned_slowdown: float = 1.0
    """Times as long as a matmul takes whose n or k is no multiple of 8."""
    attention_fraction: float = 0.4
    """Share of the peak that causal attention with heads of 128 reaches going forward."""
    attention_backward_fraction: float = 0.0
    """The same going back; 0: as forward."""
    attention_half_tokens: float = 0.0
    """Sequence at which attention reaches half its rate."""
    small_head_fraction: float = 1.0
    """Of attention's rate that heads of 64 reach."""
    bandwidth_fraction: float = 0.8
    """Share of the memory's rate that large traffic reaches."""
    memory_half_bytes: float = 0.0
    """Traffic of one kernel at which it reaches half of that."""
    launch_seconds: float = 5e-6
    """The host's time for one op: on a GPU beside the ones before, on a CPU added to the op's own."""
    kernel_seconds: float = 0.0
    """Least time of a kernel on the device."""
    reserved_bytes: int = 0
    """Taken by the driver and the libraries before a tensor exists."""
    op_slowdowns: Mapping[str, float] = field(default_factory=dict)
    """"attention backward bf16" -> times as long as the other figures say, where a model's own ops were timed."""
    copy_bytes_per_second: Mapping[str, float] = field(default_factory=dict)
    """Between host and device: `in`, `out`, `both` (each way while the other runs)."""
    power_watts: float = 0.0
    """The cap under which it was measured; 0: not known."""

    def peak(self, dtype: str, role: str = "") -> float | None:
        """Operations per second of ops in a role; None where it does not compute in the dtype. GPUs run fp16 on the
        units of bf16, and convolutions of float32 in TF32, which is torch's default for cuDNN and not for matmuls."""
        rates = self.flops_per_second
        if dtype == "fp32" and role == "convolution" and "tf32" in rates:
            return rates["tf32"]
        return rates.get("bf16" if dtype == "fp16" and dtype not in rates and self.kind != "cpu" else dtype)

    def problems(self) -> Iterator[Problem]:
        if self.kind not in KINDS:
            what = f'no kind of device is called "{self.kind}".'
            yield Problem(where="kind", what=what, fix=nearest(self.kind, KINDS))
        for dtype in self.flops_per_second:
            if dtype not in DTYPES:
                where, what = f"flops_per_second.{dtype}", "no dtype is called so."
                yield Problem(where=where, what=what, fix=nearest(dtype, DTYPES))
        if "fp32" not in self.flops_per_second:
            yield Problem(where="flops_per_second", what="has no fp32 rate.")
        for way in self.copy_bytes_per_second:
            if way not in ("in", "out", "both"):
                where = f"copy_bytes_per_second.{way}"
                yield Problem(where=where, what="no way is called so.", fix="Use in, out, both.")
        positive = {
            "memory_bytes": self.memory_bytes,
            "memory_bytes_per_second": self.memory_bytes_per_second,
            **{f"flops_per_second.{name}": rate for name, rate in self.flops_per_second.items()},
            **{f"copy_bytes_per_second.{name}": rate for name, rate in self.copy_bytes_per_second.items()},
            **{f"residuals[{i}]": min(point) for i, point in enumerate(self.residuals)},
            **{f"op_slowdowns.{name}": times for name, times in self.op_slowdowns.items()},
        }
        halves = "k_half attention_half_tokens memory_half_bytes"
        not_negative = f"launch_seconds kernel_seconds {halves} num_processors power_watts"
        shares = "matmul_fraction attention_fraction small_head_fraction bandwidth_fraction"
        shares += " attention_backward_fraction" if self.attention_backward_fraction else ""
        yield from wrong_numbers(positive, "above zero")
        rates = {name: value for name, value in positive.items() if "per_second" in name}
        yield from wrong_numbers(
            rates, f"at most {MOST_RATE:g}: no device has that", lambda value: not value > MOST_RATE
        )
        slowdown = {"unaligned_slowdown": self.unaligned_slowdown}
        yield from wrong_numbers(slowdown, "at least 1 and less than 100", lambda value: 1 <= value < 100)
        yield from wrong_numbers({name: getattr(self, name) for name in not_negative.split()}, "zero or more")
        fractions = {name: getattr(self, name) for name in shares.split()}
        yield from wrong_numbers(fractions, f"above zero and at most {MOST_OF_PEAK}", lambda v: 0 < v <= MOST_OF_PEAK)
        wanted = f"zero or more and less than the memory, {self.memory_bytes}"
        most = max(self.memory_bytes, 1)
        yield from wrong_numbers({"reserved_bytes": self.reserved_bytes}, wanted, lambda value: 0 <= value < most)


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
    step_seconds: float = 0.0
    """Of one step of a ring over nodes: gathers and scatters have as many as ranks less one."""
    sum_step_seconds: float = 0.0
    """The same of sums; 0: they take a tree."""
    by_nodes: tuple[tuple[int, float], ...] = ()
    """(nodes, share of the rate left when so many talk at once), between them by logarithms; empty: all of it."""

    def problems(self) -> Iterator[Problem]:
        rate = {"bytes_per_second": self.bytes_per_second}
        yield from wrong_numbers(rate, "above zero")
        yield from wrong_numbers(rate, f"at most {MOST_LINK:g}: no link has that", lambda value: not value > MOST_LINK)
        names = ("latency_seconds", "half_bytes", "step_seconds", "sum_step_seconds")
        not_negative = {name: getattr(self, name) for name in names}
        yield from wrong_numbers(not_negative, "zero or more")
        shares = {f"fractions.{kind}": share for kind, share in self.fractions.items()}
        shares |= {f"by_nodes.{nodes}": share for nodes, share in self.by_nodes}
        yield from wrong_numbers(shares, "above zero and at most 1.5", lambda value: 0 < value <= 1.5)
        if list(self.by_nodes) != sorted(self.by_nodes) or any(nodes < 1 for nodes, _ in self.by_nodes):
            yield Problem(where="by_nodes", what="numbers of nodes must grow from entry to entry, from 1 on.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """How nodes are joined: those of one switch at the full rate of their links, others at what switches pass on."""

    switches: tuple[int, ...]
    """Nodes of each switch, in the order of ranks; together all nodes."""
    oversubscription: float = 1.0
    """Times less than the links of its nodes that a switch passes on to others."""
    rails: bool = False
    """Whether a switch joins the cards of one place in its nodes only: messages to other places go by others. Rings
    change place inside nodes."""

    def problems(self) -> Iterator[Problem]:
        yield from wrong_numbers({f"switches[{i}]": count for i, count in enumerate(self.switches)}, "above zero")
        wanted = "at least 1 and less than 1000"
        yield from wrong_numbers({"oversubscription": self.oversubscription}, wanted, lambda value: 1 <= value < 1000)

    def passed_on(self, nodes: Any) -> Any:
        """Share of a link's rate that is left between ranks that reach over so many nodes."""
        return 1.0 / (1.0 + (self.oversubscription - 1.0) * (nodes > min(self.switches)))

    def passed_between(self, places: Any) -> Any:
        """The same for messages between any two of so many places in nodes."""
        return 1.0 / (1.0 + (self.oversubscription - 1.0) * (1.0 - 1.0 / places) * self.rails)


UPDATE_BYTES = 28
"""Of host memory that AdamW moves for a parameter: weight and moments read and written, gradient read, copy written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostResources:
    """What a node has beside its devices, for all of them together; 0: not known."""

    memory_bytes: int = 0
    memory_bytes_per_second: float = 0.0
    adam_elements_per_second: float = 0.0
    """Parameters updated on the CPU."""
    disk_bytes: int = 0
    disk_read_bytes_per_second: float = 0.0
    disk_write_bytes_per_second: float = 0.0

    @property
    def updates_per_second(self) -> float:
        """Parameters that all cores update, states in memory: as measured, and no more than memory allows (a host of
        111 GB/s updates 4.2 billion a second; small tensors, in caches, nearly twice as many). 0: not known."""
        limits = (self.adam_elements_per_second, self.memory_bytes_per_second / UPDATE_BYTES)
        return min((limit for limit in limits if limit), default=0.0)

    def shared_by(self, devices: int, of: int) -> HostResources:
        """What a node of so many devices has, if this is a node `of` others: as much for each device."""
        each = {name: value * devices for name, value in asdict(self).items()}
        return HostResources(
            **{name: value // of if isinstance(value, int) else value / of for name, value in each.items()}
        )

    def problems(self) -> Iterator[Problem]:
        yield from wrong_numbers(asdict(self), "zero or more")


@dataclass(frozen=True, slots=True)
class Tier:
    """Memory at one distance from the cores of a device, as that device sees it while all of its node do the same."""

    bytes: int
    """Of one device, or of all that share it; 0: there is none, or nobody knows."""
    shared_by: Literal["device", "node"]
    num_sharing: int = 1
    """Devices that share it."""
    in_bytes_per_second: float = 0.0
    """Towards the device, while as much goes the other way; 0: not known."""
    out_bytes_per_second: float = 0.0
    latency_seconds: float = 0.0

    @property
    def bytes_each(self) -> int:
        """What one device may have of it."""
        return self.bytes // self.num_sharing

    def copy_seconds(self, num_bytes: Any, *, is_inward: bool) -> Any:
        """Seconds to copy a number of bytes, or an array of them; practically infinite where the rate is unknown."""
        rate = self.in_bytes_per_second if is_inward else self.out_bytes_per_second
        return self.latency_seconds + num_bytes / (rate or 1.0)


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
    copy: float = 0.3
    """Between tiers of memory."""
    idle: float = 0.2
    """Stages waiting, and whatever else no rate stands behind."""

    def problems(self) -> Iterator[Problem]:
        yield from wrong_numbers(asdict(self), "zero or more and less than 3", lambda value: 0 <= value < 3)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceGroup:
    """Devices of one kind, in equal nodes."""

    device: Device
    inner: Link
    """Between devices of one node."""
    outer: Link
    """Between nodes, for each device."""
    devices_per_node: int = 1
    num_nodes: int = 1
    host: HostResources = HostResources()
    """Of one node."""
    beside: Beside = Beside()
    topology: Topology | None = None
    """None: every node reaches every other at the full rate of its links."""

    @property
    def num_devices(self) -> int:
        return self.devices_per_node * self.num_nodes

    def problems(self) -> Iterator[Problem]:
        for name in ("device", "inner", "outer", "beside", "host"):
            yield from (problem.within(name) for problem in getattr(self, name).problems())
        counts = {"devices_per_node": self.devices_per_node, "num_nodes": self.num_nodes}
        yield from wrong_numbers(counts, "above zero")
        if self.topology is not None:
            yield from (problem.within("topology") for problem in self.topology.problems())
            if (covered := sum(self.topology.switches)) != self.num_nodes:
                what = f"covers {covered} nodes, there are {self.num_nodes}."
                yield Problem(where="topology.switches", what=what, fix="List the nodes of every switch.")

    def is_like(self, other: DeviceGroup) -> bool:
        """Whether only the number of nodes differs."""
        return replace(self, num_nodes=1) == replace(other, num_nodes=1)


def slowest(links: Iterable[Link]) -> Link:
    return min(links, key=lambda link: (link.bytes_per_second, -link.latency_seconds))


@dataclass(frozen=True, kw_only=True)
class NamedArtefact(Artefact):
    """Its name comes first in a file."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Cluster(DeviceGroup, NamedArtefact):
    """The machines: compute rates and memory of the devices, and rates of the links. Its own device, nodes and links
    are those of the first group."""

    VERSION: ClassVar[int] = 4
    OLDEST: ClassVar[int] = 2

    jitter_fraction: float = 0.0
    """Of a step by which one rank's varies: the slowest of n ranks takes sqrt(2 ln n) times that longer."""
    errors: Errors = Errors()
    """Narrow after a measurement, wide from a data sheet."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where each figure comes from; versions of what measured it."""
    others: tuple[DeviceGroup, ...] = ()
    """Further groups."""
    between: Link | None = None
    """Between groups, for each device; None: the slower of the two outers."""
    version: int = 4

    def __post_init__(self) -> None:
        if self.version < 4:  # one host was written for all groups
            object.__setattr__(self, "others", tuple(replace(group, host=self.host) for group in self.others))
        object.__setattr__(self, "version", self.VERSION)  # as it is written now, whatever it was read from
        parts: dict[str, Any] = {"errors": self.errors, "between": self.between}
        parts |= {f"others[{i}]": group for i, group in enumerate(self.others)}
        problems = [*self.problems()]
        problems += [p.within(name) for name, part in parts.items() if part is not None for p in part.problems()]
        jitter = {"jitter_fraction": self.jitter_fraction}
        problems += wrong_numbers(jitter, "zero or more and less than 1", lambda value: 0 <= value < 1)
        problems += self._group_problems()
        raise_problems(problems)

    def _group_problems(self) -> Iterator[Problem]:
        if self.num_devices > MOST_DEVICES:
            counts = " + ".join(f"{each.num_nodes} x {each.devices_per_node}" for each in self.groups)
            what = f"{counts} devices are more than can be planned for."
            yield Problem(where="num_nodes", what=what, fix=f"Use at most {MOST_DEVICES} devices.")
        for i, group in enumerate(self.others):
            if group.device.kind != self.device.kind:
                what = f"is {group.device.kind}, the first group {self.device.kind}: one collective cannot join them."
                yield Problem(where=f"others[{i}].device.kind", what=what, fix="Plan for each kind by itself.")
        if self.between is not None and not self.others:
            what = "there is one group, so nothing lies between groups."
            yield Problem(where="between", what=what, fix="Leave it out, or add others.")

    @property
    def groups(self) -> tuple[DeviceGroup, ...]:
        return (DeviceGroup(**{name: getattr(self, name) for name in DeviceGroup.__slots__}), *self.others)

    @property
    def num_devices(self) -> int:
        return self.devices_per_node * self.num_nodes + sum(group.num_devices for group in self.others)

    @property
    def tiers(self) -> dict[TierName, Tier]:
        """Where tensors of a device can live, nearest first; of the first group's devices."""
        sharing, copied = self.devices_per_node, self.device.copy_bytes_per_second
        if self.device.kind == "cpu" and self.host.memory_bytes_per_second:  # copies in one memory
            copied = {"both": self.host.memory_bytes_per_second / 2}

        def rate(*limits: float) -> float:
            """Rate of a path: its slowest known part, provided that the first one is known."""
            return min(limit for limit in limits if limit) if limits[0] else 0.0

        memory = self.host.memory_bytes_per_second / (2 * sharing)  # which both ways share
        inward = rate(copied.get("both", copied.get("in", 0.0)), memory)
        outward = rate(copied.get("both", copied.get("out", 0.0)), memory)
        read = rate(self.host.disk_read_bytes_per_second / sharing, inward)
        write = rate(self.host.disk_write_bytes_per_second / sharing, outward)
        return {
            "device": Tier(self.device.memory_bytes, "device"),
            "host": Tier(self.host.memory_bytes, "node", sharing, inward, outward, HOST_LATENCY),
            "disk": Tier(self.host.disk_bytes, "node", sharing, read, write, DISK_LATENCY),
        }

    @property
    def group_names(self) -> tuple[str, ...]:
        """Names of the groups: `8xh100` and `8xa100` for `8xh100+8xa100`, numbers otherwise."""
        parts = self.name.split("+")
        if len(parts) == len(self.groups):
            return tuple(part.strip() for part in parts)
        return tuple(f"{self.name}, group {i}" for i in range(len(self.groups)))

    def view(self, index: int) -> Cluster:
        """A group alone."""
        return self.arranged((index,))

    def arranged(self, groups: tuple[int, ...]) -> Cluster:
        """These groups in this order, and no others."""
        names = self.group_names
        first, *rest = (self.groups[index] for index in groups)
        own = {name: getattr(first, name) for name in DeviceGroup.__slots__}
        name, between = "+".join(names[index] for index in groups), self.between if rest else None
        return replace(self, **own, name=name, others=tuple(rest), between=between)

    def merged(self) -> Cluster:
        """Neighbouring groups as one where nothing tells them apart: of one kind, and joined as their nodes are."""
        result: list[DeviceGroup] = []
        for group in self.groups:
            is_joined = group.topology is None and (self.between is None or self.between == group.outer)
            if result and is_joined and group.is_like(result[-1]):
                result[-1] = replace(result[-1], num_nodes=result[-1].num_nodes + group.num_nodes)
            else:
                result.append(group)
        if len(result) == len(self.groups):
            return self
        between = self.between if len(result) > 1 else None
        return replace(self, num_nodes=result[0].num_nodes, others=tuple(result[1:]), between=between)

    def link_between(self, groups: Iterable[int]) -> Link:
        """What joins these groups: the slowest they meet."""
        return self.between or slowest(self.groups[index].outer for index in groups)

    def resized(self, devices_per_node: int, num_nodes: int = 1, name: str = "") -> Cluster:
        """The same with other counts: a larger node has more of host and disk, a part of one its share; how other nodes
        are joined nobody knows. Groups keep theirs: a mixed cluster can only be said to have what it has."""
        if not self.others:
            host = self.host.shared_by(devices_per_node, self.devices_per_node)
            topology = self.topology if num_nodes == self.num_nodes else None
            named = replace(self, topology=topology, name=name or self.name)
            return replace(named, devices_per_node=devices_per_node, num_nodes=num_nodes, host=host)
        if devices_per_node * num_nodes == self.num_devices:
            return replace(self, name=name or self.name)
        counts = " + ".join(str(group.num_devices) for group in self.groups)
        what = f"has groups of {counts} devices; {devices_per_node * num_nodes} ranks do not say whose they are."
        fix = f"Use {self.num_devices} ranks, or a cluster with the groups you mean."
        raise error_at(self.name, what, fix)


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
