"""Samples with a label each, read or decoded once into arrays that are mapped from the cache afterwards.

Images have a class: a folder of one sub-folder per class, or an .npz of arrays. Tables have a label of 0 or 1, with
dense numbers and categorical ids in columns: a column is categorical where it is of a whole-number type, or its name
begins with "cat" or "id" and all its numbers are whole; others are dense. An .npz brings the arrays as they are:
dense (N, D), ids (N, T), labels (N,).
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from meshwright.core.errors import Problem, error_at, nearest, raise_problems
from meshwright.data.cache import ArrayWriter, CachedArrays, CacheKey, Facts, Fill, cached
from meshwright.data.data_section import DataSection
from meshwright.data.dataset import Inputs, SampleInfo, SampleRows, Source
from meshwright.data.file_list import (
    SourceFile,
    collect_problems,
    first_not_finite,
    npz_names,
    optional_package,
    parquet_file,
    read_npz,
    readable,
    readable_parquet,
    require_plausible,
)
from meshwright.data.sample_order import Index

SUFFIXES = (".png", ".jpg", ".jpeg")
_GRAY_MODES = ("1", "L")
_DEEP_MODES = ("I", "F", "I;16", "I;16B", "I;16L")
_CHANNELS = (1, 3, 4)
_BLOCK_BYTES = 1 << 26
# As many decoders as cores run at once, each with a few copies of its image.
_MAX_PIXELS = 1 << 24
_ID_PREFIXES = ("cat", "id")
_readable_image = partial(readable, kind="a readable image", fix="Repair it or leave it out.")

Column = npt.NDArray[Any]
_Columns = tuple[dict[str, Column], dict[str, Column], Column]
"""Dense ones and ids by name, and the labels."""


@dataclass(kw_only=True, eq=False)
class LabelledSource(Source):
    """Rows of cached arrays, each with one target of weight 1."""

    entry: CachedArrays
    files: tuple[SourceFile, ...]
    info: SampleInfo

    def __post_init__(self) -> None:
        self.num_samples = len(self.entry.arrays["labels"])
        kind, shape, digest = self.info.kind, list(self.info.shape), self.entry.facts["digest"]
        self.facts = [kind, self.num_samples, shape, digest]
        if kind == "images":
            self.facts = [kind, [self.num_samples, *shape], self.info.num_classes, digest]

    def pick(self, samples: Index) -> SampleRows:
        self.entry.check_rows(samples, samples + 1)
        arrays = self.entry.arrays
        inputs: Inputs
        if self.info.kind == "table":
            inputs = arrays["dense"][samples], arrays["ids"][samples].astype(np.int64)
        else:
            chosen = arrays["images"][samples]
            inputs = np.divide(chosen, np.float32(255), dtype=np.float32) if chosen.dtype == np.uint8 else chosen
        return SampleRows(inputs, arrays["labels"][samples], np.ones(len(samples), dtype=np.float32))


def open_npz_images(file: SourceFile, cache: Path | None, section: DataSection) -> LabelledSource:
    return _images("images", file, cache, partial(_convert, file.path))


def open_image_folder(folder: str, cache: Path | None, section: DataSection) -> LabelledSource:
    """Image files in one sub-folder per class; the classes are numbered by name."""
    listing, problems = [], []
    for name in sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != "."):
        inside = os.path.join(folder, name)
        images = sorted((e for e in os.scandir(inside) if e.name.lower().endswith(SUFFIXES)), key=lambda e: e.name)
        if not images:
            what = f"this class folder holds no {', '.join(SUFFIXES)} file."
            problems.append(Problem(where=inside, what=what, fix="Remove it or fill it."))
        for image in images:
            status = image.stat()
            listing.append((image.path, f"{name}/{image.name}", status.st_size, status.st_mtime_ns))
    raise_problems(problems)
    state = xxhash.xxh3_64_intdigest(repr([image[1:] for image in listing]).encode()) >> 1
    total_bytes = sum(size for _, _, size, _ in listing)
    file = SourceFile(path=os.path.abspath(folder), size_bytes=total_bytes, mtime_ns=state)
    return _images("image folder", file, cache, partial(_decode, [image[0] for image in listing]))


def _images(question: str, file: SourceFile, cache: Path | None, fill: Fill) -> LabelledSource:
    """The array `images` is (samples, channels, height, width): uint8, or float32 taken as it is."""
    entry = cached(cache, CacheKey(question=(question,), files=(file,)), fill, by_rows=("images", "labels"))
    shape, num_classes = entry.arrays["images"].shape[1:], entry.facts["num_classes"]
    info = SampleInfo(kind="images", shape=shape, num_classes=num_classes, classes=tuple(entry.facts["classes"]))
    return LabelledSource(entry=entry, files=(file,), info=info)


def open_table(file: SourceFile, cache: Path | None, section: DataSection) -> LabelledSource:
    """The arrays `dense` and `ids` have a column each of the table's; `id_sizes` are the largest ids plus one."""
    key = CacheKey(question=("table", section.label), files=(file,))
    by_rows = ("dense", "ids", "labels")
    entry = cached(cache, key, lambda writer: _read_table(file.path, section.label, writer), by_rows)
    num_columns = (entry.arrays[name].shape[1] for name in ("dense", "ids"))
    info = SampleInfo(kind="table", shape=(*num_columns, *entry.facts["id_sizes"]), num_classes=2)
    return LabelledSource(entry=entry, files=(file,), info=info)


