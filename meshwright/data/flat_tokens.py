"""Token files as other programs write them: one array, in an .npy or as bare numbers in a .bin. Mapped, never read in.

What such a file holds is told from its size, its first and last MiB and some blocks between: a corpus of a
terabyte must start as fast as a small one. The cache keeps that, and its largest token once somebody asked.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash

from meshwright.core.errors import MeshwrightError, Problem
from meshwright.core.units import MIB
from meshwright.data.arrays import map_npy
from meshwright.data.cache import CacheKey, Facts, load, remember
from meshwright.data.data_section import DataSection
from meshwright.data.file_list import SourceFile
from meshwright.data.token_reader import FlatTokens
from meshwright.data.token_samples import TokenSource, scan_range
from meshwright.data.tokenizer import TokenArray

_NUM_BLOCKS, _BLOCK_BYTES = 64, 4096


def open_flat(file: SourceFile, cache: Path | None, section: DataSection) -> TokenSource:
    if section.packing == "documents":
        what = 'does not say where documents begin; packing = "documents" needs that.'
        fix = 'Use packing = "stream", or Megatron .bin + .idx files (`mw data prepare` writes them).'
        raise MeshwrightError([Problem(where=file.path, what=what, fix=fix)])
    is_npy = file.path.lower().endswith(".npy")
    tokens = _tokens_of(file.path) if is_npy else map_bin(file, _dtype(section))
    return token_file(file, tokens, cache, section)


def token_file(
    file: SourceFile, tokens: TokenArray, cache: Path | None, section: DataSection, more: tuple[SourceFile, ...] = ()
) -> TokenSource:
    """The source of mapped tokens; `more` are files that belong to it."""
    sidecar = CacheKey(question=("token file", tokens.dtype.str), files=(file, *more))
    known = load(cache, sidecar) if cache else None
    facts = dict(known.facts) if known else {"digest": _digest(file)}
    if not known:
        remember(cache, sidecar, facts)
    return TokenSource(
        corpus=FlatTokens(tokens=tokens),
        digest=facts["digest"],
        files=(file, *more),
        sequence=section.sequence,
        id_range=_range_of(tokens, facts, lambda found: remember(cache, sidecar, found)),
    )


def _range_of(tokens: TokenArray, facts: Facts, save: Callable[[Facts], None]) -> Callable[[], tuple[int, int]]:
    def id_range() -> tuple[int, int]:
        if "largest" not in facts:
            facts["smallest"], facts["largest"] = scan_range(tokens)
            save(facts)
        return facts["smallest"], facts["largest"]

    return id_range


def _dtype(section: DataSection) -> np.dtype[np.integer]:
    return np.dtype("uint16" if section.token_dtype == "auto" else section.token_dtype)


def map_bin(file: SourceFile, dtype: np.dtype[np.integer]) -> TokenArray:
    over = file.size_bytes % dtype.itemsize
    if over:
        what = f"has {file.size_bytes:,} bytes, not a multiple of {dtype.itemsize} ({dtype})."
        fix = "It is cut off: copy it again; or its tokens are of another type: set data.token_dtype."
        raise MeshwrightError([Problem(where=file.path, what=what, fix=fix)])
    return np.asarray(np.memmap(file.path, dtype=dtype, mode="r"))


def _tokens_of(path: str) -> TokenArray:
    tokens = map_npy(path)
    if tokens.dtype.kind not in "iu" or tokens.ndim != 1:
        what = f"holds {tokens.dtype} of shape {tokens.shape}."
        raise MeshwrightError([Problem(where=path, what=what, fix="Tokens are one row of whole numbers.")])
    return tokens


def _digest(file: SourceFile) -> str:
    """Of the first and the last MiB and of blocks spread between them."""
    state = xxhash.xxh3_64()
    last = max(0, file.size_bytes - MIB)
    between = {last * block // _NUM_BLOCKS for block in range(1, _NUM_BLOCKS)}
    handle = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        state.update(os.pread(handle, MIB, 0))
        for offset in sorted(between):
            state.update(os.pread(handle, _BLOCK_BYTES, offset))
        state.update(os.pread(handle, MIB, last))
    finally:
        os.close(handle)
    return str(state.hexdigest())
