"""A timeline as lines of text: a row for each distinct rank, and the memory of the fullest below."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from meshwright.core.timeline import Span, Timeline
from meshwright.core.units import pretty_bytes, pretty_seconds
from meshwright.report import timeline_lanes as lanes

Line = list[tuple[str, str]]
"""Pieces of text, each with a style that a terminal may give it."""

LETTERS = {
    "forward": ("F", "blue"),
    "backward": ("B", "green"),
    "weight": ("W", "yellow"),
    "update": ("U", "magenta"),
    "collective": ("=", "red"),
    "copy": ("~", "cyan"),
    "idle": (".", "dim"),
}
_WORDS = {"weight": "weight half", "collective": "collective alone", "copy": "copy alone"}
_LEAST = 0.02
"""Shares of a column that are not shown."""
_MEMORY_ROWS = 4
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_PLAIN = " ......##"
_LABEL = 12
_END = 11
"""Columns left and right of the drawing."""


def draw(timeline: Timeline, *, width: int = 100, plain: bool = False) -> list[Line]:
    """`plain`: letters, digits and signs that every encoding has."""
    columns = max(8, width - _LABEL - _END)
    total = timeline.seconds or 1.0
    lines: list[Line] = [[("; ".join(lanes.said(timeline)), "dim")]] if lanes.said(timeline) else []
    used: set[str] = set()
    for device, spans in lanes.spans_by_device(timeline, lanes.shown_devices(timeline)).items():
        cells = _cells(spans, total, columns)
        used |= set(cells)
        computing = [(span.start_seconds, span.end_seconds) for span in spans if span.lane == "compute"]
        busy = lanes.length(lanes.united(computing)) / total
        label = (f"rank {device}".ljust(_LABEL), "")
        drawn = [(LETTERS[kind][0] * len(list(run)), LETTERS[kind][1]) for kind, run in itertools.groupby(cells)]
        lines.append([label, *drawn, (f" busy {busy:4.0%}".rjust(_END), "")])
    lines.append([(f"{'':{_LABEL}}0{pretty_seconds(total):>{columns - 1}}", "dim")])
    if marked := lanes.period(timeline):  # one step among several that overlap
        first, last = (min(columns - 1, int(each / total * columns)) for each in marked)
        inside = f" one step: {pretty_seconds(marked[1] - marked[0])} ".center(max(0, last - first - 1), "-")
        lines.append([(f"{'':{_LABEL + first}}|{inside}|", "")])
    if timeline.memory:
        lines += _memory(timeline, total, columns, plain)
    legend: Line = [(" " * _LABEL, "")]
    for kind, (letter, style) in LETTERS.items():
        if kind in used:
            legend += [("   " if len(legend) > 1 else "", ""), (letter, style), (f" {_WORDS.get(kind, kind)}", "")]
    return [*lines, legend]


def _cells(spans: Sequence[Span], total: float, columns: int) -> list[str]:
    """What takes most of each column's time; collectives only where nothing is computed, copies where neither is."""
    amounts: list[dict[str, float]] = [{} for _ in range(columns)]
    for span in spans:
        kind = lanes.kind_of(span)
        if kind == "message":
            continue
        start, end = span.start_seconds / total * columns, span.end_seconds / total * columns
        for column in range(int(start), min(columns, int(end) + 1)):
            covered = min(end, column + 1) - max(start, column)
            amounts[column][kind] = amounts[column].get(kind, 0.0) + max(0.0, covered)
    cells: list[str] = []
    owed: dict[str, float] = {}
    for amount in amounts:
        left = 1.0 - sum(share for kind, share in amount.items() if kind not in ("collective", "copy"))
        for kind in ("collective", "copy"):
            amount[kind] = min(amount.get(kind, 0.0), max(0.0, left))
            left -= amount[kind]
        amount["idle"] = max(0.0, 1.0 - sum(amount.values()))
        # What a column has too little room for is owed to the next: many short spans show in their proportion.
        owed = {kind: share + owed.get(kind, 0.0) for kind, share in amount.items() if share > _LEAST}
        cells.append(max(owed, key=lambda kind: owed[kind]))
        owed[cells[-1]] -= 1.0
    return cells


def _memory(timeline: Timeline, total: float, columns: int, plain: bool) -> list[Line]:
    device, peak = lanes.fullest(timeline)
    has = lanes.memory_bytes(timeline)
    limit = has if lanes.is_near(has, peak) else 0
    top = max(peak, limit) or 1
    levels = [0 if point is None else point.bytes for point in lanes.by_column(timeline, device, total, columns)]
    blocks = _PLAIN if plain else _EIGHTHS
    lines: list[Line] = []
    for row in reversed(range(_MEMORY_ROWS)):
        text = ""
        for level in levels:
            filled = level / top * _MEMORY_ROWS - row
            text += blocks[max(0, min(8, round(filled * 8)))]
        label = ("memory", f"of rank {device}", "", "")[_MEMORY_ROWS - 1 - row]
        lines.append([(label.ljust(_LABEL), ""), (text, "cyan")])
    if limit:
        rule = ("-" if plain else "┄") * columns
        lines.insert(_MEMORY_ROWS - min(_MEMORY_ROWS, -(-limit * _MEMORY_ROWS // top)), [(" " * _LABEL + rule, "red")])
    says = f"{'':{_LABEL}}at most {pretty_bytes(peak)}"
    if has:
        says += f"; a device has {pretty_bytes(has)} ({'the line' if limit else 'far above'})"
    return [*lines, [(says, "")]]
