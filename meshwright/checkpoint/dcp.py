"""A torch Distributed Checkpoint folder, read without running it.

    .metadata        a pickle: which chunks make up which tensor, and where each is stored
    __0_0.distcp     chunk after chunk, each a small zip archive as `torch.save` writes it:
                     data.pkl (a pickle that says "a tensor of this size, its numbers are record 0") and data/0

Both kinds of pickle are walked by `inert`, never loaded; what they say is checked, and numbers are read from their
place in the file. Whatever is not a tensor (steps, settings) is stored as a pickle of anything and is left alone.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from meshwright.checkpoint.box_reads import read_box
from meshwright.checkpoint.cover import cover_problem
from meshwright.checkpoint.inert_pickle import Made, Named, Outside, inert
from meshwright.checkpoint.manifest import DTYPES, MAX_DIMS, MAX_NAME_CHARS, MAX_PIECES, MAX_TENSORS
from meshwright.checkpoint.safetensors_folder import raise_first
from meshwright.core.box import Box
from meshwright.core.errors import MeshwrightError, Problem
from meshwright.core.plain_files import open_plain, read_plain

METADATA = ".metadata"
MAX_METADATA_BYTES = 256 << 20
_MAX_RECORD_BYTES = 1 << 20
_DCP = "torch.distributed.checkpoint"
_DTYPES = {f"torch.{name}": name for name in DTYPES}
_STORAGES = {
    "torch.DoubleStorage": "float64",
    "torch.FloatStorage": "float32",
    "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16",
    "torch.LongStorage": "int64",
    "torch.IntStorage": "int32",
    "torch.ShortStorage": "int16",
    "torch.CharStorage": "int8",
    "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool",
}
_REBUILD = "torch._utils._rebuild_tensor_v2"
_IN_TENSORS = frozenset({_REBUILD, "collections.OrderedDict", *_STORAGES})
_OLD = "torch.distributed._shard.sharded_tensor.metadata"
_IN_METADATA = frozenset(
    {
        *(f"{_DCP}.metadata.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
        *(f"{_DCP}.metadata.{kind}StorageMetadata" for kind in ("Tensor", "Chunk", "Bytes")),
        f"{_DCP}.metadata.TensorProperties",
        f"{_DCP}.filesystem._StorageInfo",
        f"{_DCP}.filesystem._StoragePrefix",
        f"{_OLD}.TensorProperties",
        f"{_OLD}.MEM_FORMAT_ENCODING",
        *(f"pathlib{sub}.{kind}" for sub in ("", "._local") for kind in ("PosixPath", "PurePosixPath", "WindowsPath")),
        "collections.OrderedDict",
        "torch.Size",
        "torch.serialization._get_layout",
        *_DTYPES,
    }
)


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box of a tensor, and the bytes its archive lies in."""

    box: Box
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Tensorful:
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[StoredBox, ...]
    path: tuple[str, ...]
    """Keys of the nested dicts it was saved in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DcpFolder:
    path: Path
    tensors: Mapping[str, Tensorful]
    files: dict[str, tuple[int, int]] = field(default_factory=dict, repr=False)

    @property
    def where(self) -> str:
        return str(self.path)

    def read_into(self, name: str, box: Box, out: Tensor) -> None:
        held = self.tensors[name]
        for chunk in held.chunks:
            both = chunk.box.overlap(box)
            if both is not None:
                self._read_chunk(held, chunk, both, out[both.within(box)])

    def _read_chunk(self, held: Tensorful, chunk: StoredBox, both: Box, out: Tensor) -> None:
        where = f"{self.path / chunk.file}: the archive at byte {chunk.start}"
        if chunk.file not in self.files:
            self.files[chunk.file] = open_plain(self.path, chunk.file)
        file, num_bytes = self.files[chunk.file]
        if chunk.start + chunk.length > num_bytes:
            what = f"is cut short: it should end at byte {chunk.start + chunk.length} of {num_bytes}."
            raise MeshwrightError([Problem(where=where, what=what)])
        start, strides = _place_in_archive(_Window(file, chunk.start, chunk.length), held.dtype, chunk.box.size, where)
        # A transposed tensor is saved as it lies in memory: order the dims by stride, largest first, to read it so.
        whole = chunk.box.size
        order = sorted(range(len(strides)), key=lambda dim: (whole[dim] > 1, -strides[dim], dim))
        size = tuple(whole[dim] for dim in order)
        if any(strides[d] != step for d, step in zip(order, _contiguous(size), strict=True) if whole[d] > 1):
            raise MeshwrightError([Problem(where=where, what=f"has the strides {strides}, which leave gaps.")])
        offset = tuple(both.offset[dim] - chunk.box.offset[dim] for dim in order)
        within = Box(size, offset, tuple(both.size[dim] for dim in order))
        read_box(file, start, held.dtype, within, out.permute(order), where)

    def close(self) -> None:
        while self.files:
            os.close(self.files.popitem()[1][0])


def _contiguous(size: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(size[dim + 1 :]) for dim in range(len(size)))


def open_dcp(folder: str | Path) -> DcpFolder:
    """The tensors of its model, named as the model names them; problems of the whole metadata at once."""
    folder = Path(folder)
    where = str(folder / METADATA)
    metadata = inert(read_plain(folder, METADATA, MAX_METADATA_BYTES), _IN_METADATA, where)
    problems: list[Problem] = []
    tensors: dict[str, Tensorful] = {}
    try:
        for name, each in _tensors(metadata):
            if isinstance(each, str):
                problems.append(Problem(where=where, what=f"{name[:80]!r} {each}"))
            else:
                tensors[name] = each
    except (TypeError, KeyError, IndexError, ValueError, AttributeError) as error:
        what = f"is not the metadata of a Distributed Checkpoint ({type(error).__name__}: {str(error)[:120]})."
        raise MeshwrightError([Problem(where=where, what=what)]) from None
    raise_first(problems)
    return DcpFolder(path=folder, tensors=_of_the_model(tensors))


def _tensors(metadata: Any) -> Iterator[tuple[str, Tensorful | str]]:
    """Each tensor, or what is wrong with it."""
    state = _state(metadata, f"{_DCP}.metadata.Metadata")
    listed, planned = state["state_dict_metadata"], state.get("planner_data") or {}
    if len(listed) > MAX_TENSORS:
        raise ValueError(f"{len(listed)} tensors; the limit is {MAX_TENSORS}")
    places = {}
    for index, info in state["storage_data"].items():
        key = _state(index, f"{_DCP}.metadata.MetadataIndex")
        places[key["fqn"], _numbers(key.get("offset") or ())] = _state(info, f"{_DCP}.filesystem._StorageInfo")
    num_chunks = 0
    for name, entry in listed.items():
        if entry.name != f"{_DCP}.metadata.TensorStorageMetadata":
            continue
        num_chunks += len(entry.state["chunks"])
        if num_chunks > MAX_PIECES:
            raise ValueError(f"more than {MAX_PIECES} chunks")
        path = planned.get(name, (name,))
        path = tuple(map(str, path)) if isinstance(path, tuple) and len(path) < 32 else (name,)
        yield name, _tensor(name, entry.state, places, path)


def _state(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, Made) or value.name != name or not isinstance(value.state, dict):
        raise ValueError(f"expected {name}")
    return value.state


def _numbers(value: Any) -> tuple[int, ...]:
    """A torch.Size, or a tuple of whole numbers."""
    found = value.arguments[0] if isinstance(value, Made) and value.name == "torch.Size" else value
    if not isinstance(found, tuple) or not all(type(each) is int and 0 <= each < 1 << 48 for each in found):
        raise ValueError("expected whole numbers")
    return found


def _tensor(name: Any, state: Mapping[str, Any], places: Mapping[Any, Any], path: tuple[str, ...]) -> Tensorful | str:
    properties = state["properties"].state
    kind = properties[0] if isinstance(properties, tuple) else properties["dtype"]
    shape = _numbers(state["size"])
    if not isinstance(name, str) or not name.isprintable() or len(name) > MAX_NAME_CHARS:
        return f"is not a plain name of at most {MAX_NAME_CHARS} characters."
    if not isinstance(kind, Named) or kind.name not in _DTYPES:
        return "has an unknown dtype."
    if len(shape) > MAX_DIMS:
        return f"has {len(shape)} dims; the limit is {MAX_DIMS}."
    chunks = []
    for each in state["chunks"]:
        offset, size = _numbers(each.state["offsets"]), _numbers(each.state["sizes"])
        fits = len(offset) == len(size) == len(shape)
        if not fits or any(o + s > limit for o, s, limit in zip(offset, size, shape, strict=True)):
            return f"of shape {shape} has a chunk at {offset} of size {size}."
        found = _chunk(Box(shape, offset, size), places.get((name, offset)))
        if isinstance(found, str):
            return found
        num_bytes = math.prod(size) * DTYPES[_DTYPES[kind.name]][1]
        if found.length < num_bytes:
            return f"has a chunk of {num_bytes} bytes that is stored in {found.length}."
        chunks.append(found)
    what = cover_problem(shape, [chunk.box for chunk in chunks])
    return f"of shape {shape}: {what}" if what else Tensorful(_DTYPES[kind.name], shape, tuple(chunks), path)


def _chunk(box: Box, info: Mapping[str, Any] | None) -> StoredBox | str:
    if info is None:
        return f"has a chunk at {box.offset} that is stored nowhere."
    file, start, length = info["relative_path"], info["offset"], info["length"]
    if info.get("transform_descriptors"):
        return "is stored in a transformed way (compressed?), which is not read here."
    if not isinstance(file, str) or not file.isprintable() or "/" in file or "\\" in file or file in ("", ".", ".."):
        return f"is stored in {str(file)[:80]!r}, which is not a plain file name."
    if type(start) is not int or type(length) is not int or not (0 <= start < 1 << 60 and 0 < length < 1 << 60):
        return f"is stored at the impossible place {str(start)[:20]}, of {str(length)[:20]} bytes."
    return StoredBox(box, file, start, length)


def _of_the_model(tensors: Mapping[str, Tensorful]) -> dict[str, Tensorful]:
    """Those saved under a key `model` (else those at the top), by the names below it; an optimizer's are left out."""
    inside = {name: each.path.index("model") + 1 for name, each in tensors.items() if "model" in each.path[:-1]}
    if not inside:
        inside = {name: 0 for name, each in tensors.items() if len(each.path) == 1} or dict.fromkeys(tensors, 0)
    return {".".join(tensors[name].path[first:]): tensors[name] for name, first in inside.items()}


