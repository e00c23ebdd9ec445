"""What a file is: told from its name, and where that is not enough from its first bytes."""

from __future__ import annotations

import os
from typing import Literal

from meshwright.core.errors import MeshwrightError, Problem
from meshwright.data.arrays import npz_names
from meshwright.data.columns import parquet_file
from meshwright.data.data_section import DataSection
from meshwright.data.file_list import DATASETS, SourceFile
from meshwright.data.json_records import has_messages, nearest_format

Form = Literal["text", "flat", "megatron", "npz images", "npz table", "csv", "parquet table"]


def form_of(file: SourceFile, section: DataSection) -> Form:
    """Raises MeshwrightError where the file cannot be what the section says, or anything."""
    suffix = os.path.splitext(file.path)[1].lower()
    if suffix == ".npz":
        form: Form = _npz_form(file.path)
    elif suffix == ".csv" and section.kind != "tokens":  # a CSV can also be read as the text it is
        form = "csv"
    elif suffix == ".parquet" and not file.path.startswith(DATASETS):
        form = _parquet_form(file.path, section)
    elif suffix == ".idx" or (suffix == ".bin" and os.path.exists(f"{os.path.splitext(file.path)[0]}.idx")):
        form = "megatron"
    elif suffix in (".bin", ".npy"):
        form = "flat"
    else:
        form = "text"
    if section.kind not in ("auto", kind_of(form)):
        what = f"holds {kind_of(form)}, data.kind is {section.kind}."
        raise MeshwrightError([Problem(where=file.path, what=what, fix='Change one of them, or use kind = "auto".')])
    return form


def kind_of(form: Form) -> str:
    if form in ("text", "flat", "megatron"):
        return "tokens"
    return "images" if form == "npz images" else "table"


def _npz_form(path: str) -> Form:
    names = npz_names(path)
    if "images" in names:
        return "npz images"
    if "ids" in names or "dense" in names:
        return "npz table"
    what = f"holds the arrays {', '.join(names[:8]) or 'of nothing'}."
    fix = "Images are arrays images and labels; a table is dense, ids and labels."
    raise MeshwrightError([Problem(where=path, what=what, fix=fix)])


def _parquet_form(path: str, section: DataSection) -> Form:
    names = parquet_file(path).schema_arrow.names
    if section.kind == "tokens" or (section.kind == "auto" and (section.text_key in names or has_messages(names))):
        return "text"
    if section.kind == "table" or section.label in names:
        return "parquet table"
    what = f'has neither a column "{section.text_key}" (text) nor "{section.label}" (a table).'
    fix = f"Its columns: {', '.join(names[:8])}. {nearest_format(names) or 'Set data.text_key or data.label.'}"
    raise MeshwrightError([Problem(where=path, what=what, fix=fix)])
