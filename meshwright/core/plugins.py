"""Techniques, schedules and more from outside the package: modules named in `MESHWRIGHT_PLUGINS`, by commas.

Only the user's own environment names them, never a file that is read; rank processes inherit it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache
from types import ModuleType
from typing import TypeVar

from meshwright.core.errors import error_at

T = TypeVar("T")

VARIABLE = "MESHWRIGHT_PLUGINS"


def plugins() -> tuple[ModuleType, ...]:
    return _imported(os.environ.get(VARIABLE, ""))


@lru_cache(maxsize=8)
def _imported(names: str) -> tuple[ModuleType, ...]:
    modules = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        try:
            modules.append(importlib.import_module(name))
        except ImportError as error:
            fix = "Name modules that Python can import, separated by commas."
            raise error_at(VARIABLE, f'"{name}": {error}.', fix) from None
    return tuple(modules)


def added(noun: str, own: Collection[str], found_in: Callable[[ModuleType], Iterable[tuple[str, T]]]) -> dict[str, T]:
    """What plugins add to those of the package, by name; raises where a name is taken."""
    values: dict[str, T] = {}
    for module in plugins():
        for name, value in found_in(module):
            if name in own or name in values:
                raise error_at(VARIABLE, f'a {noun} "{name}" exists already.', "Give the plugin's another name.")
            values[name] = value
    return values
