"""Sums over the whole of each parameter, wherever its pieces lie.

All ranks add up one float64 vector in which every parameter of every stage has its place: one message, on the control
group, whatever cuts the parameters. Replicas and copies of a piece are counted once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.ops.device_mesh import Mesh
from meshwright.optimizers.rule import ParameterPiece, squares

Shape = tuple[int, ...]


class Sums:
    def __init__(
        self,
        mesh: Mesh,
        shapes: Mapping[str, Shape],
        pieces: list[ParameterPiece],
        length: Callable[[Shape], int],
        places: list[Tensor],
    ):
        """`length`: sums that a parameter of some shape has; `places`: those of them that each piece adds to."""
        starts, self.total = {}, 0
        for name, shape in shapes.items():
            starts[name] = self.total
            self.total += length(shape)
        self.control, self.device = mesh.control, mesh.device
        self.lengths = [place.numel() for place in places]
        empty = torch.zeros(0, dtype=torch.int64)
        pairs = list(zip(pieces, places, strict=True))
        self.place = torch.cat([empty, *(starts[piece.name] + place.flatten() for piece, place in pairs)])
        owned = [torch.full((place.numel(),), piece.is_owned) for piece, place in pairs]
        self.is_owned = torch.cat([empty.bool(), *owned])

    def __call__(self, values: list[Tensor]) -> tuple[Tensor, ...]:
        """What each piece has, flat in the order of its places -> the same over all ranks, on the device."""
        mine = torch.cat([value.flatten().double() for value in values]) if values else torch.zeros(0).double()
        if self.control is not None:
            whole = torch.zeros(self.total, dtype=torch.float64)
            whole[self.place[self.is_owned]] = mine.cpu()[self.is_owned]
            dist.all_reduce(whole, group=self.control)
            mine = whole[self.place].to(self.device)
        return mine.split(self.lengths)


class Norms:
    """Norms of whole parameters and of tensors like them."""

    def __init__(self, mesh: Mesh, shapes: Mapping[str, Shape], pieces: list[ParameterPiece], count: int):
        places = [torch.arange(count) for _ in pieces]
        self.sums = Sums(mesh, shapes, pieces, lambda shape: count, places)
        self.device = mesh.device

    def __call__(self, *lists: list[Tensor]) -> list[list[float]]:
        """For each piece, the norm of the whole of what it is a piece of, in each of the lists."""
        table = torch.stack([squares(tensors, self.device) for tensors in lists], dim=1)
        totals = self.sums(list(table))
        return torch.stack(totals).sqrt().tolist() if totals else []
