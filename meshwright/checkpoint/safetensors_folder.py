"""A folder of safetensors that a stranger gave, judged before a byte of its tensors is read.

    model.safetensors                       or   model.safetensors.index.json: tensor name -> shard
    8 bytes: length of the header                model-00001-of-00002.safetensors ...
    JSON: name -> dtype, shape, [start, end]
    the tensors' bytes, in no order, without overlap or hole

Headers are read here, not by a library: every count is bounded, every offset checked, and everything wrong is told at
once. Only plain files of the folder itself are opened.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from meshwright.checkpoint.box_reads import read_box
from meshwright.checkpoint.manifest import DTYPES, MAX_DIMS, MAX_NAME_CHARS, MAX_PROBLEMS, MAX_TENSORS
from meshwright.core.box import Box
from meshwright.core.errors import MeshwrightError, Problem
from meshwright.core.plain_files import json_object, open_plain, read_plain

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
MAX_SHARDS = 10_000
MOST_OPEN_FILES = 200
_DTYPE_OF = {code: (dtype, size) for dtype, (code, size) in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor and where its bytes begin."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Folder:
    path: Path
    tensors: Mapping[str, Stored]
    files: dict[str, int] = field(default_factory=dict, repr=False)
    """Descriptors, opened when first read from."""

    @property
    def where(self) -> str:
        return str(self.path)

    def descriptor(self, file: str) -> int:
        if file not in self.files:
            if len(self.files) >= MOST_OPEN_FILES:
                os.close(self.files.pop(next(iter(self.files))))
            self.files[file] = open_plain(self.path, file)[0]
        return self.files[file]

    def read_into(self, name: str, box: Box, out: Tensor) -> None:
        """That box of a tensor, and no more, into `out`, whatever its dtype and strides."""
        held = self.tensors[name]
        where = f"{self.path / held.file}: {name}"
        read_box(self.descriptor(held.file), held.start, held.dtype, box, out, where)

    def close(self) -> None:
        while self.files:
            os.close(self.files.popitem()[1])


def open_folder(folder: str | Path) -> Folder:
    """Its tensors, once every header has been found right; else every problem (the first twenty) at once."""
    folder = Path(folder)
    if not folder.is_dir():
        raise MeshwrightError([Problem(where=str(folder), what="there is no such folder.")])
    index = _read_index(folder)
    problems: list[Problem] = []
    tensors: dict[str, Stored] = {}
    for shard in sorted(set(index.values())) if index is not None else [WEIGHTS]:
        try:
            held = read_shard(folder, shard)
        except MeshwrightError as error:
            problems.extend(error.problems)
            continue
        for name in tensors.keys() & held.keys():
            what = f"{name!r} is in {tensors[name].file} too."
            problems.append(Problem(where=str(folder / shard), what=what))
        tensors.update(held)
        if len(tensors) > MAX_TENSORS:
            raise MeshwrightError([_too_many(folder / shard, len(tensors))])
    if index is not None and not problems:
        problems += [Problem(where=str(folder / INDEX), what=what) for what in _disagreements(index, tensors)]
    raise_first(problems)
    return Folder(path=folder, tensors=tensors)


def raise_first(problems: list[Problem]) -> None:
    """A broken folder may be wrong in a million places; people read the first few."""
    if problems:
        left = len(problems) - MAX_PROBLEMS
        more = [Problem(where="", what=f"And {left} more.")] if left > 0 else []
        raise MeshwrightError([*problems[:MAX_PROBLEMS], *more])


def _too_many(path: Path, count: int) -> Problem:
    return Problem(where=str(path), what=f"lists {count} tensors; the limit is {MAX_TENSORS}.")


def _read_index(folder: Path) -> dict[str, str] | None:
    """Tensor -> shard, every shard a plain name; None when there is one file without an index."""
    path = folder / INDEX
    if not os.path.lexists(path):
        if os.path.lexists(folder / WEIGHTS):
            return None
        what = f"has neither {WEIGHTS} nor {INDEX}."
        other = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        fix = "Its pickled weights are not read: save them as safetensors." if other else ""
        raise MeshwrightError([Problem(where=str(folder), what=what, fix=fix)])
    index = json_object(read_plain(folder, INDEX, MAX_HEADER_BYTES), str(path)).get("weight_map")
    if not isinstance(index, dict):
        raise MeshwrightError([Problem(where=str(path), what="weight_map is not a table of names and files.")])
    if len(index) > MAX_TENSORS:
        raise MeshwrightError([_too_many(path, len(index))])
    wrong = {repr(shard)[:80] for shard in index.values() if not _is_plain_name(shard)}
    raise_first(
        [Problem(where=str(path), what=f"the shard {each} is not a plain file name.") for each in sorted(wrong)]
    )
    shards = len(set(index.values()))
    if not 1 <= shards <= MAX_SHARDS:
        what = f"names {shards} shards; there may be 1 to {MAX_SHARDS}."
        raise MeshwrightError([Problem(where=str(path), what=what)])
    return index


def _is_plain_name(name: Any) -> bool:
    return (
        isinstance(name, str)
        and name.isprintable()
        and name.endswith(".safetensors")
        and len(name.encode("utf-8", "replace")) <= 255
        and not any(part in name for part in ("/", "\\", "\0"))
    )


def _disagreements(index: Mapping[str, str], tensors: Mapping[str, Stored]) -> Iterator[str]:
    for name, shard in index.items():
        if name not in tensors:
            yield f"{name[:80]!r} is not in {shard}."
        elif tensors[name].file != shard:
            yield f"{name[:80]!r} is in {tensors[name].file}, not in {shard}."
    for name in tensors.keys() - index.keys():
        yield f"{name[:80]!r} of {tensors[name].file} is not listed."


def read_shard(folder: Path, shard: str) -> dict[str, Stored]:
    """The tensors of one file, by its header alone."""
    path = folder / shard
    file, num_bytes = open_plain(folder, shard)
    with os.fdopen(file, "rb") as stream:
        first = stream.read(8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length > num_bytes - 8:
            what = f"is cut short: it has {num_bytes} bytes, its header alone {8 + length if len(first) == 8 else 8}."
            raise MeshwrightError([Problem(where=str(path), what=what)])
        if length > MAX_HEADER_BYTES:
            what = f"has a header of {length} bytes; the limit is {MAX_HEADER_BYTES}."
            raise MeshwrightError([Problem(where=str(path), what=what)])
        text = stream.read(length)
    count = text.count(b'"data_offsets"')  # before an object is made for each
    if count > MAX_TENSORS:
        raise MeshwrightError([_too_many(path, count)])
    header = json_object(text, str(path))
    header.pop("__metadata__", None)
    problems = [Problem(where=str(path), what=what) for what in header_problems(header, num_bytes - 8 - length)]
    raise_first(problems)
    return {
        name: Stored(_DTYPE_OF[each["dtype"]][0], tuple(each["shape"]), shard, 8 + length + each["data_offsets"][0])
        for name, each in header.items()
    }


def header_problems(header: Mapping[str, Any], data_bytes: int) -> Iterator[str]:
    """What each entry says of itself, and whether together they are the file's bytes exactly."""
    spans: list[tuple[int, int, str]] = []
    is_sound = True
    for name, each in header.items():
        what = _entry_problem(name, each)
        if what:
            is_sound = False
            yield f"{name[:80]!r} {what}"
        else:
            spans.append((*each["data_offsets"], name[:80]))
    if not is_sound:
        return
    end = 0
    for start, stop, name in sorted(spans):
        if start != end:
            how = "overlaps the tensor before it" if start < end else "leaves a hole before it"
            yield f"{name!r} begins at byte {start} and {how}, which ends at {end}."
        end = max(end, stop)
    if end != data_bytes:
        yield f"its tensors end at byte {end} of {data_bytes}: it is {'cut short' if end > data_bytes else 'too long'}."


def _entry_problem(name: str, entry: Any) -> str:
    if not name.isprintable() or len(name) > MAX_NAME_CHARS:
        return f"is not a plain name of at most {MAX_NAME_CHARS} characters."
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        return "must have dtype, shape and data_offsets."
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPE_OF:
        return f"has the unknown dtype {str(dtype)[:40]!r}."
    if not _are_counts(shape) or len(shape) > MAX_DIMS or any(length >= 1 << 48 for length in shape):
        return f"has the impossible shape {str(shape)[:60]}."
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"has the impossible data_offsets {str(offsets)[:60]}."
    num_bytes = math.prod(shape) * _DTYPE_OF[dtype][1]
    if offsets[1] - offsets[0] != num_bytes:
        return f"of shape {shape} and {dtype} has {num_bytes} bytes, its data_offsets say {offsets[1] - offsets[0]}."
    return ""


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
