"""What a manifest says, and everything that can be wrong with one.

A manifest comes from a disk, perhaps from a stranger's, so it is judged before anything acts on it: counts
are bounded before they are decoded, names cannot leave the folder, and the pieces of a tensor cover every
element exactly once. The file opens with a digest of the rest of its own bytes, so that a flipped bit in the
cursor or the seed is noticed as surely as one in a tensor.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Literal

from meshwright.checkpoint.cover import cover_problem
from meshwright.core import codec
from meshwright.core.box import Box
from meshwright.core.codec import decode_fields, encode, read_artefact, to_json
from meshwright.core.errors import MeshwrightError, Problem, Problems

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 256 << 20
MAX_FILES = 65_536
MAX_TENSORS = 250_000
MAX_PIECES = 2_000_000
MAX_DIMS = 16
MAX_NAME_CHARS = 512
MAX_PROBLEMS = 20
"""A broken manifest may be wrong in a million places; people read the first few."""

FILE_NAME = re.compile(r"[A-Za-z0-9._-]+")
_HASH = re.compile(r"[0-9a-f]{32}")

# name in torch and in the manifest -> (name in safetensors, bytes per element)
DTYPES: dict[str, tuple[str, int]] = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPiece:
    """`size` elements of `tensor` from `offset` on, stored as `key` of `file`."""

    tensor: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    key: str

    def encode_self(self) -> dict[str, Any]:
        return {
            "tensor": self.tensor,
            "offset": list(self.offset),
            "size": list(self.size),
            "file": self.file,
            "key": self.key,
        }

    @classmethod
    def decode_any(cls, value: Any, where: str, problems: list[Problem]) -> StoredPiece | None:
        """A large run has 100,000 pieces: sound ones skip the codec, which explains the others."""
        try:
            texts = (value["tensor"], value["file"], value["key"])
            offset, size = value["offset"], value["size"]
            lists = isinstance(offset, list) and isinstance(size, list)
            sound = lists and len(value) == 5 and all(type(text) is str for text in texts)
            if sound and all(type(number) is int for number in (*offset, *size)):
                tensor, file, key = texts
                return cls(tensor=tensor, offset=tuple(offset), size=tuple(size), file=file, key=key)
        except (TypeError, KeyError, IndexError):
            pass
        piece: StoredPiece | None = decode_fields(cls, value, where, problems)
        return piece


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    bytes: int
    xxh3: str
    """XXH3-128 of the whole file, in hex."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEntry:
    """What one rank wrote: its line of the index that rank 0 gathers into a manifest."""

    file: str
    bytes: int
    xxh3: str
    pieces: tuple[StoredPiece, ...]
    tensors: Mapping[str, TensorEntry]


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    VERSION: ClassVar[int] = 1

    version: Literal[1] = 1
    step: int
    saved_utc: str = ""
    """For people only: the order of checkpoints is the order of steps, whatever the clock did."""
    state: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, FileEntry]
    pieces: tuple[StoredPiece, ...]

    @classmethod
    def decode_any(cls, value: Any, where: str, problems: list[Problem]) -> Manifest | None:
        """Count first: a million tensors are refused before an object is made for each."""
        limits = {"tensors": MAX_TENSORS, "pieces": MAX_PIECES, "files": MAX_FILES}
        before = len(problems)
        for key, limit in limits.items():
            held = value.get(key) if isinstance(value, Mapping) else None
            if isinstance(held, list | Mapping) and len(held) > limit:
                problems.append(Problem(where=where, what=f"lists {len(held)} {key}; the limit is {limit}."))
        if len(problems) > before:
            return None
        manifest: Manifest | None = decode_fields(cls, value, where, problems)
        return manifest

    def box(self, piece: StoredPiece) -> Box:
        return Box(self.tensors[piece.tensor].shape, piece.offset, piece.size)

    @property
    def total_bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())


def seal(manifest: Manifest) -> bytes:
    """The bytes of the manifest file: JSON whose first key is the digest of everything after it."""
    try:
        return codec.seal(_text(manifest))
    except (ValueError, TypeError, RecursionError) as error:
        what = f"step {manifest.step} cannot be written as JSON: {error}."
        raise MeshwrightError([Problem(where="checkpoint state", what=what)]) from None


