"""Several sources numbered through as one: files that stay where they are, and the parts of a mixture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.core.errors import Problem, Problems
from meshwright.data.batch import Inputs, SampleRows
from meshwright.data.dataset import Source
from meshwright.data.file_list import SourceFile
from meshwright.data.sample_order import Index
from meshwright.data.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, eq=False)
class JoinedSource:
    parts: tuple[Source, ...]

    @property
    def kind(self) -> str:
        return self.parts[0].kind

    @property
    def files(self) -> tuple[SourceFile, ...]:
        return tuple(file for part in self.parts for file in part.files)

    @property
    def facts(self) -> list[Any]:
        return [part.facts for part in self.parts]

    @property
    def num_samples(self) -> int:
        return int(self._firsts[-1])

    @property
    def sequence(self) -> int:
        return self.parts[0].sequence

    @property
    def tokenizer(self) -> Tokenizer | None:
        return next((part.tokenizer for part in self.parts if part.tokenizer), None)

    @property
    def num_bytes_per_token(self) -> float:
        """Unknown where one part does not know it; else by samples, as a run sees them about so often."""
        known = [part.num_bytes_per_token for part in self.parts]
        counts = [part.num_samples for part in self.parts]
        return float(np.average(known, weights=counts)) if all(known) else 0.0

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Table columns are as large as their largest."""
        return tuple(max(sizes) for sizes in zip(*(part.sample_shape for part in self.parts), strict=True))

    @property
    def num_classes(self) -> int:
        return max(part.num_classes for part in self.parts)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.parts[0].classes

    @property
    def max_chunk_samples(self) -> int:
        return self.parts[0].max_chunk_samples

    @property
    def vocab_size(self) -> int:
        return max(part.vocab_size for part in self.parts)

    def check_vocabulary(self, vocab_size: int) -> Problems:
        return tuple(dict.fromkeys(problem for part in self.parts for problem in part.check_vocabulary(vocab_size)))

    @cached_property
    def _firsts(self) -> Index:
        return np.cumsum([0, *(part.num_samples for part in self.parts)], dtype=np.int64)

    def pick(self, samples: Index) -> SampleRows:
        part_of = np.searchsorted(self._firsts, samples, side="right") - 1
        chosen = np.unique(part_of) if len(samples) else np.zeros(1, dtype=np.int64)
        where = [np.flatnonzero(part_of == part) for part in chosen]
        picked = [
            self.parts[part].pick(samples[rows] - self._firsts[part]) for part, rows in zip(chosen, where, strict=True)
        ]
        if len(picked) == 1:
            return picked[0]
        back = np.argsort(np.concatenate(where))
        return SampleRows(
            _stack([rows.inputs for rows in picked], back),
            np.concatenate([rows.targets for rows in picked])[back],
            np.concatenate([rows.weights for rows in picked])[back],
        )

    def count(self, samples: Index) -> float:
        part_of = np.searchsorted(self._firsts, samples, side="right") - 1
        return sum(
            (self.parts[part].count(samples[part_of == part] - self._firsts[part]) for part in np.unique(part_of)), 0.0
        )


def _stack(inputs: Sequence[Inputs], back: npt.NDArray[np.intp]) -> Inputs:
    if isinstance(inputs[0], tuple):
        return tuple(np.concatenate(arrays)[back] for arrays in zip(*inputs, strict=True))
    return np.concatenate(inputs)[back]


def join_sources(sources: Sequence[Source], problems: list[Problem]) -> Source:
    """One source of several; those of another kind or shape are told."""
    if len(sources) == 1:
        return sources[0]
    first = sources[0]
    for other in sources[1:]:
        where = other.files[0].path if other.files else "data"
        if other.kind != first.kind:
            what = f"holds {other.kind}, {first.files[0].path} holds {first.kind}."
            problems.append(Problem(where=where, what=what, fix="Use one kind of data in a run."))
        elif _shape(other) != _shape(first):
            what = f"its samples have the shape {_shape(other)}, those of {first.files[0].path} {_shape(first)}."
            problems.append(Problem(where=where, what=what, fix="Bring all to one shape."))
        elif other.classes != first.classes:
            names, others = ", ".join(first.classes), ", ".join(other.classes)
            what = f"its classes are {others}; those of {first.files[0].path} are {names}."
            problems.append(Problem(where=where, what=what, fix="A class must have one number everywhere."))
    return JoinedSource(parts=tuple(sources))


def _shape(source: Source) -> tuple[int, ...]:
    """Of a table only how many columns there are: their sizes may differ."""
    return source.sample_shape[:2] if source.kind == "table" else source.sample_shape
