"""Several candidates priced at once, and one of them taken out again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from operator import is_
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
_PLAIN = frozenset((str, int, float, bool, type(None)))


def stacked(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Numbers of all candidates: an array where they differ, else the number they share."""
    return {
        name: value if all(one[name] == value for one in each) else np.array([one[name] for one in each])
        for name, value in each[0].items()
    }


def picked(value: T, at: int) -> T:
    """The same with the numbers of one candidate in the place of arrays over all; what has none stays what it is."""
    one: T = _picked(value, at)
    return one


def _picked(value: Any, at: int) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, np.ndarray):
        return value[at].item() if value.ndim else value.item()
    if isinstance(value, tuple):
        parts = _all_picked(value, at)
        if all(map(is_, parts, value)):
            return value
        return kind(*parts) if hasattr(kind, "_fields") else tuple(parts)
    if isinstance(value, dict):
        return dict(zip(value, _all_picked(value.values(), at), strict=True))
    if is_dataclass(kind):
        names = _names(kind)
        before = [getattr(value, name) for name in names]
        parts = _all_picked(before, at)
        return value if all(map(is_, parts, before)) else kind(**dict(zip(names, parts, strict=True)))
    return value


def _all_picked(values: Iterable[Any], at: int) -> list[Any]:
    return [value if type(value) in _PLAIN else _picked(value, at) for value in values]


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))
