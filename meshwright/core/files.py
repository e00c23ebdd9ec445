"""Files of a run folder: written whole or not at all, and never through a link; files in memory. No torch."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from meshwright.core.errors import MeshwrightError, Problem, Problems

_FOREIGN = "track"  # whose tools make links of their own


def write_whole(path: Path, text: str) -> None:
    """The whole text or nothing, for a reader that may look at any time. A link at `path` is replaced, not followed."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(draft, "x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def open_to_append(path: Path, flags: int = os.O_WRONLY) -> int:
    """A descriptor of this very file, made where it is missing; a link is refused."""
    try:
        return os.open(path, flags | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise MeshwrightError([_link(path)]) from None
        raise


def refuse_link(path: Path) -> None:
    """Raise where it is a link: for what others open by name."""
    if path.is_symlink():
        raise MeshwrightError([_link(path)])


def link_problems(folder: Path) -> Problems:
    """Every link in a run folder, by name: whoever put it there chooses which file is written or read."""
    problems: list[Problem] = []
    waiting = [folder]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.is_symlink():
                    problems.append(_link(Path(entry.path)))
                elif entry.is_dir(follow_symlinks=False) and entry.name != _FOREIGN:
                    waiting.append(Path(entry.path))
    return tuple(problems)


def _link(path: Path) -> Problem:
    fix = "Replace it with what it points to, or move it out of the run folder."
    return Problem(where=str(path), what="is a symbolic link; links in a run folder are not followed.", fix=fix)


@contextlib.contextmanager
def memory_file(text: str = "") -> Iterator[str]:
    """The path of a file that is only in memory: nothing of it is left on a disk, however this process ends."""
    file = os.memfd_create("meshwright")
    try:
        with open(file, "w", encoding="utf-8", closefd=False) as stream:
            stream.write(text)
        yield f"/proc/{os.getpid()}/fd/{file}"
    finally:
        os.close(file)
