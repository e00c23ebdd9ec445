"""The manifest of a checkpoint: what it holds, and everything that can be wrong with it.

A manifest comes from a disk, perhaps from a stranger's, so it is checked before anything acts on it: counts
are bounded before they are decoded, names cannot leave the folder, and the pieces of a tensor cover every
element exactly once. The file opens with a digest of the rest of its own bytes, so that a flipped bit in the
cursor or the seed is noticed as surely as one in a tensor.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Literal

import numpy as np

from meshwright.core.box import Box
from meshwright.core.codec import decode_fields, encode, read_artefact, seal, to_json, unseal
from meshwright.core.errors import MOST_PROBLEMS, MeshwrightError, Problem, Problems, error_at, raise_problems

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 256 << 20
MAX_FILES = 65_536
MAX_TENSORS = 250_000
MAX_PIECES = 2_000_000
MAX_DIMS = 16
MAX_NAME_CHARS = 512
MAX_CELLS = 1 << 22

_FILE_NAME = re.compile(r"[A-Za-z0-9._-]+")
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


@dataclass(frozen=True, kw_only=True)
class StoredPiece:
    """`size` elements of `tensor` from `offset` on, stored as `key` of `file`."""

    tensor: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    key: str

    def encode_self(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def decode_any(cls, value: Any, where: str, problems: list[Problem]) -> StoredPiece | None:
        """A large run has 100,000 pieces: sound ones skip the codec, which explains the others."""
        try:
            texts = (value["tensor"], value["file"], value["key"])
            offset, size = value["offset"], value["size"]
            lists = isinstance(offset, list | tuple) and isinstance(size, list | tuple)
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


def manifest_bytes(manifest: Manifest) -> bytes:
    """The bytes of the manifest file: JSON whose first key is the digest of everything after it, a line per piece."""
    try:
        fields = encode(manifest)
        pieces = ",\n    ".join(json.dumps(piece, ensure_ascii=False) for piece in fields.pop("pieces"))
        return seal(to_json(fields)[:-1].rstrip() + f',\n  "pieces": [\n    {pieces}\n  ]\n}}')
    except (ValueError, TypeError, RecursionError) as error:
        raise error_at("checkpoint state", f"step {manifest.step} cannot be written as JSON: {error}.") from None


def parse_manifest(data: bytes, source: str) -> Manifest:
    """The manifest in these bytes, checked in every way that needs no other file."""
    try:
        manifest = read_artefact(Manifest, unseal(data), source)
    except ValueError as error:
        raise error_at(source, f"{error}.", exit_code=1) from None
    except MeshwrightError as error:
        raise MeshwrightError(error.problems[:MOST_PROBLEMS], exit_code=1) from None
    raise_problems(manifest_problems(manifest, source), exit_code=1)
    return manifest


def tensor_problem(name: str, dtype: Any, shape: Sequence[Any]) -> str:
    """What is wrong with the description of a stored tensor, also of another format; "" when nothing is."""
    if not isinstance(name, str) or not name.isprintable() or len(name) > MAX_NAME_CHARS:
        return f"is not a plain name (printable text of at most {MAX_NAME_CHARS} characters)."
    if not isinstance(dtype, str) or dtype not in DTYPES:
        return f"has the unknown dtype {str(dtype)[:40]!r}."
    if len(shape) > MAX_DIMS or any(type(length) is not int or not 0 <= length < 1 << 48 for length in shape):
        return f"has the impossible shape {str(shape)[:60]}."
    return ""


def manifest_problems(manifest: Manifest, source: str) -> Problems:
    """Stage by stage, because each stage relies on what the one before has found sound."""
    for stage in (_entry_problems, _piece_problems, _whole_problems):
        problems = [Problem(where=source, what=what) for what in islice(stage(manifest), MOST_PROBLEMS)]
        if problems:
            return tuple(problems)
    return ()


def _entry_problems(manifest: Manifest) -> Iterator[str]:
    if manifest.step < 0:
        yield f"step is {manifest.step}."
    for name, tensor in manifest.tensors.items():
        if what := tensor_problem(name, tensor.dtype, tensor.shape):
            yield f"tensor {name[:80]!r} {what}"
    for name, file in manifest.files.items():
        if not _FILE_NAME.fullmatch(name) or name in (".", "..", MANIFEST) or len(name) > 255:
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
        if what := cover_problem(manifest.tensors[name].shape, held):
            yield f"tensor {name!r} of shape {manifest.tensors[name].shape}: {what}"


def cover_problem(shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """None, or why these boxes, all within the shape, do not hold every element exactly once.

    The tensor is cut along every edge of every box, and the cells of each box are marked. Pieces of a mesh are a grid,
    so there are about as many cells as boxes; the work is bounded for any input, unlike comparing all pairs.

         +----+--+        edges 0 4 6 across, 0 2 5 down: 4 cells
         | A  |  |        A takes cell (0,0), C both cells of the second column
         +----+ C|        and so each must be marked once
         | B  |  |
         +----+--+
    """
    boxes = [box for box in boxes if not box.is_empty]
    total, held = math.prod(shape), sum(math.prod(box.size) for box in boxes)
    if held < total:
        return f"its pieces hold {held} of its {total} elements."
    if held > total:
        return f"its pieces overlap: they hold {held} elements, it has {total}."
    if len(boxes) < 2:
        return None
    sizes: list[int] = []
    spans: list[list[slice]] = [[] for _ in boxes]
    for dim in range(len(shape)):
        ends = [(box.offset[dim], box.offset[dim] + box.size[dim]) for box in boxes]
        cell_at = {edge: cell for cell, edge in enumerate(sorted({edge for pair in ends for edge in pair}))}
        sizes.append(len(cell_at) - 1)
        for span, (start, stop) in zip(spans, ends, strict=True):
            span.append(slice(cell_at[start], cell_at[stop]))
    if math.prod(sizes) > MAX_CELLS:
        return f"its {len(boxes)} pieces are cut too irregularly to check ({math.prod(sizes)} cells)."
    # Counted before they are marked, so that marking never costs more than one visit to each cell.
    if sum(math.prod(s.stop - s.start for s in span) for span in spans) != math.prod(sizes):
        return "its pieces overlap."
    cells = np.zeros(sizes, dtype=bool)
    for span in spans:
        cells[tuple(span)] = True
    return None if cells.all() else "its pieces overlap."
