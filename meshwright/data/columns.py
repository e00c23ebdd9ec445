"""Text in columns: Parquet files, and folders of the `datasets` package. Both packages are optional."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from meshwright.core.errors import MeshwrightError, Problem, nearest
from meshwright.data.arrays import readable, require_plausible
from meshwright.data.file_list import DATASETS, dataset_place
from meshwright.data.json_records import BadRecord, FileProblems, Records, TextKeys, nearest_format

DATASET_CHUNK_ROWS = 20_000
_BATCH_ROWS = 1024


def parquet_file(path: str) -> Any:
    """An opened `pyarrow.parquet.ParquetFile`: its schema is read, its rows are not."""
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError:
        fix = "Run: pip install meshwright[data]"
        raise MeshwrightError([Problem(where=path, what="reading it needs the pyarrow package.", fix=fix)]) from None
    with _readable_parquet(path):
        opened = parquet.ParquetFile(path, memory_map=True)
        assert all(isinstance(name, str) for name in opened.schema_arrow.names)  # Arrow decodes names only now
        return opened


def parquet_row_group(path: str, group: int) -> Any:
    """One row group of numbers as an Arrow table."""
    file, where = parquet_file(path), f"{path}: row group {group}"
    with _readable_parquet(where):
        about = file.metadata.row_group(group)
        require_plausible(where, 8 * about.num_rows * about.num_columns, os.path.getsize(path))
        table = file.read_row_group(group)
        table.validate(full=True)
        return table


def _readable_parquet(where: str) -> Any:
    return readable(where, "readable Parquet", "Write it again, or leave it out.")


def read_row_group(path: str, group: int, keys: TextKeys, problems: list[Problem]) -> Records:
    names = parquet_file(path).schema_arrow.names
    wanted = keys.wanted(names)
    if not wanted:
        problems.append(_no_column(path, keys.text, names))
        return Records()
    where = f"{path}: row group {group}"
    columns: dict[str, list[Any]] = {name: [] for name in wanted}
    num_bytes = 0
    with _readable_parquet(where):
        # Equal texts take next to nothing in the file: they are counted as they are unpacked.
        for batch in parquet_file(path).iter_batches(_BATCH_ROWS, row_groups=[group], columns=wanted):
            batch.validate(full=True)
            for name in wanted:
                values = batch.column(name)
                values = values.dictionary_decode() if hasattr(values, "dictionary_decode") else values
                num_bytes += values.nbytes
                require_plausible(where, num_bytes, os.path.getsize(path))
                columns[name] += values.to_pylist()
    return _records(path, columns, keys, where, problems)


def num_dataset_rows(path: str) -> int:
    return len(_dataset(path))


def read_dataset_rows(path: str, start: int, stop: int, keys: TextKeys, problems: list[Problem]) -> Records:
    dataset = _dataset(path)
    wanted = keys.wanted(dataset.column_names)
    if not wanted:
        problems.append(_no_column(path, keys.text, dataset.column_names))
        return Records()
    with readable(path, "a readable dataset"):
        table = dataset.data.table  # mapped as it is: offsets that lead outside would end the process
        (table if dataset._indices else table.slice(start, stop - start)).validate(full=True)
        rows = dataset.select_columns(wanted)[start:stop]
    return _records(path, {name: rows[name] for name in wanted}, keys, f"{path}: rows from {start}", problems)


def _no_column(where: str, name: str, names: Iterable[str]) -> Problem:
    fix = nearest_format(tuple(names)) or f"{nearest(name, names)} Set data.text_key to the column that holds the text."
    return Problem(where=where, what=f'has no column "{name}".', fix=fix.lstrip())


def _records(path: str, columns: dict[str, list[Any]], keys: TextKeys, where: str, problems: list[Problem]) -> Records:
    records, bad_rows = Records(), FileProblems(path=path, problems=problems, name="bad rows")
    for row, values in enumerate(zip(*columns.values(), strict=True)):
        record = dict(zip(columns, values, strict=True))
        if keys.text in record and record[keys.text] is None:
            record[keys.text] = ""
        try:
            records.add(record, keys)
        except BadRecord as bad:
            bad_rows.add(f"{where}: row {row}", bad)
    bad_rows.close()
    return records


def _dataset(path: str) -> Any:
    """The rows of "datasets:FOLDER" or "datasets:FOLDER:SPLIT", saved by `save_to_disk` or as plain data files."""
    folder, split = dataset_place(path)
    try:
        datasets = import_module("datasets")
    except ImportError:
        fix = "Run: pip install meshwright[data]"
        raise MeshwrightError([Problem(where=path, what="needs the datasets package.", fix=fix)]) from None
    is_saved = any(os.path.exists(os.path.join(folder, name)) for name in ("state.json", "dataset_dict.json"))
    with readable(path, "a readable dataset"):
        found = datasets.load_from_disk(folder) if is_saved else datasets.load_dataset(folder)
    if not isinstance(found, dict):
        return found
    chosen = split or ("train" if "train" in found else next(iter(found)) if len(found) == 1 else "")
    if chosen not in found:
        what = f'has no split "{chosen}".' if chosen else "has several splits."
        fix = f"Name one: {', '.join(f'{DATASETS}{folder}:{name}' for name in found)}."
        raise MeshwrightError([Problem(where=path, what=what, fix=fix)])
    return found[chosen]
