"""Arrays that come from outside: .npz members by name, and whether all numbers are numbers."""

from __future__ import annotations

import zipfile
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.core.errors import MeshwrightError, Problem, nearest

_BLOCK_ROWS = 1 << 16


def npz_names(path: str) -> tuple[str, ...]:
    """The names of its arrays; nothing is read."""
    try:
        with zipfile.ZipFile(path) as archive:
            return tuple(name.removesuffix(".npy") for name in archive.namelist())
    except (OSError, zipfile.BadZipFile) as error:
        raise MeshwrightError([_unreadable(path, error)]) from None


def read_npz(path: str, wanted: tuple[str, ...]) -> dict[str, npt.NDArray[Any]]:
    names = npz_names(path)
    missing = [name for name in wanted if name not in names]
    if missing:
        raise MeshwrightError(
            [Problem(where=path, what=f'has no array "{name}".', fix=nearest(name, names)) for name in missing]
        )
    try:
        with np.load(path) as archive:
            return {name: archive[name] for name in wanted}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:  # ValueError: an array of Python objects
        raise MeshwrightError([_unreadable(path, error)]) from None


def _unreadable(path: str, error: Exception) -> Problem:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return Problem(where=path, what=f"is not a readable .npz file: {reason}.", fix="Write it again with numpy.savez.")


def first_not_finite(values: npt.NDArray[Any]) -> tuple[int, ...] | None:
    """The place of the first NaN or infinity."""
    for start in range(0, len(values), _BLOCK_ROWS):
        wrong = ~np.isfinite(values[start : start + _BLOCK_ROWS])
        if wrong.any():
            place = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
            return (start + int(place[0]), *map(int, place[1:]))
    return None
