"""What looks wrong in a cluster file: figures no such card has, for all that they are possible. Stdlib only."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.core.cluster import Cluster, Link, parse_cluster_name
from meshwright.core.units import pretty_bytes, pretty_rate
from meshwright.machine.named_clusters import ALIASES, preset, preset_names, preset_of_device

_LEAST_SPARSE, _MOST_SPARSE = 1.9, 2.1
"""Times the dense rate: data sheets print it first, and no training reaches it."""
_MOST_OF_SHEET = 1.25
_MOST_OF_MEMORY = 1.02
_SAME_CARD = 1.1


def warnings_of(cluster: Cluster) -> tuple[str, ...]:
    """Against the data sheet of the same card, where it can be told which that is."""
    if cluster.others:
        return tuple(line for at in range(len(cluster.groups)) for line in warnings_of(cluster.view(at)))
    sheet = _sheet_of(cluster)
    if sheet is None or cluster.device.kind == "cpu":
        return ()
    return (*_of_device(cluster, sheet), *_of_links(cluster, sheet))


def _sheet_of(cluster: Cluster) -> Cluster | None:
    """By what torch called the card, by the cluster's name, or by what no sparsity changes: fp32 and memory."""
    if found := preset_of_device(cluster.sources.get("device", "")):
        return found
    parsed = parse_cluster_name(cluster.name.lower())
    if parsed is not None and parsed[2] in preset_names():
        return preset(parsed[2])
    known = (preset(name) for name in preset_names() if name not in ALIASES)
    return next((sheet for sheet in known if _is_same_card(cluster, sheet)), None)


def _is_same_card(cluster: Cluster, sheet: Cluster) -> bool:
    one, other = cluster.device, sheet.device
    pairs = (
        (one.flops_per_second["fp32"], other.flops_per_second["fp32"]),
        (one.memory_bytes, other.memory_bytes),
        (one.memory_bytes_per_second, other.memory_bytes_per_second),
    )
    return one.kind == other.kind and all(1 / _SAME_CARD < a / b < _SAME_CARD for a, b in pairs)


def _of_device(cluster: Cluster, sheet: Cluster) -> Iterator[str]:
    device, known = cluster.device, sheet.device
    for dtype, rate in device.flops_per_second.items():
        dense = known.flops_per_second.get(dtype)
        if dense is None or rate <= _MOST_OF_SHEET * dense:
            continue
        share, says = rate / dense, f"{sheet.name} has {pretty_rate(dense, 'FLOP/s')}"
        what = f"{rate / dense:.2f} times the data sheet's: {says}"
        if _LEAST_SPARSE <= share <= _MOST_SPARSE:
            what = f"the rate with sparsity, which no training reaches: {says} without; every forecast is too fast"
        yield f"device.flops_per_second.{dtype} is {pretty_rate(rate, 'FLOP/s')}, {what}."
    if device.memory_bytes_per_second > _MOST_OF_SHEET * known.memory_bytes_per_second:
        yield (
            f"device.memory_bytes_per_second is {pretty_rate(device.memory_bytes_per_second, 'B/s')}; "
            f"{sheet.name} has {pretty_rate(known.memory_bytes_per_second, 'B/s')}."
        )
    if device.memory_bytes > _MOST_OF_MEMORY * known.memory_bytes:
        yield (
            f"device.memory_bytes is {pretty_bytes(device.memory_bytes)}; {sheet.name} has "
            f"{pretty_bytes(known.memory_bytes)}: plans may be called fitting that do not fit."
        )


def _of_links(cluster: Cluster, sheet: Cluster) -> Iterator[str]:
    pairs: dict[str, tuple[Link, Link]] = {
        "inner": (cluster.inner, sheet.inner),
        "outer": (cluster.outer, sheet.outer),
    }
    for name, (link, known) in pairs.items():
        share = link.bytes_per_second / known.bytes_per_second
        if share <= _MOST_OF_SHEET:
            continue
        both = " (is that both ways together?)" if _LEAST_SPARSE <= share <= _MOST_SPARSE else ""
        yield (
            f"{name}.bytes_per_second is {pretty_rate(link.bytes_per_second, 'B/s')}{both}; {known.name or 'it'} of "
            f"{sheet.name} gives one device {pretty_rate(known.bytes_per_second, 'B/s')} one way."
        )
