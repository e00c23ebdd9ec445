"""Lines that end at words, at the width of a terminal or where COLUMNS says so."""

from __future__ import annotations

import os
import re
import shutil
from typing import TextIO

_WORDS = re.compile(r"(?:'[^']*'|\S)+")


def width_of(stream: TextIO, piped: int = 0) -> int:
    """Columns; `piped` where the stream is no terminal and COLUMNS does not say. 0: lines may be of any length."""
    size = shutil.get_terminal_size((piped, 0)).columns
    return size if stream.isatty() or "COLUMNS" in os.environ else piped


def wrapped(text: str, width: int, more: str = "", end: str = "") -> str:
    """Each line broken at spaces, and after commas where a list is wider than the line; no word is cut. Further lines
    begin as the first does and with `more`; all but the last end with `end`, as those of a command do, whose words in
    quotation marks stay whole."""
    lines: list[str] = []
    for line in text.split("\n"):
        if not width or len(line) <= width:
            lines.append(line)
            continue
        indent = line[: len(line) - len(line.lstrip())]
        words = _WORDS.findall(line)
        if not end:
            words = " ".join(each if len(each) < width else each.replace(",", ", ") for each in line.split()).split()
        now = indent + words[0]
        for word in words[1:]:
            if len(now) + 1 + len(word) + len(end) > width:
                lines.append(now + end)
                now = indent + more + word
            else:
                now += " " + word
        lines.append(now)
    return "\n".join(lines)
