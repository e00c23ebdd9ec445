"""Arrays kept on disk: the rank processes of a machine share one copy, and a restart need not make them again.

    <slot>.json               what they were made from; written last, so if it is there the rest is whole
    <slot>-<stamp>.NAME.npy   one for each array, mapped rather than read

The slot names the question (paths, settings), the stamp the state of the files (sizes, times). Each file appears
by an atomic rename, so two processes may build the same slot at once: they write the same bytes. Whatever
cannot be read back is a miss, never an error: the files themselves are the truth.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from meshwright.core.codec import decode, to_json
from meshwright.core.errors import MeshwrightError, Problem
from meshwright.data.files import SourceFile

# Raise it when the same files give other arrays than before.
_CACHE_VERSION = 2

Array = npt.NDArray[Any]
Facts = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Arrays by name, and small facts about them."""

    arrays: dict[str, Array]
    facts: Facts


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A question about files: what is asked (JSON), and of which state of which files."""

    question: tuple[Any, ...]
    files: tuple[SourceFile, ...]

    @property
    def stem(self) -> str:
        return _short([_CACHE_VERSION, self.question, [file.path for file in self.files]])

    @property
    def stamp(self) -> str:
        return _short([[file.size_bytes, file.mtime_ns] for file in self.files])


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheIndex:
    """What lies in a slot, as told by its JSON file."""

    version: int
    files: tuple[SourceFile, ...]
    arrays: dict[str, tuple[str, tuple[int, ...]]]
    """Name -> (type, shape)."""
    facts: dict[str, Any]


@dataclass(kw_only=True)
class Draft:
    """Arrays being made: in files that have no name yet where there is a cache, else in memory."""

    folder: Path | None
    arrays: dict[str, Array] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)

    def put(self, name: str, array: Array) -> None:
        """Keep a finished array."""
        self.arrays[name] = array
        if self.folder is not None:
            with _refusals(self.folder), open(self._draft(name), "xb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())

    def array(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An array to be filled in place, however large."""
        if self.folder is None:
            self.arrays[name] = np.empty(shape, dtype)
            return self.arrays[name]
        with _refusals(self.folder):
            mapped = np.lib.format.open_memmap(self._draft(name), mode="w+", dtype=np.dtype(dtype), shape=shape)
            with open(self.paths[name], "r+b") as file:
                # A full disk must be noticed here: later it would end the process without a word.
                os.posix_fallocate(file.fileno(), 0, max(1, mapped.offset + mapped.nbytes))
        self.arrays[name] = mapped
        return mapped

    def publish(self, stem: str) -> None:
        for name, path in self.paths.items():
            array = self.arrays[name]
            if isinstance(array, np.memmap):
                array.flush()
            os.replace(path, path.with_name(f"{stem}.{name}.npy"))

    def discard(self) -> None:
        for path in self.paths.values():
            path.unlink(missing_ok=True)

    def _draft(self, name: str) -> Path:
        assert self.folder is not None
        self.paths[name] = self.folder / f".{name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
        return self.paths[name]


def keep(folder: Path | None, slot: Slot, fill: Callable[[Draft], Facts]) -> Kept:
    """What the slot holds, made by `fill` where it is absent, out of date or damaged. Without a folder: made."""
    if folder is None:
        draft = Draft(folder=None)
        facts = fill(draft)
        return Kept(arrays=draft.arrays, facts=facts)
    found = load(folder, slot)
    if found:
        return found
    with _refusals(folder):
        folder.mkdir(parents=True, exist_ok=True)
    draft = Draft(folder=folder)
    try:
        facts = fill(draft)
        with _refusals(folder):
            _store(folder, slot, draft, facts)
    finally:
        draft.discard()
    # Mapping what was just written frees this process's own copy.
    return load(folder, slot) or Kept(arrays=draft.arrays, facts=facts)


def load(folder: Path, slot: Slot) -> Kept | None:
    """What is kept for this slot, mapped from disk; None when absent, out of date or damaged."""
    try:
        value = json.loads((folder / f"{slot.stem}.json").read_text(encoding="utf-8"))
        index = decode(CacheIndex, value, "cache")
        if index.version != _CACHE_VERSION or index.files != slot.files:
            return None
        arrays = {
            name: _map(folder / f"{slot.stem}-{slot.stamp}.{name}.npy", *form) for name, form in index.arrays.items()
        }
    except (OSError, ValueError, EOFError, TypeError, MeshwrightError):
        return None
    return Kept(arrays=arrays, facts=index.facts)


def remember(folder: Path | None, slot: Slot, facts: Facts) -> None:
    """Facts alone, in place of those that were kept; where they cannot be written, they are found out again."""
    if folder is not None:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            _store(folder, slot, Draft(folder=folder), facts)


def _store(folder: Path, slot: Slot, draft: Draft, facts: Facts) -> None:
    """The arrays, then their index, and drop what an earlier state of the same files left."""
    stem = f"{slot.stem}-{slot.stamp}"
    draft.publish(stem)
    forms = {name: (array.dtype.str, tuple(array.shape)) for name, array in draft.arrays.items()}
    index = CacheIndex(version=_CACHE_VERSION, files=slot.files, arrays=forms, facts=facts)
    write_whole(folder / f"{slot.stem}.json", lambda file: file.write(to_json(index).encode()))
    for path in folder.glob(f"{slot.stem}-*.npy"):
        if not path.name.startswith(f"{stem}."):
            with contextlib.suppress(OSError):  # another process dropped it first
                path.unlink()


def _short(value: Any) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(value).encode())


def _map(path: Path, dtype: str, shape: tuple[int, ...]) -> Array:
    array = np.load(path, mmap_mode="r" if math.prod(shape) else None)  # nothing cannot be mapped
    if array.dtype.str != dtype or array.shape != tuple(shape):
        raise ValueError(f"{path} does not hold what its index says")
    return np.asarray(array)


def write_whole(path: Path, fill: Callable[[BinaryIO], object], *, is_durable: bool = True) -> None:
    """All of the file or none of it, also for a reader at this moment and (if durable) after a power cut."""
    draft = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with open(draft, "xb") as file:
            fill(file)
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


@contextlib.contextmanager
def _refusals(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"the cache cannot be written: {(error.strerror or str(error)).lower()}."
        fix = "Free some space there, or name another folder."
        raise MeshwrightError([Problem(where=str(folder), what=what, fix=fix)]) from None
