"""Timelines as a picture (SVG): lanes of each distinct rank, one timeline above the other on one time axis, and the
memory of the fullest rank below."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from xml.sax.saxutils import escape

from meshwright.core.timeline import LANES, MemoryPoint, Span, Timeline, in_rows
from meshwright.core.units import pretty_bytes, pretty_seconds
from meshwright.report.timeline_lanes import (
    by_column,
    fullest,
    is_near,
    kind_of,
    memory_bytes,
    period,
    said,
    shown_devices,
    step_seconds,
)

WIDTH = 1200
LETTER = 0.61
"""Width of a letter of the usual monospaced fonts, in sizes of the font: words are placed by counting letters."""


def wide(text: str, size: float) -> float:
    return len(text) * LETTER * size


def clipped(text: str, room: float, size: float) -> str:
    most = max(1, int(room / (LETTER * size)))
    return text if len(text) <= most else text[: most - 1] + "…"


class Sheet:
    def __init__(self) -> None:
        self.parts: list[str] = []

    def rect(self, x: float, y: float, w: float, h: float, fill: str, *, opacity: float = 1.0, title: str = "") -> None:
        faint = f' fill-opacity="{opacity:g}"' if opacity < 1 else ""
        shape = f'<rect x="{x:.2f}" y="{y:.1f}" width="{w:.2f}" height="{h:.1f}" fill="{fill}"{faint}'
        self.parts.append(f"{shape}><title>{escape(title)}</title></rect>" if title else f"{shape}/>")

    def line(self, x: float, y: float, x2: float, y2: float, colour: str, *, dashed: bool = False) -> None:
        dashes = ' stroke-dasharray="6 4"' if dashed else ""
        self.parts.append(f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dashes}/>')

    def area(self, points: Iterable[tuple[float, float]], fill: str) -> None:
        self.parts.append(f'<polygon points="{_listed(points)}" fill="{fill}"/>')

    def curve(self, points: Iterable[tuple[float, float]], colour: str) -> None:
        self.parts.append(f'<polyline points="{_listed(points)}" fill="none" stroke="{colour}" stroke-width="1.5"/>')

    def text(
        self, x: float, y: float, words: str, *, size: float = 12, anchor: str = "start", is_bold: bool = False
    ) -> None:
        """`y` is the line that letters stand on."""
        weight = ' font-weight="bold"' if is_bold else ""
        place = f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" text-anchor="{anchor}"{weight}>'
        self.parts.append(f"{place}{escape(words)}</text>")

    def written(self, height: float) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
            f'viewBox="0 0 {WIDTH} {height:.0f}" font-family="monospace" fill="#1c2430">'
        )
        return "\n".join([head, f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>', *self.parts, "</svg>"])


def legend(sheet: Sheet, entries: Sequence[tuple[str, str]], x: float, y: float, right: float) -> float:
    """(colour, words) in as many rows as it takes; where the next thing may stand."""
    at = x
    for colour, words in entries:
        room = 16 + wide(words, 11) + 18
        if at > x and at + room > right:
            at, y = x, y + 18
        sheet.rect(at, y - 9, 11, 10, colour)
        sheet.text(at + 16, y, words, size=11)
        at += room
    return y + 18


def _listed(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


LEFT, RIGHT = 120, 1160
"""Where time begins and ends."""
_TALL = {"compute": 14, "collective": 6, "copy": 6}
_MOST_ROWS = 3
"""For what overlaps in one lane; the last one has all that is left."""
_MEMORY_TALL = 150
_NARROW = 0.75
"""Pixels below which spans of one pixel are drawn as one, in the colour of most of them."""

_FIXED = {
    "model": "#3b6fb6",
    "collective": "#b4572e",
    "copy": "#5b8c5a",
    "waiting": "#c9ced6",
    "waiting for the host": "#8a93a1",
}
_COLOURS = ("#d98c1f", "#2f8f5b", "#a34d9e", "#c0392b", "#17889b", "#8c6d31", "#6a5acd", "#d16ba5", "#5b7f1f")
_MEMORY_COLOURS = ("#9db8d9", "#7fb093", "#e0b878", "#c79bc4", "#8fc3cc", "#d3a08c", "#b9b7e0", "#c4cf9a", "#b7bec8")
_RED, _GREY, _SHADE, _INK = "#c0392b", "#d5dae1", "#eef2f7", "#1c2430"


def picture(timelines: Sequence[Timeline], *, title: str, notes: Iterable[str] = ()) -> str:
    """The first one's ranks decide which are shown of the others."""
    sheet = Sheet()
    total = max((each.seconds for each in timelines), default=0.0) or 1.0
    y = 26.0
    for at, row in enumerate(textwrap.wrap(title, int((WIDTH - 32) / (LETTER * 15)))):
        y += 20 * (at > 0)
        sheet.text(16, y, row, size=15, is_bold=True)
    for note in notes:
        for row in textwrap.wrap(note, int((WIDTH - 32) / (LETTER * 12))):
            y += 18
            sheet.text(16, y, row)
    colours = _colours(timelines)
    for timeline in timelines:
        y = _section(sheet, timeline, shown_devices(timelines[0]), total, y + 30, colours)
    y = legend(sheet, [(colour, name) for name, colour in colours.items()], LEFT, y + 14, RIGHT)
    sheet.text(LEFT, y, "paler: forward; thin rows: collectives, messages and copies, beside what is computed", size=11)
    if any(each.memory for each in timelines):
        y = _memory(sheet, [each for each in timelines if each.memory], total, y + 34)
    return sheet.written(y + 16)


