"""The same weights for the same seed under any plan.

Every parameter is drawn from generators seeded by its name and block of rows, so that a rank draws only the rows its
piece touches, and no piece depends on the mesh.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from meshwright.core.box import Box

_BLOCK_ELEMENTS = 1 << 20

Source = Callable[[str, Box, torch.dtype], Tensor]
"""(name, piece) -> its values: from a seed, from a module's own weights, from a checkpoint."""


def seeded(value_of: Callable[[str], float | tuple[float, float]], seed: int) -> Source:
    """`value_of(name)`: a constant, or (mean, standard deviation) of a normal."""

    def draw(name: str, box: Box, dtype: torch.dtype) -> Tensor:
        value = value_of(name)
        if not isinstance(value, tuple):
            return torch.full(box.size, value, dtype=dtype)
        return _normal(name, box, value[0], value[1], seed).to(dtype)

    return draw


def _normal(name: str, box: Box, mean: float, deviation: float, seed: int) -> Tensor:
    rows, width = box.shape[0], max(1, torch.Size(box.shape[1:]).numel())
    block = max(1, _BLOCK_ELEMENTS // width)
    first, last = box.offset[0], box.offset[0] + box.size[0]
    out = torch.empty(box.size)

    def draw(start: int) -> None:
        end = min(start + block, rows)
        digest = hashlib.blake2b(f"{seed}/{name}/{start}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        drawn = torch.empty((end - start, *box.shape[1:])).normal_(mean, deviation, generator=generator)
        low, high = max(start, first), min(end, last)
        out[low - first : high - first] = drawn[(slice(low - start, high - start), *box.slices[1:])]

    starts = range(first // block * block, last, block)
    if len(starts) < 2:
        list(map(draw, starts))
        return out
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:  # one core takes eight seconds for a billion
        list(threads.map(draw, starts))
    return out


def join_in_order(box: Box, parts: list[Tensor]) -> Tensor:
    """A piece from the values of its boxes of the tensor as it lies (`box.in_order()`)."""
    return parts[0] if box.order is None or len(parts) == 1 else torch.cat(parts, box.order[0])


def from_tensors(tensors: dict[str, Tensor]) -> Source:
    def take(name: str, box: Box, dtype: torch.dtype) -> Tensor:
        return tensors[name][box.slices].to(dtype)

    return take
