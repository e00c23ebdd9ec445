"""Save: every rank writes its pieces, then rank 0 commits.

    begin ---> write_rank_file (each rank) ---> gather entries ---> commit (rank 0)
    mkdir      write, hash, fsync                                   manifest last, fsync, rename, fsync root,
    .tmp-id                                                         read back, only then delete older ones

A kill anywhere leaves the checkpoints that were there before. Everything goes through `os` calls in an order that
tests can watch and interrupt one by one; see tests/checkpoint/test_save_crash.py.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.manifest import (
    DTYPES,
    MANIFEST,
    FileEntry,
    Manifest,
    RankEntry,
    StoredPiece,
    TensorEntry,
    manifest_bytes,
    manifest_problems,
)
from meshwright.checkpoint.memory_folder import MemoryFolder
from meshwright.checkpoint.safetensors_folder import safetensors_chunks
from meshwright.checkpoint.step_folders import (
    committed_folders,
    discard,
    leftover_folders,
    rank_file,
    read_manifest,
    size_problems,
    step_folder,
    temporary_name,
    usable_folders,
)
from meshwright.core.box import Box
from meshwright.core.codec import decode, encode
from meshwright.core.errors import MeshwrightError, Problem, error_at, raise_problems
from meshwright.core.files import fsync_folder, make_folder, write_new, write_whole
from meshwright.core.units import pretty_bytes

_FIXES = {
    errno.ENOSPC: "Free space on that disk, or keep fewer checkpoints.",
    errno.EDQUOT: "Free space within the quota, or keep fewer checkpoints.",
    errno.EROFS: "Choose a run folder on a disk that can be written.",
    errno.EACCES: "Choose a run folder that this user can write.",
    errno.EPERM: "Choose a run folder that this user can write.",
    errno.EIO: "The disk reports a fault; choose another.",
    errno.ESTALE: "The network file system has lost that folder; mount it again.",
    errno.EFBIG: "Raise the limit on the size of files (`ulimit -f`), or choose another disk.",
    errno.ENOENT: "The run folder was moved or deleted while the run was under way.",
}

_TEST_BYTES = 16 << 20
"""Of a test of how fast a disk is written."""


@contextmanager
def disk_errors(doing: str, path: Path, tmp: Path | None = None, exit_code: int = 1) -> Iterator[None]:
    """An error of the disk as one problem with its fix; the unfinished `tmp` folder goes, to give its space back."""
    try:
        yield
    except (OSError, MeshwrightError) as error:
        if tmp is not None:
            shutil.rmtree(tmp, ignore_errors=True)
        if isinstance(error, MeshwrightError):
            raise
        what = f"{doing} failed: {error.strerror or error}. Earlier checkpoints are untouched."
        raise error_at(path, what, _FIXES.get(error.errno or 0, ""), exit_code=exit_code) from error


def space_forecast(root: Path, checkpoint_bytes: int, steps_left: int, *, keep: int, every: int = 0) -> str:
    """Whether the disk has room for the checkpoints that a run will keep: "", or a warning with the numbers. Raises
    where not even the next one can be written."""
    with disk_errors("a test of the checkpoint folder", root, exit_code=2):
        make_folder(root)
        write_whole(probe := root / ".write-test", b"x" * 4096, is_durable=True)
        probe.unlink()
    disk, held = os.statvfs(root), 0
    for _, folder in usable_folders(root).items():
        held += sum(each.stat().st_size for each in os.scandir(folder) if each.is_file(follow_symlinks=False))
    free, count = disk.f_bavail * disk.f_frsize, keep + 1 + (steps_left // every if every else 0)
    numbers = f"a checkpoint takes {pretty_bytes(checkpoint_bytes)} and {pretty_bytes(free)} are free on this disk"
    if free < checkpoint_bytes:
        raise error_at(root, f"{numbers}: not one can be written.", "Free space, or choose another run.folder.")
    if free + held >= count * checkpoint_bytes:
        return ""
    kept = f"{count - 1} are kept and one more is being written" if every else f"{keep} are kept, and one is written"
    fix = "train.keep_every" if every else "train.keep"
    return f"warning: {root}: {numbers}; {kept}: {pretty_bytes(count * checkpoint_bytes)} in all. Lower {fix}."


def write_seconds(root: Path, num_bytes: int) -> float:
    """What it takes to write so much there, by a file of `_TEST_BYTES` at most; 0 where that fails."""
    content = os.urandom(min(max(num_bytes, 1), _TEST_BYTES))  # which no file system makes smaller
    start, seconds = time.monotonic(), 0.0
    with suppress(OSError):  # a checkpoint says why
        write_whole(probe := root / ".write-test", content, is_durable=True)
        seconds = time.monotonic() - start
        probe.unlink()
    return seconds * max(1.0, num_bytes / len(content))


def begin(root: Path, step: int) -> Path:
    """The folder this step is written into until it is committed. Rank 0 calls it and tells the others."""
    root = Path(root)
    tmp = temporary_name(step_folder(root, step))
    with disk_errors(f"starting the checkpoint of step {step}", tmp):
        make_folder(root)
        for other, folder in leftover_folders(root, "old"):
            if not step_folder(root, other).exists():  # a crash cut its replacement short: it takes its name again
                os.rename(folder, step_folder(root, other))
                fsync_folder(root)
        os.mkdir(tmp)
    return tmp


def write_rank_file(
    folder: Path | MemoryFolder, rank: int, pieces: Iterable[tuple[str, Box, torch.Tensor]]
) -> dict[str, Any]:
    """Write the pieces this rank owns; returns its index entry, plain JSON, for `commit`.

    Each piece of a tensor must be given by exactly one rank. Empty pieces are recorded by name only. After a failure
    the caller discards the folder, once no rank writes any more: it would report that the folder is missing.
    """
    owned = [(name, box, tensor.detach(), str(tensor.dtype).removeprefix("torch.")) for name, box, tensor in pieces]
    problems: list[Problem] = []
    tensors: dict[str, TensorEntry] = {}
    for name, box, tensor, dtype in owned:
        entry = TensorEntry(dtype=dtype, shape=tuple(box.shape))
        if dtype not in DTYPES:
            problems.append(Problem(where=name, what=f"a checkpoint cannot hold the dtype {dtype}."))
        if tuple(tensor.shape) != tuple(box.size):
            what = f"its piece has shape {tuple(tensor.shape)}, its box says {tuple(box.size)}."
            problems.append(Problem(where=name, what=what))
        if tensors.setdefault(name, entry) != entry:
            problems.append(Problem(where=name, what=f"is given as {tensors[name]} and as {entry}."))
    raise_problems(problems)
    # Widest elements first keeps every tensor aligned in the file, as safetensors' own writer does.
    owned = sorted((piece for piece in owned if not piece[1].is_empty), key=lambda piece: -piece[2].element_size())
    name, is_in_memory = rank_file(rank), isinstance(folder, MemoryFolder)
    path = folder / name
    entries = {f"k{index}": (dtype, tuple(box.size)) for index, (_, box, _, dtype) in enumerate(owned)}
    with disk_errors(f"writing the checkpoint of rank {rank}", path):
        chunks = safetensors_chunks(entries, (tensor.cpu() for _, _, tensor, _ in owned))
        num_bytes, xxh3 = write_new(path, chunks, replaces=is_in_memory)
    listed = tuple(
        StoredPiece(tensor=tensor, offset=tuple(box.offset), size=tuple(box.size), file=name, key=f"k{index}")
        for index, (tensor, box, _, _) in enumerate(owned)
    )
    encoded: dict[str, Any] = encode(RankEntry(file=name, bytes=num_bytes, xxh3=xxh3, pieces=listed, tensors=tensors))
    return encoded


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """Which checkpoints stay when a newer one is durable."""

    last: int
    """So many of the newest."""
    every: int = 0
    """And those of steps that are multiples of it; 0: no others."""
    spared: Callable[[int], bool] = field(default=lambda step: False, compare=False)
    """And those somebody still reads."""

    def of(self, steps: Sequence[int]) -> set[int]:
        """Which of these stay; they ascend."""
        newest = len(steps) - self.last
        own = (bool(self.every and step % self.every == 0) or self.spared(step) for step in steps)
        return {step for place, (step, stays) in enumerate(zip(steps, own, strict=True)) if stays or place >= newest}


def commit(
    root: Path, step: int, tmp: Path, entries: list[dict[str, Any]], state: Mapping[str, Any], keep: int | Retention
) -> Path:
    """Make the step's checkpoint real, then delete the older ones that need not stay: `keep`, or all but `keep` - 1.

    Rank 0 calls it, once all ranks have written. `state` is everything that is not a tensor (cursor, seed, plan, data
    fingerprint), as JSON. A folder that has the step's name already is set aside, not deleted: we may die between.
    """
    root, tmp, final, aside = Path(root), Path(tmp), step_folder(root, step), None
    with disk_errors(f"committing the checkpoint of step {step}", final, tmp=tmp):
        retention = keep if isinstance(keep, Retention) else Retention(last=keep)
        if retention.last < 1:
            raise error_at("keep", f"is {retention.last}.", "Keep at least 1 checkpoint.")
        manifest = _manifest(step, entries, state)
        raise_problems(size_problems(tmp, manifest), exit_code=1)
        write_new(tmp / MANIFEST, [manifest_bytes(manifest)])
        fsync_folder(tmp)
        if final.exists():
            aside = temporary_name(final, "old")
            os.rename(final, aside)
        try:
            if aside is not None:
                fsync_folder(root)
            os.rename(tmp, final)
        except OSError:
            if aside is not None:
                os.rename(aside, final)
            raise
        fsync_folder(root)
        # Nothing older goes before the new one has been read back.
        raise_problems(size_problems(final, read_manifest(final)), exit_code=1)
    known = [other for other in committed_folders(root) if other <= step]  # newer ones are not touched
    due = sorted({*known} - retention.of(known))
    leftovers = [folder for kind in ("tmp", "old") for _, folder in leftover_folders(root, kind)]
    for folder in [*(step_folder(root, other) for other in due), *leftovers]:  # `aside` is one of the leftovers
        discard(folder)
    return final


def commit_in_memory(folder: MemoryFolder, step: int, entries: list[dict[str, Any]], state: Mapping[str, Any]) -> None:
    """Make a copy in memory count; rank 0 calls it, once all ranks have written."""
    write_new(folder / MANIFEST, [manifest_bytes(_manifest(step, entries, state))], replaces=True)


def _manifest(step: int, entries: list[dict[str, Any]], state: Mapping[str, Any]) -> Manifest:
    """The entries of all ranks as one manifest, checked."""
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
    raise_problems(problems or manifest_problems(manifest, f"checkpoint of step {step}"), exit_code=1)
    return manifest