def _text(manifest: Manifest) -> str:
    """The usual JSON, but a line per piece."""
    fields = encode(manifest)
    pieces = ",\n    ".join(json.dumps(piece, ensure_ascii=False) for piece in fields.pop("pieces"))
    return to_json(fields)[:-1].rstrip() + f',\n  "pieces": [\n    {pieces}\n  ]\n}}'


def unseal(data: bytes, source: str) -> Manifest:
    """The manifest in these bytes, checked in every way that needs no other file."""
    try:
        manifest = read_artefact(Manifest, codec.unseal(data), source)
    except ValueError as error:
        raise MeshwrightError([Problem(where=source, what=f"{error}.")], exit_code=1) from None
    except MeshwrightError as error:
        raise MeshwrightError(error.problems[:MAX_PROBLEMS], exit_code=1) from None
    problems = manifest_problems(manifest, source)
    if problems:
        raise MeshwrightError(problems, exit_code=1)
    return manifest


def manifest_problems(manifest: Manifest, source: str) -> Problems:
    """Stage by stage, because each stage relies on what the one before has found sound."""
    for stage in (_entry_problems, _piece_problems, _whole_problems):
        problems = [Problem(where=source, what=what) for what in islice(stage(manifest), MAX_PROBLEMS)]
        if problems:
            return tuple(problems)
    return ()


def _entry_problems(manifest: Manifest) -> Iterator[str]:
    if manifest.step < 0:
        yield f"step is {manifest.step}."
    for name, tensor in manifest.tensors.items():
        if not name.isprintable() or len(name) > MAX_NAME_CHARS:
            yield f"tensor name {name[:40]!r} is not plain text of at most {MAX_NAME_CHARS} characters."
        if tensor.dtype not in DTYPES:
            yield f"tensor {name!r} has the unknown dtype {tensor.dtype[:40]!r}."
        if len(tensor.shape) > MAX_DIMS or any(not 0 <= length < 1 << 48 for length in tensor.shape):
            yield f"tensor {name!r} has the impossible shape {tensor.shape[:MAX_DIMS]}."
    for name, file in manifest.files.items():
        if not FILE_NAME.fullmatch(name) or name in (".", "..", MANIFEST) or len(name) > 255:
            yield f"file name {name[:40]!r} is not allowed (only A-Z a-z 0-9 . _ -)."
        if file.bytes < 0 or not _HASH.fullmatch(file.xxh3):
            yield f"file {name!r} has the impossible size {file.bytes} or hash {file.xxh3[:40]!r}."


def _piece_problems(manifest: Manifest) -> Iterator[str]:
    for index, piece in enumerate(manifest.pieces):
        tensor = manifest.tensors.get(piece.tensor)
        if tensor is None:
            yield f"pieces[{index}] is of the tensor {piece.tensor[:40]!r}, which is not listed."
        elif piece.file not in manifest.files:
            yield f"pieces[{index}] of {piece.tensor!r} is in {piece.file[:40]!r}, which is not listed."
        elif not len(piece.offset) == len(piece.size) == len(tensor.shape) or any(
            start < 0 or length < 0 or start + length > limit
            for start, length, limit in zip(piece.offset, piece.size, tensor.shape, strict=True)
        ):
            yield (
                f"pieces[{index}] of {piece.tensor!r} has offset {piece.offset[:MAX_DIMS]} and size "
                f"{piece.size[:MAX_DIMS]}, outside its shape {tensor.shape}."
            )


def _whole_problems(manifest: Manifest) -> Iterator[str]:
    boxes: dict[str, list[Box]] = {name: [] for name in manifest.tensors}
    held_bytes: Counter[str] = Counter()
    for piece in manifest.pieces:
        boxes[piece.tensor].append(manifest.box(piece))
        held_bytes[piece.file] += math.prod(piece.size) * DTYPES[manifest.tensors[piece.tensor].dtype][1]
    for file, num_bytes in held_bytes.items():
        if num_bytes > manifest.files[file].bytes:
            yield f"file {file!r} of {manifest.files[file].bytes} bytes is said to hold {num_bytes}."
    for name, held in boxes.items():
        what = cover_problem(manifest.tensors[name].shape, held)
        if what:
            yield f"tensor {name!r} of shape {manifest.tensors[name].shape}: {what}"
