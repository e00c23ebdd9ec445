"""Tokens cut into samples.

    tokens    t0 t1 t2 t3 t4 t5 t6 t7 t8 ...          sequence = 4
    sample 0  [inputs    ]                            targets are the inputs one token later,
    sample 1              [inputs    ]                so neighbours share one token

Packed documents are the same rows with their borders kept: a token knows the document it belongs to, and no
target lies in the next document. A long document goes on in the next row.

    tokens     a0 a1 a2 . b0 .  c0 c1          sequence = 8, each text ends with its separator
    documents   0  0  0 0  1 1   2  2
    weights     1  1  1 0  1 0   1  1          the separator is a target; what follows it is not
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from meshwright.core.errors import Problem, Problems
from meshwright.data.dataset import SampleInfo, SampleRows, Source
from meshwright.data.file_list import SourceFile
from meshwright.data.sample_order import MAX_CHUNK_SAMPLES, Index
from meshwright.data.token_reader import FlatTokens
from meshwright.data.tokenizer import TokenArray, Tokenizer

SCAN_TOKENS = 1 << 22


@dataclass(frozen=True, kw_only=True, eq=False)
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

    @cached_property
    def info(self) -> SampleInfo:
        return SampleInfo(
            kind="tokens",
            sequence=self.sequence,
            tokenizer=self.tokenizer,
            num_bytes_per_token=self.num_bytes_per_token,
            max_chunk_samples=MAX_CHUNK_SAMPLES,
        )

    @cached_property
    def num_tokens(self) -> int:
        return len(self.corpus.tokens)

    @cached_property
    def num_samples(self) -> int:
        return max(0, self.num_tokens - 1) // self.sequence

    @cached_property
    def facts(self) -> list[Any]:
        name = self.tokenizer.name if self.tokenizer else "tokens"
        return [name, self.num_tokens, self.digest, *(["documents"] if self.is_packed else [])]

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
