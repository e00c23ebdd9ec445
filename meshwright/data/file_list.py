"""From what the user wrote ("corpus/*.jsonl", a folder, "stdlib") to a fixed list of files, and to what lies in them.

The order is the order of the patterns, and sorted by path inside each, so that it is the same on every
machine. A file reached twice (two patterns, a symbolic link) is read once.

Arrays and tables come from outside: .npy files, .npz members by name, Parquet. What a file claims is compared with its
size before memory is taken for it. Packages that not everybody has are imported here, where they are needed.
"""

from __future__ import annotations

import contextlib
import glob
import math
import os
import stat
import sysconfig
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from meshwright.core.errors import MeshwrightError, Problem, error_at, first_line, nearest
from meshwright.core.units import MIB, pretty_bytes

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


_BLOCK_ROWS = 1 << 16
_MAX_HEADER_BYTES = 10_000
# A small file may claim to hold a lot: that much is unpacked whatever it claims, more only in proportion to its size.
_FREE_BYTES, _MAX_RATIO = 256 * MIB, 32


def optional_package(module: str, where: str, extra: str, package: str = "") -> Any:
    """A module of a package that not everybody has; `extra` is how to install it, `package` another name of it."""
    try:
        return import_module(module)
    except ImportError:
        what = f"reading it needs the {package or module.partition('.')[0]} package."
        raise error_at(where, what, f"Run: pip install meshwright[{extra}]") from None


@contextlib.contextmanager
def readable(where: str, kind: str, fix: str = "") -> Iterator[None]:
    """Whatever a library raises on a broken file, as a problem of that file: what it is depends on how it is broken."""
    try:
        yield
    except MeshwrightError:
        raise
    except PermissionError as error:
        raise error_at(where, f"cannot be read: {str(error.strerror).lower()}.") from None
    except Exception as error:
        raise error_at(where, f"is not {kind}: {first_line(error)}.", fix) from None


def require_plausible(where: str, num_bytes: int, stored_bytes: int) -> None:
    """Refuse what would take far more memory than the file has bytes."""
    if num_bytes > max(_FREE_BYTES, _MAX_RATIO * stored_bytes):
        fix = f"At most {_MAX_RATIO} times as much is unpacked: if it is right, store it uncompressed."
        raise error_at(where, f"unpacks to {pretty_bytes(num_bytes)} from {pretty_bytes(stored_bytes)}.", fix)


_readable_npz = partial(readable, kind="a readable .npz file", fix="Write it again with numpy.savez.")
readable_parquet = partial(readable, kind="readable Parquet", fix="Write it again, or leave it out.")


def npz_names(path: str) -> tuple[str, ...]:
    """The names of its arrays; nothing is read."""
    with _readable_npz(path), zipfile.ZipFile(path) as archive:
        return tuple(name.removesuffix(".npy") for name in archive.namelist())


def read_npz(path: str, wanted: tuple[str, ...]) -> dict[str, npt.NDArray[Any]]:
    names = npz_names(path)
    missing = [name for name in wanted if name not in names]
    if missing:
        raise MeshwrightError(
            Problem(where=path, what=f'has no array "{name}".', fix=nearest(name, names)) for name in missing
        )
    with _readable_npz(path), zipfile.ZipFile(path) as archive:
        arrays = {}
        for name in wanted:
            info = archive.getinfo(f"{name}.npy" if f"{name}.npy" in archive.namelist() else name)
            require_plausible(f"{path}: {name}", info.file_size, info.compress_size)
            with archive.open(info) as stream:
                read_header(stream, info.file_size)  # type: ignore[arg-type]
            with archive.open(info) as stream:
                arrays[name] = np.lib.format.read_array(stream, allow_pickle=False)
        return arrays


def map_npy(path: str) -> npt.NDArray[Any]:
    with readable(path, "a whole .npy file", "Write it again with numpy.save."):
        with open(path, "rb") as stream:
            read_header(stream, os.fstat(stream.fileno()).st_size)
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


def read_header(stream: BinaryIO, num_bytes: int) -> None:
    """Raise ValueError unless the header of an .npy file says what its size says."""
    major, _ = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(stream, max_header_size=_MAX_HEADER_BYTES)
    if dtype.hasobject or not dtype.itemsize:
        raise ValueError(f"it holds {'Python objects' if dtype.hasobject else 'nothing'}, not numbers")
    needed, actual = math.prod(shape) * dtype.itemsize, num_bytes - stream.tell()
    if any(length < 0 for length in shape) or needed != actual:
        raise ValueError(f"an array of shape {shape} and type {dtype} has {needed:,} bytes, not {actual:,}")


def first_not_finite(values: npt.NDArray[Any]) -> tuple[int, ...] | None:
    """The place of the first NaN or infinity."""
    for start in range(0, len(values), _BLOCK_ROWS):
        wrong = ~np.isfinite(values[start : start + _BLOCK_ROWS])
        if wrong.any():
            place = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
            return (start + int(place[0]), *map(int, place[1:]))
    return None


def parquet_file(path: str) -> Any:
    """An opened `pyarrow.parquet.ParquetFile`: its schema is read, its rows are not."""
    parquet = optional_package("pyarrow.parquet", path, "data")
    with readable_parquet(path):
        opened = parquet.ParquetFile(path, memory_map=True)
        assert all(isinstance(name, str) for name in opened.schema_arrow.names)  # Arrow decodes names only now
        return opened
