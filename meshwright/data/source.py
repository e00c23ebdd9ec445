"""An opened corpus: any step's batch, for any rank of any mesh, from one integer.

    tokens    t0 t1 t2 t3 t4 t5 t6 t7 t8 ...          sequence = 4
    sample 0  [inputs    ]                            targets are the inputs one token later,
    sample 1              [inputs    ]                so neighbours share one token

A cursor is the number of samples consumed so far. It alone says what comes next: cursor -> epoch and place ->
(permutation of that epoch) -> train index -> (split) -> sample -> a slice of the tokens. Nothing is shuffled
in memory, nothing depends on the mesh, and resuming costs nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import xxhash

from meshwright.core.errors import Problem
from meshwright.data import cache as token_cache
from meshwright.data.batch import Batch, part_rows, require_place
from meshwright.data.files import SourceFile, find_files
from meshwright.data.order import ORDER_VERSION, Index, permuted
from meshwright.data.read import TextKeys, Tokens, raise_all, read_files
from meshwright.data.split import Split, split_samples
from meshwright.data.tokenizer import ByteTokenizer, TokenArray

__all__ = ["Batch", "TextData", "open_text"]


@dataclass(frozen=True, kw_only=True, eq=False)
class TextData:
    """Tokens cut into samples, split into train and held-out. Make one with `open_text`."""

    corpus: Tokens
    digest: str
    files: tuple[SourceFile, ...]
    sequence: int
    held_out_fraction: float
    seed: int
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)

    @property
    def num_tokens(self) -> int:
        return len(self.corpus.tokens)

    @property
    def num_samples(self) -> int:
        """All samples, train and held-out."""
        return (self.num_tokens - 1) // self.sequence

    @property
    def num_train(self) -> int:
        """The samples of one epoch."""
        return self.split.num_train

    @property
    def num_held_out(self) -> int:
        return self.split.num_held_out

    @property
    def num_bytes_per_token(self) -> float:
        return self.tokenizer.num_bytes_per_token

    @cached_property
    def split(self) -> Split:
        return split_samples(self.num_samples, held_out_fraction=self.held_out_fraction, seed=self.seed)

    @cached_property
    def fingerprint(self) -> str:
        """Tells changed data: content, file names and sizes, cut and order; not where the files lie."""
        files = [[os.path.basename(file.path), file.size_bytes] for file in self.files]
        cut = [self.sequence, self.held_out_fraction, self.seed, ORDER_VERSION]
        facts = [files, cut, self.tokenizer.name, self.num_tokens, self.digest]
        return xxhash.xxh3_64_hexdigest(json.dumps(facts).encode())

    def order(self, cursor: int, num_samples: int) -> Index:
        """The samples that train at `cursor`, `cursor + 1`, ...; each epoch is a new order of all of them."""
        epoch, place = np.divmod(cursor + np.arange(num_samples, dtype=np.int64), self.num_train)
        return self.split.train(permuted(place, size=self.num_train, seed=self.seed, stream=epoch))

    def batch(self, cursor: int, batch: int, part: int = 0, num_parts: int = 1) -> Batch:
        """Part `part` of the `batch` samples that follow `cursor`."""
        require_place(cursor=cursor, batch=batch, part=part, num_parts=num_parts)
        samples = self.order(cursor, batch)
        return self._rows(samples, batch, part_rows(batch, part, num_parts))

    def held_out_batches(
        self, batch: int, part: int = 0, num_parts: int = 1, limit: int | None = None
    ) -> Iterator[Batch]:
        """The held-out samples in a fixed order, at most `limit` batches; the last is padded to shape."""
        require_place(cursor=0, batch=batch, part=part, num_parts=num_parts)
        rows = part_rows(batch, part, num_parts)
        starts = range(0, self.num_held_out, batch)[:limit]
        return (self._held_out(start, batch, rows) for start in starts)

    def _held_out(self, start: int, batch: int, rows: slice) -> Batch:
        index = np.arange(start, start + batch, dtype=np.int64)
        num_real = min(batch, self.num_held_out - start)
        # Padding rows repeat the last real sample: ordinary tokens, so no model chokes on them.
        samples = self.split.held_out(np.minimum(index, self.num_held_out - 1))
        return self._rows(samples, num_real, rows)

    def _rows(self, samples: Index, num_real: int, rows: slice) -> Batch:
        """The `rows` of the batch made of `samples`, of which the first `num_real` count."""
        windows = _windows(self.corpus.tokens, self.sequence)[samples[rows]].astype(np.int64)
        weights = np.ones((len(windows), self.sequence), dtype=np.float32)
        num_tokens = num_real * self.sequence
        if self.corpus.weights is not None:
            whole = _windows(self.corpus.weights, self.sequence)[samples, 1:]
            weights = whole[rows].astype(np.float32)
            num_tokens = int(whole[:num_real].sum(dtype=np.int64))
        weights[max(0, num_real - rows.start) :] = 0
        return Batch(
            inputs=np.ascontiguousarray(windows[:, :-1]),
            targets=np.ascontiguousarray(windows[:, 1:]),
            weights=weights,
            num_tokens=float(num_tokens),
        )


def open_text(
    patterns: str | tuple[str, ...],
    *,
    sequence: int,
    held_out_fraction: float,
    seed: int,
    cache: Path | None = None,
    text_key: str = "text",
    prompt_key: str = "prompt",
) -> TextData:
    """Find, check and tokenize the files (or map them from `cache`); everything wrong is raised at once."""
    problems = _setting_problems(sequence, held_out_fraction)
    files = find_files((patterns,) if isinstance(patterns, str) else tuple(patterns), problems)
    keys = TextKeys(text=text_key, prompt=prompt_key)
    corpus, digest = _load_or_read(files, keys, cache, problems)
    if not problems:
        problems.extend(_length_problems(len(corpus.tokens), sequence, held_out_fraction))
    raise_all(problems)
    return TextData(
        corpus=corpus,
        digest=digest,
        files=files,
        sequence=sequence,
        held_out_fraction=held_out_fraction,
        seed=seed,
    )


def _load_or_read(
    files: tuple[SourceFile, ...], keys: TextKeys, cache: Path | None, problems: list[Problem]
) -> tuple[Tokens, str]:
    """The corpus and its digest. Where problems are known the files are still read, to report theirs too."""
    if cache is None or problems:
        corpus = read_files(files, keys, problems)
        return corpus, token_cache.digest_of(corpus)
    cached = token_cache.load(cache, files, keys)
    if cached:
        return cached
    corpus = read_files(files, keys, problems)
    digest = token_cache.digest_of(corpus)
    if not problems:
        token_cache.store(cache, files, keys, corpus, digest)
    # Mapping what was just written frees this process's own copy.
    return token_cache.load(cache, files, keys) or (corpus, digest)


def _windows(flat: TokenArray, sequence: int) -> TokenArray:
    """Row i is sample i, `sequence` + 1 long: a view, so that nothing is copied before rows are picked."""
    return np.lib.stride_tricks.sliding_window_view(flat, sequence + 1)[::sequence]


def _setting_problems(sequence: int, held_out_fraction: float) -> list[Problem]:
    problems = []
    if sequence < 1:
        problems.append(Problem(where="data.sequence", what=f"{sequence} is not positive.", fix="Use 1 or more."))
    if not 0 <= held_out_fraction < 1:
        what, fix = f"{held_out_fraction} is not a fraction in [0, 1).", "Use 0 to hold nothing out."
        problems.append(Problem(where="data.held_out_fraction", what=what, fix=fix))
    return problems


def _length_problems(num_tokens: int, sequence: int, held_out_fraction: float) -> list[Problem]:
    min_samples = 2 if held_out_fraction > 0 else 1
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
