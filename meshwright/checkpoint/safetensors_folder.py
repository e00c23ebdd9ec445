"""Safetensors files: a folder of them from a stranger, checked before a byte of its tensors is read; and a writer.

    model.safetensors                       or   model.safetensors.index.json: tensor name -> shard
    8 bytes: length of the header                model-00001-of-00002.safetensors ...
    JSON: name -> dtype, shape, [start, end]
    the tensors' bytes, in no order, without overlap or hole

Headers are read here, not by a library: every count is bounded, every offset checked, and everything wrong is told at
once. Only plain files of the folder itself are opened. A file is read, not mapped: mapped pages would count as this
process's memory, and a rank must need no more than its own slices.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from mmap import mmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.manifest import DTYPES, MAX_TENSORS, tensor_problem
from meshwright.core.box import Box
from meshwright.core.errors import MeshwrightError, Problem, error_at, raise_problems
from meshwright.core.files import json_object, open_plain, read_plain

BUFFER_BYTES = 4 << 20
SMALL_RUN_BYTES = 64 << 10
"""Shorter runs are read together with what lies between them: a disk reads that much anyway."""
_MOST_BYTES_OF_A_READ = 1 << 30
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
MAX_SHARDS = 10_000
MOST_OPEN_FILES = 200
_DTYPE_OF_CODE = {code: dtype for dtype, (code, _) in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor and where its bytes begin."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensors:
    """Named tensors in files of a folder."""

    path: Path
    tensors: Mapping[str, Any]
    """Name -> something with a dtype (its name) and a shape."""
    files: dict[str, tuple[int, int]] = field(default_factory=dict, repr=False)
    """Descriptors and sizes, opened when first read from."""

    @property
    def where(self) -> str:
        return str(self.path)

    def opened(self, file: str) -> tuple[int, int]:
        if file not in self.files:
            if len(self.files) >= MOST_OPEN_FILES:
                os.close(self.files.pop(next(iter(self.files)))[0])
            self.files[file] = open_plain(self.path, file)
        return self.files[file]

    def read_into(self, name: str, box: Box, out: Tensor) -> None:
        """Read one box of a tensor into `out`, which may have any dtype and strides."""
        raise NotImplementedError

    def close(self) -> None:
        while self.files:
            os.close(self.files.popitem()[1][0])


class SafetensorsFolder(StoredTensors):
    def read_into(self, name: str, box: Box, out: Tensor) -> None:
        held = self.tensors[name]
        read_box(self.opened(held.file)[0], held.start, held.dtype, box, out, f"{self.path / held.file}: {name}")


def open_folder(folder: str | Path) -> SafetensorsFolder:
    """Its tensors, once every header has been found right; else every problem (the first twenty) at once."""
    folder = Path(folder)
    if not folder.is_dir():
        raise error_at(folder, "there is no such folder.")
    path = folder / INDEX
    index: dict[str, str] | None = None  # tensor -> shard; there is none beside a single file
    if os.path.lexists(path):
        listed = json_object(read_plain(folder, INDEX, MAX_HEADER_BYTES), str(path)).get("weight_map")
        if not isinstance(listed, dict):
            raise error_at(path, "weight_map is not a table of names and files.")
        if len(listed) > MAX_TENSORS:
            raise MeshwrightError([_too_many(path, len(listed))])
        strange = {
            repr(shard)[:80]
            for shard in listed.values()
            if not isinstance(shard, str)
            or not (shard.isprintable() and shard.endswith(".safetensors"))
            or len(shard.encode("utf-8", "replace")) > 255
            or any(part in shard for part in ("/", "\\", "\0"))
        }
        raise_problems(
            Problem(where=str(path), what=f"the shard {each} is not a plain file name.") for each in sorted(strange)
        )
        index, num_shards = listed, len(set(listed.values()))
        if not 1 <= num_shards <= MAX_SHARDS:
            raise error_at(path, f"names {num_shards} shards; there may be 1 to {MAX_SHARDS}.")
    elif not os.path.lexists(folder / WEIGHTS):
        other = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        fix = "Its pickled weights are not read: save them as safetensors." if other else ""
        raise error_at(folder, f"has neither {WEIGHTS} nor {INDEX}.", fix)
    problems: list[Problem] = []
    tensors: dict[str, TensorPlace] = {}
    for shard in sorted(set(index.values())) if index is not None else [WEIGHTS]:
        try:
            held = read_shard(folder, shard)
        except MeshwrightError as error:
            problems.extend(error.problems)
            continue
        for name in tensors.keys() & held.keys():
            problems.append(Problem(where=str(folder / shard), what=f"{name!r} is in {tensors[name].file} too."))
        tensors.update(held)
        if len(tensors) > MAX_TENSORS:
            raise MeshwrightError([_too_many(folder / shard, len(tensors))])
    raise_problems(problems)
    if index is not None:
        wrong = [
            f"{name[:80]!r} is in {tensors[name].file}, not in {shard}."
            if name in tensors
            else f"{name[:80]!r} is not in {shard}."
            for name, shard in index.items()
            if name not in tensors or tensors[name].file != shard
        ]
        wrong += [f"{name[:80]!r} of {tensors[name].file} is not listed." for name in tensors.keys() - index.keys()]
        raise_problems(Problem(where=str(folder / INDEX), what=what) for what in wrong)
    return SafetensorsFolder(path=folder, tensors=tensors)


def _too_many(path: Path, count: int) -> Problem:
    return Problem(where=str(path), what=f"lists {count} tensors; the limit is {MAX_TENSORS}.")


def read_shard(folder: Path, shard: str) -> dict[str, TensorPlace]:
    """The tensors of one file, by its header alone."""
    path = folder / shard
    file, num_bytes = open_plain(folder, shard)
    with os.fdopen(file, "rb") as stream:
        first = stream.read(8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length > num_bytes - 8:
            what = f"is cut short: it has {num_bytes} bytes, its header alone {8 + length if len(first) == 8 else 8}."
            raise error_at(path, what)
        if length > MAX_HEADER_BYTES:
            raise error_at(path, f"has a header of {length} bytes; the limit is {MAX_HEADER_BYTES}.")
        text = stream.read(length)
    count = text.count(b'"data_offsets"')  # before an object is made for each
    if count > MAX_TENSORS:
        raise MeshwrightError([_too_many(path, count)])
    header = json_object(text, str(path))
    header.pop("__metadata__", None)
    raise_problems(Problem(where=str(path), what=what) for what in _header_problems(header, num_bytes - 8 - length))
    return {
        name: TensorPlace(
            _DTYPE_OF_CODE[each["dtype"]], tuple(each["shape"]), shard, 8 + length + each["data_offsets"][0]
        )
        for name, each in header.items()
    }


def _header_problems(header: Mapping[str, Any], data_bytes: int) -> Iterator[str]:
    """What is wrong with each entry; if nothing is, whether together they are the file's bytes exactly."""
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if what := _entry_problem(name, entry):
            yield f"{name[:80]!r} {what}"
        else:
            spans.append((*entry["data_offsets"], name[:80]))
    if len(spans) < len(header):
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
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        return "must have dtype, shape and data_offsets."
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    dtype = _DTYPE_OF_CODE.get(code) if isinstance(code, str) else None
    if dtype is None:
        return f"has the unknown dtype {str(code)[:40]!r}."
    if not isinstance(shape, list):
        return f"has the impossible shape {str(shape)[:60]}."
    if what := tensor_problem(name, dtype, shape):
        return what
    are_counts = isinstance(offsets, list) and all(type(offset) is int and offset >= 0 for offset in offsets)
    if not are_counts or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"has the impossible data_offsets {str(offsets)[:60]}."
    num_bytes = math.prod(shape) * DTYPES[dtype][1]
    if offsets[1] - offsets[0] != num_bytes:
        return f"of shape {shape} and {code} has {num_bytes} bytes, its data_offsets say {offsets[1] - offsets[0]}."
    return ""


