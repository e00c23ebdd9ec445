"""Bytes of a file into a box of a tensor, with one large read where the box is one run of bytes.

A file is read, not mapped: mapped pages would count as this process's memory, and a rank must need no more than its own
slices. What is not one run, or of another dtype, goes through a buffer of a few MiB.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from mmap import mmap

import torch
from torch import Tensor

from meshwright.checkpoint.manifest import DTYPES
from meshwright.core.box import Box
from meshwright.core.errors import MeshwrightError, Problem

BUFFER_BYTES = 4 << 20
SMALL_RUN_BYTES = 64 << 10
"""Shorter runs are read together with what lies between them: a disk reads that much anyway."""
_MOST_BYTES_OF_A_READ = 1 << 30


def read_box(file: int, start: int, dtype: str, box: Box, out: Tensor, where: str) -> None:
    """Fill `out`, of the size of the box and any strides and dtype, from the tensor at byte `start`."""
    if box.is_empty:
        return
    stored, item = getattr(torch, dtype), DTYPES[dtype][1]
    with torch.no_grad():
        for offset, rows, target in _runs(box, out, item):
            is_whole = rows.size == rows.shape
            if is_whole and target.dtype == stored and target.is_contiguous():
                _fill(file, start + offset * item, target, where)
            else:
                _fill_through_buffer(file, start + offset * item, stored, rows, target, where)


def _runs(box: Box, out: Tensor, item: int) -> Iterator[tuple[int, Box, Tensor]]:
    """(first element, box within the rows read, where it goes): as few as the layout allows."""
    if not box.shape:
        yield 0, box, out
        return
    width = math.prod(box.shape[1:])
    is_run = tuple(box.size[1:]) == tuple(box.shape[1:])
    is_short = math.prod(box.size[1:]) * item < SMALL_RUN_BYTES
    inner = Box(tuple(box.shape[1:]), tuple(box.offset[1:]), tuple(box.size[1:]))
    if is_run or len(box.shape) == 1 or (is_short and width * item <= BUFFER_BYTES):
        rows = Box((box.size[0], *box.shape[1:]), (0, *inner.offset), tuple(box.size))
        yield box.offset[0] * width, rows, out
        return
    for row in range(box.size[0]):
        for offset, rows, target in _runs(inner, out[row], item):
            yield (box.offset[0] + row) * width + offset, rows, target


def _fill_through_buffer(file: int, start: int, stored: torch.dtype, rows: Box, out: Tensor, where: str) -> None:
    """Whole rows into a buffer, their columns from there; a row longer than the buffer in parts."""
    if not rows.shape:
        held = torch.empty((), dtype=stored)
        _fill(file, start, held, where)
        out.copy_(held)
        return
    width, item = math.prod(rows.shape[1:]), stored.itemsize
    if width * item > BUFFER_BYTES and len(rows.shape) > 1:  # only whole rows come here that long
        inner = Box(tuple(rows.shape[1:]), (0,) * (len(rows.shape) - 1), tuple(rows.shape[1:]))
        for row in range(rows.size[0]):
            _fill_through_buffer(file, start + row * width * item, stored, inner, out[row], where)
        return
    count = max(1, BUFFER_BYTES // (width * item))
    height = min(count, rows.size[0])
    held = _buffer(height * width, stored).view(height, *rows.shape[1:])
    for first in range(0, rows.size[0], count):
        last = min(first + count, rows.size[0])
        if last < rows.size[0]:
            _read_ahead(file, start + last * width * item, count * width * item)
        _fill(file, start + first * width * item, held[: last - first], where)
        out[first:last].copy_(held[(slice(0, last - first), *rows.slices[1:])])


def _read_ahead(file: int, start: int, num_bytes: int) -> None:
    """The disk reads the next rows while these are converted; where there is no such wish, it does not."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, start, num_bytes, os.POSIX_FADV_WILLNEED)


def _buffer(num_elements: int, dtype: torch.dtype) -> Tensor:
    """Memory of its own that goes back when it is dropped; from the heap it would leave holes between the slices."""
    return torch.frombuffer(mmap(-1, num_elements * dtype.itemsize), dtype=dtype)


def _fill(file: int, start: int, out: Tensor, where: str) -> None:
    view = memoryview(out.as_strided((out.numel(),), (1,)).view(torch.uint8).numpy())
    while len(view):
        count = os.preadv(file, [view[:_MOST_BYTES_OF_A_READ]], start)
        if count == 0:
            raise MeshwrightError([Problem(where=where, what=f"ends before byte {start + len(view)}.")])
        view, start = view[count:], start + count
