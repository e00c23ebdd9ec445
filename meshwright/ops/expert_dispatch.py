"""Rows to the ranks that hold their experts, and what becomes of them back again.

    4 experts on 2 ranks; a1 is what rank a has for expert 1

      rank a   a0 a1 | a2 a3      all_to_all      a0 a1 | b0 b1      by expert      a0 b0 | a1 b1
      rank b   b0 b1 | b2 b3     ----------->     a2 a3 | b2 b3     --------->      a2 b2 | a3 b3

Each rank first says how many rows it has for every expert, so messages are as long as they must be: no padding, and a
rank that nobody chose gets nothing. The way back is the mirror image, and gradients take the opposite ways.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.ops.routing import Back, Send, fresh


def swap(rows: Tensor, given: list[int], taken: list[int], group: dist.ProcessGroup) -> Tensor:
    """Rows, `given` to each peer in turn, for the rows `taken` from each."""
    received = rows.new_empty(sum(taken), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), taken, given, group=group)
    return received


@dataclass(frozen=True, kw_only=True)
class Trip:
    """Where the rows of one pass through a layer go, known to both ends."""

    group: dist.ProcessGroup
    sent: list[int]
    """Rows of this rank for each rank."""
    received: list[list[int]]
    """Rows of each rank for each of the experts here."""

    def there(self, rows: Tensor) -> Tensor:
        arrived = swap(rows, self.sent, self._from_each, self.group)
        return _transposed(arrived, self.received)

    def back(self, rows: Tensor) -> Tensor:
        by_expert = [list(column) for column in zip(*self.received, strict=True)]
        return swap(_transposed(rows, by_expert), self._from_each, self.sent, self.group)

    @property
    def _from_each(self) -> list[int]:
        return [sum(row) for row in self.received]


def _transposed(rows: Tensor, lengths: list[list[int]]) -> Tensor:
    """Runs of rows that lie in the order of a table of lengths, in the order of its columns instead."""
    if len(lengths) == 1 or len(lengths[0]) == 1:
        return rows
    runs = rows.split([length for row in lengths for length in row])
    width = len(lengths[0])
    return torch.cat([run for column in range(width) for run in runs[column::width]])


class _There(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        return fresh(trip.there(rows))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.trip.back(grad), None


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        return fresh(trip.back(rows))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.trip.there(grad), None


def sending_over(group: dist.ProcessGroup) -> Send:
    """For experts dealt to the ranks of `group`, equally many to each, in their order."""

    def send(rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Back]:
        peers = torch.empty_like(counts)
        dist.all_to_all_single(peers, counts, group=group)
        ways = group.size()
        # One copy to the host for both tables.
        sent, received = torch.stack((counts, peers)).view(2, ways, -1).tolist()
        trip = Trip(group=group, sent=[sum(row) for row in sent], received=received)
        return _There.apply(rows, trip), peers.view(ways, -1).sum(0), lambda out: _Back.apply(out, trip)

    return send
