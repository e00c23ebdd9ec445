"""Several ranks in one process: cut tensors into boxes, deal the boxes to ranks, save them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.save import Retention, begin, commit, write_rank_file
from meshwright.checkpoint.step_folders import discard
from meshwright.core.box import Box
from meshwright.core.errors import MeshwrightError


def grid(shape: tuple[int, ...], counts: tuple[int, ...]) -> list[Box]:
    """The boxes of a mesh: dim d cut `counts[d]` ways. Some may be empty, as `torch.chunk` leaves them."""
    boxes = [Box.whole(shape)]
    for dim, count in enumerate(counts[: len(shape)]):
        boxes = [box.chunk(dim, index, count) for box in boxes for index in range(count)]
    return boxes


def ragged(shape: tuple[int, ...], num_cuts: int, dice: random.Random) -> list[Box]:
    """Cut a random box at a random place, again and again; pieces may come out empty."""
    boxes = [Box.whole(shape)]
    for _ in range(num_cuts if shape else 0):
        box = boxes.pop(dice.randrange(len(boxes)))
        dim = dice.randrange(len(shape))
        first = dice.randint(0, box.size[dim])
        left, right, start = list(box.size), list(box.size), list(box.offset)
        left[dim], right[dim] = first, box.size[dim] - first
        start[dim] += first
        boxes += [Box(shape, box.offset, tuple(left)), Box(shape, tuple(start), tuple(right))]
    return boxes


def save(
    root: Path,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    counts: tuple[int, ...] = (2, 2),
    num_ranks: int = 2,
    keep: int | Retention = 2,
    state: Mapping[str, Any] | None = None,
) -> Path:
    tmp = begin(root, step)
    dealt: list[list[tuple[str, Box, torch.Tensor]]] = [[] for _ in range(num_ranks)]
    for name, tensor in tensors.items():
        for index, box in enumerate(grid(tuple(tensor.shape), counts)):
            dealt[index % num_ranks].append((name, box, tensor[box.slices]))
    try:
        entries = [write_rank_file(tmp, rank, pieces) for rank, pieces in enumerate(dealt)]
    except MeshwrightError:
        discard(tmp)
        raise
    return commit(root, step, tmp, entries, state or {"seed": 7, "cursor": {"epoch": 0}}, keep)


def toy(step: int) -> dict[str, torch.Tensor]:
    """A few tensors whose values tell the step."""
    return {
        "weight": torch.arange(24, dtype=torch.float32).reshape(4, 6) + step,
        "bias": torch.full((5,), float(step), dtype=torch.bfloat16),
        "count": torch.tensor(step),
    }


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, NaN and -0.0 included."""
    raw = [t.contiguous().as_strided((t.numel(),), (1,)).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


def holds(folder: Path, tensors: Mapping[str, torch.Tensor]) -> bool:
    """The checkpoint is exactly these tensors."""
    reader = Reader(folder)
    if set(reader.tensor_names()) != set(tensors):
        return False
    for name, tensor in tensors.items():
        out = torch.empty_like(tensor)
        reader.read_into(name, Box.whole(tuple(tensor.shape)), out)
        if not same_bits(out, tensor):
            return False
    return True
