"""Look-ups in tables that are shared out: ids go to whoever has the row, its vector comes back.

    asked by rank 0                                  found by rank 1, for all who ask
      of rank 0: t0 t0 t1 t2      ---- ids --->        for rank 0: t0 t1 t1 t2
      of rank 1: t0 t1 t1 t2     <-- vectors ---       for rank 1: t0 t0 t2 t2

Going backward the gradients of the vectors take the way of the ids, and are added to the owner's rows: of a table only
the rows that were looked up ever travel.

Where tables lie in host memory, each row that a microbatch asks for is copied to the device once, and the sum of its
gradients back once (`HostTables`); what ranks ask of each other is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.core.build import Exchange
from meshwright.ops.collectives import swap
from meshwright.ops.routing import Travel

Counts = list[list[int]]
"""By peer and table."""
Find = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Ids of rows by table -> their vectors."""
HOST = torch.device("cpu")


class HostTables(Exchange):
    """Tables in host memory. A key numbers the rows of all of them, one table after the other.

    On a GPU, ids and rows travel on a stream of their own, which waits for what was there when the model's forward
    began (`mark`) and not for the layers launched since: the host looks up while these run.
    """

    def __init__(self, tables: Sequence[nn.Embedding], device: torch.device):
        self.tables, self.device = tables, device
        self.starts = [0, *accumulate(table.weight.shape[0] for table in tables)]
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.begun: torch.cuda.Event | None = None
        self.gradients: list[tuple[Tensor, Tensor]] = []
        """(keys, sums of gradients) of the step's microbatches; perhaps still on their way."""

    def mark(self) -> None:
        if self.stream is not None:
            self.begun = torch.cuda.current_stream(self.device).record_event()

    def __call__(self, ids: Sequence[Tensor]) -> Sequence[Tensor]:
        self._follow(self.begun)
        with torch.no_grad(), torch.cuda.stream(self.stream):  # no stream: no change
            numbered = torch.cat([each + start for each, start in zip(ids, self.starts[:-1], strict=True)])
            keys, places = numbered.unique(return_inverse=True)
            keys, weight = keys.to(HOST), self.tables[0].weight
            rows = torch.empty(len(keys), weight.shape[1], dtype=weight.dtype, pin_memory=self.stream is not None)
            for table, start, (first, last) in self._by_table(keys):
                torch.index_select(table.weight, 0, keys[first:last] - start, out=rows[first:last])
            rows = rows.to(self.device, non_blocking=True)
        if self.stream is not None:
            here = torch.cuda.current_stream(self.device)
            here.wait_stream(self.stream)
            places.record_stream(here)
            rows.record_stream(here)
        if torch.is_grad_enabled() and any(table.weight.requires_grad for table in self.tables):
            rows.requires_grad_().register_post_accumulate_grad_hook(partial(self._send_back, keys))
        return F.embedding(places, rows).split([len(each) for each in ids])

    def _follow(self, event: torch.cuda.Event | None) -> None:
        """Let the stream wait for what is launched so far, or up to an event."""
        if self.stream is not None:
            self.stream.wait_event(event or torch.cuda.current_stream(self.device).record_event())

    def _by_table(self, keys: Tensor) -> list[tuple[nn.Embedding, int, tuple[int, int]]]:
        """Each table, its first key and where its keys are among these, which are in order."""
        ends = torch.searchsorted(keys, torch.tensor(self.starts)).tolist()
        return list(zip(self.tables, self.starts[:-1], pairwise(ends), strict=True))

    def _send_back(self, keys: Tensor, rows: Tensor) -> None:
        """The gradient of the rows of a microbatch, summed over its samples, to the host."""
        gradient, rows.grad = rows.grad, None
        assert gradient is not None
        self._follow(None)
        with torch.cuda.stream(self.stream):
            there = torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=self.stream is not None)
            there.copy_(gradient, non_blocking=True)
        if self.stream is not None:
            gradient.record_stream(self.stream)
        self.gradients.append((keys, there))

    def begin_step(self) -> None:
        self.gradients = []

    def finish(self) -> None:
        """Give each table the gradient of the rows that the step has looked up, as a sparse tensor."""
        if not self.gradients:
            return
        if self.stream is not None:
            self.stream.synchronize()
        keys, values = (torch.cat(each) for each in zip(*self.gradients, strict=True))
        if len(self.gradients) > 1:
            shape = (self.starts[-1], values.shape[1])
            whole = torch.sparse_coo_tensor(keys[None], values, shape, check_invariants=False).coalesce()
            keys, values = whole.indices()[0], whole.values()
        for table, start, (first, last) in self._by_table(keys):
            if table.weight.requires_grad:
                given = (keys[first:last] - start)[None], values[first:last], tuple(table.weight.shape)
                table.weight.grad = torch.sparse_coo_tensor(*given, check_invariants=False, is_coalesced=True)


class Lookup:
    """Row r of table t is row r % step[t] of what rank first[t] + r // step[t] has of it."""

    def __init__(
        self,
        find: Find,
        first: Sequence[int],
        step: Sequence[int],
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        is_whole: bool,
    ):
        """`find`: in what this rank has of the tables. `is_whole`: a table is all on one rank, so that how much is
        asked of whom does not depend on the ids."""
        self.find, self.owners, self.group, self.is_whole = find, tuple(first), group, is_whole
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
        answers = torch.cat([vectors.to(dtype) for vectors in self.find(of_table)])

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
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.group)
        asked, answered = torch.stack((counts, received)).view(2, self.ways, -1).tolist()
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