def is_image_folder(path: str) -> bool:
    """Whether some sub-folder holds an image. What may not be read is not one, and is told by whoever reads it."""
    if not os.path.isdir(path) or not os.access(path, os.R_OK | os.X_OK, effective_ids=True):
        return False
    folders = [entry.path for entry in os.scandir(path) if entry.is_dir()]
    readable = [folder for folder in folders if os.access(folder, os.R_OK | os.X_OK, effective_ids=True)]
    return any(entry.name.lower().endswith(SUFFIXES) for folder in readable for entry in os.scandir(folder))


def _decode(paths: list[str], writer: ArrayWriter) -> Facts:
    library = optional_package("PIL.Image", paths[0], "images", "pillow")
    problems: list[Problem] = []
    mode, (width, height) = _form(paths, library, problems)
    raise_problems(problems)
    shape = (len(paths), 1 if mode == "L" else 3, height, width)
    images = writer.allocate("images", shape, np.uint8)

    def decode(number: int) -> None:
        with collect_problems(problems), _readable_image(paths[number]), library.open(paths[number]) as image:
            pixels = np.asarray(image.convert(mode))
            images[number] = pixels.reshape(height, width, -1).transpose(2, 0, 1)

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # decoding runs outside Python's lock
        list(pool.map(decode, range(len(paths))))
    raise_problems(sorted(problems, key=lambda problem: problem.where))
    names = [os.path.basename(os.path.dirname(path)) for path in paths]
    classes, labels = np.unique(names, return_inverse=True)
    writer.save("labels", labels.astype(np.int64))
    digest = _digest(images, labels, ",".join(classes))
    return {"num_classes": len(classes), "classes": classes.tolist(), "digest": digest}


def _form(paths: list[str], library: Any, problems: list[Problem]) -> tuple[str, tuple[int, int]]:
    """Gray or colour, and the size that all have, from the files' headers."""
    first, is_gray, others = None, True, []
    for path in paths:
        size = None
        quiet = warnings.catch_warnings(action="ignore")  # too many pixels: told below
        with collect_problems(problems), _readable_image(path), quiet, library.open(path) as image:
            size, mode = image.size, image.mode
        if size is None:
            continue
        if size[0] * size[1] > _MAX_PIXELS:
            what = f"is {size[0]:,} x {size[1]:,} pixels; at most {_MAX_PIXELS:,} are read."
            problems.append(Problem(where=path, what=what, fix="Scale it down, or cut it into pieces."))
        if mode in _DEEP_MODES:
            what = f'its pixels have the mode "{mode}"; 8 bits per channel are read.'
            problems.append(Problem(where=path, what=what, fix="Save it with 8 bits, or give arrays in an .npz."))
        first, is_gray = first or (path, size), is_gray and mode in _GRAY_MODES
        if size != first[1]:
            others.append((path, size))
    if others and first:
        (path, size), more = others[0], f" {len(others) - 1:,} others differ too." if len(others) > 1 else ""
        what = f"is {size[0]} x {size[1]} pixels, {first[0]} is {first[1][0]} x {first[1][1]}.{more}"
        problems.append(Problem(where=path, what=what, fix="Bring all images to one size."))
    return "L" if is_gray else "RGB", first[1] if first else (0, 0)


