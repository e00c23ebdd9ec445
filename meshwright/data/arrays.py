"""Arrays and tables that come from outside: .npy files, .npz members by name, Parquet; whether all numbers are numbers.

What a file claims is compared with its size before memory is taken for it. Packages that not everybody has are imported
here, where they are needed.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from meshwright.core.errors import MeshwrightError, Problem, error_at, nearest
from meshwright.core.units import MIB, pretty_bytes

_BLOCK_ROWS = 1 << 16
_MAX_HEADER_BYTES = 10_000
# A small file may claim to hold a lot: that much is unpacked whatever it claims, more only in proportion to its size.
_FREE_BYTES, _MAX_RATIO = 256 * MIB, 32


def optional_package(module: str, where: str, extra: str) -> Any:
    """A module of a package that not everybody has; `extra` is how to install it."""
    try:
        return import_module(module)
    except ImportError:
        what = f"reading it needs the {module.partition('.')[0]} package."
        raise error_at(where, what, f"Run: pip install meshwright[{extra}]") from None


@contextmanager
def readable(where: str, kind: str, fix: str = "") -> Iterator[None]:
    """Whatever a library raises on a broken file, as a problem of that file: what it is depends on how it is broken."""
    try:
        yield
    except MeshwrightError:
        raise
    except PermissionError as error:
        raise error_at(where, f"cannot be read: {str(error.strerror).lower()}.") from None
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:200]
        raise error_at(where, f"is not {kind}: {reason}.", fix) from None


def require_plausible(where: str, num_bytes: int, stored_bytes: int) -> None:
    """Refuse what would take far more memory than the file has bytes."""
    if num_bytes > max(_FREE_BYTES, _MAX_RATIO * stored_bytes):
        fix = f"At most {_MAX_RATIO} times as much is unpacked: if it is right, store it uncompressed."
        raise error_at(where, f"unpacks to {pretty_bytes(num_bytes)} from {pretty_bytes(stored_bytes)}.", fix)


def npz_names(path: str) -> tuple[str, ...]:
    """The names of its arrays; nothing is read."""
    with _readable_npz(path), zipfile.ZipFile(path) as archive:
        return tuple(name.removesuffix(".npy") for name in archive.namelist())


def _readable_npz(path: str) -> Any:
    return readable(path, "a readable .npz file", "Write it again with numpy.savez.")


def read_npz(path: str, wanted: tuple[str, ...]) -> dict[str, npt.NDArray[Any]]:
    names = npz_names(path)
    missing = [name for name in wanted if name not in names]
    if missing:
        raise MeshwrightError(
            Problem(where=path, what=f'has no array "{name}".', fix=nearest(name, names)) for name in missing
        )
    with _readable_npz(path), zipfile.ZipFile(path) as archive:
        arrays = {}
        for name in wanted:
            info = archive.getinfo(f"{name}.npy" if f"{name}.npy" in archive.namelist() else name)
            require_plausible(f"{path}: {name}", info.file_size, info.compress_size)
            with archive.open(info) as stream:
                read_header(stream, info.file_size)  # type: ignore[arg-type]
            with archive.open(info) as stream:
                arrays[name] = np.lib.format.read_array(stream, allow_pickle=False)
        return arrays


def map_npy(path: str) -> npt.NDArray[Any]:
    with readable(path, "a whole .npy file", "Write it again with numpy.save."):
        with open(path, "rb") as stream:
            read_header(stream, os.fstat(stream.fileno()).st_size)
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


def read_header(stream: BinaryIO, num_bytes: int) -> None:
    """Raise ValueError unless the header of an .npy file says what its size says."""
    major, _ = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(stream, max_header_size=_MAX_HEADER_BYTES)
    if dtype.hasobject or not dtype.itemsize:
        raise ValueError(f"it holds {'Python objects' if dtype.hasobject else 'nothing'}, not numbers")
    needed, actual = math.prod(shape) * dtype.itemsize, num_bytes - stream.tell()
    if any(length < 0 for length in shape) or needed != actual:
        raise ValueError(f"an array of shape {shape} and type {dtype} has {needed:,} bytes, not {actual:,}")


def first_not_finite(values: npt.NDArray[Any]) -> tuple[int, ...] | None:
    """The place of the first NaN or infinity."""
    for start in range(0, len(values), _BLOCK_ROWS):
        wrong = ~np.isfinite(values[start : start + _BLOCK_ROWS])
        if wrong.any():
            place = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
            return (start + int(place[0]), *map(int, place[1:]))
    return None


def parquet_file(path: str) -> Any:
    """An opened `pyarrow.parquet.ParquetFile`: its schema is read, its rows are not."""
    parquet = optional_package("pyarrow.parquet", path, "data")
    with readable_parquet(path):
        opened = parquet.ParquetFile(path, memory_map=True)
        assert all(isinstance(name, str) for name in opened.schema_arrow.names)  # Arrow decodes names only now
        return opened


def readable_parquet(where: str) -> Any:
    return readable(where, "readable Parquet", "Write it again, or leave it out.")
