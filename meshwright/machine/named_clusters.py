"""A cluster by name (`64x8xh100`) or from a file. Stdlib only: `mw plan` on a named cluster must start fast.

Presets hold one device each, from its data sheet; the counts in the name put them in nodes. `warnings_of` says what
looks wrong in a cluster file: figures that no such card has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

from meshwright.core.cluster import Cluster, Device, Errors, HostResources, parse_cluster_name
from meshwright.core.codec import load_artefact
from meshwright.core.errors import Problem, nearest, raise_problems
from meshwright.core.units import pretty_bytes, pretty_rate

PRESETS_FOLDER = Path(__file__).parent / "presets"
ALIASES = {"a100": "a100-80", "a100-pcie": "a100-pcie-80", "v100-32": "v100", "rtx-a6000": "a6000"}

_HOST_BYTES_PER_SECOND = 4e10


def preset_names() -> tuple[str, ...]:
    """The devices `cluster` knows, sorted, aliases included."""
    return tuple(sorted({path.stem for path in PRESETS_FOLDER.glob("*.json")} | set(ALIASES)))


@cache
def preset(name: str) -> Cluster:
    """One device as its data sheet has it."""
    return load_artefact(Cluster, PRESETS_FOLDER / f"{ALIASES.get(name, name)}.json")


def preset_of_device(torch_name: str) -> Cluster | None:
    """The preset of the card that torch calls `torch_name`, or None.

    A preset whose links we know has torch's name in `sources.torch_name`, as a pattern. Word boundaries matter: GH200
    is no H200, GB200 no B200, and the PCIe and NVL versions of A100 and H100 are other machines.
    """
    for sheet in map(preset, preset_names() if torch_name else ()):
        pattern = sheet.sources.get("torch_name")
        if pattern and re.search(pattern, torch_name.strip(), re.IGNORECASE):
            return sheet
    return None


def cluster(name_or_path: str) -> Cluster:
    """`h200`, `8xh100` (one node), `64x8xh100` (64 nodes of 8), groups joined by `+`, or a JSON file by `mw probe`."""
    text = name_or_path.strip()
    if text.lower().endswith(".json"):
        return load_artefact(Cluster, text)
    groups: list[Cluster] = []
    problems: list[Problem] = []
    for part in text.lower().split("+"):
        name, known = part.strip() or name_or_path, preset_names()
        parsed = parse_cluster_name(name)
        if parsed is None:
            fix = f"Write 8xh100, 64x8xh100, 8xh100+8xa100 or a .json file. {nearest(name, known)}"
            problems.append(Problem(where="cluster", what=f'"{name}" is no cluster name.', fix=fix))
            continue
        num_nodes, devices_per_node, device = parsed
        if device not in known:
            what = f'no device is called "{device}".'
            problems.append(Problem(where="cluster", what=what, fix=nearest(device, known)))
        elif num_nodes < 1 or devices_per_node < 1:
            what = f'"{name}" has {num_nodes} x {devices_per_node} devices; both counts must be at least 1.'
            problems.append(Problem(where="cluster", what=what))
        else:
            groups.append(preset(device).resized(devices_per_node, num_nodes, name=name))
    # A known name wins over a file that happens to be called `h100`.
    if problems and Path(text).is_file():
        return load_artefact(Cluster, text)
    raise_problems(problems)
    first, *rest = groups
    if not rest:
        return first
    # What a cluster says once (errors, jitter) is the widest of its groups.
    bounds = {f.name: max(getattr(each.errors, f.name) for each in groups) for f in fields(Errors)}
    return replace(
        first,
        name=text.lower(),
        errors=Errors(**bounds),
        jitter_fraction=max(each.jitter_fraction for each in groups),
        others=tuple(each.groups[0] for each in rest),
        sources={f"{each.name} {key}": source for each in groups for key, source in each.sources.items()},
    )


_LEAST_SPARSE, _MOST_SPARSE = 1.9, 2.1
"""Times the dense rate: data sheets print it first, and no training reaches it."""
_MOST_OF_SHEET = 1.25
_MOST_OF_MEMORY = 1.02
_SAME_CARD = 1.1


def with_host_memory(cluster: Cluster, num_bytes: int) -> Cluster:
    """Every host with so much memory; where nobody measured its rate, that of two channels of DDR4 is taken."""

    def changed(host: HostResources) -> HostResources:
        rate = host.memory_bytes_per_second or _HOST_BYTES_PER_SECOND
        return replace(host, memory_bytes=num_bytes, memory_bytes_per_second=rate)

    others = tuple(replace(group, host=changed(group.host)) for group in cluster.others)
    return replace(cluster, host=changed(cluster.host), others=others)


def warnings_of(cluster: Cluster) -> Iterator[str]:
    """Against the data sheet of the same card, where it can be told which that is."""
    if cluster.others:
        for at in range(len(cluster.groups)):
            yield from warnings_of(cluster.view(at))
        return
    sheet = None if cluster.device.kind == "cpu" else _sheet_of(cluster)
    if sheet is None:
        return
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
    rate, own_rate = device.memory_bytes_per_second, known.memory_bytes_per_second
    if rate > _MOST_OF_SHEET * own_rate:
        says = f"{sheet.name} has {pretty_rate(own_rate, 'B/s')}"
        yield f"device.memory_bytes_per_second is {pretty_rate(rate, 'B/s')}; {says}."
    if device.memory_bytes > _MOST_OF_MEMORY * known.memory_bytes:
        says = f"{sheet.name} has {pretty_bytes(known.memory_bytes)}: plans may be called fitting that do not fit"
        yield f"device.memory_bytes is {pretty_bytes(device.memory_bytes)}; {says}."
    for name, link, own in (("inner", cluster.inner, sheet.inner), ("outer", cluster.outer, sheet.outer)):
        share = link.bytes_per_second / own.bytes_per_second
        if share > _MOST_OF_SHEET:
            both = " (is that both ways together?)" if _LEAST_SPARSE <= share <= _MOST_SPARSE else ""
            yield (
                f"{name}.bytes_per_second is {pretty_rate(link.bytes_per_second, 'B/s')}{both}; {own.name or 'it'} of "
                f"{sheet.name} gives one device {pretty_rate(own.bytes_per_second, 'B/s')} one way."
            )


def _sheet_of(cluster: Cluster) -> Cluster | None:
    """By what torch called the card, by the cluster's name, or by what no sparsity changes: fp32 and memory."""
    if result := preset_of_device(cluster.sources.get("device", "")):
        return result
    parsed = parse_cluster_name(cluster.name.lower())
    if parsed is not None and parsed[2] in preset_names():
        return preset(parsed[2])
    for sheet in (preset(name) for name in preset_names() if name not in ALIASES):
        ours, theirs = figures_of(cluster.device), figures_of(sheet.device)
        is_near = all(1 / _SAME_CARD < ours[name] / theirs[name] < _SAME_CARD for name in ours)
        if is_near and cluster.device.kind == sheet.device.kind:
            return sheet
    return None


def figures_of(device: Device) -> dict[str, float]:
    """By which cards are told apart, as their data sheets have them."""
    return {
        "memory bytes": device.memory_bytes,
        "memory bytes per second": device.memory_bytes_per_second,
        "fp32 operations per second": device.flops_per_second["fp32"],
    }
