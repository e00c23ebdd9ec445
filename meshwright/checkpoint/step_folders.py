"""Checkpoints on disk: which folders are committed, what they hold, and whether their bytes are still right.

    <root>/step-00000100/                 committed: manifest.json and rank-*.safetensors
    <root>/step-00000200.tmp-1f3a90c2/    being written, or left by a crash: never read
    <root>/step-00000100.old-77be01d4/    set aside while its replacement takes its name

A valid manifest in a committed folder *is* the checkpoint. A folder set aside is read only if a crash came
before the replacement had the name. No torch here: `mw ckpt list`, `mw ckpt verify` and the supervisor use it.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from meshwright.checkpoint.manifest import MANIFEST, MAX_MANIFEST_BYTES, FileEntry, Manifest, parse_manifest
from meshwright.core.errors import MeshwrightError, Problem, Problems, error_at
from meshwright.core.files import BLOCK_BYTES, fsync_folder, make_folder, refuse_link, unreadable, write_new

_FOLDER = re.compile(r"step-([0-9]{8,18})(\.(?:tmp|old)-[A-Za-z0-9-]+)?")


def step_folder(root: Path, step: int) -> Path:
    return Path(root) / f"step-{step:08d}"


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _folders(root: Path) -> list[tuple[int, str, Path]]:
    """(step, suffix, folder) of every folder of ours; links are not ours."""
    folders = []
    refuse_link(Path(root))
    try:
        entries = list(os.scandir(root))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise error_at(root, f"cannot be listed: {error.strerror}.", exit_code=1) from None
    for entry in entries:
        match = _FOLDER.fullmatch(entry.name)
        if match and f"{int(match[1]):08d}" == match[1] and entry.is_dir(follow_symlinks=False):
            folders.append((int(match[1]), match[2] or "", Path(root) / entry.name))
    return sorted(folders)


def committed_folders(root: Path) -> dict[int, Path]:
    """Step -> folder, ascending."""
    return {step: folder for step, suffix, folder in _folders(root) if not suffix}


def list_steps(root: Path) -> tuple[int, ...]:
    return tuple(committed_folders(root))


def leftover_folders(root: Path, kind: str) -> list[tuple[int, Path]]:
    """Folders with the suffix `.tmp-*` or `.old-*` (`kind` is "tmp" or "old")."""
    return [(step, folder) for step, suffix, folder in _folders(root) if suffix.startswith(f".{kind}-")]


def usable_folders(root: Path) -> dict[int, Path]:
    """The committed folders, and those set aside by a replacement that a crash cut short."""
    usable = dict(leftover_folders(root, "old"))
    usable.update(committed_folders(root))
    return dict(sorted(usable.items()))


def _plain_file_bytes(path: Path) -> int:
    """The size of a regular file; a link, a pipe (it would hang us) or a folder in its place is refused."""
    about = os.lstat(path)
    if not stat.S_ISREG(about.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(about.st_mode) else "not a plain file"
        raise error_at(path, f"is {kind}; it is not followed.", exit_code=1)
    return about.st_size


def read_manifest(folder: Path) -> Manifest:
    """The manifest, valid in itself and at home in this folder; the shards' bytes are `verify`'s to check."""
    folder = Path(folder)
    path = folder / MANIFEST
    try:
        num_bytes = _plain_file_bytes(path)
        if num_bytes > MAX_MANIFEST_BYTES:
            raise error_at(path, f"has {num_bytes} bytes; the limit is {MAX_MANIFEST_BYTES}.", exit_code=1)
        manifest = parse_manifest(path.read_bytes(), str(path))
    except OSError as error:
        raise MeshwrightError([unreadable(path, error)], exit_code=1) from None
    named = _FOLDER.fullmatch(folder.name)
    if named and int(named[1]) != manifest.step:
        raise error_at(path, f"is of step {manifest.step}, in the folder {folder.name}.", exit_code=1)
    for name in manifest.files:
        try:
            _plain_file_bytes(folder / name)
        except OSError:
            continue  # missing: `verify` says so, with the size it should have
    return manifest


def size_problems(folder: Path, manifest: Manifest) -> Problems:
    """Files that are missing or of another size: cheap, and enough right after writing."""
    problems = []
    for name, entry in sorted(manifest.files.items()):
        path = Path(folder) / name
        try:
            num_bytes = _plain_file_bytes(path)
        except OSError as error:
            problems.append(unreadable(path, error))
        except MeshwrightError as error:
            problems.extend(error.problems)
        else:
            if num_bytes != entry.bytes:
                what = f"has {num_bytes} bytes, its manifest says {entry.bytes}."
                problems.append(Problem(where=str(path), what=what))
    return tuple(problems)


def verify(folder: Path) -> Problems:
    """Everything wrong with a checkpoint: its manifest, or files that are missing, cut short or changed."""
    try:
        manifest = read_manifest(folder)
    except MeshwrightError as error:
        return error.problems
    problems = list(size_problems(folder, manifest))
    wrong_size = {problem.where for problem in problems}
    for name, entry in sorted(manifest.files.items()):
        path = Path(folder) / name
        if str(path) not in wrong_size and (problem := changed_file(path, entry)) is not None:
            problems.append(problem)
    return tuple(problems)


def changed_file(path: Path, entry: FileEntry) -> Problem | None:
    """What is wrong with a file whose bytes are not those that were written; None where they are."""
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(min(BLOCK_BYTES, max(1, entry.bytes))))
    try:
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
    except OSError as error:
        return unreadable(path, error)
    if digest.hexdigest() == entry.xxh3:
        return None
    what = f"has changed since it was written: xxh3 {digest.hexdigest()}, its manifest says {entry.xxh3}."
    return Problem(where=str(path), what=what)


def newest_good(root: Path, *, report: Callable[[str], None]) -> Path | None:
    """The newest undamaged checkpoint, or None if there are none at all.

    Each damaged one that is passed over is reported in one line.
    """
    damaged: list[Problem] = []
    for _, folder in reversed(usable_folders(root).items()):
        problems = verify(folder)
        if not problems:
            return folder
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        first = str(problems[0]).replace("\n", " ")
        report(f"checkpoint {folder.name} is damaged and is not used: {first}{more}")
        damaged.extend(problems)
    if damaged:
        fix = "Restore one from a copy, or move the folder away to start from the beginning."
        all_bad = Problem(where=str(root), what="every checkpoint here is damaged.", fix=fix)
        raise MeshwrightError([all_bad, *damaged], exit_code=1)
    return None


def temporary_name(path: Path, kind: str = "tmp") -> Path:
    """`path` with a suffix of its own, for a folder that is being written ("tmp") or replaced ("old")."""
    return path.with_name(f"{path.name}.{kind}-{uuid.uuid4().hex[:12]}")


def discard(folder: Path) -> None:
    """Delete a folder, best effort; renamed first, so a crash half-way leaves no half checkpoint behind."""
    if ".tmp-" not in folder.name:
        aside = temporary_name(folder.with_name(folder.name.partition(".")[0]))
        try:
            os.rename(folder, aside)
            fsync_folder(aside.parent)  # or a power cut could bring the name back, to what is left of the files
        except OSError:
            return
        folder = aside
    shutil.rmtree(folder, ignore_errors=True)


def write_checkpoint(
    root: Path, data: bytes, source: str, chunks_of: Callable[[str, FileEntry], Iterable[Any]]
) -> Path:
    """Write a checkpoint that lies elsewhere, with the manifest `data`, every byte of it checked; its folder."""
    manifest = parse_manifest(data, source)
    final = step_folder(root, manifest.step)
    tmp = temporary_name(final)
    try:
        make_folder(root)
        os.mkdir(tmp)
        for name, entry in manifest.files.items():
            found = write_new(tmp / name, chunks_of(name, entry))
            if found != (entry.bytes, entry.xxh3):
                raise error_at(f"{source}: {name}", f"has changed: {found}, its manifest says {entry}.", exit_code=1)
        write_new(tmp / MANIFEST, [data])
        fsync_folder(tmp)
        os.rename(tmp, final)
        fsync_folder(root)
    except BaseException as error:
        discard(tmp)
        if isinstance(error, OSError):
            raise error_at(final, f"cannot be written: {error.strerror or error}.", exit_code=1) from None
        raise
    return final


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRow:
    step: int
    bytes: int = 0
    num_files: int = 0
    num_tensors: int = 0
    when_utc: str = ""
    damage: str = ""
    """Why its manifest cannot be read; the counts are then 0. Shards are not read here: see `verify_all`."""


def describe(root: Path) -> list[CheckpointRow]:
    """Every checkpoint, oldest first, from its manifest."""
    rows = []
    for step, folder in usable_folders(root).items():
        try:
            manifest = read_manifest(folder)
        except MeshwrightError as error:
            rows.append(CheckpointRow(step=step, damage=str(error.problems[0])))
            continue
        row = CheckpointRow(
            step=step,
            bytes=manifest.total_bytes,
            num_files=len(manifest.files),
            num_tensors=len(manifest.tensors),
            when_utc=manifest.saved_utc,
        )
        rows.append(row)
    return rows


def verify_all(root: Path) -> dict[int, Problems]:
    """Step -> everything wrong with that checkpoint (an empty tuple when every byte is right)."""
    return {step: verify(folder) for step, folder in usable_folders(root).items()}
