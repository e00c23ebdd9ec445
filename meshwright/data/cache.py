"""Arrays kept on disk: the rank processes of a machine share one copy, and a restart need not make them again.

    <slot>.json               what they were made from, sealed; written last, so if it is there the rest is whole
    <slot>-<stamp>.NAME.npy   one for each array, mapped rather than read
    <slot>-<stamp>.xxh3       hashes of their blocks

The slot names the question (paths, settings), the stamp the state of the files (sizes, times). Each file appears
by an atomic rename, so two processes may build the same slot at once: they write the same bytes. Whatever
cannot be read back, or is not as it was written, is a miss, never an error: the files themselves are the truth.
Of a large array a block is checked when it is first used; by then only a new start can make it again.
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

from meshwright.core.codec import decode, seal, to_json, unseal
from meshwright.core.errors import MeshwrightError, Problem
from meshwright.data.file_list import SourceFile
from meshwright.data.hashed_files import BlockHashes, CheckedFile, DamagedFile, hash_files, open_hashed
from meshwright.data.sample_order import Index

# Raise it when the same files give other arrays than before.
_CACHE_VERSION = 3

Array = npt.NDArray[Any]
Facts = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class CachedArrays:
    """Arrays by name, and small facts about them."""

    arrays: dict[str, Array]
    facts: Facts
    index: Path | None = None
    unchecked: dict[str, CheckedFile] = field(default_factory=dict)
    """Files of large arrays that go by rows: to be checked before rows are used."""

    def check_rows(self, first: Index, stop: Index) -> None:
        """Check the rows from `first` up to `stop`, many ranges at once. The next start makes anew what is damaged."""
        for name, file in self.unchecked.items():
            array = self.arrays[name]
            num_bytes = array.nbytes // len(array)
            begin = len(file.bytes) - array.nbytes
            try:
                file.check(begin + first * num_bytes, begin + stop * num_bytes)
            except DamagedFile as damage:
                if self.index is not None:
                    self.index.unlink(missing_ok=True)
                fix = "It is made again from the data itself when the same command is run again."
                problem = Problem(where=str(damage.path), what=f"{damage.what}.", fix=fix)
                raise MeshwrightError([problem], exit_code=1) from None


@dataclass(frozen=True, kw_only=True)
class CacheKey:
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
    slot: str
    files: tuple[SourceFile, ...]
    arrays: dict[str, tuple[str, tuple[int, ...]]]
    """Name -> (type, shape)."""
    hashes: BlockHashes
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

    def publish(self, stem: str) -> BlockHashes:
        for name in self.paths:
            array = self.arrays[name]
            if isinstance(array, np.memmap):
                array.flush()
        hashes, content = hash_files(self.paths)
        if self.paths:
            assert self.folder is not None
            write_whole(self.folder / f"{stem}.xxh3", lambda file: file.write(content))
        for name, path in self.paths.items():
            os.replace(path, path.with_name(f"{stem}.{name}.npy"))
        return hashes

    def discard(self) -> None:
        for path in self.paths.values():
            path.unlink(missing_ok=True)

    def _draft(self, name: str) -> Path:
        assert self.folder is not None
        self.paths[name] = self.folder / f".{name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
        return self.paths[name]


def keep(
    folder: Path | None, slot: CacheKey, fill: Callable[[Draft], Facts], by_rows: tuple[str, ...] = ()
) -> CachedArrays:
    """What the slot holds, made by `fill` where it is absent, out of date or damaged. Without a folder: made.

    `by_rows`: arrays that the caller only uses after `CachedArrays.check_rows`; large ones are not checked here.
    """
    if folder is None:
        draft = Draft(folder=None)
        facts = fill(draft)
        return CachedArrays(arrays=draft.arrays, facts=facts)
    found = load(folder, slot, by_rows)
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
    return load(folder, slot, by_rows) or CachedArrays(arrays=draft.arrays, facts=facts)


def load(folder: Path, slot: CacheKey, by_rows: tuple[str, ...] = ()) -> CachedArrays | None:
    """What is kept for this slot, mapped from disk; None when absent, out of date or damaged."""
    path, stem = folder / f"{slot.stem}.json", f"{slot.stem}-{slot.stamp}"
    try:
        index = decode(CacheIndex, json.loads(unseal(path.read_bytes())), "cache")
        if (index.version, index.slot, index.files) != (_CACHE_VERSION, slot.stem, slot.files):
            return None
        paths = {name: folder / f"{stem}.{name}.npy" for name in index.arrays}
        files = open_hashed(index.hashes, folder / f"{stem}.xxh3", paths) if paths else {}
        for name, file in files.items():
            if name not in by_rows:
                file.check_all()
        arrays = {name: _map(files[name], *form) for name, form in index.arrays.items()}
    except (OSError, ValueError, TypeError, KeyError, RecursionError, MeshwrightError, DamagedFile):
        return None
    unchecked = {name: file for name, file in files.items() if file.num_unseen}
    return CachedArrays(arrays=arrays, facts=index.facts, index=path, unchecked=unchecked)


def remember(folder: Path | None, slot: CacheKey, facts: Facts) -> None:
    """Facts alone, in place of those that were kept; where they cannot be written, they are found out again."""
    if folder is not None:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            _store(folder, slot, Draft(folder=folder), facts)


def _store(folder: Path, slot: CacheKey, draft: Draft, facts: Facts) -> None:
    """The arrays, then their index, and drop what an earlier state of the same files left."""
    stem = f"{slot.stem}-{slot.stamp}"
    hashes = draft.publish(stem)
    forms = {name: (array.dtype.str, tuple(array.shape)) for name, array in draft.arrays.items()}
    index = CacheIndex(
        version=_CACHE_VERSION, slot=slot.stem, files=slot.files, arrays=forms, hashes=hashes, facts=facts
    )
    write_whole(folder / f"{slot.stem}.json", lambda file: file.write(seal(to_json(index))))
    for path in folder.glob(f"{slot.stem}-*"):
        if not path.name.startswith(f"{stem}."):
            with contextlib.suppress(OSError):  # another process dropped it first
                path.unlink()


def _short(value: Any) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(value).encode())


def _map(file: CheckedFile, dtype: str, shape: tuple[int, ...]) -> Array:
    """The array at the end of the file. Its .npy header is for other programs: the index says the same, sealed."""
    begin = len(file.bytes) - np.dtype(dtype).itemsize * math.prod(shape)
    return np.asarray(file.bytes[begin:].view(dtype).reshape(shape))


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
