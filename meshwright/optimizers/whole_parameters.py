"""What a rule needs of whole parameters where ranks hold pieces: sums over all of one, or the whole matrix.

**Sums**: all ranks add up one float64 vector in which every parameter of every stage has its place: one message, on the
control group, whatever cuts the parameters. Replicas and copies of a piece are counted once.

**Whole matrices**: the ranks that cut a matrix deal the matrices out among themselves. Along an axis every rank sends
its piece of each matrix to the one rank that will have it whole, and gets its piece of the result back: two messages,
and no rank holds or computes more than its share.

    pieces of 4 matrices on 2 ranks         there                back
      rank 0:  a0 b0 c0 d0             a0 a1   c0 c1        a0 b0 c0 d0
      rank 1:  a1 b1 c1 d1             b0 b1   d0 d1        a1 b1 c1 d1

Where two axes cut, the one that cut last is undone first. Messages are padded so that all ranks send the same: equal
matrices (a sort) are dealt in turn, as many to each rank as the first gets, every piece as long as the longest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.core.box import Box
from meshwright.core.build import Build
from meshwright.ops.collectives import all_gather_single
from meshwright.ops.device_mesh import Mesh
from meshwright.optimizers.rule import ParameterPiece, squares

Shape = tuple[int, ...]
Held = dict[str, Tensor]


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


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A matrix, or a stack of them, that this rank has a piece of."""

    name: str
    box: Box
    sort: Hashable
    """Equal ones are dealt together."""


@dataclass(frozen=True, kw_only=True)
class Deal:
    """Who has a matrix, and where its pieces lie in the parts of a message."""

    name: str
    owner: int
    start: int
    boxes: list[Box]

    @property
    def whole(self) -> Box:
        filled = [box for box in self.boxes if not box.is_empty] or self.boxes[:1]
        low = [min(starts) for starts in zip(*(box.offset for box in filled), strict=True)]
        ends = zip(*([o + s for o, s in zip(box.offset, box.size, strict=True)] for box in filled), strict=True)
        return Box(filled[0].shape, tuple(low), tuple(max(end) - lo for end, lo in zip(ends, low, strict=True)))


@dataclass(frozen=True, kw_only=True)
class Round:
    """The deals along one axis."""

    group: dist.ProcessGroup
    size: int
    index: int
    part: int
    """Elements sent to each rank."""
    deals: list[Deal]
    zero: Tensor
    """What messages are made of."""

    def there(self, held: Held) -> Held:
        message = self.zero.new_zeros(self.size, self.part)
        for deal in self.deals:
            _fill(message[deal.owner], deal.start, held[deal.name])
        received = self._swap(message)
        dealt = {deal.name for deal in self.deals}
        kept = {name: value for name, value in held.items() if name not in dealt}
        for deal in self.deals:
            if deal.owner == self.index:
                kept[deal.name] = received.new_empty(deal.whole.size)
                for part, box in zip(received, deal.boxes, strict=True):
                    kept[deal.name][box.within(deal.whole)] = _read(part, deal.start, box)
        return kept

    def back(self, held: Held) -> Held:
        message = self.zero.new_zeros(self.size, self.part)
        for deal in self.deals:
            if deal.owner == self.index:
                for part, box in zip(message, deal.boxes, strict=True):
                    _fill(part, deal.start, held[deal.name][box.within(deal.whole)])
        received = self._swap(message)
        mine = {deal.name: _read(received[deal.owner], deal.start, deal.boxes[self.index]) for deal in self.deals}
        return {**held, **mine}

    def _swap(self, message: Tensor) -> Tensor:
        received = torch.empty_like(message)
        dist.all_to_all_single(received, message, group=self.group)
        return received


def _fill(part: Tensor, start: int, value: Tensor) -> None:
    part[start : start + value.numel()] = value.flatten()


def _read(part: Tensor, start: int, box: Box) -> Tensor:
    return part[start : start + math.prod(box.size)].view(box.size)


