"""Techniques, schedules and more from outside the package: modules named in `MESHWRIGHT_PLUGINS`, by commas.

Only the user's own environment names them, never a file that is read; rank processes inherit it.
"""

from __future__ import annotations

import importlib
import os
from functools import lru_cache
from types import ModuleType

from meshwright.core.errors import MeshwrightError, Problem

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
            raise MeshwrightError([Problem(where=VARIABLE, what=f'"{name}": {error}.', fix=fix)]) from None
    return tuple(modules)
