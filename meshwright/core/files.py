"""Writing files that are whole or absent, and reading files that a stranger gave. No torch.

Writers never follow a link; readers follow neither links nor pipes, and bound every size before memory is taken.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from meshwright.core.errors import MeshwrightError, Problem, Problems, error_at

BLOCK_BYTES = 4 << 20
_FOREIGN = "track"  # whose tools make links of their own


def write_whole(path: Path, content: str | bytes | Callable[[BinaryIO], object], *, is_durable: bool = False) -> None:
    """The whole content or nothing, for a reader at any time and (if durable) after a power cut.

    `content` may be a function that writes into the file. A link at `path` is replaced, not followed.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with open(draft, "xb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_new(path: Path, chunks: Iterable[Any], *, replaces: bool = False) -> tuple[int, str]:
    """Write the chunks (flat bytes) to a new file and fsync it; how many bytes, and their XXH3-128 in hex.

    `replaces`: to a file that is there already, in place of what it holds.
    """
    digest, num_bytes = xxhash.xxh3_128(), 0
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC | (0 if replaces else os.O_CREAT | os.O_EXCL), 0o666)
    try:
        for chunk in chunks:
            view = memoryview(chunk)
            for start in range(0, len(view), BLOCK_BYTES):
                block = view[start : start + BLOCK_BYTES]
                digest.update(block)  # while it is in the cache
                while len(block):
                    block = block[os.write(file, block) :]
            num_bytes += len(view)
        if replaces:  # only now: pages that are written again need not be taken again
            os.ftruncate(file, num_bytes)
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
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder)
    fsync_folder(folder.parent)


def open_to_append(path: Path, flags: int = os.O_WRONLY) -> int:
    """A descriptor of this very file, made where it is missing; a link is refused."""
    try:
        return os.open(path, flags | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise MeshwrightError([_link(path)]) from None
        raise


def append_line(file: int, line: bytes) -> None:
    """Append a line by one call, so that writers do not mix theirs, and close the file. A line that was cut short
    before is ended first."""
    try:
        size_bytes = os.fstat(file).st_size
        if size_bytes and os.pread(file, 1, size_bytes - 1) != b"\n":
            line = b"\n" + line
        if os.write(file, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(file)


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


def is_locked(folder: Path) -> bool:
    """Whether a process of this machine (or, on a shared file system, of another) has the run folder."""
    try:
        file = os.open(folder / ".lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def unreadable(path: Path, error: OSError) -> Problem:
    """Why a file of a stranger's folder could not be opened."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return Problem(where=str(path), what="is missing.")
    return Problem(where=str(path), what=f"cannot be read: {error.strerror or error}.")


def open_plain(folder: Path, name: str) -> tuple[int, int]:
    """(descriptor, bytes) of a regular file that lies in the folder itself. The caller closes it."""
    path = folder / name
    try:
        # Without O_NONBLOCK a pipe of that name would hang us.
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        problem = unreadable(path, error)
        if path.is_symlink():
            fix = "Copy the files themselves (`cp -rL OLD NEW`) and use that folder."
            problem = Problem(where=str(path), what="is a symbolic link; it is not followed.", fix=fix)
        raise MeshwrightError([problem]) from None
    about = os.fstat(file)
    if not stat.S_ISREG(about.st_mode):
        os.close(file)
        raise error_at(path, "is not a plain file.")
    return file, about.st_size


def read_plain(folder: Path, name: str, limit_bytes: int) -> bytes:
    """The bytes of a regular file of the folder, which may have at most `limit_bytes`."""
    file, num_bytes = open_plain(folder, name)
    with os.fdopen(file, "rb") as stream:
        if num_bytes > limit_bytes:
            raise error_at(folder / name, f"has {num_bytes} bytes; the limit is {limit_bytes}.")
        return stream.read(limit_bytes)


def parse_json(data: str | bytes, where: str) -> Any:
    """What this JSON says; a name given twice is refused, because readers differ in which one counts."""
    try:
        return json.loads(data, object_pairs_hook=_without_repeats, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise error_at(where, f"is not valid JSON: {reason}.") from None


def json_object(data: bytes, where: str) -> dict[str, Any]:
    value = parse_json(data, where)
    if not isinstance(value, dict):
        raise error_at(where, "is not a JSON object.")
    return value


def json_rows(data: bytes) -> list[dict[str, Any]]:
    """The objects among lines of JSON; a line that is cut, or is something else, is left out."""
    rows = []
    for line in data.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


def last_lines(path: Path, most_bytes: int) -> bytes:
    """The last whole lines of a file; nothing where there is none."""
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        start = max(0, os.fstat(file.fileno()).st_size - most_bytes)
        file.seek(start)
        data = file.read(most_bytes)
    return data[data.find(b"\n") + 1 :] if start else data


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        ((repeated, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{repeated[:80]!r} is there twice")
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number this program accepts")