def _convert(path: str, writer: ArrayWriter) -> Facts:
    """The arrays `images` and `labels` of an .npz, checked and laid out."""
    images, labels = read_npz(path, ("images", "labels")).values()
    problems: list[Problem] = []

    def refuse(name: str, what: str, fix: str) -> None:
        problems.append(Problem(where=f"{path}: {name}", what=what, fix=fix))

    is_known = images.ndim == 3 or (images.ndim == 4 and (images.shape[1] in _CHANNELS or images.shape[3] in _CHANNELS))
    if not is_known or not images.size:
        shapes = "(N, height, width), (N, height, width, channels) or (N, channels, height, width)"
        refuse("images", f"has the shape {images.shape}.", f"Use {shapes}; 1, 3 or 4 channels.")
    elif images.dtype != np.uint8 and images.dtype.kind != "f":
        refuse("images", f"are {images.dtype}.", "Use uint8 (0 to 255), or floats as the model wants.")
    elif images.dtype.kind == "f" and (place := first_not_finite(images)) is not None:
        refuse("images", f"{images[place]} at index {tuple(map(int, place))}.", "Only finite numbers train.")
    if labels.shape != (len(images),):
        what = f"has the shape {labels.shape}; there are {len(images):,} images."
        refuse("labels", what, "Give one label for each image.")
    elif labels.dtype.kind not in "iu":
        refuse("labels", f"are {labels.dtype}.", "Use whole numbers from 0.")
    elif len(labels) and labels.min() < 0:
        row = int(np.argmax(labels < 0))
        refuse("labels", f"{labels[row]} at index {row} is negative.", "Count classes from 0.")
    raise_problems(problems)
    laid_out = images[:, None] if images.ndim == 3 else images
    if images.ndim == 4 and images.shape[3] in _CHANNELS:
        laid_out = images.transpose(0, 3, 1, 2)
    dtype = np.uint8 if images.dtype == np.uint8 else np.float32
    kept = writer.allocate("images", laid_out.shape, dtype)
    kept[...] = laid_out
    writer.save("labels", labels.astype(np.int64))
    return {"num_classes": int(labels.max()) + 1, "classes": [], "digest": _digest(kept, labels, "")}


