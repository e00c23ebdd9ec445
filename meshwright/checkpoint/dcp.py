"""A torch Distributed Checkpoint folder, read without running it.

    .metadata        a pickle: which chunks make up which tensor, and where each is stored
    __0_0.distcp     chunk after chunk, each a small zip archive as `torch.save` writes it:
                     data.pkl (a pickle that says "a tensor of this size, its numbers are record 0") and data/0

Both kinds of pickle are parsed by `parse_pickle`, never loaded; what they say is checked, and numbers are read from
their place in the file. Whatever is not a tensor (steps, settings) is stored as a pickle of anything and is left alone.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickletools import genops
from typing import Any

from torch import Tensor

from meshwright.checkpoint.manifest import DTYPES, MAX_PIECES, MAX_TENSORS, cover_problem, tensor_problem
from meshwright.checkpoint.safetensors_folder import StoredTensors, read_box
from meshwright.core.box import Box
from meshwright.core.errors import Problem, error_at, raise_problems
from meshwright.core.files import read_plain

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
MOST_INSTRUCTIONS = 40_000_000


@dataclass(slots=True, eq=False)
class PickledValue:
    """Where a pickle names a class or a function (`torch.Size`), calls one, or refers to what is stored beside it."""

    name: str
    """"" of a reference."""
    arguments: tuple[Any, ...] | None = None
    """None where it is only named."""
    state: Any = None
    """What would be set after the call."""


class _PickleMachine:
    """The stack and the memo of a pickle, which is a small program, and what its instructions do to them."""

    def __init__(self, allowed: Collection[str]):
        self.allowed = allowed
        self.refused: list[str] = []
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def since_mark(self) -> list[Any]:
        return list(self.last(len(self.stack) - self.marks.pop()))

    def last(self, count: int) -> tuple[Any, ...]:
        start = len(self.stack) - count
        if not 0 <= start <= len(self.stack):
            raise ValueError("it takes more than there is")
        items = tuple(self.stack[start:])
        del self.stack[start:]
        return items

    def run(self, instruction: str, argument: Any) -> None:
        """Raises ValueError, KeyError or IndexError where it has no place here."""
        stack = self.stack
        match instruction:
            case "BINPUT" | "LONG_BINPUT" | "MEMOIZE":  # the most frequent ones first
                self.memo[len(self.memo) if argument is None else argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self.memo[argument])
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT" | "SHORT_BINBYTES" | "BINBYTES":
                stack.append(argument)
            case "SHORT_BINUNICODE" | "BINUNICODE" | "BINUNICODE8":
                stack.append(argument)
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[instruction])
            case "MARK":
                self.marks.append(len(stack))
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(self.last(("EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3").index(instruction)))
            case "TUPLE":
                stack.append(tuple(self.since_mark()))
            case "APPEND" | "APPENDS":
                items = self.since_mark() if instruction == "APPENDS" else list(self.last(1))
                if not isinstance(stack[-1], list):
                    raise ValueError("it appends to what is not a list")
                stack[-1].extend(items)
            case "SETITEM" | "SETITEMS":
                items = self.since_mark() if instruction == "SETITEMS" else list(self.last(2))
                if not isinstance(stack[-1], dict) or len(items) % 2:
                    raise ValueError("it sets items of what is not a dict")
                for key, value in zip(items[::2], items[1::2], strict=True):
                    # Hashing a tuple of tuples of ... would overflow the C stack.
                    if not isinstance(key, str | int | PickledValue):
                        raise ValueError(f"a dict has a key of type {type(key).__name__}")
                    stack[-1][key] = value
            case "GLOBAL" | "STACK_GLOBAL":
                module, name = argument.split(" ", 1) if instruction == "GLOBAL" else self.last(2)
                if not isinstance(module, str) or not isinstance(name, str):
                    raise ValueError("it names something without text")
                full = f"{module}.{name}"
                if full not in self.allowed and full not in self.refused:
                    self.refused.append(full)
                stack.append(PickledValue(full))
            case "REDUCE" | "NEWOBJ":
                called, arguments = self.last(2)
                if not _is_name(called) or not isinstance(arguments, tuple):
                    raise ValueError("it calls what is not a name")
                is_dict = called.name == "collections.OrderedDict" and not arguments
                stack.append({} if is_dict else PickledValue(called.name, arguments))
            case "BUILD":
                (state,) = self.last(1)
                if not isinstance(stack[-1], PickledValue) or _is_name(stack[-1]):
                    raise ValueError("it sets the state of what it did not make")
                stack[-1].state = state
            case "BINPERSID":
                stack.append(PickledValue("", self.last(1)))
            case "PROTO" | "FRAME" | "STOP":
                pass
            case _:
                raise ValueError(f"the instruction {instruction} has no place here")


def _is_name(value: Any) -> bool:
    return isinstance(value, PickledValue) and value.arguments is None


def parse_pickle(data: bytes, allowed: Collection[str], where: str) -> Any:
    """What a pickle describes, as lists, dicts, text, numbers and the classes above; nothing is imported or called.

    `allowed`: every name that it may mention; the others are refused, all of them at once.
    """
    machine, damage = _PickleMachine(allowed), ""
    try:
        for count, (code, argument, _) in enumerate(genops(data)):
            if count > MOST_INSTRUCTIONS:
                raise ValueError(f"it has more than {MOST_INSTRUCTIONS} instructions")
            machine.run(code.name, argument)
        (result,) = machine.last(1)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        damage, result = str(error)[:200], None
    fix = "Nothing of it was run. Save the weights again, as plain tensors."
    raise_problems(
        Problem(where=where, what=f"names {name[:120]!r}, which has no place in it.", fix=fix)
        for name in machine.refused
    )
    if damage:
        raise error_at(where, f"cannot be read as plain values: {damage}.")
    return result


@dataclass(frozen=True, slots=True)
class DcpChunk:
    """A box of a tensor, and the bytes its archive lies in."""

    box: Box
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor and the chunks it is stored in."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[DcpChunk, ...]
    path: tuple[str, ...]
    """Keys of the nested dicts it was saved in."""


class DcpFolder(StoredTensors):
    def read_into(self, name: str, box: Box, out: Tensor) -> None:
        held = self.tensors[name]
        for chunk in held.chunks:
            both = chunk.box.overlap(box)
            if both is None:
                continue
            where = f"{self.path / chunk.file}: the archive at byte {chunk.start}"
            file, num_bytes = self.opened(chunk.file)
            end, whole = chunk.start + chunk.length, chunk.box.size
            if end > num_bytes:
                raise error_at(where, f"is cut short: it should end at byte {end} of {num_bytes}.")
            start, strides = _place_in_archive(_Window(file, chunk.start, chunk.length), held.dtype, whole, where)
            # A transposed tensor is saved as it lies in memory: order the dims by stride, largest first, to read it so.
            order = sorted(range(len(strides)), key=lambda dim: (whole[dim] > 1, -strides[dim], dim))
            size = tuple(whole[dim] for dim in order)
            packed = [math.prod(size[place + 1 :]) for place in range(len(size))]
            if any(strides[dim] != step for dim, step in zip(order, packed, strict=True) if whole[dim] > 1):
                raise error_at(where, f"has the strides {strides}, which leave gaps.")
            offset = tuple(both.offset[dim] - chunk.box.offset[dim] for dim in order)
            within = Box(size, offset, tuple(both.size[dim] for dim in order))
            read_box(file, start, held.dtype, within, out[both.within(box)].permute(order), where)


def open_dcp(folder: str | Path) -> DcpFolder:
    """The tensors of its model, named as the model names them; problems of the whole metadata at once."""
    folder = Path(folder)
    where = str(folder / METADATA)
    metadata = parse_pickle(read_plain(folder, METADATA, MAX_METADATA_BYTES), _IN_METADATA, where)
    problems: list[Problem] = []
    tensors: dict[str, DcpTensor] = {}
    try:
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
            tensor = _tensor(name, entry.state, places, path)
            if isinstance(tensor, str):
                problems.append(Problem(where=where, what=f"{name[:80]!r} {tensor}"))
            else:
                tensors[name] = tensor
    except (TypeError, KeyError, IndexError, ValueError, AttributeError) as error:
        what = f"is not the metadata of a Distributed Checkpoint ({type(error).__name__}: {str(error)[:120]})."
        raise error_at(where, what) from None
    raise_problems(problems)
    # Those saved under a key `model` (else those at the top), by the names below it; an optimizer's are left out.
    depths = {name: each.path.index("model") + 1 for name, each in tensors.items() if "model" in each.path[:-1]}
    if not depths:
        depths = {name: 0 for name, each in tensors.items() if len(each.path) == 1} or dict.fromkeys(tensors, 0)
    named = {".".join(tensors[name].path[depth:]): tensors[name] for name, depth in depths.items()}
    return DcpFolder(path=folder, tensors=named)


def _state(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, PickledValue) or value.name != name or not isinstance(value.state, dict):
        raise ValueError(f"expected {name}")
    return value.state


def _numbers(value: Any) -> tuple[int, ...]:
    """A torch.Size, or a tuple of whole numbers."""
    is_size = isinstance(value, PickledValue) and value.name == "torch.Size" and value.arguments
    sizes = value.arguments[0] if is_size else value
    if not isinstance(sizes, tuple) or not all(type(size) is int and 0 <= size < 1 << 48 for size in sizes):
        raise ValueError("expected whole numbers")
    return sizes


def _tensor(name: Any, state: Mapping[str, Any], places: Mapping[Any, Any], path: tuple[str, ...]) -> DcpTensor | str:
    """A tensor and its chunks, or what is wrong with it."""
    properties = state["properties"].state
    kind = properties[0] if isinstance(properties, tuple) else properties["dtype"]
    shape = _numbers(state["size"])
    dtype = _DTYPES.get(kind.name, kind.name) if _is_name(kind) else ""
    if what := tensor_problem(name, dtype, shape):
        return what
    chunks = []
    for each in state["chunks"]:
        offset, size = _numbers(each.state["offsets"]), _numbers(each.state["sizes"])
        fits = len(offset) == len(size) == len(shape)
        if not fits or any(o + s > limit for o, s, limit in zip(offset, size, shape, strict=True)):
            return f"of shape {shape} has a chunk at {offset} of size {size}."
        info = places.get((name, offset))
        if info is None:
            return f"has a chunk at {offset} that is stored nowhere."
        file, start, length = info["relative_path"], info["offset"], info["length"]
        if info.get("transform_descriptors"):
            return "is stored in a transformed way (compressed?), which is not read here."
        is_name = isinstance(file, str) and file.isprintable() and file not in ("", ".", "..")
        if not is_name or "/" in file or "\\" in file:
            return f"is stored in {str(file)[:80]!r}, which is not a plain file name."
        if type(start) is not int or type(length) is not int or not (0 <= start < 1 << 60 and 0 < length < 1 << 60):
            return f"is stored at the impossible place {str(start)[:20]}, of {str(length)[:20]} bytes."
        num_bytes = math.prod(size) * DTYPES[dtype][1]
        if length < num_bytes:
            return f"has a chunk of {num_bytes} bytes that is stored in {length}."
        chunks.append(DcpChunk(Box(shape, offset, size), file, start, length))
    overlap = cover_problem(shape, [chunk.box for chunk in chunks])
    return f"of shape {shape}: {overlap}" if overlap else DcpTensor(dtype, shape, tuple(chunks), path)


class _Window(io.RawIOBase):
    """Some bytes of a file as a file of their own; a large read is refused, because only an archive's index is read."""

    def __init__(self, file: int, start: int, length: int):
        self.file, self.start, self.length, self.at = file, start, length, 0

    def seekable(self) -> bool:
        return True

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
        raise error_at(where, f"is not a tensor as torch saves it: {str(error)[:120]}.") from None
    made = parse_pickle(text, _IN_TENSORS, where)
    first, problem = 0, "is not a plain tensor."
    strides: tuple[int, ...] = ()
    with contextlib.suppress(ValueError, TypeError, AttributeError, IndexError):
        if isinstance(made, PickledValue) and made.name == _REBUILD and made.arguments:
            storage, first, shape, strides = made.arguments[:4]
            (_, kind, key, *_), *_ = storage.arguments
            is_plain = storage.name == "" and key == "0" and type(first) is int
            if not is_plain or not 0 <= first < 1 << 48 or _STORAGES.get(kind.name) != dtype or _numbers(shape) != size:
                raise error_at(where, f"holds {kind.name} of shape {shape}; the metadata says {dtype} of shape {size}.")
            strides = _numbers(strides)
            problem = "" if len(strides) == len(size) else "has other strides than dims."
    if problem:
        raise error_at(where, problem)
    num_bytes = (first + math.prod(size)) * DTYPES[dtype][1]
    if data.compress_type != zipfile.ZIP_STORED or data.file_size < num_bytes:
        problem = f"has {data.file_size} bytes of numbers, or compressed ones; {num_bytes} plain ones are needed."
    window.seek(data.header_offset)
    head = window.read(30)
    start = data.header_offset + 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
    if not problem and (head[:4] != b"PK\x03\x04" or start + data.file_size > window.length):
        problem = "has numbers that lie outside of it."
    if problem:
        raise error_at(where, problem)
    return window.start + start + first * DTYPES[dtype][1], strides
