"""Tokens kept on disk: the rank processes of a machine share one copy, and a restart need not tokenize.

    <slot>.json               what it was made from; written last, so if it is there the rest is whole
    <slot>-<stamp>.tokens.npy and, where some tokens do not count, <slot>-<stamp>.weights.npy

The slot names the question (paths, keys), the stamp the state of the files (sizes, times). Each file appears
by an atomic rename, so two processes may build the same slot at once: they write the same bytes. Whatever
cannot be read back is a miss, never an error: the files themselves are the truth.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from meshwright.core.codec import decode, encode, to_json
from meshwright.core.errors import MeshwrightError, Problem
from meshwright.data.files import SourceFile
from meshwright.data.read import TextKeys, Tokens
from meshwright.data.tokenizer import ByteTokenizer, TokenArray

# Raise it when reading the same files gives other tokens than before.
_CACHE_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheIndex:
    """What a cached corpus was made from, and the digest of its content."""

    version: int
    files: tuple[SourceFile, ...]
    keys: TextKeys
    tokenizer: str
    num_tokens: int
    has_weights: bool
    digest: str


def digest_of(corpus: Tokens) -> str:
    """A hash of the content: tokens and weights."""
    state = xxhash.xxh3_64(corpus.tokens.data)
    if corpus.weights is not None:
        state.update(b"weights")
        state.update(corpus.weights.data)
    return state.hexdigest()


def load(folder: Path, files: tuple[SourceFile, ...], keys: TextKeys) -> tuple[Tokens, str] | None:
    """The cached corpus and its digest, mapped from disk; None when absent, out of date or damaged."""
    slot, stamp = _names(files, keys)
    try:
        value = json.loads((folder / f"{slot}.json").read_text(encoding="utf-8"))
        index = decode(CacheIndex, value, "cache")
        if index.version != _CACHE_VERSION or index.files != files or index.keys != keys:
            return None
        tokens = _map(folder / f"{slot}-{stamp}.tokens.npy", index.num_tokens)
        weights = _map(folder / f"{slot}-{stamp}.weights.npy", index.num_tokens) if index.has_weights else None
    except (OSError, ValueError, EOFError, MeshwrightError):
        return None
    return Tokens(tokens=tokens, weights=weights), index.digest


def store(folder: Path, files: tuple[SourceFile, ...], keys: TextKeys, corpus: Tokens, digest: str) -> None:
    """Write the corpus, its index last, and drop what an earlier state of the same files left."""
    slot, stamp = _names(files, keys)
    weights = corpus.weights
    index = CacheIndex(
        version=_CACHE_VERSION,
        files=files,
        keys=keys,
        tokenizer=ByteTokenizer.name,
        num_tokens=len(corpus.tokens),
        has_weights=weights is not None,
        digest=digest,
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / f"{slot}-{stamp}.tokens.npy", lambda file: np.save(file, corpus.tokens))
        if weights is not None:
            _write(folder / f"{slot}-{stamp}.weights.npy", lambda file: np.save(file, weights))
        _write(folder / f"{slot}.json", lambda file: file.write(to_json(index).encode()))
    except OSError as error:
        what = f"the cache cannot be written: {(error.strerror or str(error)).lower()}."
        fix = "Free some space there, or name another folder."
        raise MeshwrightError([Problem(where=str(folder), what=what, fix=fix)]) from None
    for path in folder.glob(f"{slot}-*.npy"):
        if not path.name.startswith(f"{slot}-{stamp}."):
            with contextlib.suppress(OSError):  # another process dropped it first
                path.unlink()


def _names(files: tuple[SourceFile, ...], keys: TextKeys) -> tuple[str, str]:
    slot = json.dumps([_CACHE_VERSION, ByteTokenizer.name, encode(keys), [file.path for file in files]])
    stamp = json.dumps([[file.size_bytes, file.mtime_ns] for file in files])
    return xxhash.xxh3_64_hexdigest(slot.encode()), xxhash.xxh3_64_hexdigest(stamp.encode())


def _map(path: Path, num_tokens: int) -> TokenArray:
    array = np.load(path, mmap_mode="r")
    if array.dtype != np.uint8 or array.shape != (num_tokens,):
        raise ValueError(f"{path} does not hold {num_tokens} tokens")
    return np.asarray(array)


def _write(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """All of the file or none of it, also for a reader at this moment and after a power cut."""
    draft = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with open(draft, "xb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
