"""Tokens cut into samples.

    tokens    t0 t1 t2 t3 t4 t5 t6 t7 t8 ...          sequence = 4
    sample 0  [inputs    ]                            targets are the inputs one token later,
    sample 1              [inputs    ]                so neighbours share one token

Packed documents are the same rows with their borders kept: a token knows the document it belongs to, and no
target lies in the next document. A long document goes on in the next row.

    tokens     a0 a1 a2 . b0 .  c0 c1          sequence = 8, each text ends with its separator
    documents   0  0  0 0  1 1   2  2
    weights     1  1  1 0  1 0   1  1          the separator is a target; what follows it is not

Token files as other programs write them are mapped, never read in.

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

import json
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from meshwright.core.codec import decode, unseal
from meshwright.core.errors import MeshwrightError, Problem, Problems, error_at, raise_problems
from meshwright.core.units import MIB
from meshwright.data.cache import (
    ArrayWriter,
    BlockHashes,
    CacheKey,
    CheckedFile,
    Facts,
    cached,
    cached_facts,
    open_hashed,
)
from meshwright.data.data_section import DataSection
from meshwright.data.dataset import SampleInfo, SampleRows, Source
from meshwright.data.file_list import SourceFile, find_files, map_npy
from meshwright.data.sample_order import MAX_CHUNK_SAMPLES, Index
from meshwright.data.token_reader import FlatTokens
from meshwright.data.tokenizer import ByteTokenizer, FileTokenizer, TokenArray, Tokenizer

SCAN_TOKENS = 1 << 22


@dataclass(kw_only=True, eq=False)
class TokenSource(Source):
    corpus: FlatTokens
    digest: str
    """Hash of the content, or of a sample of it in files too large to read at every start."""
    files: tuple[SourceFile, ...]
    sequence: int
    tokenizer: Tokenizer | None = None
    is_packed: bool = False
    """Documents keep their borders."""
    num_bytes_per_token: float = 0.0
    find_range: Callable[[], tuple[int, int]] = lambda: (0, 0)
    """Smallest and largest token, of files that no tokenizer of ours made."""
    check: Callable[[Index, Index], None] | None = None
    """Called with the first token and the end of each range before it is used, of files that have hashes."""

    def __post_init__(self) -> None:
        self.num_tokens = len(self.corpus.tokens)
        self.num_samples = max(0, self.num_tokens - 1) // self.sequence
        name = self.tokenizer.name if self.tokenizer else "tokens"
        self.facts = [name, self.num_tokens, self.digest, *(["documents"] if self.is_packed else [])]
        self.info = SampleInfo(
            kind="tokens",
            sequence=self.sequence,
            tokenizer=self.tokenizer,
            num_bytes_per_token=self.num_bytes_per_token,
            max_chunk_samples=MAX_CHUNK_SAMPLES,
        )

    @cached_property
    def id_range(self) -> tuple[int, int]:
        return self.find_range()

    @cached_property
    def vocab_size(self) -> int:
        return self.id_range[1] + 1 if self.tokenizer is None else self.tokenizer.vocab_size

    def check_vocabulary(self, vocab_size: int) -> Problems:
        if self.tokenizer is not None:
            what = f"the tokenizer has {self.vocab_size:,} tokens, the model's vocabulary {vocab_size:,}."
            fix = f"Use a vocabulary of at least {self.vocab_size}."
            fits = self.vocab_size <= vocab_size
            return () if fits else (Problem(where="data.tokenizer", what=what, fix=fix),)
        smallest, largest = self.id_range
        if smallest >= 0 and largest < vocab_size:
            return ()
        for start in range(0, self.num_tokens, SCAN_TOKENS):
            piece = self.corpus.tokens[start : start + SCAN_TOKENS]
            wrong = np.flatnonzero((piece < 0) | (piece >= vocab_size))
            if len(wrong):
                position, token = start + int(wrong[0]), int(piece[wrong[0]])
                break
        what = f"token {token} at position {position:,} is outside the vocabulary of {vocab_size:,}."
        fix = f"The largest token in it is {largest}; use a vocabulary of at least {largest + 1}."
        if smallest < 0:
            fix = "Negative tokens are never valid: was it written with another token_dtype?"
        return (Problem(where=self.files[0].path, what=what, fix=fix),)

    def pick(self, samples: Index) -> SampleRows:
        self._check(samples)
        rows = self._windows(self.corpus.tokens)[samples]
        inputs, targets = rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)
        weights = self._weights(samples)
        if not self.is_packed:
            return SampleRows(inputs, targets, weights)
        row, place = self._borders(samples)
        weights[row, place - 1] = 0
        begins = np.zeros(rows.shape, dtype=np.int8)
        begins[row, place] = 1
        return SampleRows((inputs, np.cumsum(begins[:, :-1], axis=1, dtype=np.int32)), targets, weights)

    def count(self, samples: Index) -> float:
        if self.corpus.weights is not None:
            self._check(samples)
            weights = self._weights(samples)
            if self.is_packed:
                row, place = self._borders(samples)
                weights[row, place - 1] = 0
            return float(weights.sum(dtype=np.float64))
        num_borders = len(self._borders(samples)[0]) if self.is_packed else 0
        return float(len(samples) * self.sequence - num_borders)

    def _check(self, samples: Index) -> None:
        if self.check is not None:
            self.check(samples * self.sequence, (samples + 1) * self.sequence + 1)

    def _weights(self, samples: Index) -> Any:
        if self.corpus.weights is None:
            return np.ones((len(samples), self.sequence), dtype=np.float32)
        return self._windows(self.corpus.weights)[samples, 1:].astype(np.float32)

    def _borders(self, samples: Index) -> tuple[Index, Index]:
        """(row, place in its window) of every document that begins after a row's first token."""
        starts = self.corpus.starts
        assert starts is not None, "packing needs to know where documents begin"
        begin = samples * self.sequence
        first = np.searchsorted(starts, begin, side="right")
        counts = np.searchsorted(starts, begin + self.sequence, side="right") - first
        row = np.repeat(np.arange(len(samples)), counts)
        which = np.arange(len(row)) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        return row, starts[which] - begin[row]

    def _windows(self, flat: TokenArray) -> TokenArray:
        """Row i is sample i, `sequence` + 1 long: a view, so that nothing is copied before rows are picked."""
        return np.lib.stride_tricks.sliding_window_view(flat, self.sequence + 1)[:: self.sequence]


