"""Text in columns: Parquet files, and folders of the `datasets` package. Both packages are optional."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from meshwright.core.errors import MeshwrightError, Problem, nearest
from meshwright.data.files import DATASETS, dataset_place
from meshwright.data.records import BadRecord, FileProblems, Records, TextKeys, text_field

DATASET_CHUNK_ROWS = 20_000


def parquet_file(path: str) -> Any:
    """An opened `pyarrow.parquet.ParquetFile`: its schema is read, its rows are not."""
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError:
        fix = "Run: pip install meshwright[data]"
        raise MeshwrightError([Problem(where=path, what="reading it needs the pyarrow package.", fix=fix)]) from None
    try:
        return parquet.ParquetFile(path, memory_map=True)
    except (OSError, ValueError) as error:  # Arrow's own errors derive from these
        raise MeshwrightError([_unreadable(path, error)]) from None


def parquet_row_group(path: str, group: int, columns: list[str] | None = None) -> Any:
    """One row group as an Arrow table."""
    try:
        return parquet_file(path).read_row_group(group, columns=columns)
    except (OSError, ValueError) as error:
        raise MeshwrightError([_unreadable(f"{path}: row group {group}", error)]) from None


def _unreadable(where: str, error: Exception) -> Problem:
    reason = (str(error).strip().splitlines() or ["no reason given"])[0].rstrip(".")
    return Problem(where=where, what=f"is not readable Parquet: {reason}.", fix="Write it again, or leave it out.")


def read_row_group(path: str, group: int, keys: TextKeys, problems: list[Problem]) -> Records:
    names = parquet_file(path).schema_arrow.names
    if keys.text not in names:
        problems.append(_no_column(path, keys.text, names))
        return Records()
    wanted = [keys.text, *([keys.prompt] if keys.prompt in names else [])]
    table = parquet_row_group(path, group, wanted)
    columns = [table.column(name).to_pylist() for name in wanted]
    return _records(path, columns, keys, f"{path}: row group {group}", problems)


def num_dataset_rows(path: str) -> int:
    return len(_dataset(path))


def read_dataset_rows(path: str, start: int, stop: int, keys: TextKeys, problems: list[Problem]) -> Records:
    dataset = _dataset(path)
    if keys.text not in dataset.column_names:
        problems.append(_no_column(path, keys.text, dataset.column_names))
        return Records()
    wanted = [keys.text, *([keys.prompt] if keys.prompt in dataset.column_names else [])]
    rows = dataset.select_columns(wanted)[start:stop]
    return _records(path, [rows[name] for name in wanted], keys, f"{path}: rows from {start}", problems)


def _no_column(where: str, name: str, names: Iterable[str]) -> Problem:
    fix = f"{nearest(name, names)} Set data.text_key to the column that holds the text.".lstrip()
    return Problem(where=where, what=f'has no column "{name}".', fix=fix)


def _records(path: str, columns: list[list[Any]], keys: TextKeys, where: str, problems: list[Problem]) -> Records:
    records, bad_rows = Records(), FileProblems(path=path, problems=problems, name="bad rows")
    prompts = columns[1] if len(columns) > 1 else [None] * len(columns[0])
    for row, (text, prompt) in enumerate(zip(columns[0], prompts, strict=True)):
        try:
            given = b"" if prompt is None else text_field(prompt, keys.prompt)
            records.add(given, b"" if text is None else text_field(text, keys.text))
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
    try:
        found = datasets.load_from_disk(folder) if is_saved else datasets.load_dataset(folder)
    except Exception as error:  # the package raises its own kinds, ValueError, OSError, KeyError
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise MeshwrightError([Problem(where=path, what=f"is not a readable dataset: {reason}.")]) from None
    if not isinstance(found, dict):
        return found
    chosen = split or ("train" if "train" in found else next(iter(found)) if len(found) == 1 else "")
    if chosen not in found:
        what = f'has no split "{chosen}".' if chosen else "has several splits."
        fix = f"Name one: {', '.join(f'{DATASETS}{folder}:{name}' for name in found)}."
        raise MeshwrightError([Problem(where=path, what=what, fix=fix)])
    return found[chosen]
