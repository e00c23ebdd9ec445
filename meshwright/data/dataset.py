"""Opened data of any kind: any step's batch, for any rank of any mesh, from one integer.

    cursor -> stream (which samples) -> source (their rows) -> Batch

A source knows its samples by number and nothing of order; a stream knows order and nothing of content. Several sources
(files that stay where they are, the parts of a mixture) are numbered through as one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from meshwright.core.errors import Problem, Problems, raise_problems
from meshwright.data.file_list import SourceFile
from meshwright.data.sample_order import ORDER_VERSION, Index, Stream
from meshwright.data.tokenizer import Tokenizer

Inputs = npt.NDArray[Any] | tuple[npt.NDArray[Any], ...]


class SampleRows(NamedTuple):
    """Samples as a model takes them; what each array holds is told in `Batch`."""

    inputs: Inputs
    targets: npt.NDArray[Any]
    weights: npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """This rank's rows of one step's batch.

                inputs                                              targets
        tokens  int64 (rows, sequence)                              int64 (rows, sequence): one token later
        packed  tokens and documents, int32 (rows, sequence)        the same
        images  float32 (rows, channels, height, width)             int64 (rows,): the class
        table   dense float32 (rows, D) and ids int64 (rows, T)     float32 (rows,): 0 or 1

    `documents` numbers the document of each token inside its row, from 0: attention and positions stay inside one.
    `num_tokens` is the sum of the weights over the WHOLE batch, all ranks together, so that the loss is
    divided once and without communication. It is 0 when every row of the step lies inside prompts.
    """

    inputs: Inputs
    targets: npt.NDArray[Any]
    weights: npt.NDArray[np.float32]  # the shape of targets: 0 = this target does not count
    num_tokens: float


def part_rows(batch: int, part: int, num_parts: int, shares: Sequence[int] = ()) -> slice:
    """The contiguous rows of part `part`: the parts in order are the batch, also when it does not divide.

    `shares`: what each of as many equal runs of parts gets, in any unit; empty: all parts alike.
    """
    shares = shares or (1,)
    each = num_parts // len(shares)
    run, place = divmod(part, each)
    before, whole = sum(shares[:run]) * each + place * shares[run], sum(shares) * each
    return slice(before * batch // whole, (before + shares[run]) * batch // whole)


def require_place(*, cursor: int, batch: int, part: int, num_parts: int) -> None:
    """Refuse a place in the stream that does not exist."""
    problems = []
    if cursor < 0:
        problems.append(Problem(where="data.cursor", what=f"{cursor} is negative.", fix="Start at 0."))
    if batch < 1:
        problems.append(Problem(where="data.batch", what=f"{batch} is not positive.", fix="Use 1 or more."))
    if num_parts < 1 or not 0 <= part < num_parts:
        what = f"part {part} of {num_parts} does not exist."
        problems.append(Problem(where="data.part", what=what, fix="Parts count from 0 to num_parts - 1."))
    raise_problems(problems)


_ORDER_BLOCK = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleInfo:
    """What all samples of a source have in common."""

    kind: str
    """tokens, images or table."""
    sequence: int = 0
    """Tokens in a sample; 0 where samples are no tokens."""
    tokenizer: Tokenizer | None = None
    num_bytes_per_token: float = 0.0
    """Bytes of text per token; 0 where they are not known."""
    shape: tuple[int, ...] = ()
    """Images: (channels, height, width). Tables: (dense columns, id columns, then each id column's size)."""
    num_classes: int = 0
    """Classes of images and tables; 0 for tokens."""
    classes: tuple[str, ...] = ()
    """Names of the classes, where the data has names."""
    max_chunk_samples: int = 1
    """Neighbours that may be held out together, as they often come from one document."""


class Source:
    """Numbered samples of one kind, all of one shape. What is no token has a weight of 1 each."""

    info: SampleInfo
    files: tuple[SourceFile, ...]
    facts: list[Any]
    """What, beside the names and sizes of the files, makes this content another."""
    num_samples: int

    @property
    def vocab_size(self) -> int:
        """Largest token that may occur, plus one; 0 without tokens. Token files are read through the first time."""
        return 0

    def pick(self, samples: Index) -> SampleRows:
        """The rows of these samples, which the caller owns."""
        raise NotImplementedError

    def count(self, samples: Index) -> float:
        """The sum of the weights of these samples."""
        return float(len(samples))

    def check_vocabulary(self, vocab_size: int) -> Problems:
        """Tokens that a model of `vocab_size` does not know, by file and position."""
        return ()

    @property
    def where(self) -> str:
        """What problems of the whole are told of."""
        return self.files[0].path if self.files else "data"


@dataclass(frozen=True, kw_only=True, eq=False)
class Data:
    """Samples in their order. Make one with `open_data` or `open_text`."""

    source: Source
    stream: Stream
    held_out_fraction: float
    seed: int

    @cached_property
    def info(self) -> SampleInfo:
        return self.source.info

    @property
    def kind(self) -> str:
        """tokens, images or table."""
        return self.info.kind

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
        return self.info.sequence

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.info.tokenizer

    @property
    def vocab_size(self) -> int:
        """Largest token that may occur, plus one; 0 without tokens. Token files are read through the first time."""
        return self.source.vocab_size

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
        blocks = [self._order_block(number) for number in range(first, last + 1)]
        return np.concatenate(blocks)[cursor - first * _ORDER_BLOCK :][:num_samples]

    @cached_property
    def _order_block(self) -> Callable[[int], Index]:
        """Working out a block of the order costs about as much for one batch as for a hundred."""
        return lru_cache(4)(lambda number: self.stream.train(number * _ORDER_BLOCK, _ORDER_BLOCK))

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

        def batch_at(start: int) -> Batch:
            index = np.arange(start, start + batch, dtype=np.int64)
            # Padding rows repeat the last real sample: an ordinary sample, so no model chokes on it.
            samples = self.stream.held_out(np.minimum(index, self.num_held_out - 1))
            return self._rows(samples, min(batch, self.num_held_out - start), rows)

        return map(batch_at, range(0, self.num_held_out, batch)[:limit])

    def _rows(self, samples: Index, num_real: int, rows: slice) -> Batch:
        """The `rows` of the batch made of `samples`, of which the first `num_real` count."""
        picked = self.source.pick(samples[rows])
        picked.weights[max(0, num_real - rows.start) :] = 0
        if len(picked.weights) == len(samples):
            num_tokens = float(picked.weights.sum(dtype=np.float64))
        else:
            num_tokens = self.source.count(samples[:num_real])
        return Batch(inputs=picked.inputs, targets=picked.targets, weights=picked.weights, num_tokens=num_tokens)


class JoinedSource(Source):
    def __init__(self, parts: Sequence[Source]):
        self.parts = parts
        self.files = tuple(file for part in parts for file in part.files)
        self.facts = [part.facts for part in parts]
        self.firsts = np.cumsum([0, *(part.num_samples for part in parts)], dtype=np.int64)
        self.num_samples = int(self.firsts[-1])
        infos = [part.info for part in parts]
        known, counts = [info.num_bytes_per_token for info in infos], np.diff(self.firsts)
        self.info = replace(
            infos[0],
            tokenizer=next((info.tokenizer for info in infos if info.tokenizer), None),
            # Known where all parts know them. By samples, as a run sees the parts about so often.
            num_bytes_per_token=float(np.average(known, weights=counts)) if all(known) and any(counts) else 0.0,
            # Table columns are as large as their largest.
            shape=tuple(max(sizes) for sizes in zip(*(info.shape for info in infos), strict=False)),
            num_classes=max(info.num_classes for info in infos),
        )

    @cached_property
    def vocab_size(self) -> int:
        return max(part.vocab_size for part in self.parts)

    def check_vocabulary(self, vocab_size: int) -> Problems:
        return tuple(dict.fromkeys(problem for part in self.parts for problem in part.check_vocabulary(vocab_size)))

    def _by_part(self, samples: Index) -> Iterator[tuple[Source, Index, Index]]:
        """(part, rows of `samples` that are its own, their numbers in it); the first part where there are no rows."""
        part_of = np.searchsorted(self.firsts, samples, side="right") - 1
        for number in np.unique(part_of) if len(samples) else [0]:
            rows = np.flatnonzero(part_of == number)
            yield self.parts[number], rows, samples[rows] - self.firsts[number]

    def pick(self, samples: Index) -> SampleRows:
        parts, where, own = zip(*self._by_part(samples), strict=True)
        picked = [part.pick(each) for part, each in zip(parts, own, strict=True)]
        if len(picked) == 1:
            return picked[0]
        back = np.argsort(np.concatenate(where))

        def merged(arrays: Iterable[npt.NDArray[Any]]) -> npt.NDArray[Any]:
            return np.concatenate(list(arrays))[back]

        inputs, targets, weights = zip(*picked, strict=True)
        is_tuple = isinstance(inputs[0], tuple)
        columns = tuple(map(merged, zip(*inputs, strict=True))) if is_tuple else merged(inputs)
        return SampleRows(columns, merged(targets), merged(weights))

    def count(self, samples: Index) -> float:
        return sum(part.count(own) for part, _, own in self._by_part(samples))


def join_sources(sources: Sequence[Source], problems: list[Problem]) -> Source:
    """One source of several; those of another kind or shape are told."""
    if len(sources) == 1:
        return sources[0]

    def shape_of(info: SampleInfo) -> tuple[int, ...]:
        """For a table only the number of columns: their sizes may differ."""
        return info.shape[:2] if info.kind == "table" else info.shape

    first, path = sources[0].info, sources[0].where
    for other in sources[1:]:
        info = other.info
        if info.kind != first.kind:
            what, fix = f"holds {info.kind}, {path} holds {first.kind}.", "Use one kind of data in a run."
        elif shape_of(info) != shape_of(first):
            what = f"its samples have the shape {shape_of(info)}, those of {path} {shape_of(first)}."
            fix = "Bring all to one shape."
        elif info.classes != first.classes:
            what = f"its classes are {', '.join(info.classes)}; those of {path} are {', '.join(first.classes)}."
            fix = "A class must have one number everywhere."
        else:
            continue
        problems.append(Problem(where=other.where, what=what, fix=fix))
    return JoinedSource(sources)