def _key(span: Span) -> str:
    """What a colour stands for."""
    if span.origin == "launch":
        return "waiting for the host"
    if span.origin == "loop":
        return "waiting"
    return span.origin or ("model" if span.lane == "compute" else span.lane)


def _colours(timelines: Sequence[Timeline]) -> dict[str, str]:
    used = {_key(span) for timeline in timelines for span in timeline.spans}
    found = {name: colour for name, colour in _FIXED.items() if name in used}
    for at, name in enumerate(sorted(used - set(_FIXED))):
        found[name] = _COLOURS[at % len(_COLOURS)]
    return found


def _x(seconds: float, total: float) -> float:
    return LEFT + seconds / total * (RIGHT - LEFT)


def _section(
    sheet: Sheet, timeline: Timeline, wanted: Sequence[int], total: float, y: float, colours: Mapping[str, str]
) -> float:
    """One timeline's lanes and its axis; where the next thing may stand."""
    words = [f"{timeline.source}: {pretty_seconds(step_seconds(timeline))} a step", *said(timeline)]
    marked = period(timeline)
    if marked:
        words.append("shaded: one step")
    sheet.text(16, y, clipped("; ".join(words), WIDTH - 32, 12), is_bold=True)
    y += 10
    top, shade = y, len(sheet.parts)
    by_device: dict[int, list[Span]] = {device: [] for device in shown_devices(timeline, wanted)}
    for span in timeline.spans:
        if span.device in by_device:
            by_device[span.device].append(span)
    for device, spans in by_device.items():
        y = _lanes(sheet, device, spans, total, y, colours)
    if marked:
        start, end = (_x(each, total) for each in marked)
        sheet.rect(start, top, end - start, y - top, _SHADE)
        sheet.parts.insert(shade, sheet.parts.pop())  # behind the lanes
    return _axis(sheet, total, y)


def _lanes(
    sheet: Sheet, device: int, spans: Sequence[Span], total: float, y: float, colours: Mapping[str, str]
) -> float:
    sheet.text(LEFT - 10, y + 12, f"rank {device}", anchor="end")
    for lane in LANES:
        mine = [span for span in spans if span.lane == lane]
        messages = [span for span in mine if kind_of(span) == "message"]
        rows = [*_few_rows([span for span in mine if kind_of(span) != "message"]), *_few_rows(messages)]
        if lane == "compute":  # a device computes one thing at a time
            rows = [mine]
        for row in rows:
            _row(sheet, row, total, y, _TALL[lane] - 1, colours)
            y += _TALL[lane]
    return y + 7


def _few_rows(spans: Sequence[Span]) -> list[list[Span]]:
    rows = in_rows(spans)
    rest = [span for row in rows[_MOST_ROWS - 1 :] for span in row]
    return [*rows[: _MOST_ROWS - 1], *([rest] if rest else [])]


def _row(sheet: Sheet, spans: Sequence[Span], total: float, y: float, tall: float, colours: Mapping[str, str]) -> None:
    sheet.line(LEFT, y + tall, RIGHT, y + tall, _GREY)
    narrow: dict[int, dict[tuple[str, bool], float]] = {}
    for span in spans:
        start, end = _x(span.start_seconds, total), _x(span.end_seconds, total)
        key, is_pale = _key(span), kind_of(span) == "forward"
        if end - start >= _NARROW:
            title = f"{span.name}: {key}, {pretty_seconds(span.seconds)}"
            sheet.rect(start, y, end - start, tall, colours[key], opacity=0.55 if is_pale else 1.0, title=title)
        elif end > start:
            column = narrow.setdefault(int(start), {})
            column[key, is_pale] = column.get((key, is_pale), 0.0) + end - start
    for x, column in narrow.items():
        key, is_pale = max(column, key=lambda each: column[each])
        width = min(1.0, sum(column.values()))
        sheet.rect(x, y, width, tall, colours[key], opacity=0.55 if is_pale else 1.0)


