"""Token files as other programs write them: mapped, never read in.

One array in an .npy, or bare numbers in a .bin. What such a file holds is told from its size, its first and last MiB
and some blocks between: a corpus of a terabyte must start as fast as a small one. The cache keeps that, and its largest
token once somebody asked.

Megatron's pairs: X.bin holds the tokens, X.idx the lengths of its sequences and where documents begin.

    magic (9)  version u64  type code u8  #sequences u64  #documents u64        34 bytes
    lengths i32 [#sequences]   first bytes i64 [#sequences]   documents i64 [#documents]: first sequences, and the end

The index is mapped too: millions of documents cost nothing at start. Its numbers are not aligned, so what is searched
again and again (where documents begin) is kept as an array of its own.

`mw data prepare` writes more beside a pair, which other programs can ignore:

    X.weights         uint8: 1 for tokens that count in the loss, 0 for what is only given; absent where all count
    X.xxh3            hashes of the blocks of the files
    X.facts.json      which tokenizer, from what, and how the hashes begin; sealed
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from meshwright.core.codec import decode, unseal
from meshwright.core.errors import MeshwrightError, Problem, error_at, raise_problems
from meshwright.core.units import MIB
from meshwright.data.arrays import map_npy
from meshwright.data.cache import (
    ArrayWriter,
    BlockHashes,
    CacheKey,
    CheckedFile,
    DamagedFile,
    Facts,
    cached,
    load,
    open_hashed,
    store_facts,
)
from meshwright.data.data_section import DataSection
from meshwright.data.file_list import SourceFile, find_files
from meshwright.data.sample_order import Index
from meshwright.data.token_reader import FlatTokens
from meshwright.data.token_samples import TokenSource, scan_range
from meshwright.data.tokenizer import ByteTokenizer, FileTokenizer, TokenArray

_NUM_BLOCKS, _BLOCK_BYTES = 64, 4096


def open_flat(file: SourceFile, cache: Path | None, section: DataSection) -> TokenSource:
    if section.packing == "documents":
        fix = 'Use packing = "stream", or Megatron .bin + .idx files (`mw data prepare` writes them).'
        raise error_at(file.path, 'does not say where documents begin; packing = "documents" needs that.', fix)
    if not file.path.lower().endswith(".npy"):
        dtype = np.dtype("uint16" if section.token_dtype == "auto" else section.token_dtype)
        return _token_file(file, _map_bin(file, dtype), cache, section)
    tokens = map_npy(file.path)
    if tokens.dtype.kind not in "iu" or tokens.ndim != 1:
        what = f"holds {tokens.dtype} of shape {tokens.shape}."
        raise error_at(file.path, what, "Tokens are one row of whole numbers.")
    return _token_file(file, tokens, cache, section)


def _token_file(
    file: SourceFile, tokens: TokenArray, cache: Path | None, section: DataSection, more: tuple[SourceFile, ...] = ()
) -> TokenSource:
    """The source of mapped tokens; `more` are files that belong to it.

    Its digest is of the first and the last MiB and of blocks spread between them.
    """
    key = CacheKey(question=("token file", tokens.dtype.str), files=(file, *more))
    known = load(cache, key) if cache else None
    facts = dict(known.facts) if known else {}
    if not known:
        digest, last = xxhash.xxh3_64(), max(0, file.size_bytes - MIB)
        between = {last * block // _NUM_BLOCKS for block in range(1, _NUM_BLOCKS)}
        with open(file.path, "rb", buffering=0) as opened:
            for offset, num_bytes in ((0, MIB), *((offset, _BLOCK_BYTES) for offset in sorted(between)), (last, MIB)):
                digest.update(os.pread(opened.fileno(), num_bytes, offset))
        facts["digest"] = digest.hexdigest()
        store_facts(cache, key, facts)

    def id_range() -> tuple[int, int]:
        if "largest" not in facts:
            facts["smallest"], facts["largest"] = scan_range(tokens)
            store_facts(cache, key, facts)
        return facts["smallest"], facts["largest"]

    return TokenSource(
        corpus=FlatTokens(tokens=tokens),
        digest=facts["digest"],
        files=(file, *more),
        sequence=section.sequence,
        id_range=id_range,
    )


def _map_bin(file: SourceFile, dtype: np.dtype[np.integer]) -> TokenArray:
    if file.size_bytes % dtype.itemsize:
        fix = "It is cut off: copy it again; or its tokens are of another type: set data.token_dtype."
        raise error_at(file.path, f"has {file.size_bytes:,} bytes, not a multiple of {dtype.itemsize} ({dtype}).", fix)
    return np.asarray(np.memmap(file.path, dtype=dtype, mode="r"))


_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
# Codes of Megatron; 6 and 7 are floats. It has none for uint32.
_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_PREPARE_AGAIN = (
    "Run `mw data prepare` again; or, to use the tokens as they are, delete the .facts.json, .xxh3 and .weights files."
)
_CODES = {np.dtype(name): code for code, name in _TYPES.items()}


@dataclass(frozen=True, kw_only=True)
class PreparedFacts:
    """What `mw data prepare` leaves beside a pair, so that its tokens can be turned back into text."""

    identity: str
    """Hash of the input, the tokenizer and the settings."""
    tokenizer: str
    separator: int
    num_bytes_of_a_token: int
    num_tokens: int
    num_documents: int
    num_text_bytes: int
    hashes: BlockHashes | None = None
    """Hashes of the .bin, .idx and .weights files, by these suffixes; None in files of an earlier version."""

    @classmethod
    def beside(cls, stem: Path) -> PreparedFacts | None:
        """None where there is nothing. Raises MeshwrightError where it is damaged."""
        path = beside(stem, ".facts.json")
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            if not any(beside(stem, end).exists() for end in (".xxh3", ".weights")):
                return None
            raise error_at(path, "is missing.", _PREPARE_AGAIN) from None
        try:
            is_sealed = content.startswith(b'{"digest"')
            text = unseal(content) if is_sealed else content.decode("utf-8")
            facts = decode(cls, json.loads(text), "facts")
            if facts.hashes is None or is_sealed:
                return facts
        except (ValueError, RecursionError, MeshwrightError):
            pass
        raise error_at(path, "was damaged or edited.", _PREPARE_AGAIN)

    def open_files(self, stem: Path) -> dict[str, CheckedFile]:
        """The files by their endings, small ones checked. Raises DamagedFile, or OSError where one is missing."""
        if self.hashes is None:
            return {}
        return open_hashed(self.hashes, beside(stem, ".xxh3"), {end: beside(stem, end) for end in self.hashes.sizes})


def beside(stem: Path, end: str) -> Path:
    return stem.with_name(f"{stem.name}{end}")


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenIndex:
    """A mapped .idx file."""

    path: str
    dtype: np.dtype[np.integer]
    lengths: npt.NDArray[np.int32]
    first_bytes: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int64]

    @property
    def num_bytes(self) -> int:
        """What the .bin must have, if sequences lie one after the other."""
        if not len(self.lengths):
            return 0
        return int(self.first_bytes[-1]) + int(self.lengths[-1]) * self.dtype.itemsize


def open_megatron(file: SourceFile, cache: Path | None, section: DataSection) -> TokenSource:
    """The pair that `file` (either of the two) belongs to."""
    stem = os.path.splitext(file.path)[0]
    problems: list[Problem] = []
    pair = find_files((f"{stem}.bin", f"{stem}.idx"), problems)
    raise_problems(problems)
    tokens_file, index_file = pair
    index = _read_index(index_file)
    if index.num_bytes != tokens_file.size_bytes:
        what = f"promises {index.num_bytes:,} bytes, {tokens_file.path} has {tokens_file.size_bytes:,}."
        fix = "One of the two is cut off, or they do not belong together: copy or write both again."
        raise error_at(index.path, what, fix)
    if section.token_dtype not in ("auto", index.dtype.name):
        what = f"says the tokens are {index.dtype}, data.token_dtype is {section.token_dtype}."
        raise error_at(index.path, what, 'Use token_dtype = "auto".')
    facts = PreparedFacts.beside(Path(stem))
    with _damage_as_problem():
        files = facts.open_files(Path(stem)) if facts else {}
        if files:
            files[".idx"].check(np.zeros(1, np.int64), np.ones(1, np.int64))  # the type of the tokens
    source = _token_file(tokens_file, _map_bin(tokens_file, index.dtype), cache, section, more=(index_file,))
    source = _with_tokenizer(source, Path(stem), facts)
    weights = files[".weights"].bytes if ".weights" in files else None

    def check(first: Index, stop: Index) -> None:
        with _damage_as_problem():
            files[".bin"].check(first * index.dtype.itemsize, stop * index.dtype.itemsize)
            if weights is not None:
                files[".weights"].check(first, stop)

    if any(files[end].num_unseen for end in (".bin", ".weights") if end in files):
        source = replace(source, check=check)
    if section.packing == "stream":
        return replace(source, corpus=FlatTokens(tokens=source.corpus.tokens, weights=weights))

    def save_starts(writer: ArrayWriter) -> Facts:
        """Save the first token of every document that is not empty."""
        with _damage_as_problem():
            if files:
                files[".idx"].check_all()
        ends = index.first_bytes + index.lengths * np.int64(index.dtype.itemsize)
        is_laid_out = index.first_bytes[0] == 0 and np.array_equal(index.first_bytes[1:], ends[:-1])
        # Some writers leave documents out: each sequence is one then.
        documents = index.documents[:-1] if len(index.documents) > 1 else np.arange(len(index.lengths))
        is_ordered = len(documents) and documents[0] == 0 and documents[-1] <= len(index.lengths)
        if not (is_laid_out and is_ordered and np.all(index.lengths >= 0) and np.all(np.diff(documents) >= 0)):
            what = "its sequences do not lie one after the other, or its documents are not in order."
            raise error_at(index.path, what, "Write the pair again.")
        starts = np.append(index.first_bytes, ends[-1])[documents] // index.dtype.itemsize
        is_filled = np.diff(starts, append=ends[-1] // index.dtype.itemsize) > 0
        writer.save("starts", starts[is_filled])
        return {}

    kept = cached(cache, CacheKey(question=("document starts",), files=(index_file,)), save_starts)
    corpus = FlatTokens(tokens=source.corpus.tokens, weights=weights, starts=kept.arrays["starts"])
    return replace(source, corpus=corpus, is_packed=True)


@contextlib.contextmanager
def _damage_as_problem() -> Iterator[None]:
    try:
        yield
    except DamagedFile as damage:
        raise error_at(damage.path, f"{damage.what}.", _PREPARE_AGAIN) from None
    except FileNotFoundError as error:
        raise error_at(error.filename, "is missing.", _PREPARE_AGAIN) from None


def _with_tokenizer(source: TokenSource, stem: Path, facts: PreparedFacts | None) -> TokenSource:
    """The tokenizer that made these files, where we made them."""
    if facts is None or facts.num_tokens != source.num_tokens:
        return source
    if facts.tokenizer == ByteTokenizer.name:
        return replace(source, tokenizer=ByteTokenizer(), num_bytes_per_token=1.0)
    source = replace(source, num_bytes_per_token=facts.num_text_bytes / facts.num_tokens)
    path = beside(stem, ".tokenizer.json")
    try:
        content = path.read_bytes()
        if f":{xxhash.xxh3_64_hexdigest(content)}:" not in facts.tokenizer:
            raise error_at(path, f"is not the tokenizer that made {stem.name}.bin.", _PREPARE_AGAIN)
        return replace(source, tokenizer=FileTokenizer(content, (facts.separator,)))
    except FileNotFoundError:
        raise error_at(path, "is missing.", _PREPARE_AGAIN) from None
    except (ValueError, ImportError):  # tokens train without it; only turning them back into text needs it
        return source


def _read_index(file: SourceFile) -> TokenIndex:
    raw = np.memmap(file.path, dtype=np.uint8, mode="r")
    problem = ""
    if len(raw) < _HEADER.size or bytes(raw[:9]) != _MAGIC:
        problem = "is not an index of Megatron: it does not begin with MMIDIDX."
    else:
        _, version, code, num_sequences, num_documents = _HEADER.unpack(bytes(raw[: _HEADER.size]))
        needed = _HEADER.size + 12 * num_sequences + 8 * num_documents
        if version != 1:
            problem = f"is of version {version}; version 1 is read."
        elif code not in _TYPES:
            problem = f"says its tokens are of type {code}, which are no whole numbers."
        elif len(raw) < needed:
            problem = f"is cut off: {num_sequences:,} sequences need {needed:,} bytes, it has {len(raw):,}."
    if problem:
        raise error_at(file.path, problem, "Copy or write the pair again.")
    sections = ((np.int32, num_sequences), (np.int64, num_sequences), (np.int64, num_documents))
    arrays: list[npt.NDArray[Any]] = []
    offset = _HEADER.size
    for dtype, count in sections:
        arrays.append(np.frombuffer(raw, dtype=dtype, count=count, offset=offset))
        offset += arrays[-1].nbytes
    lengths, first_bytes, documents = arrays
    return TokenIndex(
        path=file.path, dtype=np.dtype(_TYPES[code]), lengths=lengths, first_bytes=first_bytes, documents=documents
    )


def megatron_dtype(vocab_size: int) -> np.dtype[np.integer]:
    """The smallest type of Megatron's that holds every token."""
    return np.dtype("uint8" if vocab_size <= 1 << 8 else "uint16" if vocab_size <= 1 << 16 else "int32")


def write_index(
    file: BinaryIO,
    dtype: np.dtype[np.integer],
    lengths: Sequence[npt.NDArray[np.int32]],
    begins: Sequence[bool] | None = None,
) -> None:
    """The index of sequences with these lengths, given in pieces.

    Each begins a document, but the first of a piece that does not (`begins`) goes on with the one before.
    """
    every = np.concatenate([np.empty(0, dtype=np.int32), *lengths])
    is_first = np.ones(len(every) + 1, dtype=bool)
    firsts = np.cumsum([0, *map(len, lengths)])[:-1]
    goes_on = [first for first, begin in zip(firsts, begins or [True] * len(firsts), strict=True) if not begin]
    is_first[goes_on] = False
    documents = np.flatnonzero(is_first).astype(np.int64)
    ends = np.cumsum(every, dtype=np.int64) * dtype.itemsize
    file.write(_HEADER.pack(_MAGIC, 1, _CODES[dtype], len(every), len(documents)))
    file.write(every.data)
    file.write((ends - every * np.int64(dtype.itemsize)).data)
    file.write(documents.data)
