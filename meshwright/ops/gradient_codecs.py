"""Sums over a group in which each rank sends few bits, and keeps what these lose for the next sum.

    bf16, int8, sign:  each rank codes n shards -> all_to_all -> rank i decodes and sums shard i, and codes it again
                       -> all_gather -> decoded                      (1-bit Adam's exchange: Tang et al. 2021)
    topk:              the largest entries and their places -> all_gather -> added up
    powersgd:          P = M Q -> all_reduce -> orthonormal P;  Q = M' P -> all_reduce -> P Q'   (Vogels et al. 2019)

What is lost is added to what is given next (error feedback: Karimireddy et al. 2019), also by the rank that codes a
sum. All ranks end with the same bits. A sum counts only once it is committed: a step that is refused leaves no trace.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshwright.core.box import Box
from meshwright.core.build import Build, OptimizerState
from meshwright.ops.collectives import all_gather
from meshwright.ops.host_memory import flat_views

if TYPE_CHECKING:
    from meshwright.techniques.compress_gradients import CompressGradients


def _in_blocks(rows: Tensor, block: int) -> Tensor:
    return F.pad(rows, (0, -rows.shape[1] % block)).view(len(rows), -1, block)


def encode(codec: str, rows: Tensor, block: int) -> Tensor:
    """Bytes of each row, equally many."""
    if codec == "bf16":
        return rows.to(torch.bfloat16).view(torch.uint8)
    size, blocks = rows.shape[1], _in_blocks(rows, block)
    if codec == "int8":
        scales = blocks.abs().amax(-1).float() / 127
        whole = (blocks / torch.where(scales > 0, scales, 1.0).unsqueeze(-1)).round().clamp(-127, 127)
        codes = whole.to(torch.int8).flatten(1)[:, :size].contiguous().view(torch.uint8)
    else:
        counts = (size - block * torch.arange(blocks.shape[1], device=rows.device)).clamp(max=block)
        scales = (blocks.abs().sum(-1) / counts).float()
        bits = (blocks >= 0).view(len(rows), -1, 8).to(torch.uint8)
        weights = 2 ** torch.arange(8, device=rows.device, dtype=torch.uint8)
        codes = (bits * weights).sum(-1, dtype=torch.uint8)[:, : -(-size // 8)]
    return torch.cat([codes, scales.contiguous().view(torch.uint8)], 1)


def decode(codec: str, coded: Tensor, size: int, block: int, dtype: torch.dtype) -> Tensor:
    """Rows of `size` numbers."""
    if codec == "bf16":
        return coded.view(torch.bfloat16).to(dtype)
    scale_bytes = 4 * -(-size // block)
    scales = coded[:, -scale_bytes:].flatten().clone().view(torch.float32).view(len(coded), -1, 1).to(dtype)
    codes = coded[:, :-scale_bytes]
    if codec == "int8":
        numbers = codes.contiguous().view(torch.int8).to(dtype)
    else:
        bits = codes.unsqueeze(-1) >> torch.arange(8, device=coded.device, dtype=torch.uint8) & 1
        numbers = (bits.flatten(1)[:, :size].to(torch.int8) * 2 - 1).to(dtype)
    return (_in_blocks(numbers, block) * scales).flatten(1)[:, :size]


class CodedSum:
    """Sums of one layer's tensors over an axis."""

    def __init__(self, build: Build, coding: CompressGradients, axis: str, names: list[str], like: Sequence[Tensor]):
        self.build, self.coding, self.axis, self.names = build, coding, axis, names
        self.group, self.ways = build.mesh.group(axis), build.mesh.size(axis)
        self.shapes = [each.shape for each in like]
        size = sum(each.numel() for each in like)
        self.dtype = torch.promote_types(like[0].dtype, torch.float32)
        self.shard = -(-size // self.ways)
        self.state: dict[str, Tensor] = {}
        self.fresh: dict[str, Tensor] = {}
        """What the state becomes with the next commit."""
        empty = torch.zeros(0, dtype=self.dtype, device=like[0].device)
        if coding.feedback:
            self.state["feedback"] = empty.new_zeros(size)
        if coding.feedback and coding.is_elementwise:
            self.state["owner"] = empty.new_zeros(self.shard)
        self.sketched = [at for at, shape in enumerate(self.shapes) if coding.is_sketched(tuple(shape))]
        for at in self.sketched if coding.codec == "powersgd" else ():
            drawn = torch.Generator().manual_seed(zlib.crc32(names[at].encode()))
            sketch = torch.randn(math.prod(self.shapes[at][1:]), coding.rank, generator=drawn)
            self.state[f"sketch.{at}"] = sketch.to(empty)

    @torch.no_grad()
    def __call__(self, values: Sequence[Tensor]) -> None:
        """Put the sum over all ranks in place of the values."""
        given = torch.cat([value.flatten() for value in values]).to(self.dtype)
        if self.coding.feedback:
            given = given + self.state["feedback"]
        if self.coding.is_elementwise:
            lost, total = self._by_shards(given)
        elif self.coding.codec == "topk":
            lost, total = self._largest(given, values[0].dtype)
        else:
            lost, total = self._sketches(given)
        if self.coding.feedback:
            self.fresh["feedback"] = lost
        for value, part in zip(values, flat_views(total, values), strict=True):
            value.copy_(part)

    def _by_shards(self, given: Tensor) -> tuple[Tensor, Tensor]:
        codec, block, size = self.coding.codec, self.coding.block, len(given)
        rows = F.pad(given, (0, self.ways * self.shard - size)).view(self.ways, -1)
        sent = encode(codec, rows, block)
        lost = given - decode(codec, sent, self.shard, block, self.dtype).flatten()[:size]
        arrived = torch.empty_like(sent)
        dist.all_to_all_single(arrived, sent, group=self.group)
        mine = decode(codec, arrived, self.shard, block, self.dtype).sum(0)
        if self.coding.feedback:
            mine = mine + self.state["owner"]
        part = encode(codec, mine.unsqueeze(0), block)
        if self.coding.feedback:
            self.fresh["owner"] = mine - decode(codec, part, self.shard, block, self.dtype)[0]
        whole = torch.empty_like(sent)
        all_gather(whole, part, self.group)
        return lost, decode(codec, whole, self.shard, block, self.dtype).flatten()[:size]

    def _largest(self, given: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        count = int(self.coding.num_kept(len(given)))
        places = given.abs().topk(count).indices
        values = given[places].to(dtype)
        part = torch.cat([values.view(torch.uint8), places.to(torch.int32).view(torch.uint8)]).unsqueeze(0)
        whole = part.new_empty(self.ways, part.numel())
        all_gather(whole, part, self.group)
        lost, total = given.clone(), torch.zeros_like(given)
        lost[places] -= values.to(self.dtype)
        for row in whole:
            numbers = row[: values.nbytes].clone().view(dtype).to(self.dtype)
            total[row[values.nbytes :].clone().view(torch.int32).long()] += numbers
        return lost, total

    def _sketches(self, given: Tensor) -> tuple[Tensor, Tensor]:
        rank, lost, total = self.coding.rank, torch.zeros_like(given), given.clone()
        views, summed = (given.split([shape.numel() for shape in self.shapes]) for given in (lost, total))
        given_of = given.split([shape.numel() for shape in self.shapes])
        matrices = [given_of[at].view(self.shapes[at][0], -1) for at in self.sketched]
        right = [matrix @ self.state[f"sketch.{at}"] for at, matrix in zip(self.sketched, matrices, strict=True)]
        others = [summed[at] for at in range(len(self.shapes)) if at not in self.sketched]
        flat = torch.cat([each.flatten() for each in (*right, *others)])
        dist.all_reduce(flat, group=self.group)
        *right, rest = flat.split([*(each.numel() for each in right), sum(each.numel() for each in others)])
        for each, part in zip(others, rest.split([each.numel() for each in others]), strict=True):
            each.copy_(part)
        if matrices:
            bases = [torch.linalg.qr(each.view(-1, rank)).Q for each in right]
            left = [matrix.T @ base for matrix, base in zip(matrices, bases, strict=True)]
            flat = torch.cat([each.flatten() for each in left])
            dist.all_reduce(flat, group=self.group)
            found = zip(self.sketched, matrices, bases, left, flat_views(flat, left), strict=True)
            for at, matrix, base, own, of_all in found:
                views[at].view_as(matrix).copy_(matrix - base @ own.T)
                summed[at].view_as(matrix).copy_(base @ of_all.T)
                self.fresh[f"sketch.{at}"] = of_all
        return lost, total

    def commit(self) -> None:
        self.state.update(self.fresh)
        self.fresh = {}

    def kept(self) -> Iterator[OptimizerState]:
        """By rank where ranks differ; what no other cut of the model can use has its place in its name."""
        build, boxes, first = self.build, self.build.boxes, self.names[0]
        every = [axis for axis in build.mesh.sizes if axis not in build.cut_axes[first]]
        apart = (self.axis,) if self.axis in build.plan.island_axes else tuple(every)
        which, is_mine = build.mesh.part(apart)[0], build.owns(first, *apart)
        for kind, value in self.state.items():
            if kind == "feedback":
                parts = value.split([shape.numel() for shape in self.shapes])
                for name, shape, part in zip(self.names, self.shapes, parts, strict=True):
                    yield OptimizerState(
                        f"coded.feedback@{which}", name, part.view(shape), boxes[name], build.owns(name, *apart)
                    )
                continue
            name = self.names[int(kind.split(".")[1])] if "." in kind else first
            place = f"{kind}@{which}of{self.ways}:{boxes[name].offset}{boxes[name].size}"
            yield OptimizerState(f"coded.{place}", name, value, Box.whole(tuple(value.shape)), is_mine)