def _axis(sheet: Sheet, total: float, y: float) -> float:
    sheet.line(LEFT, y, RIGHT, y, _INK)
    step = _round_step(total / 8)
    for turn in range(int(total / step + 1e-9) + 1):
        x = _x(turn * step, total)
        sheet.line(x, y, x, y + 5, _INK)
        sheet.text(x, y + 18, pretty_seconds(turn * step) if turn else "0", size=11, anchor="middle")
    return y + 24


def _round_step(least: float) -> float:
    """1, 2 or 5 times a power of ten, not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(times * power for times in (1, 2, 5, 10) if times * power >= least * (1 - 1e-9))


def _memory(sheet: Sheet, timelines: Sequence[Timeline], total: float, y: float) -> float:
    """The first one by category, the others as lines over it."""
    peaks = [fullest(each) for each in timelines]
    most = max(size for _, size in peaks) or 1
    has = max(memory_bytes(each) for each in timelines)
    top = 1.05 * (max(most, has) if is_near(has, most) else most)
    told = [
        f"{pretty_bytes(size)} {each.source} (rank {device})"
        for each, (device, size) in zip(timelines, peaks, strict=True)
    ]
    limit = f"; a device has {pretty_bytes(has)}" if has else ""
    sheet.text(16, y, f"memory of the fullest rank: at most {', '.join(told)}{limit}", is_bold=True)
    y += 12
    bottom = y + _MEMORY_TALL

    def level(size: float) -> float:
        return bottom - size / top * _MEMORY_TALL

    for share in (0.0, 0.5, 1.0):
        sheet.line(LEFT, level(share * top), RIGHT, level(share * top), _GREY)
        sheet.text(LEFT - 10, level(share * top) + 4, pretty_bytes(share * top), size=11, anchor="end")
    columns = [by_column(t, device, total, RIGHT - LEFT) for t, (device, _) in zip(timelines, peaks, strict=True)]
    entries = _stack(sheet, columns[0], level)
    for timeline, points in zip(timelines[1:], columns[1:], strict=True):
        sheet.curve(_outline([None if each is None else each.bytes for each in points], level), _INK)
        entries.append((_INK, timeline.source))
    if is_near(has, most):
        sheet.line(LEFT, level(has), RIGHT, level(has), _RED, dashed=True)
        entries.append((_RED, "what a device has"))
    y = _axis(sheet, total, bottom)
    return legend(sheet, entries, LEFT, y + 14, RIGHT)


def _stack(
    sheet: Sheet, points: Sequence[MemoryPoint | None], level: Callable[[float], float]
) -> list[tuple[str, str]]:
    """Categories on top of each other, what changes least at the bottom; what the colours say."""
    known = [each for each in points if each is not None]
    names = {name for each in known for name in each.by_category}
    by_name = {name: [each.by_category.get(name, 0) for each in known] for name in names}
    if not names:
        by_name = {"all of it": [each.bytes for each in known]}
    order = sorted(by_name, key=lambda name: (max(by_name[name]) - min(by_name[name]), name))
    entries = []
    before: list[float | None] = [None if each is None else 0.0 for each in points]
    for at, name in enumerate(order):
        colour = _MEMORY_COLOURS[at % len(_MEMORY_COLOURS)]
        sizes = iter(by_name[name])
        after = [None if low is None else low + next(sizes) for low in before]
        sheet.area([*_outline(after, level), *reversed(_outline(before, level))], colour)
        entries.append((colour, f"{name} {pretty_bytes(max(by_name[name]))}"))
        before = after
    return entries


def _outline(sizes: Sequence[float | None], level: Callable[[float], float]) -> list[tuple[float, float]]:
    """A corner left and right of every run of equal columns."""
    corners: list[tuple[float, float]] = []
    last: float | None = None
    for column, size in enumerate(sizes):
        if size is None:
            continue
        x = float(LEFT + column)
        if size == last:
            corners[-1] = x + 1, corners[-1][1]
        else:
            corners += [(x, level(size)), (x + 1, level(size))]
        last = size
    return corners