def _digest(images: npt.NDArray[Any], labels: npt.NDArray[Any], classes: str) -> str:
    state = xxhash.xxh3_64(classes.encode())
    state.update(np.ascontiguousarray(labels, dtype=np.int64).data)
    step = max(1, _BLOCK_BYTES // max(1, images[:1].nbytes))
    for start in range(0, len(images), step):
        state.update(np.ascontiguousarray(images[start : start + step]).data)
    return state.hexdigest()


def _read_table(path: str, label: str, writer: ArrayWriter) -> Facts:
    is_npz = path.lower().endswith(".npz")
    dense, ids, labels = _read_npz_table(path) if is_npz else _read_columns(path, label)
    raise_problems(_table_problems(path, label, dense, ids, labels))
    id_sizes = [int(column.max(initial=-1)) + 1 for column in ids.values()]
    id_type = np.int32 if max(id_sizes, default=0) < 1 << 31 else np.int64
    state = xxhash.xxh3_64(repr([*dense, "", *ids]).encode())
    for name, columns, dtype in (("dense", dense, np.float32), ("ids", ids, id_type)):
        array = writer.allocate(name, (len(labels), len(columns)), dtype)
        for number, column in enumerate(columns.values()):
            array[:, number] = column
        state.update(np.ascontiguousarray(array).data)
    writer.save("labels", labels.astype(np.float32))
    state.update(labels.astype(np.float32).data)
    return {"id_sizes": id_sizes, "digest": str(state.hexdigest())}


def _read_npz_table(path: str) -> _Columns:
    wanted = tuple(name for name in ("dense", "ids", "labels") if name in npz_names(path) or name == "labels")
    arrays = read_npz(path, wanted)
    labels = arrays["labels"]
    nothing = np.empty((len(labels) if labels.ndim else 0, 0))
    dense, ids = arrays.get("dense", nothing), arrays.get("ids", nothing.astype(np.int64))
    problems = [
        Problem(where=f"{path}: {name}", what=f"has the shape {array.shape}; there are {labels.shape} labels.")
        for name, array in (("dense", dense), ("ids", ids))
        if labels.ndim != 1 or array.ndim != 2 or len(array) != len(labels)
    ]
    raise_problems(problems)
    named = [
        {f"{name}[{number}]": column for number, column in enumerate(array.T)}
        for name, array in (("dense", dense), ("ids", ids))
    ]
    return named[0], named[1], labels


def _read_columns(path: str, label: str) -> _Columns:
    table, types = _arrow_table(path), import_module("pyarrow").types

    def is_number(text: str) -> bool:
        try:
            float(text)
        except ValueError:
            return False
        return True

    def column_as_numbers(name: str, column: Any) -> Column:
        """An Arrow column as an array; a cell that is empty or not a number is reported with its row."""
        if column.null_count:
            row = column.is_null().to_numpy().argmax()
            problems.append(_cell(path, row, name, "is empty", "Fill it or leave the row out."))
        elif not (types.is_integer(column.type) or types.is_floating(column.type) or types.is_boolean(column.type)):
            texts = [str(value) for value in column.to_pylist()]
            row = next((row for row, text in enumerate(texts) if not is_number(text)), 0)
            what = f"is {texts[row][:40]!r}, not a number"
            problems.append(_cell(path, row, name, what, "Turn words into ids first, or drop the column."))
        else:
            return np.asarray(column.to_numpy())
        return np.zeros(len(column))

    if label not in table.column_names:
        fix = f"{nearest(label, table.column_names)} Set data.label to the column to predict.".lstrip()
        raise error_at(path, f'has no column "{label}".', fix)
    problems: list[Problem] = []
    if not table.num_rows:
        raise error_at(path, "has column names and no rows.", "Remove it or fill it.")
    for name, count in Counter(table.column_names).items():
        if count > 1:
            problems.append(Problem(where=path, what=f'has several columns called "{name}".', fix="Rename them."))
    raise_problems(problems)
    with readable(path, "a table of numbers"):
        columns = {name: column_as_numbers(name, table.column(name)) for name in table.column_names}
    raise_problems(problems)
    labels = columns.pop(label)
    ids = {
        name: column
        for name, column in columns.items()
        # Whole numbers often come as floats; where such a name holds others, it is no id after all.
        if column.dtype.kind in "iub" or (name.lower().startswith(_ID_PREFIXES) and np.all(column == np.floor(column)))
    }
    return {name: each for name, each in columns.items() if name not in ids}, ids, labels


def _arrow_table(path: str) -> Any:
    if path.lower().endswith(".csv"):
        csv = optional_package("pyarrow.csv", path, "data")
        with readable(path, "readable CSV"):
            table = csv.read_csv(path, convert_options=csv.ConvertOptions(null_values=[""]))
            table.validate(full=True)
            assert all(isinstance(name, str) for name in table.column_names)  # Arrow decodes names only now
            return table
    file, groups = parquet_file(path), []
    for number in range(file.num_row_groups):
        where = f"{path}: row group {number}"
        with readable_parquet(where):
            about = file.metadata.row_group(number)
            require_plausible(where, 8 * about.num_rows * about.num_columns, os.path.getsize(path))
            groups.append(file.read_row_group(number))
            groups[-1].validate(full=True)
    if not groups:
        raise error_at(path, "has no rows.", "Remove it or fill it.")
    return import_module("pyarrow").concat_tables(groups)


def _table_problems(
    path: str, label: str, dense: dict[str, Column], ids: dict[str, Column], labels: Column
) -> Iterator[Problem]:
    if not len(labels) or not (dense or ids):
        yield Problem(where=path, what=f"has {len(labels)} rows and {len(dense) + len(ids)} columns.")
        return
    for name, column in {**dense, **ids, label: labels}.items():
        place = first_not_finite(column) if column.dtype.kind == "f" else None
        if place is not None:
            yield _cell(path, place[0], name, f"is {column[place]}", "Fill it or leave the row out.")
    for name, column in {**ids, label: labels}.items():
        is_wrong, why, fix = (column < 0) | (column != np.floor(column)), ", not an id", "Ids are whole numbers from 0."
        if column is labels:
            is_wrong, why, fix = (column != 0) & (column != 1), "", "Labels are 0 or 1."
        wrong = np.flatnonzero(np.isfinite(column) & is_wrong)
        if len(wrong):
            yield _cell(path, int(wrong[0]), name, f"is {column[wrong[0]]}{why}", fix)


def _cell(path: str, row: int, column: str, what: str, fix: str) -> Problem:
    """Rows count from 0; of a CSV the line is told, below its header."""
    place = f"{path}:{row + 2}" if path.lower().endswith(".csv") else f"{path}: row {row}"
    return Problem(where=f'{place}, column "{column}"', what=f"{what}.", fix=fix)
