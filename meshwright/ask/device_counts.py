"""The same kind of machine with more or fewer devices: which sizes there are, and what each would give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshwright.ask.question import Outcome, Question, Tell, outcome
from meshwright.core.cluster import MOST_DEVICES, Cluster, parse_cluster_name

MOST_SIZES = 8
ONE_NODE = 8
"""Devices of a node where only one is given: as most machines of several are built."""


def node_width(cluster: Cluster) -> int:
    """Devices a whole node has; one alone says nothing of the node it is in."""
    return cluster.devices_per_node if cluster.num_devices > 1 else ONE_NODE


def resized(cluster: Cluster, devices: int) -> Cluster | None:
    """With so many devices: some of one node, or whole nodes; None where neither is possible, or groups differ."""
    width = node_width(cluster)
    if cluster.others:
        return cluster if devices == cluster.num_devices else None
    if devices < 1 or devices > MOST_DEVICES or (devices > width and devices % width):
        return None
    return reshaped(cluster, *((devices, 1) if devices <= width else (width, devices // width)))


def reshaped(cluster: Cluster, devices_per_node: int, num_nodes: int) -> Cluster:
    """So many nodes of so many devices, named after it."""
    if (devices_per_node, num_nodes) == (cluster.devices_per_node, cluster.num_nodes):
        return cluster
    parsed = parse_cluster_name(cluster.name.lower())
    kind = parsed[2] if parsed else cluster.name
    nodes = f"{num_nodes}x" if num_nodes > 1 else ""
    return cluster.resized(devices_per_node, num_nodes, name=f"{nodes}{devices_per_node}x{kind}")


def sizes_between(cluster: Cluster, low: int, high: int) -> tuple[int, ...]:
    """At most eight numbers of devices from `low` to `high`: all there are, else both ends and powers of two."""
    if cluster.others:
        return (cluster.num_devices,) if low <= cluster.num_devices <= high else ()
    width = node_width(cluster)
    inside = {1 << bit for bit in range(width.bit_length()) if low <= 1 << bit <= min(width, high)}
    inside |= {width} if low <= width <= high else set()
    first, last = max(2, -(-low // width)), min(high, MOST_DEVICES) // width
    if len(inside) + max(0, last - first + 1) <= MOST_SIZES:
        return tuple(sorted(inside | {nodes * width for nodes in range(first, last + 1)}))
    doubled = {1 << bit for bit in range(last.bit_length()) if first <= 1 << bit <= last}
    every = sorted(inside | {nodes * width for nodes in doubled | {first, last}})
    steps = min(len(every), MOST_SIZES) - 1
    return tuple(every[round(i * (len(every) - 1) / steps)] for i in range(steps + 1))


def larger_sizes(cluster: Cluster) -> Iterator[int]:
    """Numbers of devices above the cluster's own, doubling: inside a node, then nodes."""
    width, devices = node_width(cluster), cluster.num_devices
    if cluster.others:
        return
    while (devices := 2 * devices if 2 * devices <= width else _next_nodes(devices, width)) <= MOST_DEVICES:
        yield devices


def _next_nodes(devices: int, width: int) -> int:
    """The next of 1, 2, 4, 8, ... nodes."""
    nodes = 1
    while nodes * width <= devices:
        nodes *= 2
    return nodes * width


@dataclass(frozen=True, kw_only=True)
class DeviceCount:
    devices: int
    outcome: Outcome

    @property
    def rate(self) -> float:
        """Tokens (or samples) a second; 0 where there is no plan."""
        return self.outcome.best.forecast.tokens_per_second if self.outcome.best else 0.0

    def device_hours(self, tokens: float) -> float:
        return tokens / self.rate * self.devices / 3600 if self.rate else float("inf")


@dataclass(frozen=True, kw_only=True)
class DeviceCounts:
    tried: tuple[DeviceCount, ...]
    is_interrupted: bool = False

    @property
    def fastest(self) -> DeviceCount | None:
        return max((size for size in self.tried if size.rate), key=lambda size: size.rate, default=None)

    @property
    def cheapest(self) -> DeviceCount | None:
        """Most tokens a device-hour; of equal ones the faster."""
        fitting = (size for size in self.tried if size.rate)
        return max(fitting, key=lambda size: (size.rate / size.devices, size.rate), default=None)


def compare_sizes(question: Question, devices: tuple[int, ...], tell: Tell) -> DeviceCounts:
    """The best plan for each number of devices."""
    tried: list[DeviceCount] = []
    try:
        for count in devices:
            cluster = resized(question.cluster, count)
            assert cluster is not None, f"{count} devices come from sizes_between"
            tell(f"searching {cluster.name}, {len(tried) + 1} of {len(devices)}")
            tried.append(DeviceCount(devices=count, outcome=outcome(cluster.name, replace(question, cluster=cluster))))
    except KeyboardInterrupt:
        return DeviceCounts(tried=tuple(tried), is_interrupted=True)
    return DeviceCounts(tried=tuple(tried))
