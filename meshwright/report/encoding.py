"""Output that no terminal refuses: what its encoding lacks is written in ASCII, sign for sign."""

from __future__ import annotations

import codecs
import sys
from io import TextIOWrapper

_PLAIN = {
    **dict.fromkeys("─━═", "-"),
    **dict.fromkeys("│┃║▎▏", "|"),
    **dict.fromkeys("┌┐└┘├┤┬┴┼╭╮╰╯", "+"),
    **dict.fromkeys("█▉▊▋▓■", "#"),
    **dict.fromkeys("▌▒", "="),
    **dict.fromkeys("░·…", "."),
    **dict.fromkeys("●•◆", "*"),
    "µ": "u",
    "×": "x",
    "→": ">",
    "≤": "<",
    "≥": ">",
}
_NAME = "meshwright-plain"


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    # One sign for one: tables and pictures stay in their columns.
    return "".join(_PLAIN.get(sign, "?") for sign in error.object[error.start : error.end]), error.end


def accept_any_encoding() -> None:
    """For both streams of this process."""
    codecs.register_error(_NAME, _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=_NAME)
