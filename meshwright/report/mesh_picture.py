"""The mesh on the machine: nodes as boxes, ranks in them by their place on each axis.

┌ node 0: pp 0 ──────────────┐
│ fsdp 0   tp 0 1 2 3        │
│ fsdp 1   tp 0 1 2 3        │
└────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshwright.core.cluster import Cluster, Link, slowest
from meshwright.core.placement import placed
from meshwright.core.plan import Plan
from meshwright.core.units import pretty_rate

_MOST_NODES = 3
_MOST_ROWS = 8
_MOST_CELLS = 16
Place = dict[str, int]


def mesh_picture(plan: Plan, cluster: Cluster, width: int) -> list[str]:
    """Lines of text no wider than `width`; of many nodes the first few of each group."""
    if plan.num_ranks == 1:
        return [f"one rank on one device of {cluster.name}"]
    here = placed(plan, cluster)
    names = [f" {name}" if here.others else "" for name in here.group_names]
    lines: list[str] = []
    first, node = 0, 0
    for name, group in zip(names, here.groups, strict=True):
        end = min(first + group.num_devices, plan.num_ranks)
        starts = range(first, end, group.devices_per_node)
        boxes: list[list[str]] = []
        for start in starts[:_MOST_NODES]:
            ranks = range(start, min(start + group.devices_per_node, end))
            box = _box(f"node {node + len(boxes)}{name}", [place_of(rank, plan.mesh) for rank in ranks], width)
            if boxes and sum(len(b[0]) + 2 for b in [*boxes, box]) > width:
                break
            boxes.append(box)
        left = len(starts) - len(boxes)
        height = max(len(box) for box in boxes)
        padded = [[*box, *[" " * len(box[0])] * (height - len(box))] for box in boxes]
        lines += ["  ".join(parts).rstrip() for parts in zip(*padded, strict=True)]
        lines += [f"... and {left:,} more node{'s' if left > 1 else ''}"] if left else []
        first, node = end, node + len(starts)
    return [*lines, *axis_lines(plan, here)]


def place_of(rank: int, mesh: Mapping[str, int]) -> Place:
    """Axis -> where the rank is on it; the last axis varies fastest."""
    return dict(zip(mesh, map(int, np.unravel_index(rank, tuple(mesh.values()))), strict=True))


def axis_lines(plan: Plan, here: Cluster) -> list[str]:
    """For each axis whether it stays inside a node, and over which link it talks."""
    widths = [group.devices_per_node for group in here.groups for _ in range(group.num_nodes)]
    owners = [index for index, group in enumerate(here.groups) for _ in range(group.num_devices)]
    shape, ranks = tuple(plan.mesh.values()), plan.num_ranks
    nodes = np.repeat(np.arange(len(widths)), widths)[:ranks].reshape(shape)
    groups = np.array(owners)[:ranks].reshape(shape)
    lines = []
    for dim, (axis, size) in enumerate(plan.mesh.items()):
        met, joined = _most_distinct(nodes, dim), _most_distinct(groups, dim)
        where = "between nodes" if met == size else f"{size // met} inside a node, {met} nodes"
        if met == 1:
            words = f"inside a node, {_link_words(slowest(group.inner for group in here.groups), 'inner')}"
        elif joined > 1:
            words = f"{where} of {joined} groups, {_link_words(here.link_between(range(len(here.groups))), 'outer')}"
        else:
            words = f"{where}, {_link_words(slowest(group.outer for group in here.groups), 'outer')}"
        lines.append(f"{axis} {size}: {words}")
    return lines


def _most_distinct(numbers: np.ndarray, dim: int) -> int:
    """The most different numbers that stand along a dimension."""
    ordered = np.sort(numbers, axis=dim)
    return int((np.diff(ordered, axis=dim) != 0).sum(axis=dim).max()) + 1


def _link_words(link: Link, name: str) -> str:
    return f"{link.name or name + ' link'} {pretty_rate(link.bytes_per_second, 'B/s')}"


def _box(name: str, places: list[Place], width: int) -> list[str]:
    """Axes that are the same for all its ranks are in the title; the innermost other one runs across."""
    same = [axis for axis in places[0] if len({place[axis] for place in places}) == 1]
    varying = [axis for axis in places[0] if axis not in same]
    title = f" {name}{': ' if same else ''}{' '.join(f'{axis} {places[0][axis]}' for axis in same)} "
    rows = [] if varying else ["one rank"]
    if varying:
        *outer, across = varying
        grouped: dict[tuple[int, ...], list[int]] = {}
        for place in places:
            grouped.setdefault(tuple(place[axis] for axis in outer), []).append(place[across])
        wide = max(len(str(place[axis])) for place in places for axis in varying)
        for key, cells in grouped.items():
            names = " ".join(f"{axis} {number:>{wide}}" for axis, number in zip(outer, key, strict=True))
            fit = (width - len(names) - len(across) - 10) // (wide + 1)  # beside the frame and spaces
            most = len(cells) if len(cells) <= min(_MOST_CELLS, fit) else max(1, min(_MOST_CELLS, fit - 5))
            numbers = " ".join(f"{cell:>{wide}}" for cell in cells[:most])
            more = f" ... {cells[-1]}" if len(cells) > most else ""
            rows.append(f"{names}{'   ' if names else ''}{across} {numbers}{more}")
        if len(rows) > _MOST_ROWS:
            rows = [*rows[: _MOST_ROWS - 1], f"... {len(rows) - _MOST_ROWS + 1} more rows"]
    inner = max(len(title) + 1, *(len(row) + 2 for row in rows))
    top = f"┌{title}{'─' * (inner - len(title))}┐"
    return [top, *(f"│ {row:<{inner - 2}} │" for row in rows), f"└{'─' * inner}┘"]
