"""From what the user wrote ("corpus/*.jsonl", a folder, "stdlib") to a fixed list of files.

The order is the order of the patterns, and sorted by path inside each, so that it is the same on every
machine. A file reached twice (two patterns, a symbolic link) is read once.
"""

from __future__ import annotations

import glob
import os
import stat
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from meshwright.core.errors import Problem, nearest

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
    *(
        "test",
        "tests",
        "idlelib",
        "tkinter",
        "turtledemo",
        "lib2to3",
        "distutils",
        "ensurepip",
        "venv",
        "msilib",
    ),
    *("pydoc_data", "encodings", "__phello__"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """A file and what tells whether it changed."""

    path: str
    size_bytes: int
    mtime_ns: int


def find_files(patterns: tuple[str, ...], problems: list[Problem]) -> tuple[SourceFile, ...]:
    """The regular files behind the patterns; what is wrong is appended to `problems`."""
    if not patterns or not all(pattern.strip() for pattern in patterns):
        fix = 'Give a file, a folder, a pattern such as "corpus/*.jsonl", or "stdlib".'
        problems.append(Problem(where="data", what="no file is named.", fix=fix))
    paths: dict[str, str] = {}  # real path -> the path as the user reaches it
    for pattern in patterns:
        for path in _expand(pattern, problems) if pattern.strip() else ():
            paths.setdefault(os.path.realpath(path), path)
    found = (_describe(path, problems) for path in paths.values())
    return tuple(file for file in found if file)


def _expand(pattern: str, problems: list[Problem]) -> Iterable[str]:
    if pattern == STDLIB:
        return _stdlib_files(problems)
    if pattern.startswith(DATASETS):
        return (pattern,)
    path = os.path.expanduser(pattern)
    if os.path.isdir(path):
        return _files_below(path, problems)
    if os.path.lexists(path):  # a name that happens to hold a [ or a * is still a name
        return (path,)
    if glob.has_magic(path):
        return _files_like(path, problems)
    folder, name = os.path.split(path)
    if not os.path.isdir(folder or "."):
        fix = f"There is no folder {folder} either; the current folder is {os.getcwd()}."
    else:
        fix = nearest(name, sorted(entry for entry in _names_in(folder) if not entry.startswith("."))[:50])
    problems.append(Problem(where=pattern, what="no such file.", fix=fix))
    return ()


def _files_like(pattern: str, problems: list[Problem]) -> list[str]:
    matches = sorted(glob.glob(pattern, recursive=True))
    files = [path for path in matches if not os.path.isdir(path)]
    if not files:
        what, fix = "no file matches.", f"The current folder is {os.getcwd()}."
        if matches:
            what = f"matches folders ({len(matches)}) and no file."
            fix = f'Name a folder, or use "{os.path.join(pattern, "*")}".'
        problems.append(Problem(where=pattern, what=what, fix=fix))
    return files


def _files_below(folder: str, problems: list[Problem]) -> list[str]:
    below = os.path.join(glob.escape(folder), "**")
    for suffixes in (SUFFIXES, *((suffix,) for suffix in _OTHER_SUFFIXES)):
        files = [path for end in suffixes for path in glob.glob(os.path.join(below, f"*{end}"), recursive=True)]
        files = [path for path in files if not os.path.isdir(path)]
        if files:
            break
    if not files:
        what = f"the folder holds no {', '.join((*SUFFIXES, *_OTHER_SUFFIXES))} file."
        fix = 'Name the files with a pattern, such as "folder/**/*.log".'
        if not os.access(folder, os.R_OK | os.X_OK, effective_ids=True):
            what, fix = "the folder cannot be read: permission denied.", ""
        problems.append(Problem(where=folder, what=what, fix=fix))
    return sorted(files)


def _names_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder or ".")
    except OSError:
        return []


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


def describe_folder(path: str, below: str, problems: list[Problem]) -> SourceFile | None:
    """Everything below a folder as if it were one file: a change anywhere shows."""
    try:
        states = [
            (entry.name, status.st_size, status.st_mtime_ns)
            for folder, _, names in os.walk(below)
            for entry in map(Path(folder).joinpath, sorted(names))
            for status in (entry.stat(),)
        ]
    except OSError as error:
        problems.append(Problem(where=path, what=f"cannot be read: {(error.strerror or 'unknown error').lower()}."))
        return None
    if not states:
        problems.append(Problem(where=path, what="there is no such folder, or it is empty."))
        return None
    total_bytes, latest_ns = sum(state[1] for state in states), max(state[2] for state in states)
    return SourceFile(path=path, size_bytes=total_bytes, mtime_ns=latest_ns)


def _describe_dataset(path: str, problems: list[Problem]) -> SourceFile | None:
    folder, split = dataset_place(path)
    named = f"{DATASETS}{os.path.abspath(folder)}{':' if split else ''}{split}"
    return describe_folder(named, folder, problems)


def dataset_place(path: str) -> tuple[str, str]:
    """(folder, split or nothing) of "datasets:FOLDER" or "datasets:FOLDER:SPLIT"."""
    name = os.path.expanduser(path.removeprefix(DATASETS))
    folder, _, split = name.rpartition(":")
    return (name, "") if not folder or os.path.isdir(name) else (folder, split)


def _describe(path: str, problems: list[Problem]) -> SourceFile | None:
    if path.startswith(DATASETS):
        return _describe_dataset(path, problems)
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