def safetensors_chunks(
    entries: Mapping[str, tuple[str, tuple[int, ...]]], tensors: Iterable[Tensor], **metadata: str
) -> Iterator[Any]:
    """The bytes of a file: length of the header, header, then tensor after tensor, each asked for when it is its turn.

    `entries`: key -> (dtype, shape), in the order of `tensors`.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for key, (dtype, shape) in entries.items():
        code, item = DTYPES[dtype]
        start, end = end, end + math.prod(shape) * item
        header[key] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors:
        yield flat_bytes(tensor).numpy()


def flat_bytes(tensor: Tensor) -> Tensor:
    """The elements of a tensor of the host as one row of bytes; not a copy where they lie so."""
    # One element of a strided tensor counts as contiguous, with a stride `view` refuses: say stride 1.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def read_box(file: int, start: int, dtype: str, box: Box, out: Tensor, where: str) -> None:
    """Fill `out`, of the size of the box and any strides and dtype, from the tensor at byte `start`."""
    if box.is_empty:
        return
    stored, item = getattr(torch, dtype), DTYPES[dtype][1]
    shape, offset, size = box.shape or (1,), box.offset or (0,), box.size or (1,)
    out = out if box.shape else out[None]
    widths = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    # The first dim whose rows can be read one after the other: into their place, or through a buffer, where they are
    # short enough for it and what they hold beside the box is not much.
    for dim, width in enumerate(widths):
        is_whole = size[dim + 1 :] == shape[dim + 1 :]
        is_direct = is_whole and out.dtype == stored and out[(0,) * dim].is_contiguous()
        is_short = math.prod(size[dim + 1 :]) * item < SMALL_RUN_BYTES
        if is_direct or ((is_whole or is_short) and width * item <= BUFFER_BYTES):
            break
    num_rows, row_bytes = size[dim], width * item
    count = min(num_rows, max(1, BUFFER_BYTES // row_bytes))
    if not is_direct:
        # Memory of its own goes back when it is dropped; from the heap it would leave holes between the slices.
        held = torch.frombuffer(mmap(-1, count * row_bytes), dtype=stored).view(count, *shape[dim + 1 :])
    with torch.no_grad():
        for outer in itertools.product(*map(range, size[:dim])):
            firsts = zip(offset, (*outer, 0), widths, strict=False)
            at, target = start + item * sum((begin + row) * each for begin, row, each in firsts), out[outer]
            if is_direct:
                _fill(file, at, target, where)
                continue
            for first in range(0, num_rows, count):
                last = min(first + count, num_rows)
                if last < num_rows and hasattr(os, "posix_fadvise"):  # the disk reads on while these are converted
                    os.posix_fadvise(file, at + last * row_bytes, count * row_bytes, os.POSIX_FADV_WILLNEED)
                _fill(file, at + first * row_bytes, held[: last - first], where)
                target[first:last].copy_(held[(slice(0, last - first), *box.slices[dim + 1 :])])


def _fill(file: int, start: int, out: Tensor, where: str) -> None:
    view = memoryview(out.as_strided((out.numel(),), (1,)).view(torch.uint8).numpy())
    while len(view):
        count = os.preadv(file, [view[:_MOST_BYTES_OF_A_READ]], start)
        if count == 0:
            raise error_at(where, f"ends before byte {start + len(view)}.")
        view, start = view[count:], start + count
