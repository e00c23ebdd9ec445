"""Save: every rank writes its pieces, then rank 0 commits.

    begin ---> write_rank_file (each rank) ---> gather entries ---> commit (rank 0)
    mkdir      write, hash, fsync                                   manifest last, fsync, rename, fsync root,
    .tmp-id                                                         read back, only then delete older ones

A kill anywhere leaves the checkpoints that were there before; see tests/checkpoint/test_checkpoint_crash.py.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.durable import (
    discard,
    fresh_suffix,
    fsync_folder,
    make_folder,
    refusals,
    write_durably,
)
from meshwright.checkpoint.format import (
    committed_folders,
    leftover_folders,
    rank_file,
    read_manifest,
    size_problems,
    step_folder,
)
from meshwright.checkpoint.manifest import (
    DTYPES,
    MANIFEST,
    FileEntry,
    Manifest,
    RankEntry,
    StoredPiece,
    TensorEntry,
    manifest_problems,
    seal,
)
from meshwright.core.box import Box
from meshwright.core.codec import decode, encode
from meshwright.core.errors import MeshwrightError, Problem


def begin(root: Path, step: int) -> Path:
    """The folder this step is written into until it is committed. Rank 0 calls it and tells the others."""
    root = Path(root)
    folder = step_folder(root, step)
    tmp = folder.with_name(folder.name + fresh_suffix("tmp"))
    with refusals(f"starting the checkpoint of step {step}", tmp):
        make_folder(root)
        _put_back(root)
        os.mkdir(tmp)
    return tmp


def _put_back(root: Path) -> None:
    """Undo a replacement that a crash cut short: the old folder takes its name again."""
    for step, folder in leftover_folders(root, "old"):
        if not step_folder(root, step).exists():
            os.rename(folder, step_folder(root, step))
            fsync_folder(root)


def write_rank_file(folder: Path, rank: int, pieces: Iterable[tuple[str, Box, torch.Tensor]]) -> dict[str, Any]:
    """Write the pieces this rank owns; returns its index entry, plain JSON, for `commit`.

    Each piece of a tensor must be given by exactly one rank. Empty pieces are recorded by name only. After a failure
    the caller discards the folder, once no rank writes any more: it would report that the folder is missing.
    """
    held = [(name, box, tensor.detach()) for name, box, tensor in pieces]
    tensors = _tensor_entries(held)
    # Widest elements first keeps every tensor aligned in the file, as safetensors' own writer does.
    held = sorted((p for p in held if not p[1].is_empty), key=lambda p: -p[2].element_size())
    path = Path(folder) / rank_file(rank)
    with refusals(f"writing the checkpoint of rank {rank}", path):
        num_bytes, xxh3 = write_durably(path, _file_chunks(held))
    listed = tuple(
        StoredPiece(tensor=name, offset=tuple(box.offset), size=tuple(box.size), file=path.name, key=f"k{index}")
        for index, (name, box, _) in enumerate(held)
    )
    entry: dict[str, Any] = encode(
        RankEntry(file=path.name, bytes=num_bytes, xxh3=xxh3, pieces=listed, tensors=tensors)
    )
    return entry


def _tensor_entries(held: list[tuple[str, Box, torch.Tensor]]) -> dict[str, TensorEntry]:
    problems: list[Problem] = []
    entries: dict[str, TensorEntry] = {}
    for name, box, tensor in held:
        dtype = str(tensor.dtype).removeprefix("torch.")
        entry = TensorEntry(dtype=dtype, shape=tuple(box.shape))
        if dtype not in DTYPES:
            problems.append(Problem(where=name, what=f"a checkpoint cannot hold the dtype {dtype}."))
        if tuple(tensor.shape) != tuple(box.size):
            what = f"its piece has shape {tuple(tensor.shape)}, its box says {tuple(box.size)}."
            problems.append(Problem(where=name, what=what))
        if entries.setdefault(name, entry) != entry:
            problems.append(Problem(where=name, what=f"is given as {entries[name]} and as {entry}."))
    if problems:
        raise MeshwrightError(problems)
    return entries


def _file_chunks(held: list[tuple[str, Box, torch.Tensor]]) -> Iterator[Any]:
    """A safetensors file: length of the header, header, raw bytes. One piece at a time comes to the host."""
    header: dict[str, Any] = {}
    end = 0
    for index, (_, box, tensor) in enumerate(held):
        start, end = end, end + math.prod(box.size) * tensor.element_size()
        code = DTYPES[str(tensor.dtype).removeprefix("torch.")][0]
        header[f"k{index}"] = {"dtype": code, "shape": list(box.size), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, _, tensor in held:
        # One element of a strided tensor counts as contiguous, with a stride `view` refuses: say stride 1.
        flat = tensor.cpu().contiguous().as_strided((tensor.numel(),), (1,))
        yield flat.view(torch.uint8).numpy()


def commit(
    root: Path, step: int, tmp: Path, entries: list[dict[str, Any]], state: Mapping[str, Any], keep: int
) -> Path:
    """Make the step's checkpoint real, then keep it and the `keep - 1` before it.

    Rank 0 calls it, once all ranks have written.
    `state` is everything that is not a tensor (cursor, seed, plan, data fingerprint), as JSON.
    """
    root, tmp, final = Path(root), Path(tmp), step_folder(root, step)
    with refusals(f"committing the checkpoint of step {step}", final, tmp=tmp):
        if keep < 1:
            raise MeshwrightError([Problem(where="keep", what=f"is {keep}.", fix="Keep at least 1 checkpoint.")])
        manifest = _gather(step, entries, state)
        _refuse(size_problems(tmp, manifest))
        write_durably(tmp / MANIFEST, [seal(manifest)])
        fsync_folder(tmp)
        replaced = _rename_in(tmp, final)
        fsync_folder(root)
        # Nothing older goes before the new one has been read back.
        _refuse(size_problems(final, read_manifest(final)))
    if replaced is not None:
        discard(replaced)
    _retire(root, step, keep)
    return final


def _refuse(problems: Iterable[Problem]) -> None:
    problems = tuple(problems)
    if problems:
        raise MeshwrightError(problems, exit_code=1)


def _gather(step: int, entries: list[dict[str, Any]], state: Mapping[str, Any]) -> Manifest:
    problems: list[Problem] = []
    tensors: dict[str, TensorEntry] = {}
    files: dict[str, FileEntry] = {}
    pieces: list[StoredPiece] = []
    for entry in (decode(RankEntry, e, f"entries[{index}]") for index, e in enumerate(entries)):
        if entry.file in files:
            problems.append(Problem(where=entry.file, what="is given by two ranks."))
        files[entry.file] = FileEntry(bytes=entry.bytes, xxh3=entry.xxh3)
        pieces.extend(entry.pieces)
        for name, tensor in entry.tensors.items():
            if tensors.setdefault(name, tensor) != tensor:
                what = f"{entry.file} gives {tensor}, an earlier rank {tensors[name]}."
                problems.append(Problem(where=name, what=what))
    saved_utc = datetime.now(UTC).isoformat(timespec="seconds")
    manifest = Manifest(step=step, saved_utc=saved_utc, state=state, tensors=tensors, files=files, pieces=tuple(pieces))
    _refuse([*problems, *(() if problems else manifest_problems(manifest, f"checkpoint of step {step}"))])
    return manifest


def _rename_in(tmp: Path, final: Path) -> Path | None:
    """Give the finished folder its name; one already there is set aside, not deleted: we may die between."""
    if not final.exists():
        os.rename(tmp, final)
        return None
    aside = final.with_name(final.name + fresh_suffix("old"))
    os.rename(final, aside)
    try:
        fsync_folder(final.parent)
        os.rename(tmp, final)
    except OSError:
        os.rename(aside, final)
        raise
    return aside


def _retire(root: Path, step: int, keep: int) -> None:
    """Delete what is beyond `keep`, and leftovers of crashes. Newer steps than this one are never touched."""
    older = [folder for other, folder in committed_folders(root).items() if other < step]
    leftovers = [folder for kind in ("tmp", "old") for _, folder in leftover_folders(root, kind)]
    for folder in [*older[: max(0, len(older) - (keep - 1))], *leftovers]:
        discard(folder)
