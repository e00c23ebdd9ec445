"""Blocks by their numbers, as people write them: `0-3,8,10-12`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

_PART = re.compile(r"^([0-9]{1,9})(?:-([0-9]{1,9}))?$")


def written(blocks: Iterable[int]) -> str:
    parts: list[list[int]] = []
    for block in sorted(set(blocks)):
        if parts and block == parts[-1][1] + 1:
            parts[-1][1] = block
        else:
            parts.append([block, block])
    if len(parts) == 1:  # a lone number would be how many, not which
        return f"{parts[0][0]}-{parts[0][1]}"
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


@lru_cache(maxsize=1024)
def read(text: str) -> tuple[tuple[int, int], ...] | None:
    """(first, last + 1) of each part, in rising order without overlap; None if it is not written so."""
    found: list[tuple[int, int]] = []
    for part in text.split(",") if text else ():
        match = _PART.match(part.strip())
        if match is None:
            return None
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or (found and first < found[-1][1]):
            return None
        found.append((first, last + 1))
    return tuple(found)


def count_between(parts: Iterable[tuple[int, int]], first: int, last: int) -> int:
    """How many of them are among `first` to `last` - 1."""
    return sum(max(0, min(last, end) - max(first, start)) for start, end in parts)
