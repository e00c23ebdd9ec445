"""Work -> seconds of one stage: the only place where counts meet rates. Numbers may be arrays over candidates.

Compute: the slower of arithmetic and memory traffic, plus a launch (roofline). Collectives: alpha-beta over the
axis's route. Copies: a latency and the rate of their tier. A hidden collective costs only what compute cannot cover:

    per microbatch   compute  |  F1  |  F2  |  F3  |         exposed = what each layer's compute is too short for,
                     gather |G1||G2|  |G3|                              and the first, which nothing can cover
    per step         compute  ... B3 | B2 | B1 |             exposed = what the last backward is too short for,
                     sums             |R3| |R2| |R1|                    and the last layer's, ready when it ends
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from meshwright.core.all_reduce import AllReduce, Hop
from meshwright.core.cluster import Cluster, Device, Link, TierName
from meshwright.core.units import MIB
from meshwright.core.work import Collective, Compute, Copy, HostUpdate, Num, Task, Work

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 128, 0.8), (64, 64, 0.6))
"""(rows, columns, share of the best one's rate): what libraries cut an output into, the best for a shape chosen by
them. A smaller tile reads its inputs more often."""
_ROWS, _COLUMNS = (np.array([float(tile[i]) for tile in TILES]) for i in (0, 1))
_SHARES = np.array([share / (rows * columns) for rows, columns, share in TILES])
LEAST_PART, SHARED_TILE = 512, 0.85
"""Of k that a processor takes of a shared tile, and what of the rate is left once the parts are summed."""
ALIGNED, ALIGNED_TO = ("bf16", "fp16", "fp8"), 8
"""Elements that fast kernels read at once."""
NARROW_SHARES = {"fp8": 0.885, "fp4": 0.62}
"""Of the share of its peak that a large product reaches in 16 bits, what it reaches in fewer: in 8 an H200 does 1,370
of 1,978 TFLOP/s beside 774 of 989; in 4 fitted to published runs of Llama 3 70B on GB200 and GB300."""
SMALL_HEAD, LARGE_HEAD = 64, 128
NEIGHBOURS = 4
"""Measured shapes that a shape between them is interpolated from."""
LATENCY_BY_RANK = 0.115
"""Of two ranks' latency that each further one inside a node adds: all_reduces of A100s take 46 us on 2, 79 us on 8
(vTrain's nccl-tests table)."""


def compute_seconds(task: Compute, device: Device) -> Num:
    """One layer instance's op, on the device: the slower of arithmetic and memory traffic, never less than a kernel's
    least. A matmul's tiles are dealt to processors in waves: the last wave is as long as a full one."""
    launched = np.maximum(task.kernels, 1.0)
    slower = device.op_slowdowns.get(op_class(task), 1.0) if device.op_slowdowns else 1.0
    by_host = task.kernels * device.launch_seconds if device.kind == "cpu" else 0.0
    memory_rate = device.memory_bytes_per_second * device.bandwidth_fraction
    traffic = (task.moved_bytes + launched * device.memory_half_bytes) * (1.0 / memory_rate)
    if isinstance(task.flops, float) and task.flops == 0.0:
        if isinstance(task.moved_bytes, np.ndarray) or task.moved_bytes > 0:
            return slower * (np.maximum(traffic, launched * device.kernel_seconds) + by_host)
        return slower * by_host
    dtype = "fp32" if task.dtype in ("compute", "float32") else task.dtype
    peak = device.peak(dtype, task.role)
    if peak is None:  # the device cannot compute in it: never, rather than a guess
        return task.flops * np.inf
    if task.kind == "attention":
        arithmetic = task.flops / (peak * _attention_fraction(task, device))
    else:
        arithmetic = task.flops / (peak * device.matmul_fraction * NARROW_SHARES.get(dtype, 1.0))
        if task.shape and (device.num_processors or device.k_half or device.residuals):
            arithmetic = arithmetic * _slowdown(task, device)
        if task.shape and device.unaligned_slowdown > 1 and dtype in ALIGNED:
            is_odd = sum(size % ALIGNED_TO != 0 for size in task.shape) > 0
            arithmetic = arithmetic * np.where(is_odd, device.unaligned_slowdown, 1.0)
    return slower * (np.maximum(np.maximum(arithmetic, traffic), launched * device.kernel_seconds) + by_host)


def op_class(task: Compute) -> str:
    """As in `Device.op_slowdowns`: "matmul forward bf16"."""
    kind = task.kind if task.kind in ("matmul", "attention") else "memory"
    phase = "forward" if task.is_forward else "step" if task.per_step else "backward"
    return f"{kind} {phase} {'fp32' if task.dtype in ('compute', 'float32') else task.dtype}"


def host_seconds(task: Compute, device: Device) -> Num:
    """What the host needs to launch one layer instance's op, beside what the device does."""
    return 0.0 if device.kind == "cpu" or task.is_replayed else task.kernels * device.launch_seconds


def _attention_fraction(task: Compute, device: Device) -> Num:
    fraction: Num = device.attention_fraction
    if not task.is_forward and device.attention_backward_fraction:
        fraction = device.attention_backward_fraction
    if len(task.shape) < 3:
        return fraction
    _, head_size, tokens = task.shape
    # Between heads of 64 and 128 by their logarithm; smaller ones lose as much again.
    small = (np.log2(LARGE_HEAD) - np.log2(np.minimum(head_size, LARGE_HEAD))) / np.log2(LARGE_HEAD / SMALL_HEAD)
    return fraction * device.small_head_fraction**small * tokens / (tokens + device.attention_half_tokens)


def _slowdown(task: Compute, device: Device) -> Num:
    """Slowdown of a matmul relative to a large one."""
    n, k = task.shape
    products, matrices = task.kernels, np.maximum(task.matrices, 1.0)
    rows = task.flops / (2.0 * n * k * matrices * products)
    m = np.maximum(rows, 1.0)
    to_input, to_weight = (m, k, n), (n, k, m)
    if task.is_forward:
        shapes = [(m, n, k)]
    elif task.phase == "weight":
        shapes = [to_weight]
    else:  # where it is one, the other half is apart, or of something that has no gradient
        shapes = [to_input] if products < 1.5 else [to_input, to_weight]
    slower: Num = 0.0
    for m, n, k in shapes:
        # Seconds of products of m x k by k x n over those at the rate of a large one.
        result: Num = (k + device.k_half) / k
        if device.num_processors:
            result = result / _used(m, n, k, matrices, device.num_processors)
        if device.residuals:
            result = result * _residual(m, n, k, device.residuals)
        slower = slower + result
    return slower / len(shapes)


def _used(m: Num, n: Num, k: Num, matrices: Num, processors: int) -> Num:
    """Share of the processors' time in full waves of tiles that goes into the result.

    Where tiles are few and k is long, several processors share a tile, each a part of k. Remembered: plans that differ
    elsewhere ask the same.
    """
    sizes = np.array(np.broadcast_arrays(m, n, k, matrices), dtype=float)
    key = blake2b(sizes.data, digest_size=16).digest(), sizes.shape, processors
    result = _used_shares.get(key)
    if result is None:
        m, n, k, matrices = sizes[..., None]  # against all tiles at once
        tiles = np.ceil(m / _ROWS) * np.ceil(n / _COLUMNS) * matrices
        parts = np.maximum(1.0, np.minimum(processors // tiles, k // LEAST_PART))
        waves = np.ceil(tiles * parts / processors)
        used = m * n * matrices * parts * _SHARES / (waves * processors) * np.where(parts > 1, SHARED_TILE, 1.0)
        result = _used_shares[key] = np.asarray(used.max(axis=-1))
    return result if sizes.ndim > 1 else float(result)


class _Arrays(dict[Any, np.ndarray]):
    """Up to so many bytes; then all are forgotten. Their number would be no limit: some have 80,000 rows."""

    MOST_BYTES = 128 * MIB
    num_bytes = 0

    def __setitem__(self, key: Any, value: np.ndarray) -> None:
        if self.num_bytes + value.nbytes > self.MOST_BYTES:
            self.clear()
            self.num_bytes = 0
        self.num_bytes += value.nbytes
        super().__setitem__(key, value)


_used_shares = _Arrays()


def _residual(m: Num, n: Num, k: Num, points: tuple[tuple[float, float, float, float], ...]) -> Num:
    """Measured over formula, from the nearest shapes: by inverse square distance of logarithms."""
    where, ratio = _logged(points)
    asked = np.stack(np.broadcast_arrays(*(np.log2(np.maximum(size, 1.0)) for size in (m, n, k))), axis=-1)
    flat, back = np.unique(asked.reshape(-1, 3), axis=0, return_inverse=True)
    squares = ((flat[:, None, :] - where[None, :, :]) ** 2).sum(axis=-1)
    nearest = np.argsort(squares, axis=1)[:, :NEIGHBOURS]
    weight = 1.0 / (np.take_along_axis(squares, nearest, axis=1) + 1e-3)
    result = np.exp((weight * ratio[nearest]).sum(axis=1) / weight.sum(axis=1))
    shaped = result[back.reshape(-1)].reshape(asked.shape[:-1])
    return shaped if shaped.ndim else float(shaped)


@lru_cache(maxsize=16)
def _logged(points: tuple[tuple[float, float, float, float], ...]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(points, dtype=float)
    return np.log2(table[:, :3]), np.log(table[:, 3])


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """What an axis gives to each of its ranks, one direction."""

    size: Num
    ring_bytes_per_second: Num
    """For collectives in which data passes from neighbour to neighbour."""
    direct_bytes_per_second: Num
    """For messages between two given ranks."""
    latency_seconds: Num
    """Of two ranks."""
    latency_growth: Num
    """Times that of all its ranks."""
    shared: Num
    """Driven by the compute cores: nothing hides behind compute."""
    is_inner: Num
    near: Hop
    """A message to a rank of the same node."""
    per_node: Num
    """Ranks in a row that share a node."""
    crossing: Num = 1.0
    """Share of a rank's partners that a message to them leaves the node for."""
    near_bytes_per_second: Num = np.inf
    """To the partners inside."""
    half_bytes: Num = 0.0
    """What a rank passes on when the link reaches half its rate."""
    step_seconds: Num = 0.0
    """Of each of a ring's steps."""
    sum_step_seconds: Num = 0.0
    fractions: Mapping[str, Num] = field(default_factory=dict)
    name: str = ""
    """Of what joins the groups, where the axis lies across them."""

    def seconds(self, kind: str, num_bytes: Num, algorithm: AllReduce | None = None) -> Num:
        """Latency once, then the bytes each rank must pass on (nccl-tests, PERFORMANCE.md), at a rate that grows with
        them. An `algorithm` is a number of messages, one after the other."""
        talks = self.size > 1
        if algorithm is not None:
            share = self.fractions.get("send", 1.0)
            far = _hop(self.latency_seconds, self.direct_bytes_per_second * share, self.half_bytes)
            far = Hop(*map(np.maximum, far, self.near))  # a round that leaves a node has messages inside it, too
            return talks * algorithm.seconds(self.size, self.per_node, self.near, far, num_bytes)
        if kind in ("send", "ring"):  # the slowest of a ring's pairs is two devices in two nodes
            talks, passed, rate = True, num_bytes, self.direct_bytes_per_second
            latency = self.latency_seconds
        else:
            latency = self.latency_seconds * self.latency_growth
            if kind in ("all_gather", "reduce_scatter"):
                latency = np.maximum(latency, (self.size - 1) * self.step_seconds)
            elif kind == "all_reduce":
                latency = np.maximum(latency, (self.size - 1) * self.sum_step_seconds)
            is_direct = kind == "all_to_all"
            turns = 2 if kind == "all_reduce" else 1
            passed = turns * num_bytes * ((self.size - 1) / self.size)
            rate = self.ring_bytes_per_second
            if is_direct:  # both ways at once: the slower ends it
                far = self.crossing / self.direct_bytes_per_second
                rate = 1 / np.maximum(far, (1 - self.crossing) / self.near_bytes_per_second)
        rate = rate * self.fractions.get("send" if kind == "ring" else kind, 1.0)
        return talks * (latency + (passed + self.half_bytes) / rate)


def _hop(latency: Num, rate: Num, half_bytes: Num) -> Hop:
    return Hop(latency + half_bytes / rate, 1 / rate)


def _near(link: Link) -> Hop:
    return _hop(link.latency_seconds, link.bytes_per_second * link.fractions.get("send", 1.0), link.half_bytes)


class Roads(dict[str, Route]):
    """Route by axis; that of 8 neighbours of an axis, `fsdp/8`, from `within` when it is first asked for."""

    def __init__(self, within: Callable[[str, int], Route]):
        self.within = within

    def __missing__(self, where: str) -> Route:
        axis, slash, count = where.partition("/")
        if not slash:
            raise KeyError(where)
        result = self[where] = self.within(axis, int(count))
        return result


def routes(cluster: Cluster, mesh: Mapping[str, Num]) -> Roads:
    """How fast the ranks along each axis of a mesh can talk, from where the axis lies on the machines: axis -> route;
    `mesh` is axis -> size, outermost first.

        axis_order (dp, tp), sizes (4, 8), 8 devices in a node:   tp strides 1, stays inside; dp strides 8, 4 nodes

    On a mixed cluster they are as the first group's ranks see them: its own links, but for the outermost axis, which
    lies across the groups.

    An axis that leaves the node has as many network cards as it has ranks in a node: a ring enters and leaves
    each node once per card, so it moves per_node times one card's bytes (and never more than the inner link).
    Groups of the other axes run at the same time and use their own devices' cards.
    """
    strides: dict[str, Num] = {}
    stride: Num = 1
    for axis in reversed(tuple(mesh)):
        strides[axis] = stride
        stride = stride * mesh[axis]
    result = Roads(lambda axis, count: route(cluster, count, strides[axis]))
    result.update((axis, route(cluster, mesh[axis], strides[axis])) for axis in mesh)
    if cluster.others and (outermost := next((axis for axis in mesh if mesh[axis] > 1), "")):
        result[outermost] = _across(cluster, mesh[outermost], strides[outermost])
    return result


def route(cluster: Cluster, size: Num, stride: Num) -> Route:
    """Route of an axis whose neighbours are `stride` ranks apart."""
    inner, outer = cluster.inner, cluster.outer
    inner_rate = inner.bytes_per_second
    is_inner = stride * size <= cluster.devices_per_node
    per_node = np.clip(cluster.devices_per_node // stride, 1, size)
    # Trees: latency grows with the logarithm of the nodes reached (NCCL's tuning; two nodes are the unit).
    nodes = np.maximum(-(-size // per_node), 1)
    hops = np.maximum(1.0, np.log2(nodes))
    inside = 1 + LATENCY_BY_RANK * np.maximum(size - 2, 0)
    outer_rate = outer.bytes_per_second * _left(outer, nodes)
    direct_rate = outer_rate
    if cluster.topology is not None:
        passed = cluster.topology.passed_on(-(-stride * size // cluster.devices_per_node))
        direct_rate = outer_rate * np.minimum(passed, cluster.topology.passed_between(per_node))
        outer_rate = outer_rate * passed
    same = inner.shared == outer.shared
    return Route(
        size=size,
        ring_bytes_per_second=_pick(is_inner, inner_rate, np.minimum(inner_rate, outer_rate * per_node)),
        direct_bytes_per_second=_pick(is_inner, inner_rate, direct_rate),
        latency_seconds=_pick(is_inner, inner.latency_seconds, outer.latency_seconds),
        latency_growth=_pick(is_inner, inside, hops),
        shared=inner.shared if same else _pick(is_inner, inner.shared, outer.shared),
        is_inner=is_inner,
        crossing=_pick(is_inner, 1.0, (size - per_node) / np.maximum(size - 1, 1)),
        near_bytes_per_second=inner_rate,
        near=_near(inner),
        per_node=per_node,
        half_bytes=_pick(is_inner, inner.half_bytes, outer.half_bytes),
        step_seconds=_pick(is_inner, inner.step_seconds, outer.step_seconds),
        sum_step_seconds=_pick(is_inner, inner.sum_step_seconds, outer.sum_step_seconds),
        fractions={
            kind: _pick(is_inner, inner.fractions.get(kind, 1.0), outer.fractions.get(kind, 1.0))
            for kind in {*inner.fractions, *outer.fractions}
        },
    )


def _across(cluster: Cluster, size: int, stride: int) -> Route:
    """Route of the axis that lies across all groups.

    A ring enters and leaves each group once per card, as it does each node, and is as fast as its slowest link. The
    latency of a tree is that between groups for the doublings that reach all of them, and inside them for the rest.
    """
    groups, link = cluster.groups, cluster.link_between(range(len(cluster.groups)))
    per_node = [min(max(group.devices_per_node // stride, 1), size) for group in groups]
    nodes = [-(-min(group.num_devices // stride, size) // each) for group, each in zip(groups, per_node, strict=True)]
    total = sum(nodes)
    inside = [(g.outer, each) for g, each, count in zip(groups, per_node, nodes, strict=True) if count > 1]
    rates = [(each * used.bytes_per_second * _left(used, total), used) for used, each in inside]
    rates += [(min(per_node) * link.bytes_per_second * _left(link, total), link)]
    slowest_rate, slowest = min(rates, key=lambda item: item[0])
    across = np.log2(len(groups))
    latency = link.latency_seconds
    further = max((used.latency_seconds for used, _ in inside), default=latency)
    growth = across + (np.log2(total) - across) * (further / latency if latency else 1.0)
    return Route(
        size=size,
        ring_bytes_per_second=min(slowest_rate, *(group.inner.bytes_per_second for group in groups)),
        direct_bytes_per_second=link.bytes_per_second * _left(link, total),
        latency_seconds=latency or further,
        latency_growth=growth,
        shared=link.shared,
        is_inner=False,
        crossing=(size - min(per_node)) / max(size - 1, 1),
        near_bytes_per_second=min(group.inner.bytes_per_second for group in groups),
        near=max((_near(group.inner) for group in groups), key=lambda hop: hop.seconds_per_byte),
        per_node=min(per_node),
        half_bytes=slowest.half_bytes,
        step_seconds=slowest.step_seconds,
        sum_step_seconds=slowest.sum_step_seconds,
        fractions=slowest.fractions,
        name=link.name or "the link between groups",
    )


def _left(link: Link, nodes: Num) -> Num:
    """Share of a link's rate when so many nodes talk at once."""
    if not link.by_nodes:
        return 1.0
    known, shares = zip(*link.by_nodes, strict=True)
    return np.exp(np.interp(np.log2(nodes), np.log2(known), np.log(shares)))


def _pick(condition: Num, yes: Num, no: Num) -> Num:
    return np.where(condition, yes, no) if isinstance(condition, np.ndarray) else (yes if condition else no)


K = TypeVar("K")
Part = Literal["forward", "backward", "weight", "step"]
"""forward and backward (recomputation belongs to it) come once a microbatch, and the weight half of backward where it
is apart; step once."""

COLLECTIVE_LAUNCHES = 3
"""Ops that the host could launch while it starts a collective: checks, an event on each stream, the call itself."""
AGREED_BYTES = 64
"""That all ranks tell each other in each step: loss, squared norms, what is asked of the next one."""
LAUNCH = "launch"
"""Origin of the time in which a device waits for its host."""

_PART: dict[str, Part] = {
    "forward": "forward",
    "recompute": "backward",
    "backward": "backward",
    "weight": "weight",
    "step": "step",
}


class Charge(NamedTuple):
    """Why time passes: the technique (empty: the model itself), the axis it talks over (`Collective.where`) or the tier
    it copies from or to (both empty: compute), when. `cpu`: what cores of the host do."""

    origin: str
    axis: str
    part: Part
    tier: TierName | Literal["", "cpu"] = ""

    @property
    def lane(self) -> Literal["compute", "collective", "copy"]:
        return "collective" if self.axis else "copy" if self.tier else "compute"


class Hidden(NamedTuple):
    """A collective, a copy or an update on the host that may run beside compute."""

    task: Collective | Copy | HostUpdate
    each_seconds: Num
    total_seconds: Num
    shared: Num

    @property
    def part(self) -> Part:
        """What it runs beside."""
        return _PART[self.task.phase]

    @property
    def window(self) -> float:
        """As in `Collective`."""
        return self.task.window if isinstance(self.task, Collective) else 0.0

    @property
    def lane(self) -> str:
        if isinstance(self.task, Collective):
            return "collective"
        if isinstance(self.task, HostUpdate):
            return "cpu"
        return f"{'disk' if self.task.tier == 'disk' else 'copy'} {'in' if self.task.is_inward else 'out'}"

    def charge(self, part: Part) -> Charge:
        return _charge(self.task, part)


def _charge(task: Collective | Copy | HostUpdate, part: Part) -> Charge:
    if isinstance(task, Copy | HostUpdate):
        return Charge(task.origin, "", part, task.tier if isinstance(task, Copy) else "cpu")
    return Charge(task.origin, task.where, part)


@dataclass(frozen=True, kw_only=True)
class StageCost:
    charges: Mapping[Charge, Num]
    """Seconds that pass: per microbatch for forward and backward, per step for step."""
    send_seconds: Num
    """From the end of a stage's work to the neighbour that waits for it."""
    roads: Mapping[str, Route]
    hidden: tuple[Hidden, ...] = ()
    """Collectives and copies beside compute, whole: `charges` has what shows of them."""
    bare: Mapping[Charge, Num] = field(default_factory=dict)
    """Charges without them."""
    by_layer: Mapping[tuple[str, Part], Num] = field(default_factory=dict)
    """Seconds of compute."""

    def seconds(self, part: Part) -> Num:
        return self.seconds_by_part.get(part, 0.0)

    @cached_property
    def seconds_by_part(self) -> Mapping[Part, Num]:
        """Of all charges."""
        result: dict[Part, Num] = {}
        for charge, seconds in self.charges.items():
            _add(result, charge.part, seconds)
        return result

    @cached_property
    def bare_seconds(self) -> Num:
        """Seconds of one microbatch without exposed collectives and without waiting for the host."""
        return _sum(seconds for charge, seconds in self.bare.items() if charge.part != "step")

    def without_tasks(self) -> StageCost:
        """The same seconds of the parts, and not where they come from."""
        return replace(self, roads={}, hidden=(), by_layer={})


@dataclass(frozen=True, kw_only=True)
class TaskTally:
    """Tasks gone through so far. Plans that differ in their last techniques share a tally of the rest."""

    tasks: tuple[Task, ...] = ()
    charges: Mapping[Charge, Num] = field(default_factory=dict)
    cover: Mapping[tuple[str, Part], Num] = field(default_factory=dict)
    """(layer, part) -> seconds of compute that collectives may hide behind."""
    host: Mapping[Part, Num] = field(default_factory=dict)
    """Seconds the host needs to launch all of it."""
    hidden: tuple[Hidden, ...] = ()
    send_seconds: Num = 0.0

    def begins(self, tasks: tuple[Task, ...]) -> bool:
        """Whether these very tasks come first in `tasks`."""
        return len(self.tasks) <= len(tasks) and all(map(operator.is_, self.tasks, tasks))


Known = dict[int, tuple[Compute, Num, Num]]
"""By the identity of a compute task: the task, its seconds and its host's."""


def tally(
    work: Work, cluster: Cluster, roads: Mapping[str, Route], done: TaskTally | None = None, known: Known | None = None
) -> TaskTally:
    """Go through the tasks of `work` that `done` has not; a tally of other tasks is no help and is left. What is known
    of a task, from another work that has it too, is not asked again."""
    known, device, tiers = {} if known is None else known, cluster.device, cluster.tiers
    done = done if done is not None and done.begins(work.tasks) else TaskTally()
    charges, cover, host, hidden = dict(done.charges), dict(done.cover), dict(done.host), list(done.hidden)
    send = done.send_seconds
    for task in work.tasks[len(done.tasks) :]:
        part = _PART[task.phase]
        if isinstance(task, Compute):
            if id(task) not in known:
                seconds = task.repeat * compute_seconds(task, device)
                known[id(task)] = task, seconds, task.repeat * host_seconds(task, device)
            _, seconds, launching = known[id(task)]
            _add(cover, (task.layer, part), seconds)
            _add(charges, Charge(task.origin, "", part), seconds)
            _add(host, part, launching)
            continue
        shared: Num = False
        if isinstance(task, Copy):
            each = tiers[task.tier].copy_seconds(task.bytes, is_inward=task.is_inward)
        elif isinstance(task, HostUpdate):
            each = task.elements * cluster.devices_per_node / (cluster.host.updates_per_second or 1.0)
        else:
            road = roads[task.where]
            if device.kind != "cpu":
                calls = (not task.per_step) * (road.size > 1) * task.repeat * COLLECTIVE_LAUNCHES
                _add(host, part, calls * device.launch_seconds)
            each, shared = road.seconds(task.kind, task.bytes, task.algorithm), road.shared
            if task.kind == "send" and not task.per_step:
                send = np.maximum(send, each * (task.repeat > 0))
                continue
        if task.hidden:
            hidden.append(Hidden(task, each, task.repeat * each, shared))
        else:
            _add(charges, _charge(task, "step" if task.per_step else part), task.repeat * each)
    return TaskTally(tasks=work.tasks, charges=charges, cover=cover, host=host, hidden=tuple(hidden), send_seconds=send)


def stage_cost(
    work: Work, cluster: Cluster, roads: Mapping[str, Route], done: TaskTally | None = None, known: Known | None = None
) -> StageCost:
    """`roads` are the mesh's, from `routes`; `done` a tally that begins this work, if there is one."""
    total = tally(work, cluster, roads, done, known)
    charges = dict(total.charges)
    order = ["", *(layer.name for layer in work.profile.layers)]
    beside = cluster.beside
    messages = (beside.collective_by_compute, beside.compute_by_collective)
    copies = (beside.copy_by_compute, beside.compute_by_copy)
    # Each kind hides behind compute by itself: the network, a copy engine for either way, cores of the host. A disk
    # reads and writes while those are waited for, too.
    alone = (1.0, 1.0)
    lanes = [("collective", messages), ("copy in", copies), ("copy out", copies), ("cpu", alone)]
    lanes += [("disk in", alone), ("disk out", alone)]
    parts: tuple[Part, ...] = ("forward", "backward", "weight", "step")
    waits: dict[Part, Num] = {"step": _waits(charges)}
    groups: dict[tuple[Part, str], list[Hidden]] = {}
    for item in total.hidden:
        groups.setdefault((item.part, item.lane), []).append(item)
    for part, (lane, slowed) in itertools.product(parts, lanes):
        group = groups.get((part, lane))
        if group is None:
            continue
        # Those of a layer run beside its neighbours' compute; the first layer's have nothing to hide behind.
        each = [item for item in group if not item.task.per_step]
        for layer, mine, bare in _in_turn(each, order if part in ("forward", "step") else order[::-1]):
            _expose(charges, mine, total.cover.get((layer, part), 0.0), bare, part, slowed)
        # Once a step, beside one microbatch's pass; the first layer's is needed first, or ready last.
        once = [item for item in group if item.task.per_step and not item.window]
        if long := [item for item in group if item.task.per_step and item.window]:
            passes = _sum(seconds for (_, when), seconds in total.cover.items() if when != "step")
            whole = work.size("num_microbatches") * passes
            _expose(charges, long, long[0].window * whole, 0.0, "step", slowed)
        if once:
            bare = _sum(seconds for _, _, seconds in _in_turn(once, order))
            window = _sum(seconds for (_, when), seconds in total.cover.items() if when == part)
            # Chunks end one after another: only the last one's gradients have nothing but its own pass to hide behind.
            shown = 1.0 if part == "forward" else 1.0 / work.facts.chunks
            before = _waits(charges)
            if lane.startswith("disk"):  # several layers are in memory: the first one is read ahead
                window, bare = window + waits.get(part, 0.0), 0.0
            _expose(charges, once, window, bare, "step", slowed, shown)
            waits[part] = waits.get(part, 0.0) + _waits(charges) - before
    axis, origin = work.facts.agreement
    if axis:
        _add(charges, Charge(origin, axis, "step"), roads[axis].seconds("all_reduce", AGREED_BYTES))
    # The device waits for its host, which runs ahead while it is the faster one; and before the update: whether the
    # gradients are finite is asked there.
    lead: Num = 0.0
    for part in parts:
        seconds = total.host.get(part, 0.0)
        busy = _sum(spent for charge, spent in charges.items() if charge.part == part)
        lead = 0.0 if part == "step" else lead
        waits = np.maximum(0.0, seconds - lead - busy)
        lead = lead + busy + waits - seconds
        if part in total.host:
            charges[Charge(LAUNCH, "", part)] = waits
    return StageCost(
        charges=charges,
        send_seconds=total.send_seconds,
        roads=roads,
        hidden=total.hidden,
        bare=total.charges,
        by_layer=total.cover,
    )


def _waits(charges: Mapping[Charge, Num]) -> Num:
    """Once in a step, for tiers of memory and cores of the host."""
    return _sum(seconds for charge, seconds in charges.items() if charge.tier and charge.part == "step")


def _add(amounts: dict[K, Num], key: K, seconds: Num) -> None:
    amounts[key] = amounts.get(key, 0.0) + seconds


def _in_turn(group: list[Hidden], order: list[str]) -> Iterator[tuple[str, list[Hidden], Num]]:
    """Layer, its collectives, and their seconds where it is the first that this stage has (else none)."""
    unseen: Num = True
    by_layer: dict[str, list[Hidden]] = {}
    for item in group:
        by_layer.setdefault(item.task.layer, []).append(item)
    for layer in order if group else ():
        if mine := by_layer.get(layer):
            is_here = mine[0].task.repeat > 0
            yield layer, mine, _sum(item.each_seconds for item in mine) * (unseen & is_here)
            unseen = unseen & np.logical_not(is_here)


def _expose(
    charges: dict[Charge, Num],
    group: list[Hidden],
    window: Num,
    bare: Num,
    part: Part,
    slowed: tuple[float, float],
    shown: float = 1.0,
) -> None:
    """Charge each technique its share of what stays visible of `group` beside `window` seconds of compute; `shown` of
    it where the rest hides elsewhere.

    Side by side both are slower, by as many times as `slowed` says of the group and of compute; what ends first leaves
    the other alone (Mist's peeling, for two).
    """
    itself, compute = slowed
    total = _sum(item.total_seconds for item in group)
    both = np.minimum(total * itself, window * compute)
    visible = np.minimum(total, both - both / compute + total - both / itself + bare)
    fraction = shown * visible / np.maximum(total, 1e-30)
    for item in group:
        _add(charges, item.charge(part), item.total_seconds * _pick(item.shared, 1.0, fraction))


def _sum(values: Iterable[Num]) -> Num:
    total: Num = 0.0
    for value in values:
        total = total + value
    return total
