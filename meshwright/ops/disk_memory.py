"""Tensors of layers whose home is a file, brought into a buffer of host memory while somebody changes them.

    disk in  | layer 3   | layer 4   | layer 5   |        3 buffers: layer 5 is read where 2 has been,
    cores      | 2 |       | 3 |       | 4 |                           once 2 is written
    disk out     | 1         | 2         | 3

Blocks of the file are read and written by threads, past the system's cache where the file system allows it. The file
has no name: however the process ends, its space is free again, and what a kill leaves half written is never read. A run
goes on from its checkpoint.
"""

from __future__ import annotations

import mmap
import os
import queue
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from meshwright.core.cluster import TierName
from meshwright.core.errors import MeshwrightError, error_at
from meshwright.core.units import MIB, pretty_bytes
from meshwright.ops.host_memory import flat_views

BLOCK_BYTES = 8 * MIB
"""Of one read or write, and of one hash."""
PAGE_BYTES, LINE_BYTES = mmap.PAGESIZE, 64
"""Places in the file and in buffers are multiples of the first (direct access wants that), tensors in them of the
second."""
THREADS = 4
"""That read, and as many that write: enough blocks at once for a disk to work at its full rate."""


def nameless_file(folder: Path) -> int:
    """A new file for direct access, where the file system has that; its space is free again once it is closed."""
    handle, name = tempfile.mkstemp(prefix=".meshwright-", dir=folder)
    try:
        direct = os.open(name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return handle
    finally:
        os.unlink(name)
    os.close(handle)
    return direct


class DiskFile:
    """A file of tensors, the buffers through which they pass, and the threads that move them."""

    def __init__(self, folder: Path | None, num_buffers: int):
        """`folder`: on the disk that is to be used; None: the system's folder of temporary files."""
        self.folder = Path(folder or tempfile.gettempdir())
        self.num_buffers = num_buffers
        try:
            self.handle = nameless_file(self.folder)
        except OSError as error:
            what = f"no file for optimizer states can be made there: {error.strerror or error}."
            raise error_at(str(self.folder), what, "Name a folder on a disk with run.disk.") from None
        weakref.finalize(self, os.close, self.handle)
        self.bytes = 0
        self.layers: list[LayerOnDisk] = []
        self.moved: Counter[tuple[TierName, TierName]] = Counter()
        """(source, target) -> bytes of tensors so far."""
        self.free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self.is_open = False
        self.loader, self.saver = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        """Each handles one layer after another."""
        self.readers, self.writers = ThreadPoolExecutor(THREADS), ThreadPoolExecutor(THREADS)

    def reserve(self, size: int) -> int:
        """Space on the disk, so that no later write finds it full; where it begins."""
        start, self.bytes = self.bytes, self.bytes + size
        try:
            os.posix_fallocate(self.handle, start, size)
        except OSError as error:
            left = pretty_bytes(shutil.disk_usage(self.folder).free)
            what = f"{pretty_bytes(size)} more of optimizer states cannot be reserved beside {pretty_bytes(start)}: "
            what += f"{error.strerror or error} ({left} are free)."
            fix = "Free space, name another disk with run.disk, or use a smaller share."
            raise error_at(str(self.folder), what, fix, exit_code=1) from None
        return start

    def buffer(self) -> memoryview:
        """One that is free, as soon as there is."""
        if not self.is_open:
            self.is_open = True
            size = max(layer.bytes for layer in self.layers)
            for _ in range(min(self.num_buffers, len(self.layers))):
                self.free.put(memoryview(mmap.mmap(-1, size)))
        return self.free.get()


def damaged(folder: Path, what: str) -> MeshwrightError:
    return error_at(str(folder), f"{what} The last checkpoint is untouched.", "Start again from it.", exit_code=1)


@dataclass(eq=False)
class DiskRegion:
    """Some tensors that follow each other in the file."""

    start: int
    bytes: int
    mapping: memoryview
    members: list[tuple[int, Tensor, list[Sequence[Tensor]]]]
    """(place, tensor, sets of its consecutive parts that others hold)."""
    hashes: list[int | None] = field(default_factory=list)
    """Of each block as it was written; None: by somebody else, through the mapping."""

    def bind(self, memory: memoryview) -> None:
        """Let the tensors be this memory."""
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        for place, tensor, views in self.members:
            tensor.data = whole[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for parts in views:
                for view, part in zip(parts, flat_views(tensor, parts), strict=True):
                    view.data = part


class LayerOnDisk:
    """Tensors of one layer. At rest they are views of the mapped file, which anybody may read, and write if
    `written_by_others` is called afterwards; inside of `in_memory` they are views of a buffer.

    One thread calls `prefetch`, `in_memory` and `written_by_others`.
    """

    def __init__(self, file: DiskFile):
        self.file = file
        self.regions: list[DiskRegion] = []
        self.loaded: Future[memoryview] | None = None
        """The buffer that has them."""
        self.saved: Future[None] | None = None
        file.layers.append(self)

    @property
    def bytes(self) -> int:
        """In the file, and in a buffer."""
        return sum(region.bytes for region in self.regions)

    @property
    def tensor_bytes(self) -> int:
        return sum(tensor.nbytes for region in self.regions for _, tensor, _ in region.members)

    @torch.no_grad()
    def add(self, tensors: Sequence[Tensor]) -> None:
        """Move tensors from memory into the file."""
        members, end = list[tuple[int, Tensor, list[Sequence[Tensor]]]](), 0
        for tensor in tensors:
            members.append((end, tensor, []))
            end += -(-tensor.nbytes // LINE_BYTES) * LINE_BYTES
        if not end:
            return
        size = -(-end // PAGE_BYTES) * PAGE_BYTES
        start = self.file.reserve(size)
        mapping = memoryview(mmap.mmap(self.file.handle, size, offset=start))
        old = [tensor.detach() for tensor in tensors]
        region = DiskRegion(start, size, mapping, members, [None] * -(-size // BLOCK_BYTES))
        region.bind(mapping)
        for tensor, value in zip(tensors, old, strict=True):
            if value.any():  # the file is zeros
                tensor.copy_(value)
        self.regions.append(region)

    def watch(self, tensor: Tensor, parts: Sequence[Tensor]) -> None:
        """Let `parts`, one after another, be parts of the tensor from now on, wherever it lies."""
        for region in self.regions:
            for _, each, views in region.members:
                if each is tensor:
                    views.append(parts)
        for view, part in zip(parts, flat_views(tensor, parts), strict=True):
            view.data = part

    def prefetch(self) -> None:
        """Begin to read."""
        if self.loaded is None:
            self.loaded = self.file.loader.submit(self._load)

    @contextmanager
    def in_memory(self) -> Iterator[None]:
        """Let the tensors be in memory, and write them back afterwards, while the caller goes on."""
        self.prefetch()
        assert self.loaded is not None
        buffer, self.loaded = self.loaded.result(), None
        start = 0
        for region in self.regions:
            region.bind(buffer[start : start + region.bytes])
            start += region.bytes
        try:
            yield
        except BaseException:
            self.file.free.put(buffer)
            raise
        else:
            self.saved = self.file.saver.submit(self._save, buffer)
        finally:
            for region in self.regions:
                region.bind(region.mapping)

    def settle(self) -> None:
        """Return once the file has what was last written."""
        if self.saved is not None:
            self.saved.result()
        file = self.file
        # Before somebody uses the mapping: beyond the end of a file, that would end the process.
        if (there := os.fstat(file.handle).st_size) < file.bytes:
            what = f"the file of optimizer states has {there} bytes of {file.bytes}: it was truncated."
            raise damaged(file.folder, what)

    def written_by_others(self) -> None:
        """The mapping was written."""
        loaded, self.loaded = self.loaded, None
        if loaded is not None and loaded.exception() is None:
            self.file.free.put(loaded.result())
        for region in self.regions:
            region.hashes = [None] * len(region.hashes)

    def verify(self) -> None:
        """Compare what is at rest with what was written."""
        for region in self.regions:
            for number, wanted in enumerate(region.hashes):
                at = number * BLOCK_BYTES
                self._compare(region, number, wanted, region.mapping[at : at + BLOCK_BYTES])

    def _load(self) -> memoryview:
        self.settle()
        buffer = self.file.buffer()
        try:
            self._each_block(buffer, self.file.readers, self._read)
        except BaseException:
            self.file.free.put(buffer)
            raise
        self.file.moved["disk", "host"] += self.tensor_bytes
        return buffer

    def _save(self, buffer: memoryview) -> None:
        try:
            self._each_block(buffer, self.file.writers, self._write)
        finally:
            self.file.free.put(buffer)
        self.file.moved["host", "disk"] += self.tensor_bytes

    def _each_block(
        self, buffer: memoryview, pool: ThreadPoolExecutor, call: Callable[[DiskRegion, int, memoryview], None]
    ) -> None:
        """All of them are over when this returns or raises."""
        futures, start = [], 0
        for region in self.regions:
            for number in range(len(region.hashes)):
                at = number * BLOCK_BYTES
                part = buffer[start + at : start + min(at + BLOCK_BYTES, region.bytes)]
                futures.append(pool.submit(call, region, number, part))
            start += region.bytes
        for error in [future.exception() for future in futures]:
            if error is not None:
                raise error

    def _read(self, region: DiskRegion, number: int, part: memoryview) -> None:
        self._move(region, number, part, os.preadv)
        self._compare(region, number, region.hashes[number], part)

    def _write(self, region: DiskRegion, number: int, part: memoryview) -> None:
        region.hashes[number] = xxhash.xxh3_64_intdigest(part)
        self._move(region, number, part, os.pwritev)

    def _move(
        self, region: DiskRegion, number: int, part: memoryview, call: Callable[[int, list[memoryview], int], int]
    ) -> None:
        place, done = region.start + number * BLOCK_BYTES, 0
        while done < len(part):
            try:
                count = call(self.file.handle, [part[done:]], place + done)
            except OSError as error:
                doing = "reading" if call is os.preadv else "writing"
                what = f"{doing} optimizer states failed: {error.strerror or error}."
                raise damaged(self.file.folder, what) from error
            if not count:
                what = f"the file of optimizer states ends at byte {place + done} of {self.file.bytes}."
                raise damaged(self.file.folder, what)
            done += count

    def _compare(self, region: DiskRegion, number: int, wanted: int | None, part: memoryview) -> None:
        if wanted is not None and xxhash.xxh3_64_intdigest(part) != wanted:
            place = region.start + number * BLOCK_BYTES
            what = f"{len(part)} bytes of optimizer states at byte {place} are not those that were written."
            raise damaged(self.file.folder, what)
