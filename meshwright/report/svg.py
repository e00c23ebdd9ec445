"""A sheet to draw on, written as SVG: rectangles, lines and words, no scripts and no fonts of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

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
