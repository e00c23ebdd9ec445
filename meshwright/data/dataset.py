"""Opened data of any kind: any step's batch, for any rank of any mesh, from one integer.

    cursor -> stream (which samples) -> source (their rows) -> Batch

A source knows its samples by number and nothing of order; a stream knows order and nothing of content.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

import numpy as np
import xxhash

from meshwright.core.errors import Problems
from meshwright.data.batch import Batch, SampleRows, part_rows, require_place
from meshwright.data.file_list import SourceFile
from meshwright.data.sample_order import ORDER_VERSION, Index
from meshwright.data.sample_stream import Stream
from meshwright.data.tokenizer import Tokenizer

_ORDER_BLOCK = 4096


class Source(Protocol):
    """Numbered samples of one kind, all of one shape. What the words mean is told in `Data`."""

    @property
    def kind(self) -> str: ...

    @property
    def files(self) -> tuple[SourceFile, ...]: ...

    @property
    def facts(self) -> list[Any]:
        """What, beside the names and sizes of the files, makes this content another."""
        ...

    @property
    def num_samples(self) -> int: ...

    @property
    def sequence(self) -> int: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_bytes_per_token(self) -> float: ...

    @property
    def sample_shape(self) -> tuple[int, ...]: ...

    @property
    def num_classes(self) -> int: ...

    @property
    def classes(self) -> tuple[str, ...]: ...

    @property
    def max_chunk_samples(self) -> int:
        """Neighbours that may be held out together, as they often come from one document."""
        ...

    def pick(self, samples: Index) -> SampleRows:
        """The rows of these samples, which the caller owns."""
        ...

    def count(self, samples: Index) -> float:
        """The sum of the weights of these samples."""
        ...

    def check_vocabulary(self, vocab_size: int) -> Problems: ...


class WithoutTokens:
    """The part of a source that images and tables share: one target, of weight 1, for each sample."""

    sequence: ClassVar[int] = 0
    tokenizer: ClassVar[None] = None
    vocab_size: ClassVar[int] = 0
    num_bytes_per_token: ClassVar[float] = 0.0
    max_chunk_samples: ClassVar[int] = 1

    def count(self, samples: Index) -> float:
        return float(len(samples))

    def check_vocabulary(self, vocab_size: int) -> Problems:
        return ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Data:
    """Samples in their order. Make one with `open_data` or `open_text`."""

    source: Source
    stream: Stream
    held_out_fraction: float
    seed: int

    @property
    def kind(self) -> str:
        """tokens, images or table."""
        return self.source.kind

    @property
    def files(self) -> tuple[SourceFile, ...]:
        return self.source.files

    @property
    def num_samples(self) -> int:
        """All samples, train and held-out."""
        return self.source.num_samples

    @property
    def num_train(self) -> int:
        """The samples of one epoch."""
        return self.stream.num_train

    @property
    def num_held_out(self) -> int:
        return self.stream.num_held_out

    @property
    def sequence(self) -> int:
        """Tokens in a sample; 0 where samples are no tokens."""
        return self.source.sequence

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.source.tokenizer

    @property
    def vocab_size(self) -> int:
        """Largest token that may occur, plus one; 0 without tokens. Token files are read through the first time."""
        return self.source.vocab_size

    @property
    def num_bytes_per_token(self) -> float:
        """Of text; 0 where it is not known."""
        return self.source.num_bytes_per_token

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Images: (channels, height, width). Tables: (dense columns, id columns, then each id column's size)."""
        return self.source.sample_shape

    @property
    def num_classes(self) -> int:
        """Of images and tables; 0 for tokens."""
        return self.source.num_classes

    @property
    def classes(self) -> tuple[str, ...]:
        """Their names, where the data has names."""
        return self.source.classes

    @cached_property
    def fingerprint(self) -> str:
        """Tells changed data: content, file names and sizes, cut and order; not where the files lie."""
        files = [[os.path.basename(file.path), file.size_bytes] for file in self.files]
        cut = [self.sequence, self.held_out_fraction, self.seed, ORDER_VERSION]
        facts = [files, cut, *self.source.facts, *self.stream.facts]
        return xxhash.xxh3_64_hexdigest(json.dumps(facts).encode())

    @property
    def file_states(self) -> dict[str, list[int]]:
        """Name -> size and time of each file: kept beside the fingerprint, they tell which file changed."""
        return {os.path.basename(file.path): [file.size_bytes, file.mtime_ns] for file in self.files}

    def changed_files(self, earlier: Mapping[str, Sequence[int]]) -> tuple[str, ...]:
        """The files that are new, gone or changed since `file_states` was `earlier`."""
        now = self.file_states
        names = {*earlier, *now}
        return tuple(sorted(name for name in names if list(earlier.get(name, ())) != now.get(name)))

    def check_vocabulary(self, vocab_size: int) -> Problems:
        """Tokens that a model of `vocab_size` does not know, by file and position."""
        return self.source.check_vocabulary(vocab_size)

    def order(self, cursor: int, num_samples: int) -> Index:
        """The samples that train at `cursor`, `cursor + 1`, ...; each epoch is a new order of all of them."""
        first, last = cursor // _ORDER_BLOCK, (cursor + max(num_samples, 1) - 1) // _ORDER_BLOCK
        blocks = np.concatenate([self._order_block(number) for number in range(first, last + 1)])
        return blocks[cursor - first * _ORDER_BLOCK :][:num_samples]

    def _order_block(self, number: int) -> Index:
        """A run of the order: working it out costs about as much for one batch as for a hundred."""
        found = self._order_blocks.get(number)
        if found is None:
            found = self.stream.train(number * _ORDER_BLOCK, _ORDER_BLOCK)
            if len(self._order_blocks) >= 4:
                self._order_blocks.clear()
            self._order_blocks[number] = found
        return found

    @cached_property
    def _order_blocks(self) -> dict[int, Index]:
        return {}

    def batch(self, cursor: int, batch: int, part: int = 0, num_parts: int = 1, shares: Sequence[int] = ()) -> Batch:
        """Part `part` of the `batch` samples that follow `cursor`; `shares` as in `part_rows`."""
        require_place(cursor=cursor, batch=batch, part=part, num_parts=num_parts)
        samples = self.order(cursor, batch)
        return self._rows(samples, batch, part_rows(batch, part, num_parts, shares))

    def held_out_batches(
        self, batch: int, part: int = 0, num_parts: int = 1, limit: int | None = None, shares: Sequence[int] = ()
    ) -> Iterator[Batch]:
        """The held-out samples in a fixed order, at most `limit` batches; the last is padded to shape."""
        require_place(cursor=0, batch=batch, part=part, num_parts=num_parts)
        rows = part_rows(batch, part, num_parts, shares)
        starts = range(0, self.num_held_out, batch)[:limit]
        return (self._held_out(start, batch, rows) for start in starts)

    def _held_out(self, start: int, batch: int, rows: slice) -> Batch:
        index = np.arange(start, start + batch, dtype=np.int64)
        num_real = min(batch, self.num_held_out - start)
        # Padding rows repeat the last real sample: an ordinary sample, so no model chokes on it.
        samples = self.stream.held_out(np.minimum(index, self.num_held_out - 1))
        return self._rows(samples, num_real, rows)

    def _rows(self, samples: Index, num_real: int, rows: slice) -> Batch:
        """The `rows` of the batch made of `samples`, of which the first `num_real` count."""
        picked = self.source.pick(samples[rows])
        picked.weights[max(0, num_real - rows.start) :] = 0
        if len(picked.weights) == len(samples):
            num_tokens = float(picked.weights.sum(dtype=np.float64))
        else:
            num_tokens = self.source.count(samples[:num_real])
        return Batch(inputs=picked.inputs, targets=picked.targets, weights=picked.weights, num_tokens=num_tokens)
