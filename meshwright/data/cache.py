"""Arrays kept on disk: the rank processes of a machine share one copy, and a restart need not make them again.

    <slot>.json               what they were made from, sealed; written last, so if it is there the rest is whole
    <slot>-<stamp>.NAME.npy   one for each array, mapped rather than read
    <slot>-<stamp>.xxh3       hashes of their blocks, uint64, one file after the other

The slot names the question (paths, settings), the stamp the state of the files (sizes, times). Each file appears
by an atomic rename, so two processes may build the same slot at once: they write the same bytes. Whatever
cannot be read back, or is not as it was written, is a miss, never an error: the files themselves are the truth.

Files have one XXH3 hash for each block of 64 KiB. Of a large file a block is checked when it is first used: a start
costs nothing for files of any size, and a page fault reads about as much from a disk anyway.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from meshwright.core.codec import decode, seal, to_json, unseal
from meshwright.core.errors import MeshwrightError, error_at
from meshwright.core.files import write_whole
from meshwright.core.units import MIB
from meshwright.data.file_list import SourceFile
from meshwright.data.sample_order import Index

BLOCK_BYTES = 64 * 1024
EAGER_BYTES = 256 * MIB
"""Files up to this size are checked when they are opened: it takes a few hundredths of a second."""


Damaged = Callable[[object, str], MeshwrightError]


@dataclass(frozen=True, kw_only=True)
class BlockHashes:
    """What a sealed JSON file says of hashed files."""

    sizes: dict[str, int]
    """Name -> bytes of each file, in the order of the hashes."""
    digest: str
    """Hash of the file that holds their hashes."""


class CheckedFile:
    """A mapped file and the hashes of its blocks; `num_unseen` of them were not compared yet.

    Raises the error that `damaged` makes of a path and what is wrong there.
    """

    def __init__(self, path: Path, num_bytes: int, hashes: npt.NDArray[np.uint64], damaged: Damaged):
        self.path, self.hashes, self.damaged = path, hashes, damaged
        self.bytes = _map_bytes(path)
        if len(self.bytes) != num_bytes:
            raise damaged(path, f"has {len(self.bytes):,} bytes; {num_bytes:,} were written.")
        self.is_unseen = np.ones(len(hashes), dtype=bool)
        self.num_unseen = len(hashes)

    def check(self, first: Index, stop: Index) -> None:
        """Check every block that holds a byte of the ranges from `first` up to `stop`, if it was not checked yet."""
        if self.num_unseen and len(first):
            low, high = first // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES
            blocks = np.minimum(low[:, None] + np.arange(int((high - low).max()) + 1), high[:, None])
            self._check(np.unique(blocks[self.is_unseen[blocks]]))

    def check_all(self) -> None:
        self._check(np.flatnonzero(self.is_unseen))

    def _check(self, blocks: npt.NDArray[np.integer]) -> None:
        for block in blocks.tolist():
            if _hash_block(self.bytes, block) != self.hashes[block]:
                raise self.damaged(self.path, f"is not as it was written, at offset {block * BLOCK_BYTES:,}.")
            self.is_unseen[block] = False
        self.num_unseen -= len(blocks)


def _map_bytes(path: Path) -> npt.NDArray[np.uint8]:
    if not path.stat().st_size:  # nothing cannot be mapped
        return np.empty(0, dtype=np.uint8)
    return np.memmap(path, dtype=np.uint8, mode="r")


def _hash_block(data: npt.NDArray[np.uint8], block: int) -> int:
    return int(xxhash.xxh3_64_intdigest(data[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES].data))


def _num_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES)


def hash_files(paths: Mapping[str, Path]) -> tuple[BlockHashes, bytes]:
    """What to seal, and the content of the hashes file."""
    sizes, hashes = {}, []
    for name, path in paths.items():
        data = _map_bytes(path)
        sizes[name] = len(data)
        hashes += [_hash_block(data, block) for block in range(_num_blocks(len(data)))]
    content = np.asarray(hashes, dtype=np.uint64).tobytes()
    return BlockHashes(sizes=sizes, digest=xxhash.xxh3_128_hexdigest(content)), content


def open_hashed(
    sealed: BlockHashes, hashes: Path, paths: Mapping[str, Path], damaged: Damaged
) -> dict[str, CheckedFile]:
    """The files, small ones checked already."""
    opened = {}
    try:
        content: npt.NDArray[Any] = np.fromfile(hashes, dtype=np.uint8)
        counts = [_num_blocks(num_bytes) for num_bytes in sealed.sizes.values()]
        if len(content) != 8 * sum(counts) or xxhash.xxh3_128_hexdigest(content.data) != sealed.digest:
            raise damaged(hashes, "is not as it was written.")
        parts = np.split(content.view(np.uint64), np.cumsum(counts)[:-1])
        for (name, num_bytes), part in zip(sealed.sizes.items(), parts, strict=True):
            opened[name] = CheckedFile(paths[name], num_bytes, part, damaged)
            if num_bytes <= EAGER_BYTES:
                opened[name].check_all()
    except FileNotFoundError as error:
        raise damaged(error.filename, "is missing.") from None
    return opened


# Raise it when the same files give other arrays than before.
_CACHE_VERSION = 3

Array = npt.NDArray[Any]
Facts = dict[str, Any]
Fill = Callable[["ArrayWriter"], Facts]


@dataclass(frozen=True, kw_only=True)
class CachedArrays:
    """Arrays by name, and small facts about them."""

    arrays: dict[str, Array]
    facts: Facts
    index: Path = Path()
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
            except MeshwrightError:
                self.index.unlink(missing_ok=True)
                raise


@dataclass(frozen=True, kw_only=True)
class CacheKey:
    """A question about files: what is asked (JSON), and of which state of which files."""

    question: tuple[Any, ...]
    files: tuple[SourceFile, ...]

    @property
    def slot(self) -> str:
        return json_digest([_CACHE_VERSION, self.question, [file.path for file in self.files]])

    @property
    def stamp(self) -> str:
        return json_digest([[file.size_bytes, file.mtime_ns] for file in self.files])


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
class ArrayWriter:
    """Arrays that are being made: in temporary files where there is a cache folder, else in memory."""

    folder: Path | None
    arrays: dict[str, Array] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)

    def save(self, name: str, array: Array) -> None:
        """Keep a finished array."""
        self.arrays[name] = array
        if self.folder is not None:
            with _write_errors(self.folder), open(self._temporary(self.folder, name), "xb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())

    def allocate(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An array to be filled in place, however large."""
        if self.folder is None:
            self.arrays[name] = np.empty(shape, dtype)
            return self.arrays[name]
        with _write_errors(self.folder):
            path = self._temporary(self.folder, name)
            mapped = np.lib.format.open_memmap(path, mode="w+", dtype=np.dtype(dtype), shape=shape)
            with open(path, "r+b") as file:
                # A full disk must be noticed here: later it would end the process without a word.
                os.posix_fallocate(file.fileno(), 0, max(1, mapped.offset + mapped.nbytes))
        self.arrays[name] = mapped
        return mapped

    def _temporary(self, folder: Path, name: str) -> Path:
        self.paths[name] = folder / f".{name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
        return self.paths[name]


