"""Look-ups in tables that are shared out: ids go to whoever has the row, its vector comes back.

    asked by rank 0                                  found by rank 1, for all who ask
      of rank 0: t0 t0 t1 t2      ---- ids --->        for rank 0: t0 t1 t1 t2
      of rank 1: t0 t1 t1 t2     <-- vectors ---       for rank 1: t0 t0 t2 t2

Going backward the gradients of the vectors take the way of the ids, and are added to the owner's rows: of a table only
the rows that were looked up ever travel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.ops.collectives import swap
from meshwright.ops.routing import Travel

Counts = list[list[int]]
"""By peer and table."""


class Lookup:
    """Row r of table t is row r % step[t] of what rank first[t] + r // step[t] has of it."""

    def __init__(
        self,
        tables: Sequence[nn.Module],
        first: Sequence[int],
        step: Sequence[int],
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        is_whole: bool,
    ):
        """`is_whole`: a table is all on one rank, so that how much is asked of whom does not depend on the ids."""
        self.tables, self.owners, self.group, self.is_whole = tables, tuple(first), group, is_whole
        self.first, self.step = torch.tensor(first, device=device), torch.tensor(step, device=device)
        self.ways, self.index = dist.get_world_size(group), dist.get_rank(group)

    def __call__(self, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """(samples, tables) -> for every table the vectors of all samples."""
        samples, num_tables = ids.shape
        table = torch.arange(num_tables, device=ids.device)
        # By owner, then by table: as owners answer.
        key, order = ((self.first + ids // self.step) * num_tables + table).flatten().sort(stable=True)
        asked, answered = self._counts(key, samples)
        given, taken = [sum(row) for row in asked], [sum(row) for row in answered]
        rows = swap((ids % self.step).flatten()[order], given, taken, self.group)
        # All peers' rows, table after table, and where in the answer each belongs.
        by_table = torch.arange(num_tables).repeat(self.ways).repeat_interleave(torch.tensor(answered).flatten())
        place = by_table.to(rows.device).argsort(stable=True)
        of_table = rows[place].split([sum(column) for column in zip(*answered, strict=True)])
        # Tables that nobody asked for take part too: then all ranks agree on whether there is a gradient to send.
        answers = torch.cat([module(each).to(dtype) for module, each in zip(self.tables, of_table, strict=True)])

        def fetch(vectors: Tensor) -> Tensor:
            """To those who asked, each where the id stood."""
            received = swap(torch.empty_like(vectors).index_copy_(0, place, vectors), taken, given, self.group)
            return torch.empty_like(received).index_copy_(0, order, received)

        def fetch_back(grad: Tensor) -> Tensor:
            return swap(grad.index_select(0, order), given, taken, self.group).index_select(0, place)

        vectors = Travel.apply(answers, fetch, fetch_back)
        return vectors.view(samples, num_tables, -1).unbind(1)

    def _counts(self, key: Tensor, samples: int) -> tuple[Counts, Counts]:
        """What this rank asks of each peer, and what each asks of it."""
        if self.is_whole:  # all ranks have equally many samples
            asked = [[samples * (owner == peer) for owner in self.owners] for peer in range(self.ways)]
            return asked, [asked[self.index]] * self.ways
        ends = torch.arange(self.ways * len(self.owners) + 1, device=key.device)
        counts = torch.searchsorted(key, ends).diff()
        told = torch.empty_like(counts)
        dist.all_to_all_single(told, counts, group=self.group)
        asked, answered = torch.stack((counts, told)).view(2, self.ways, -1).tolist()
        return asked, answered


ParameterPlace = tuple[nn.Module, str, nn.Parameter]
"""A parameter and where it hangs."""


def take_out_empty(tables: nn.Module) -> list[ParameterPlace]:
    """Those without elements, which the module no longer has."""
    empty = [
        (module, name, value)
        for module in tables.modules()
        for name, value in module._parameters.items()
        if value is not None and not value.numel()
    ]
    for module, name, _ in empty:
        del module._parameters[name]
    return empty


def put_back(held: list[ParameterPlace], dtype: torch.dtype, device: torch.device) -> None:
    """Where they were, no longer on the meta device."""
    for module, name, value in held:
        filled = torch.empty(value.shape, dtype=dtype, device=device)
        module._parameters[name] = nn.Parameter(filled, requires_grad=value.requires_grad)