class _Window(io.RawIOBase):
    """Some bytes of a file as a file of their own; a large read is refused, because only an archive's index is read."""

    def __init__(self, file: int, start: int, length: int):
        self.file, self.start, self.length, self.at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.length}[whence]
        if base + offset < 0:
            raise OSError("before the beginning")
        self.at = base + offset
        return self.at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self.length - self.at)
        count = left if size is None or size < 0 else min(size, left)
        if count > _MAX_RECORD_BYTES:
            raise OSError(f"its index has {count} bytes; the limit is {_MAX_RECORD_BYTES}")
        data = os.pread(self.file, count, self.start + self.at)
        self.at += len(data)
        return data


def _place_in_archive(window: _Window, dtype: str, size: tuple[int, ...], where: str) -> tuple[int, tuple[int, ...]]:
    """(first byte of its numbers in the file, strides) of the one tensor an archive holds."""
    try:
        with zipfile.ZipFile(window) as archive:
            records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            pickled, data = records["data.pkl"], records["data/0"]
            order = records.get("byteorder")
            if pickled.file_size > _MAX_RECORD_BYTES or (order is not None and order.file_size > 16):
                raise ValueError("its description is too long")
            if order is not None and archive.read(order) != b"little":
                raise ValueError("its numbers are not little-endian")
            text = archive.read(pickled)
    except (zipfile.BadZipFile, OSError, KeyError, ValueError, NotImplementedError, EOFError, RuntimeError) as error:
        what = f"is not a tensor as torch saves it: {str(error)[:120]}."
        raise MeshwrightError([Problem(where=where, what=what)]) from None
    numbers = inert(text, _IN_TENSORS, where)
    first, strides, problem = _described(numbers, dtype, size)
    num_bytes = (first + math.prod(size)) * DTYPES[dtype][1]
    if not problem and (data.compress_type != zipfile.ZIP_STORED or data.file_size < num_bytes):
        problem = f"has {data.file_size} bytes of numbers, or compressed ones; {num_bytes} plain ones are needed."
    window.seek(data.header_offset)
    head = window.read(30)
    start = data.header_offset + 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
    if not problem and (head[:4] != b"PK\x03\x04" or start + data.file_size > window.length):
        problem = "has numbers that lie outside of it."
    if problem:
        raise MeshwrightError([Problem(where=where, what=problem)])
    return window.start + start + first * DTYPES[dtype][1], strides


def _described(made: Any, dtype: str, size: tuple[int, ...]) -> tuple[int, tuple[int, ...], str]:
    """(first element, strides, what is wrong) as data.pkl says."""
    try:
        if not isinstance(made, Made) or made.name != _REBUILD:
            return 0, (), "is not a plain tensor."
        storage, first, shape, strides = made.arguments[:4]
        kind, key = storage.key[1], storage.key[2]
        is_plain = isinstance(storage, Outside) and key == "0" and type(first) is int and 0 <= first < 1 << 48
        if not is_plain or _STORAGES.get(kind.name) != dtype or _numbers(shape) != size:
            return 0, (), f"holds {kind.name} of shape {shape}; the metadata says {dtype} of shape {size}."
        strides = _numbers(strides)
        return first, strides, "" if len(strides) == len(size) else "has other strides than dims."
    except (ValueError, TypeError, AttributeError, IndexError):
        return 0, (), "is not a plain tensor."