def plan_rounds(build: Build, matrices: list[Matrix], shapes: Mapping[str, tuple[int, ...]]) -> list[Round]:
    """Who gets which matrix along every axis that cuts some. All ranks call it together."""
    mesh, stages = build.mesh, "" if build.wire is None else build.wire.axis
    axes = [axis for axis, size in mesh.sizes.items() if size > 1 and axis != stages]
    held, zero = list(matrices), torch.zeros((), dtype=build.dtype, device=mesh.device)
    counts: dict[Hashable, int] = Counter(matrix.sort for matrix in matrices)
    order = {name: index for index, name in enumerate(shapes)}
    rounds = []
    # Samples are split last, when what cuts the model is done: those shards are pieces of pieces.
    for axis in sorted(axes, key=lambda axis: axis not in build.plan.sample_axes):
        cut = [matrix for matrix in held if axis in build.cut_axes[matrix.name]]
        boxes = _divided(mesh, axis, cut)
        # Elements of a sort's longest piece on any rank, 0 where it is not cut; also of sorts none of which came here.
        table = torch.zeros(len(order), dtype=torch.int64)
        for name, pieces in boxes.items():
            table[order[name]] = max(math.prod(box.size) for box in pieces)
        dist.all_reduce(table, op=dist.ReduceOp.MAX, group=mesh.control)
        longest: dict[Hashable, int] = {}
        for matrix in matrices:
            longest[matrix.sort] = max(longest.get(matrix.sort, 0), int(table[order[matrix.name]]))
        deals, part = _deal(held, boxes, longest, counts, mesh.size(axis))
        if part:
            index = mesh.index(axis)
            common = {"group": mesh.group(axis), "size": mesh.size(axis), "index": index}
            rounds.append(Round(**common, part=part, deals=list(deals.values()), zero=zero))
            held = [
                matrix if deal is None else Matrix(name=matrix.name, box=deal.whole, sort=matrix.sort)
                for matrix in held
                if (deal := deals.get(matrix.name)) is None or deal.owner == index
            ]
    return rounds


def _divided(mesh: Mesh, axis: str, matrices: list[Matrix]) -> dict[str, list[Box]]:
    """The pieces along an axis of those matrices that it cuts inside; a stack may be cut between its matrices."""
    if not matrices:
        return {}
    wide = max(len(matrix.box.shape) for matrix in matrices)
    rows = [[(*m.box.offset, *m.box.size) + (0,) * 2 * (wide - len(m.box.shape))] for m in matrices]
    mine = torch.tensor(rows, device=mesh.device)
    peers = mine.new_empty(mesh.size(axis) * len(rows), *mine.shape[1:])
    all_gather_single(peers, mine, group=mesh.group(axis))
    result = {}
    for matrix, each in zip(matrices, peers.view(mesh.size(axis), len(rows), -1).transpose(0, 1).tolist(), strict=True):
        dims = len(matrix.box.shape)
        boxes = [Box(matrix.box.shape, tuple(row[:dims]), tuple(row[dims : 2 * dims])) for row in each]
        if len({(box.offset[-2:], box.size[-2:]) for box in boxes}) > 1:
            result[matrix.name] = boxes
    return result


def _deal(
    held: list[Matrix],
    boxes: dict[str, list[Box]],
    longest: dict[Hashable, int],
    counts: dict[Hashable, int],
    ways: int,
) -> tuple[dict[str, Deal], int]:
    """(deals by name, elements of a part); `counts` becomes how many of each sort a rank has afterwards, at most."""
    deals: dict[str, Deal] = {}
    start = 0
    for sort, length in longest.items():
        if not length:
            continue
        first = len(deals)  # each sort goes on where the last one ended, so that no rank gets one more of all
        for place, name in enumerate(matrix.name for matrix in held if matrix.sort == sort):
            owner, at = (first + place) % ways, start + place // ways * length
            deals[name] = Deal(name=name, owner=owner, start=at, boxes=boxes[name])
        counts[sort] = -(-counts[sort] // ways)
        start += counts[sort] * length
    return deals, start
