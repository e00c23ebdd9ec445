"""Bytes that survive a power cut: write, fsync, rename, fsync the folder; refusals of the disk said plainly.

Everything goes through `os` calls in an order that tests can watch and interrupt one by one.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from meshwright.checkpoint.format import BLOCK_BYTES
from meshwright.core.errors import MeshwrightError, Problem

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


def fresh_suffix(kind: str) -> str:
    return f".{kind}-{uuid.uuid4().hex[:12]}"


def write_durably(path: Path, chunks: Iterable[Any]) -> tuple[int, str]:
    """Write the chunks (flat bytes) to a new file and fsync it; how many bytes, and their xxh3-128."""
    digest, num_bytes = xxhash.xxh3_128(), 0
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for chunk in chunks:
            view = memoryview(chunk)
            for start in range(0, len(view), BLOCK_BYTES):
                block = view[start : start + BLOCK_BYTES]
                digest.update(block)  # while it is in the cache
                while len(block):
                    block = block[os.write(file, block) :]
            num_bytes += len(view)
        os.fsync(file)
    finally:
        os.close(file)
    return num_bytes, digest.hexdigest()


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable: without this a rename may be forgotten."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot, and need not
            raise
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """`mkdir -p`, each new name made durable in its parent."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    with suppress(FileExistsError):
        os.mkdir(folder)
    fsync_folder(folder.parent)


def discard(folder: Path) -> None:
    """Delete a folder, best effort; renamed first, so a crash half-way leaves no half checkpoint behind."""
    if ".tmp-" not in folder.name:
        aside = folder.with_name(folder.name.partition(".")[0] + fresh_suffix("tmp"))
        try:
            os.rename(folder, aside)
        except OSError:
            return
        folder = aside
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def refusals(doing: str, path: Path, tmp: Path | None = None) -> Iterator[None]:
    """What the disk refuses as one clear error; the unfinished `tmp` folder goes, to give its space back."""
    try:
        yield
    except (OSError, MeshwrightError) as error:
        if tmp is not None:
            shutil.rmtree(tmp, ignore_errors=True)
        if isinstance(error, MeshwrightError):
            raise
        what = f"{doing} failed: {error.strerror or error}. Earlier checkpoints are untouched."
        fix = _FIXES.get(error.errno or 0, "")
        raise MeshwrightError([Problem(where=str(path), what=what, fix=fix)], exit_code=1) from error