def scan_range(tokens: TokenArray) -> tuple[int, int]:
    """Smallest and largest token, read in pieces that stay in the processor's cache."""
    pieces = [tokens[start : start + SCAN_TOKENS] for start in range(0, len(tokens), SCAN_TOKENS)]
    smallest = 0 if tokens.dtype.kind == "u" else min((int(piece.min()) for piece in pieces), default=0)
    return smallest, max((int(piece.max()) for piece in pieces), default=-1)


def length_problems(num_tokens: int, sequence: int, min_samples: int) -> list[Problem]:
    needed = min_samples * sequence + 1
    if num_tokens >= needed:
        return []
    purpose = "one sequence" if min_samples == 1 else "one sequence to train on and one to hold out"
    what = f"the corpus has {num_tokens:,} tokens; {purpose} of {sequence:,} needs {needed:,}."
    shorter = (num_tokens - 1) // min_samples
    fix = f"Add text, or use sequence = {shorter} or less." if shorter >= 1 else "Add text."
    if min_samples == 2 and num_tokens > sequence:
        fix = f"{fix[:-1]}, or held_out_fraction = 0."
    return [Problem(where="data", what=what, fix=fix)]


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
    """The source of mapped tokens; `more` are files that belong to it."""

    def digest() -> Facts:
        """Hash of the first and last MiB and of blocks spread between them."""
        state, last = xxhash.xxh3_64(), max(0, file.size_bytes - MIB)
        between = {last * block // _NUM_BLOCKS for block in range(1, _NUM_BLOCKS)}
        with open(file.path, "rb", buffering=0) as opened:
            for offset, num_bytes in ((0, MIB), *((offset, _BLOCK_BYTES) for offset in sorted(between)), (last, MIB)):
                state.update(os.pread(opened.fileno(), num_bytes, offset))
        return {"digest": state.hexdigest()}

    def fact(question: str, find: Callable[[], Facts]) -> Facts:
        return cached_facts(cache, CacheKey(question=(question, tokens.dtype.str), files=(file, *more)), find)

    return TokenSource(
        corpus=FlatTokens(tokens=tokens),
        digest=fact("token file", digest)["digest"],
        files=(file, *more),
        sequence=section.sequence,
        find_range=lambda: fact("token range", lambda: {"range": scan_range(tokens)})["range"],
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
            raise _damaged(path, "is missing.") from None
        try:
            is_sealed = content.startswith(b'{"digest"')
            text = unseal(content) if is_sealed else content.decode("utf-8")
            facts = decode(cls, json.loads(text), "facts")
            if facts.hashes is None or is_sealed:
                return facts
        except (ValueError, RecursionError, MeshwrightError):
            pass
        raise _damaged(path, "was damaged or edited.")

    def open_files(self, stem: Path) -> dict[str, CheckedFile]:
        """The files by their endings, small ones checked."""
        if self.hashes is None:
            return {}
        paths = {end: beside(stem, end) for end in self.hashes.sizes}
        return open_hashed(self.hashes, beside(stem, ".xxh3"), paths, _damaged)

    def read_tokenizer(self, stem: Path) -> bytes:
        """The tokenizer's file beside them. Raises MeshwrightError where it is missing, or another."""
        path = beside(stem, ".tokenizer.json")
        if not path.exists():
            raise _damaged(path, "is missing.")
        content = path.read_bytes()
        if f":{xxhash.xxh3_64_hexdigest(content)}:" not in self.tokenizer:
            raise _damaged(path, f"is not the tokenizer that made {stem.name}.bin.")
        return content


def beside(stem: Path, end: str) -> Path:
    return stem.with_name(f"{stem.name}{end}")


def open_megatron(file: SourceFile, cache: Path | None, section: DataSection) -> TokenSource:
    """The pair that `file` (either of the two) belongs to."""
    stem = Path(os.path.splitext(file.path)[0])
    problems: list[Problem] = []
    pair = find_files((f"{stem}.bin", f"{stem}.idx"), problems)
    raise_problems(problems)
    tokens_file, index_file = pair
    dtype, lengths, first_bytes, documents = _read_index(index_file.path)
    # If sequences lie one after the other.
    num_bytes = int(first_bytes[-1]) + int(lengths[-1]) * dtype.itemsize if len(lengths) else 0
    if num_bytes != tokens_file.size_bytes:
        what = f"promises {num_bytes:,} bytes, {tokens_file.path} has {tokens_file.size_bytes:,}."
        fix = "One of the two is cut off, or they do not belong together: copy or write both again."
        raise error_at(index_file.path, what, fix)
    if section.token_dtype not in ("auto", dtype.name):
        what = f"says the tokens are {dtype}, data.token_dtype is {section.token_dtype}."
        raise error_at(index_file.path, what, 'Use token_dtype = "auto".')
    facts = PreparedFacts.beside(stem)
    files = facts.open_files(stem) if facts else {}
    if files:
        files[".idx"].check(np.zeros(1, np.int64), np.ones(1, np.int64))  # the type of the tokens
    source = _token_file(tokens_file, _map_bin(tokens_file, dtype), cache, section, more=(index_file,))
    source = _with_tokenizer(source, stem, facts)
    weights = files[".weights"].bytes if ".weights" in files else None
    itemsizes = {end: size for end, size in ((".bin", dtype.itemsize), (".weights", 1)) if end in files}

    def check(first: Index, stop: Index) -> None:
        for end, size in itemsizes.items():
            files[end].check(first * size, stop * size)

    if any(files[end].num_unseen for end in itemsizes):
        source = replace(source, check=check)
    corpus = FlatTokens(tokens=source.corpus.tokens, weights=weights)
    if section.packing == "stream":
        return replace(source, corpus=corpus)

    def save_starts(writer: ArrayWriter) -> Facts:
        """Save the first token of every document that is not empty."""
        if files:
            files[".idx"].check_all()
        ends = first_bytes + lengths * np.int64(dtype.itemsize)
        is_laid_out = first_bytes[0] == 0 and np.array_equal(first_bytes[1:], ends[:-1])
        # Some writers leave documents out: each sequence is one then.
        firsts = documents[:-1] if len(documents) > 1 else np.arange(len(lengths))
        is_ordered = len(firsts) and firsts[0] == 0 and firsts[-1] <= len(lengths)
        if not (is_laid_out and is_ordered and np.all(lengths >= 0) and np.all(np.diff(firsts) >= 0)):
            what = "its sequences do not lie one after the other, or its documents are not in order."
            raise error_at(index_file.path, what, "Write the pair again.")
        starts = np.append(first_bytes, ends[-1])[firsts] // dtype.itemsize
        is_filled = np.diff(starts, append=ends[-1] // dtype.itemsize) > 0
        writer.save("starts", starts[is_filled])
        return {}

    kept = cached(cache, CacheKey(question=("document starts",), files=(index_file,)), save_starts)
    return replace(source, corpus=replace(corpus, starts=kept.arrays["starts"]), is_packed=True)


def _damaged(path: object, what: str) -> MeshwrightError:
    return error_at(path, what, _PREPARE_AGAIN)


def _with_tokenizer(source: TokenSource, stem: Path, facts: PreparedFacts | None) -> TokenSource:
    """The tokenizer that made these files, where we made them."""
    if facts is None or facts.num_tokens != source.num_tokens:
        return source
    if facts.tokenizer == ByteTokenizer.name:
        return replace(source, tokenizer=ByteTokenizer(), num_bytes_per_token=1.0)
    source = replace(source, num_bytes_per_token=facts.num_text_bytes / facts.num_tokens)
    content = facts.read_tokenizer(stem)
    try:
        return replace(source, tokenizer=FileTokenizer(content, (facts.separator,)))
    except (ValueError, ImportError):  # tokens train without it; only turning them back into text needs it
        return source


def _read_index(path: str) -> tuple[np.dtype[np.integer], npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """A mapped .idx file: the type of the tokens, lengths, first bytes and documents."""
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    problem = ""
    if len(raw) < _HEADER.size or bytes(raw[:9]) != _MAGIC:
        problem = "is not an index of Megatron: it does not begin with MMIDIDX."
    else:
        _, version, code, num_sequences, num_documents = _HEADER.unpack(bytes(raw[: _HEADER.size]))
        ends = np.cumsum([_HEADER.size, 4 * num_sequences, 8 * num_sequences, 8 * num_documents], dtype=object)
        if version != 1:
            problem = f"is of version {version}; version 1 is read."
        elif code not in _TYPES:
            problem = f"says its tokens are of type {code}, which are no whole numbers."
        elif len(raw) < ends[-1]:
            problem = f"is cut off: {num_sequences:,} sequences need {ends[-1]:,} bytes, it has {len(raw):,}."
    if problem:
        raise error_at(path, problem, "Copy or write the pair again.")
    lengths, first_bytes, documents = (raw[start:end] for start, end in pairwise(ends))
    return np.dtype(_TYPES[code]), lengths.view(np.int32), first_bytes.view(np.int64), documents.view(np.int64)


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
