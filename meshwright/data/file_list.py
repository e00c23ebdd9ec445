"""From what the user wrote ("corpus/*.jsonl", a folder, "stdlib") to a fixed list of files.

The order is the order of the patterns, and sorted by path inside each, so that it is the same on every
machine. A file reached twice (two patterns, a symbolic link) is read once.
"""

from __future__ import annotations

import contextlib
import glob
import os
import stat
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from meshwright.core.errors import MeshwrightError, Problem, nearest

SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")
# What a folder may hold instead, looked for in this order.
_OTHER_SUFFIXES = (".idx", ".npy", ".npz", ".csv")
STDLIB = "stdlib"
DATASETS = "datasets:"
# Enough to train a toy model on, and read in a tenth of a second.
STDLIB_MAX_BYTES = 8_000_000
# Not on every machine (distributions package them apart), written per machine, or tables rather than text.
_STDLIB_LEFT_OUT = {
    *("site-packages", "dist-packages", "lib-dynload", "__pycache__", "sitecustomize.py", "usercustomize.py"),
    *("test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "distutils", "ensurepip", "venv", "msilib"),
    *("pydoc_data", "encodings", "__phello__"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """A file and what tells whether it changed."""

    path: str
    size_bytes: int
    mtime_ns: int


def unreadable(path: str, error: OSError) -> Problem:
    return Problem(where=path, what=f"cannot be read: {(error.strerror or 'unknown error').lower()}.")


@contextlib.contextmanager
def collect_problems(problems: list[Problem], path: str = "") -> Iterator[None]:
    """Append what a MeshwrightError says, or that the file at `path` cannot be read, and go on after the block."""
    try:
        yield
    except MeshwrightError as error:
        problems.extend(error.problems)
    except OSError as error:
        if not path:
            raise
        problems.append(unreadable(str(error.filename or path), error))


def find_files(patterns: tuple[str, ...], problems: list[Problem]) -> tuple[SourceFile, ...]:
    """The regular files behind the patterns; what is wrong is appended to `problems`."""
    if not patterns or not all(pattern.strip() for pattern in patterns):
        fix = 'Give a file, a folder, a pattern such as "corpus/*.jsonl", or "stdlib".'
        problems.append(Problem(where="data", what="no file is named.", fix=fix))
    paths: dict[str, str] = {}  # real path -> the path as the user reaches it
    for pattern in patterns:
        for path in _expand(pattern, problems) if pattern.strip() else ():
            paths.setdefault(os.path.realpath(path), path)
    files = (_describe(path, problems) for path in paths.values())
    return tuple(file for file in files if file)


def _expand(pattern: str, problems: list[Problem]) -> Iterable[str]:
    if pattern == STDLIB:
        return _stdlib_files(problems)
    if pattern.startswith(DATASETS):
        return (pattern,)
    path = os.path.expanduser(pattern)
    if os.path.isdir(path):
        below = os.path.join(glob.escape(path), "**")
        for suffixes in (SUFFIXES, *((suffix,) for suffix in _OTHER_SUFFIXES)):
            files = [match for end in suffixes for match in glob.glob(os.path.join(below, f"*{end}"), recursive=True)]
            files = sorted(match for match in files if not os.path.isdir(match))
            if files:
                return files
        what = f"the folder holds no {', '.join((*SUFFIXES, *_OTHER_SUFFIXES))} file."
        fix = 'Name the files with a pattern, such as "folder/**/*.log".'
        if not os.access(path, os.R_OK | os.X_OK, effective_ids=True):
            what, fix = "the folder cannot be read: permission denied.", ""
        problems.append(Problem(where=path, what=what, fix=fix))
        return ()
    if os.path.lexists(path):  # a name that happens to hold a [ or a * is still a name
        return (path,)
    folder, name = os.path.split(path)
    what, fix = "no such file.", f"There is no folder {folder} either; the current folder is {os.getcwd()}."
    if glob.has_magic(path):
        matches = sorted(glob.glob(path, recursive=True))
        files = [match for match in matches if not os.path.isdir(match)]
        if files:
            return files
        what, fix = "no file matches.", f"The current folder is {os.getcwd()}."
        if matches:
            what = f"matches folders ({len(matches)}) and no file."
            fix = f'Name a folder, or use "{os.path.join(path, "*")}".'
    elif os.path.isdir(folder or "."):
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = os.listdir(folder or ".")
        fix = nearest(name, sorted(entry for entry in names if not entry.startswith("."))[:50])
    problems.append(Problem(where=pattern, what=what, fix=fix))
    return ()


def _stdlib_files(problems: list[Problem]) -> Iterator[str]:
    """Modules first, then packages, each sorted, up to the size cap."""
    root = Path(sysconfig.get_paths()["stdlib"])
    modules = sorted(root.glob("*.py"))
    packages = sorted(file for init in root.glob("*/__init__.py") for file in init.parent.rglob("*.py"))
    total_bytes = 0
    for path in (*modules, *packages):
        parts = path.relative_to(root).parts
        if not _STDLIB_LEFT_OUT.isdisjoint(parts) or parts[0].startswith("_sysconfigdata"):
            continue
        total_bytes += path.stat().st_size
        if total_bytes > STDLIB_MAX_BYTES:
            return
        yield str(path)
    if not total_bytes:
        what = f"this Python has no source files in {root}."
        problems.append(Problem(where=STDLIB, what=what, fix="Name your own text files."))


def dataset_place(path: str) -> tuple[str, str]:
    """(folder, split or nothing) of "datasets:FOLDER" or "datasets:FOLDER:SPLIT"."""
    name = os.path.expanduser(path.removeprefix(DATASETS))
    folder, _, split = name.rpartition(":")
    return (name, "") if not folder or os.path.isdir(name) else (folder, split)


def _describe(path: str, problems: list[Problem]) -> SourceFile | None:
    if path.startswith(DATASETS):
        folder, split = dataset_place(path)
        named = f"{DATASETS}{os.path.abspath(folder)}{':' if split else ''}{split}"
        try:  # everything below the folder as if it were one file: a change anywhere shows
            states = [os.stat(os.path.join(place, file)) for place, _, files in os.walk(folder) for file in files]
        except OSError as error:
            problems.append(unreadable(named, error))
            return None
        if not states:
            problems.append(Problem(where=named, what="there is no such folder, or it is empty."))
            return None
        total_bytes, latest_ns = sum(state.st_size for state in states), max(state.st_mtime_ns for state in states)
        return SourceFile(path=named, size_bytes=total_bytes, mtime_ns=latest_ns)
    try:
        status = os.stat(path)
    except OSError as error:
        reason = "a broken link" if os.path.islink(path) else (error.strerror or "unknown error").lower()
        problems.append(Problem(where=path, what=f"cannot be read: {reason}."))
        return None
    if not stat.S_ISREG(status.st_mode):  # reading a pipe would wait for ever
        problems.append(Problem(where=path, what="is not a regular file.", fix="Save its content as a file."))
        return None
    if status.st_size == 0:
        if os.path.basename(path) == "__init__.py":  # marks a package: empty by custom, in every source tree
            return None
        problems.append(Problem(where=path, what="is empty (0 bytes).", fix="Remove it or fill it."))
        return None
    return SourceFile(path=os.path.abspath(path), size_bytes=status.st_size, mtime_ns=status.st_mtime_ns)
