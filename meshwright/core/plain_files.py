"""Plain files of a folder that a stranger gave: links and pipes are not followed, and sizes are bounded. No torch."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from meshwright.core.errors import MeshwrightError, Problem


def open_plain(folder: Path, name: str) -> tuple[int, int]:
    """(descriptor, bytes) of a regular file that lies in the folder itself. The caller closes it."""
    path = folder / name
    try:
        # Without O_NONBLOCK a pipe of that name would hang us.
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise MeshwrightError([_refused(path, error)]) from None
    about = os.fstat(file)
    if not stat.S_ISREG(about.st_mode):
        os.close(file)
        raise MeshwrightError([Problem(where=str(path), what="is not a plain file.")])
    return file, about.st_size


def _refused(path: Path, error: OSError) -> Problem:
    if path.is_symlink():
        fix = "Copy the files themselves (`cp -rL OLD NEW`) and use that folder."
        return Problem(where=str(path), what="is a symbolic link; it is not followed.", fix=fix)
    missing = isinstance(error, FileNotFoundError | NotADirectoryError)
    return Problem(where=str(path), what="is missing." if missing else f"cannot be read: {error.strerror or error}.")


def read_plain(folder: Path, name: str, limit_bytes: int) -> bytes:
    file, num_bytes = open_plain(folder, name)
    with os.fdopen(file, "rb") as stream:
        if num_bytes > limit_bytes:
            what = f"has {num_bytes} bytes; the limit is {limit_bytes}."
            raise MeshwrightError([Problem(where=str(folder / name), what=what)])
        return stream.read(limit_bytes)


def json_object(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object in these bytes; a name given twice is refused, because readers differ in which one counts."""
    try:
        value = json.loads(data, object_pairs_hook=_without_repeats, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise MeshwrightError([Problem(where=where, what=f"is not valid JSON: {reason}.")]) from None
    if not isinstance(value, dict):
        raise MeshwrightError([Problem(where=where, what="is not a JSON object.")])
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        repeated = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{repeated[:80]!r} is there twice")
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")
