"""A room that is also its main verb: `mw.search(...)` works although `meshwright.search` is a package.

Importing a package sets the name on its parent, so a function of the same name would be hidden by the first import.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


def make_callable(room: str, module: str, function: str) -> None:
    """Calling the package `room` calls `module.function`, imported when first needed."""

    class Room(ModuleType):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return getattr(importlib.import_module(module), function)(*args, **kwargs)

    sys.modules[room].__class__ = Room
