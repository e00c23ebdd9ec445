"""Files that are checked before they are used: one XXH3 hash for each block of 64 KiB, compared when the block is
first read. A start costs nothing for files of any size, and a page fault reads about as much from a disk anyway.

    hashes file   the hashes of all blocks of all files, uint64, one file after the other
    BlockHashes   names and sizes of the files, and a digest of the hashes file; part of a sealed JSON file
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from meshwright.core.units import MIB
from meshwright.data.sample_order import Index

BLOCK_BYTES = 64 * 1024
EAGER_BYTES = 256 * MIB
"""Files up to this size are checked when they are opened: it takes a few hundredths of a second."""


@dataclass(frozen=True, kw_only=True)
class BlockHashes:
    sizes: dict[str, int]
    """Name -> bytes of each file, in the order of the hashes."""
    digest: str


class DamagedFile(Exception):
    """A file that is not as it was written, and the offset of the first block that differs."""

    def __init__(self, path: Path, what: str):
        super().__init__(f"{path} {what}")
        self.path, self.what = path, what


class CheckedFile:
    """A mapped file and the hashes of its blocks."""

    def __init__(self, path: Path, num_bytes: int, hashes: npt.NDArray[np.uint64]):
        self.path, self.hashes = path, hashes
        self.bytes = map_bytes(path)
        if len(self.bytes) != num_bytes:
            raise DamagedFile(path, f"has {len(self.bytes):,} bytes; {num_bytes:,} were written")
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
                raise DamagedFile(self.path, f"is not as it was written, at offset {block * BLOCK_BYTES:,}")
            self.is_unseen[block] = False
        self.num_unseen -= len(blocks)


def map_bytes(path: Path) -> npt.NDArray[np.uint8]:
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
        data = map_bytes(path)
        sizes[name] = len(data)
        hashes += [_hash_block(data, block) for block in range(_num_blocks(len(data)))]
    content = np.asarray(hashes, dtype=np.uint64).tobytes()
    return BlockHashes(sizes=sizes, digest=xxhash.xxh3_128_hexdigest(content)), content


def open_hashed(sealed: BlockHashes, hashes: Path, paths: Mapping[str, Path]) -> dict[str, CheckedFile]:
    """The files, small ones checked already. Raises DamagedFile, or OSError where one is missing."""
    content: npt.NDArray[Any] = np.fromfile(hashes, dtype=np.uint8)
    counts = [_num_blocks(num_bytes) for num_bytes in sealed.sizes.values()]
    if len(content) != 8 * sum(counts) or xxhash.xxh3_128_hexdigest(content.data) != sealed.digest:
        raise DamagedFile(hashes, "is not as it was written")
    parts = np.split(content.view(np.uint64), np.cumsum(counts)[:-1])
    opened = {}
    for (name, num_bytes), part in zip(sealed.sizes.items(), parts, strict=True):
        opened[name] = CheckedFile(paths[name], num_bytes, part)
        if num_bytes <= EAGER_BYTES:
            opened[name].check_all()
    return opened
