"""Copies of checkpoints in host memory, which outlive any rank: a crash then costs the steps since the last copy.

    supervisor                                    ranks
    CheckpointMemory: two sets of empty files     by the paths in their job:
      rank-00000.safetensors ... manifest.json      rank 0: empty the manifest of the older set
      no name anywhere: a descriptor of the         each:   write and hash its file of it
      supervisor's is all that holds them           rank 0: write the manifest
    restart: the newest set with a manifest  ───> every hash is checked, as of any checkpoint; else the disk's

Only a set with a manifest counts, so one is whole while the other is written. Where the run is given up, the newest is
written to disk. The kernel frees all of it with the last process of the run, however that ends. No torch.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from meshwright.checkpoint.manifest import MANIFEST, FileEntry, Manifest, parse_manifest
from meshwright.checkpoint.step_folders import changed_file, rank_file, write_checkpoint
from meshwright.core.errors import MeshwrightError, Problems
from meshwright.core.files import BLOCK_BYTES, memory_file
from meshwright.launch.guard import leave_files, left_files


@dataclass(frozen=True)
class MemoryFolder:
    """A set of files in memory, under the names of a checkpoint's files: `folder / name` is the path of one."""

    paths: Mapping[str, str]

    def __truediv__(self, name: str) -> Path:
        return Path(self.paths[name])

    def __str__(self) -> str:
        return "in memory"

    def read_manifest(self) -> Manifest:
        """Raises where there is none: the set is empty, or was being written when a rank died."""
        return parse_manifest((self / MANIFEST).read_bytes(), "the copy in memory")

    def verify(self, manifest: Manifest) -> Problems:
        """Every file that has changed since it was written."""
        found = (changed_file(self / name, entry) for name, entry in sorted(manifest.files.items()))
        return tuple(problem for problem in found if problem is not None)

    def write_to_disk(self, root: Path) -> None:
        """As a checkpoint like any other."""

        def chunks_of(name: str, entry: FileEntry) -> Iterator[bytes]:
            with open(self / name, "rb", buffering=0) as file:
                yield from iter(lambda: file.read(BLOCK_BYTES), b"")

        write_checkpoint(root, (self / MANIFEST).read_bytes(), "the copy in memory", chunks_of)

    @property
    def held_bytes(self) -> int:
        """Memory that its files take already."""
        return sum((self / name).stat().st_blocks * 512 for name in self.paths)


def copies_in_memory(folders: Iterable[MemoryFolder]) -> dict[int, MemoryFolder]:
    """Step -> set, the newest first, of those that are whole."""
    found = {}
    for folder in filter(lambda folder: folder.paths, folders):
        with contextlib.suppress(MeshwrightError):
            found[folder.read_manifest().step] = folder
    return dict(sorted(found.items(), reverse=True))


class CheckpointMemory(contextlib.ExitStack):
    """The supervisor's: it holds two sets of files until it is closed; at first those of a killed one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: tuple[dict[str, str], ...] = ({}, {})
        self.folders = tuple(MemoryFolder(paths) for paths in self.paths)
        self.num_left = 0
        """Files that are left for a supervisor after this one."""
        about, files = left_files()
        for (place, name), file in zip(json.loads(about or "[]"), files, strict=True):
            self.callback(os.close, file)
            self.paths[place][name] = f"/proc/{os.getpid()}/fd/{file}"

    def fit(self, num_ranks: int) -> tuple[dict[str, str], ...]:
        """Have a file for each rank; what ranks are told of the sets."""
        for paths in self.paths:
            for name in (MANIFEST, *map(rank_file, range(num_ranks))):
                if name not in paths:
                    paths[name] = self.enter_context(memory_file())
        files = {(place, name): path for place, paths in enumerate(self.paths) for name, path in paths.items()}
        if len(files) != self.num_left:
            self.num_left = len(files)
            leave_files(json.dumps(list(files)), [int(Path(path).name) for path in files.values()])
        return self.paths