def cached(folder: Path | None, key: CacheKey, fill: Fill, by_rows: tuple[str, ...] = ()) -> CachedArrays:
    """The arrays of this key, made by `fill` where they are absent, out of date or damaged. Without a folder: made.

    `by_rows`: arrays that the caller only uses after `CachedArrays.check_rows`; large ones are not checked here.
    """
    writer = ArrayWriter(folder=folder)
    if folder is None:
        return CachedArrays(facts=fill(writer), arrays=writer.arrays)
    if kept := load(folder, key, by_rows):
        return kept
    with _write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        facts = fill(writer)
        with _write_errors(folder):
            _store(folder, key, writer, facts)
    finally:
        for path in writer.paths.values():
            path.unlink(missing_ok=True)
    # Mapping what was just written frees this process's own copy.
    return load(folder, key, by_rows) or CachedArrays(arrays=writer.arrays, facts=facts)


def cached_facts(folder: Path | None, key: CacheKey, find: Callable[[], Facts]) -> Facts:
    """Facts alone; where they cannot be written, they are found out again the next time."""
    kept = load(folder, key) if folder else None
    facts = kept.facts if kept else find()
    if folder and not kept:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            _store(folder, key, ArrayWriter(folder=folder), facts)
    return facts


def load(folder: Path, key: CacheKey, by_rows: tuple[str, ...] = ()) -> CachedArrays | None:
    """What is kept for this key, mapped from disk; None when absent, out of date or damaged."""
    path, stem = folder / f"{key.slot}.json", f"{key.slot}-{key.stamp}"

    def damaged(path: object, what: str) -> MeshwrightError:
        fix = "It is made again from the data itself when the same command is run again."
        return error_at(path, what, fix, exit_code=1)

    try:
        index = decode(CacheIndex, json.loads(unseal(path.read_bytes())), "cache")
        if (index.version, index.slot, index.files) != (_CACHE_VERSION, key.slot, key.files):
            return None
        paths = {name: folder / f"{stem}.{name}.npy" for name in index.arrays}
        files = open_hashed(index.hashes, folder / f"{stem}.xxh3", paths, damaged) if paths else {}
        arrays = {}
        for name, (dtype, shape) in index.arrays.items():
            if name not in by_rows:
                files[name].check_all()
            # The array is at the end. The .npy header is for other programs: the index says the same, sealed.
            begin = len(files[name].bytes) - np.dtype(dtype).itemsize * math.prod(shape)
            arrays[name] = np.asarray(files[name].bytes[begin:].view(dtype).reshape(shape))
    except (OSError, ValueError, TypeError, KeyError, RecursionError, MeshwrightError):
        return None
    unchecked = {name: file for name, file in files.items() if file.num_unseen}
    return CachedArrays(arrays=arrays, facts=index.facts, index=path, unchecked=unchecked)


def _store(folder: Path, key: CacheKey, writer: ArrayWriter, facts: Facts) -> None:
    """The arrays, then their index, and drop what an earlier state of the same files left."""
    stem = f"{key.slot}-{key.stamp}"
    for array in writer.arrays.values():
        if isinstance(array, np.memmap):
            array.flush()
    hashes, content = hash_files(writer.paths)
    if writer.paths:
        write_whole(folder / f"{stem}.xxh3", content, is_durable=True)
    for name, path in writer.paths.items():
        os.replace(path, folder / f"{stem}.{name}.npy")
    index = CacheIndex(
        version=_CACHE_VERSION,
        slot=key.slot,
        files=key.files,
        arrays={name: (array.dtype.str, tuple(array.shape)) for name, array in writer.arrays.items()},
        hashes=hashes,
        facts=facts,
    )
    write_whole(folder / f"{key.slot}.json", seal(to_json(index)), is_durable=True)
    for path in folder.glob(f"{key.slot}-*"):
        if not path.name.startswith(f"{stem}."):
            with contextlib.suppress(OSError):  # another process dropped it first
                path.unlink()


def json_digest(value: Any) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(value).encode())


@contextlib.contextmanager
def _write_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"the cache cannot be written: {(error.strerror or str(error)).lower()}."
        raise error_at(folder, what, "Free some space there, or name another folder.") from None
