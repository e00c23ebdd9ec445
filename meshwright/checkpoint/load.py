"""Load: read any box of any tensor from a checkpoint (`format.newest_good` finds the newest whose bytes are right).

The pieces on disk were cut for the plan that saved them; the box asked for is the loading plan's. What lies
in both is copied, whichever files it is in, so changing the plan between two runs needs no conversion.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open

from meshwright.checkpoint.manifest import DTYPES, Manifest, StoredPiece
from meshwright.checkpoint.memory_folder import MemoryFolder
from meshwright.checkpoint.step_folders import read_manifest
from meshwright.core.box import Box
from meshwright.core.errors import error_at


class Reader:
    """A committed folder, or a copy in memory, open for reading: shards are mapped, only what is asked for is read.

    It checks the manifest, not the hashes of the shards: `newest_good` or `MemoryFolder.verify` does that, once, for
    all ranks.
    """

    def __init__(self, folder: Path | MemoryFolder):
        self.folder = folder
        self.manifest: Manifest = folder.read_manifest() if isinstance(folder, MemoryFolder) else read_manifest(folder)
        self._pieces: dict[str, list[tuple[Box, StoredPiece]]] = {name: [] for name in self.manifest.tensors}
        for piece in self.manifest.pieces:
            self._pieces[piece.tensor].append((self.manifest.box(piece), piece))
        self._files: dict[str, Any] = {}

    @property
    def state(self) -> Mapping[str, Any]:
        return self.manifest.state

    @property
    def step(self) -> int:
        return self.manifest.step

    def tensor_names(self) -> tuple[str, ...]:
        return tuple(self.manifest.tensors)

    def read_into(self, name: str, box: Box, out: torch.Tensor) -> None:
        """Fill `out`, of shape `box.size`, with that box of the tensor."""
        entry = self.manifest.tensors.get(name)
        if entry is None:
            close = difflib.get_close_matches(name, self.tensor_names(), n=1)
            fix = f'Did you mean "{close[0]}"?' if close else f"It has {len(self._pieces)} others."
            self._refuse(f"has no tensor {name!r}.", fix)
        wanted = str(out.dtype).removeprefix("torch.")
        if tuple(box.shape) != entry.shape:
            self._refuse(f"{name!r} has shape {entry.shape} here, the model wants {tuple(box.shape)}.")
        if wanted != entry.dtype:
            self._refuse(f"{name!r} is {entry.dtype} here, the model wants {wanted}.")
        if tuple(out.shape) != tuple(box.size):
            self._refuse(f"{name!r}: the tensor to fill has shape {tuple(out.shape)}, its box {tuple(box.size)}.")
        for held, piece in self._pieces[name]:
            both = held.overlap(box)
            if both is None:
                continue
            try:
                if piece.file not in self._files:
                    self._files[piece.file] = safe_open(self.folder / piece.file, framework="pt")
                stored = self._files[piece.file].get_slice(piece.key)
                actual = (stored.get_dtype(), tuple(stored.get_shape()))
                listed = (DTYPES[entry.dtype][0], piece.size)
                if actual != listed:
                    self._refuse(f"{piece.file}: {piece.key} of {name!r} is {actual}, the manifest says {listed}.")
                # What is wanted whole may have no dim to slice.
                values = self._files[piece.file].get_tensor(piece.key) if both == held else stored[both.within(held)]
            except (OSError, SafetensorError) as error:
                self._refuse(f"{piece.file} cannot be read: {error}.")
            with torch.no_grad():
                out[both.within(box)].copy_(values)

    def _refuse(self, what: str, fix: str = "") -> NoReturn:
        raise error_at(f"checkpoint {self.folder}", what, fix, exit_code=1)
