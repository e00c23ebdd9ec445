"""Tables with a label of 0 or 1: dense numbers and categorical ids in columns. Read once, mapped afterwards.

A column is categorical where it is of a whole-number type, or its name begins with "cat" or "id" and all its numbers
are whole; others are dense. An .npz brings the arrays as they are: dense (N, D), ids (N, T), labels (N,).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import xxhash

from meshwright.core.errors import MeshwrightError, Problem, nearest
from meshwright.data.arrays import first_not_finite, npz_names, read_npz, readable
from meshwright.data.batch import SampleRows
from meshwright.data.cache import CachedArrays, CacheKey, Draft, Facts, keep
from meshwright.data.columns import parquet_file, parquet_row_group
from meshwright.data.data_section import DataSection
from meshwright.data.dataset import WithoutTokens
from meshwright.data.file_list import SourceFile
from meshwright.data.sample_order import Index
from meshwright.data.token_reader import raise_all

Column = npt.NDArray[Any]
_ID_PREFIXES = ("cat", "id")


@dataclass(frozen=True, kw_only=True, eq=False)
class TableSource(WithoutTokens):
    kept: CachedArrays
    dense: npt.NDArray[np.float32]
    ids: npt.NDArray[np.integer]
    labels: npt.NDArray[np.float32]
    id_sizes: tuple[int, ...]
    """Of each id column: the largest id plus one."""
    digest: str
    files: tuple[SourceFile, ...]
    kind: ClassVar[str] = "table"
    num_classes: ClassVar[int] = 2
    classes: ClassVar[tuple[str, ...]] = ()

    @property
    def num_samples(self) -> int:
        return len(self.labels)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        return (self.dense.shape[1], self.ids.shape[1], *self.id_sizes)

    @property
    def facts(self) -> list[Any]:
        return ["table", self.num_samples, list(self.sample_shape), self.digest]

    def pick(self, samples: Index) -> SampleRows:
        self.kept.check_rows(samples, samples + 1)
        inputs = (self.dense[samples], self.ids[samples].astype(np.int64))
        return SampleRows(inputs, self.labels[samples], np.ones(len(samples), dtype=np.float32))


def open_table(file: SourceFile, cache: Path | None, section: DataSection) -> TableSource:
    slot = CacheKey(question=("table", section.label), files=(file,))
    kept = keep(cache, slot, lambda draft: _read(file.path, section.label, draft), ("dense", "ids", "labels"))
    return TableSource(
        kept=kept,
        dense=kept.arrays["dense"],
        ids=kept.arrays["ids"],
        labels=kept.arrays["labels"],
        id_sizes=tuple(kept.facts["id_sizes"]),
        digest=kept.facts["digest"],
        files=(file,),
    )


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """Named columns, checked one by one."""

    dense: dict[str, Column]
    ids: dict[str, Column]
    labels: Column


def _read(path: str, label: str, draft: Draft) -> Facts:
    found = _read_npz_table(path) if path.lower().endswith(".npz") else _read_columns(path, label)
    raise_all(list(_problems(path, label, found)))
    num_rows = len(found.labels)
    id_sizes = [int(column.max(initial=-1)) + 1 for column in found.ids.values()]
    dense = draft.array("dense", (num_rows, len(found.dense)), np.float32)
    ids = draft.array("ids", (num_rows, len(found.ids)), np.int32 if max(id_sizes, default=0) < 1 << 31 else np.int64)
    for array, columns in ((dense, found.dense), (ids, found.ids)):
        for number, column in enumerate(columns.values()):
            array[:, number] = column
    labels = found.labels.astype(np.float32)
    draft.put("labels", labels)
    state = xxhash.xxh3_64(repr([*found.dense, "", *found.ids]).encode())
    for array in (dense, ids, labels):
        state.update(np.ascontiguousarray(array).data)
    return {"id_sizes": id_sizes, "digest": str(state.hexdigest())}


def _read_npz_table(path: str) -> _Columns:
    wanted = tuple(name for name in ("dense", "ids", "labels") if name in npz_names(path) or name == "labels")
    found = read_npz(path, wanted)
    labels = found["labels"]
    nothing = np.empty((len(labels) if labels.ndim else 0, 0))
    dense, ids = found.get("dense", nothing), found.get("ids", nothing.astype(np.int64))
    problems = [
        Problem(where=f"{path}: {name}", what=f"has the shape {array.shape}; there are {labels.shape} labels.")
        for name, array in (("dense", dense), ("ids", ids))
        if labels.ndim != 1 or array.ndim != 2 or len(array) != len(labels)
    ]
    raise_all(problems)
    return _Columns(
        dense={f"dense[{number}]": dense[:, number] for number in range(dense.shape[1])},
        ids={f"ids[{number}]": ids[:, number] for number in range(ids.shape[1])},
        labels=labels,
    )


def _read_columns(path: str, label: str) -> _Columns:
    table = _arrow_table(path)
    if label not in table.column_names:
        fix = f"{nearest(label, table.column_names)} Set data.label to the column to predict.".lstrip()
        raise MeshwrightError([Problem(where=path, what=f'has no column "{label}".', fix=fix)])
    problems = _shape_problems(path, table)
    raise_all(problems)
    with readable(path, "a table of numbers"):
        columns = {name: _column(path, name, table.column(name), problems) for name in table.column_names}
    raise_all(problems)
    labels = columns.pop(label)
    ids = {name: column for name, column in columns.items() if _is_ids(name, column)}
    return _Columns(dense={name: each for name, each in columns.items() if name not in ids}, ids=ids, labels=labels)


def _shape_problems(path: str, table: Any) -> list[Problem]:
    if not table.num_rows:
        return [Problem(where=path, what="has column names and no rows.", fix="Remove it or fill it.")]
    twice = [name for name, count in Counter(table.column_names).items() if count > 1]
    return [Problem(where=path, what=f'has several columns called "{name}".', fix="Rename them.") for name in twice]


def _is_ids(name: str, column: Column) -> bool:
    if column.dtype.kind in "iub":
        return True
    # Whole numbers often come as floats; where such a name holds others, it is no id after all.
    return name.lower().startswith(_ID_PREFIXES) and bool(np.all(column == np.floor(column)))


def _arrow_table(path: str) -> Any:
    if path.lower().endswith(".parquet"):
        groups = [parquet_row_group(path, group) for group in range(parquet_file(path).num_row_groups)]
        if not groups:
            raise MeshwrightError([Problem(where=path, what="has no rows.", fix="Remove it or fill it.")])
        return import_module("pyarrow").concat_tables(groups)
    try:
        csv = import_module("pyarrow.csv")
    except ImportError:
        fix = "Run: pip install meshwright[data]"
        raise MeshwrightError([Problem(where=path, what="reading it needs the pyarrow package.", fix=fix)]) from None
    with readable(path, "readable CSV"):
        table = csv.read_csv(path, convert_options=csv.ConvertOptions(null_values=[""]))
        table.validate(full=True)
        assert all(isinstance(name, str) for name in table.column_names)  # Arrow decodes names only now
        return table


def _column(path: str, name: str, column: Any, problems: list[Problem]) -> Column:
    """An Arrow column as numbers; what is empty or no number is told with its row."""
    types = import_module("pyarrow").types
    if column.null_count:
        row = column.is_null().to_numpy().argmax()
        problems.append(_cell(path, row, name, "is empty", "Fill it or leave the row out."))
    elif not (types.is_integer(column.type) or types.is_floating(column.type) or types.is_boolean(column.type)):
        row = next((row for row, value in enumerate(column.to_pylist()) if not _is_number(value)), 0)
        what = f"is {str(column[row].as_py())[:40]!r}, not a number"
        problems.append(_cell(path, row, name, what, "Turn words into ids first, or drop the column."))
    else:
        return np.asarray(column.to_numpy())
    return np.zeros(len(column))


def _is_number(value: object) -> bool:
    try:
        float(str(value))
    except ValueError:
        return False
    return True


def _problems(path: str, label: str, found: _Columns) -> Iterator[Problem]:
    if not len(found.labels) or not (found.dense or found.ids):
        yield Problem(where=path, what=f"has {len(found.labels)} rows and {len(found.dense) + len(found.ids)} columns.")
        return
    numbers = {**found.dense, **found.ids, label: found.labels}
    for name, column in numbers.items():
        place = first_not_finite(column) if column.dtype.kind == "f" else None
        if place is not None:
            yield _cell(path, place[0], name, f"is {column[place]}", "Fill it or leave the row out.")
    for name, column in found.ids.items():
        wrong = np.isfinite(column) & ((column < 0) | (column != np.floor(column)))
        if wrong.any():
            row = int(wrong.argmax())
            yield _cell(path, row, name, f"is {column[row]}, not an id", "Ids are whole numbers from 0.")
    wrong = np.isfinite(found.labels) & (found.labels != 0) & (found.labels != 1)
    if wrong.any():
        row = int(wrong.argmax())
        yield _cell(path, row, label, f"is {found.labels[row]}", "Labels are 0 or 1.")


def _cell(path: str, row: int, column: str, what: str, fix: str) -> Problem:
    """Rows count from 0; of a CSV the line is told, below its header."""
    place = f"{path}:{row + 2}" if path.lower().endswith(".csv") else f"{path}: row {row}"
    return Problem(where=f'{place}, column "{column}"', what=f"{what}.", fix=fix)
