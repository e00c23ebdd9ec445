"""Timelines as a picture (SVG): lanes of each distinct rank, one timeline above the other on one time axis, and the
memory of the fullest rank below."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from xml.sax.saxutils import escape

from meshwright.core.timeline import LANES, MemoryPoint, Span, Timeline, in_rows
from meshwright.core.units import pretty_bytes, pretty_seconds
from meshwright.report import timeline_lanes as lanes

WIDTH = 1200
LETTER = 0.61
"""Width of a letter of the usual monospaced fonts, in sizes of the font: words are placed by counting letters."""


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
    sheet = Sheet(timelines)
    for at, row in enumerate(textwrap.wrap(title, int((WIDTH - 32) / (LETTER * 15)))):
        sheet.y += 20 * (at > 0)
        sheet.text(16, row, size=15, is_bold=True)
    for note in notes:
        for row in textwrap.wrap(note, int((WIDTH - 32) / (LETTER * 12))):
            sheet.y += 18
            sheet.text(16, row)
    for timeline in timelines:
        sheet.y += 30
        sheet.section(timeline, lanes.shown_devices(timelines[0]))
    sheet.legend([(colour, name) for name, colour in sheet.colours.items()])
    sheet.text(LEFT, "paler: forward; thin rows: collectives, messages and copies, beside what is computed", size=11)
    if with_memory := [each for each in timelines if each.memory]:
        sheet.y += 34
        sheet.memory(with_memory)
    height = f"{sheet.y + 16:.0f}"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="monospace" fill="#1c2430">'
    )
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>', *sheet.parts, "</svg>"])


def _key(span: Span) -> str:
    """What a colour stands for."""
    if span.origin == "launch":
        return "waiting for the host"
    if span.origin == "loop":
        return "waiting"
    return span.origin or ("model" if span.lane == "compute" else span.lane)


def _points(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


class Sheet:
    """Shapes so far; `y` is where the next thing stands."""

    def __init__(self, timelines: Sequence[Timeline]) -> None:
        self.parts: list[str] = []
        self.y = 26.0
        self.total = max((each.seconds for each in timelines), default=0.0) or 1.0
        used = {_key(span) for timeline in timelines for span in timeline.spans}
        self.colours = {name: colour for name, colour in _FIXED.items() if name in used}
        for at, name in enumerate(sorted(used - set(_FIXED))):
            self.colours[name] = _COLOURS[at % len(_COLOURS)]

    def add(self, tag: str, *, inside: str = "", **attributes: str | float) -> None:
        """`inside` is XML; numbers are written to a hundredth, `stroke_width` as stroke-width."""
        written = ""
        for name, value in attributes.items():
            shown = value if isinstance(value, str) else f"{round(value, 2):.6g}"
            written += f' {name.replace("_", "-")}="{shown}"' if shown else ""
        self.parts.append(f"<{tag}{written}>{inside}</{tag}>" if inside else f"<{tag}{written}/>")

    def rect(
        self, x: float, y: float, w: float, h: float, fill: str, *, is_pale: bool = False, title: str = ""
    ) -> None:
        inside, faint = f"<title>{escape(title)}</title>" if title else "", "0.55" if is_pale else ""
        self.add("rect", inside=inside, x=x, y=y, width=w, height=h, fill=fill, fill_opacity=faint)

    def line(self, x: float, y: float, x2: float, y2: float, colour: str, dashes: str = "") -> None:
        self.add("line", x1=x, y1=y, x2=x2, y2=y2, stroke=colour, stroke_dasharray=dashes)

    def text(
        self,
        x: float,
        words: str,
        *,
        below: float = 0.0,
        size: float = 12,
        anchor: str = "start",
        is_bold: bool = False,
    ) -> None:
        """Letters stand on the line `below` the next thing's place."""
        bold = "bold" if is_bold else ""
        place = {"x": x, "y": self.y + below, "font_size": size}
        self.add("text", inside=escape(words), **place, text_anchor=anchor, font_weight=bold)

    def x(self, seconds: float) -> float:
        return LEFT + seconds / self.total * (RIGHT - LEFT)

    def legend(self, entries: Sequence[tuple[str, str]]) -> None:
        """(colour, words) in as many rows as it takes."""
        at, self.y = float(LEFT), self.y + 14
        for colour, words in entries:
            room = 16 + len(words) * LETTER * 11 + 18
            if at > LEFT and at + room > RIGHT:
                at, self.y = LEFT, self.y + 18
            self.rect(at, self.y - 9, 11, 10, colour)
            self.text(at + 16, words, size=11)
            at += room
        self.y += 18

    def section(self, timeline: Timeline, wanted: Sequence[int]) -> None:
        """One timeline's lanes and its axis."""
        words = [f"{timeline.source}: {pretty_seconds(lanes.step_seconds(timeline))} a step", *lanes.said(timeline)]
        marked = lanes.period(timeline)
        if marked:
            words.append("shaded: one step")
        heading, most = "; ".join(words), int((WIDTH - 32) / (LETTER * 12))
        self.text(16, heading if len(heading) <= most else heading[: most - 1] + "…", is_bold=True)
        self.y += 10
        top, shade = self.y, len(self.parts)
        for device, spans in lanes.spans_by_device(timeline, lanes.shown_devices(timeline, wanted)).items():
            self.lanes(device, spans)
        if marked:
            start, end = map(self.x, marked)
            self.rect(start, top, end - start, self.y - top, _SHADE)
            self.parts.insert(shade, self.parts.pop())  # behind the lanes
        self.axis()

    def lanes(self, device: int, spans: Sequence[Span]) -> None:
        self.text(LEFT - 10, f"rank {device}", below=12, anchor="end")
        for lane in LANES:
            mine = [span for span in spans if span.lane == lane]
            messages = [span for span in mine if lanes.kind_of(span) == "message"]
            rows = [*_few_rows([span for span in mine if lanes.kind_of(span) != "message"]), *_few_rows(messages)]
            if lane == "compute":  # a device computes one thing at a time
                rows = [mine]
            for row in rows:
                self.row(row, _TALL[lane] - 1)
                self.y += _TALL[lane]
        self.y += 7

    def row(self, spans: Sequence[Span], tall: float) -> None:
        self.line(LEFT, self.y + tall, RIGHT, self.y + tall, _GREY)
        narrow: dict[int, dict[tuple[str, bool], float]] = {}
        for span in spans:
            start, end = self.x(span.start_seconds), self.x(span.end_seconds)
            key, is_pale = _key(span), lanes.kind_of(span) == "forward"
            if end - start >= _NARROW:
                title = f"{span.name}: {key}, {pretty_seconds(span.seconds)}"
                self.rect(start, self.y, end - start, tall, self.colours[key], is_pale=is_pale, title=title)
            elif end > start:
                column = narrow.setdefault(int(start), {})
                column[key, is_pale] = column.get((key, is_pale), 0.0) + end - start
        for x, column in narrow.items():
            key, is_pale = max(column, key=lambda each: column[each])
            self.rect(x, self.y, min(1.0, sum(column.values())), tall, self.colours[key], is_pale=is_pale)

    def axis(self) -> None:
        self.line(LEFT, self.y, RIGHT, self.y, _INK)
        power = 10.0 ** math.floor(math.log10(self.total / 8))
        # 1, 2 or 5 times a power of ten, for at most eight marks.
        step = next(times * power for times in (1, 2, 5, 10) if times * power >= self.total / 8 * (1 - 1e-9))
        for turn in range(int(self.total / step + 1e-9) + 1):
            x = self.x(turn * step)
            self.line(x, self.y, x, self.y + 5, _INK)
            self.text(x, pretty_seconds(turn * step) if turn else "0", below=18, size=11, anchor="middle")
        self.y += 24

    def memory(self, timelines: Sequence[Timeline]) -> None:
        """The first one by category, the others as lines over it."""
        peaks = [lanes.fullest(each) for each in timelines]
        most = max(size for _, size in peaks) or 1
        has = max(lanes.memory_bytes(each) for each in timelines)
        top = 1.05 * (max(most, has) if lanes.is_near(has, most) else most)
        maxima = [
            f"{pretty_bytes(size)} {each.source} (rank {device})"
            for each, (device, size) in zip(timelines, peaks, strict=True)
        ]
        limit = f"; a device has {pretty_bytes(has)}" if has else ""
        self.text(16, f"memory of the fullest rank: at most {', '.join(maxima)}{limit}", is_bold=True)
        self.y += 12 + _MEMORY_TALL
        bottom = self.y

        def level(size: float) -> float:
            return bottom - size / top * _MEMORY_TALL

        for share in (0.0, 0.5, 1.0):
            at = level(share * top)
            self.line(LEFT, at, RIGHT, at, _GREY)
            self.text(LEFT - 10, pretty_bytes(share * top), below=at + 4 - bottom, size=11, anchor="end")
        columns = [
            lanes.by_column(t, device, self.total, RIGHT - LEFT)
            for t, (device, _) in zip(timelines, peaks, strict=True)
        ]
        entries = self.stack(columns[0], level)
        for timeline, points in zip(timelines[1:], columns[1:], strict=True):
            outline = _outline([None if each is None else each.bytes for each in points], level)
            self.add("polyline", points=_points(outline), fill="none", stroke=_INK, stroke_width=1.5)
            entries.append((_INK, timeline.source))
        if lanes.is_near(has, most):
            self.line(LEFT, level(has), RIGHT, level(has), _RED, dashes="6 4")
            entries.append((_RED, "what a device has"))
        self.axis()
        self.legend(entries)

    def stack(self, points: Sequence[MemoryPoint | None], level: Callable[[float], float]) -> list[tuple[str, str]]:
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
            corners = [*_outline(after, level), *reversed(_outline(before, level))]
            self.add("polygon", points=_points(corners), fill=colour)
            entries.append((colour, f"{name} {pretty_bytes(max(by_name[name]))}"))
            before = after
        return entries


def _few_rows(spans: Sequence[Span]) -> list[list[Span]]:
    rows = in_rows(spans)
    rest = [span for row in rows[_MOST_ROWS - 1 :] for span in row]
    return [*rows[: _MOST_ROWS - 1], *([rest] if rest else [])]


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
