"""Sums of gradients over the ranks of an axis: in buckets while backward goes on, or late in one message.

There is a bucket for each layer, summed over the replicas. Each parameter's `.grad` is a view into its layer's flat
bucket, so nothing is copied. All ranks sum the buckets in one order, whatever their own backward did: a bucket leaves
as soon as its last gradient of the last microbatch has arrived and those before it have left. The order is the one in
which the first rank's gradients arrived in the first step. A parameter that took no part in a rank's step adds zeros,
and the rest waits for the end of the backward passes. Of large tables only the rows that a step has looked up may be
sent (`LookedUp`): each rank gathers those of all ranks when the backward passes are over, as many as were looked up,
and adds them in the order of the ranks, so that all have the same bits. A layer whose gradients leave the device has no
lasting bucket: one is made when they are all there, and let go of once its sum has left.

Late sums are of gradients that are partial for another reason, such as a norm's under a split sequence.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.core.all_reduce import AllReduce
from meshwright.core.build import Build, Exchange, OptimizerState
from meshwright.ops.collectives import all_gather, all_reduce_by_sends
from meshwright.ops.fsdp import local
from meshwright.ops.gradient_codecs import CodedSum
from meshwright.ops.host_memory import HostUnit, flat_views
from meshwright.ops.model_interface import ParameterUnit

if TYPE_CHECKING:
    from meshwright.techniques.compress_gradients import CompressGradients


class LookedUp:
    """A table and the ids that a step has looked up in it: other rows have no gradient."""

    def __init__(self, table: nn.Embedding, rows_pay: Callable[[int, int, int], bool]):
        """`rows_pay`: by the ids of a rank's step, and the table's rows and bytes of each."""
        self.weight, self.rows_pay, self.ids = table.weight, rows_pay, list[Tensor]()
        table.register_forward_pre_hook(self.keep)

    def keep(self, table: nn.Module, given: tuple[Tensor, ...]) -> None:
        if torch.is_grad_enabled():
            self.ids.append(given[0].flatten())

    @property
    def pays(self) -> bool:
        """Whether rows are gathered in this step, and not the whole table summed."""
        rows, columns = self.weight.shape
        return self.rows_pay(sum(len(ids) for ids in self.ids), rows, columns * self.weight.element_size())

    def take(self) -> tuple[Tensor, Tensor]:
        """The ids in order and their rows of the gradient, which are zero from here on; of equal ids the first has the
        row, the others zeros."""
        assert self.weight.grad is not None
        ids, gradient = torch.cat(self.ids).sort().values, self.weight.grad
        rows = gradient[ids]
        rows[1:].masked_fill_((ids[1:] == ids[:-1])[:, None], 0)
        gradient.index_fill_(0, ids, 0)
        return ids, rows


@torch.no_grad()
def gather_rows(tables: Sequence[LookedUp], group: dist.ProcessGroup) -> None:
    """Add all ranks' rows to the tables' gradients."""
    taken, ways = [table.take() for table in tables], group.size()
    ids, rows = torch.cat([ids for ids, _ in taken]), torch.cat([rows for _, rows in taken])
    all_ids, all_rows = ids.new_empty(ways * len(ids)), rows.new_empty(ways * len(rows), rows.shape[1])
    all_gather(all_ids, ids, group)
    all_gather(all_rows, rows, group)
    counts = [len(ids) for ids, _ in taken]
    for ids, rows in zip(all_ids.chunk(ways), all_rows.chunk(ways), strict=True):  # no row twice in one sum
        for table, at, added in zip(tables, ids.split(counts), rows.split(counts), strict=True):
            assert table.weight.grad is not None
            table.weight.grad.index_add_(0, at, added)


class Bucket:
    def __init__(self, parameters: list[nn.Parameter], chunk: int, host: HostUnit | None, tables: list[LookedUp]):
        """`host`: where sums go as soon as they are made. `tables`: the last of the parameters, in rising order."""
        self.parameters, self.chunk, self.host, self.tables = parameters, chunk, host, tables
        self.gathered: list[LookedUp] = []
        """Tables whose rows are gathered in this step; the rest of the bucket is summed."""
        size = 0 if host else sum(parameter.numel() for parameter in parameters)
        self.flat = torch.zeros(size, dtype=parameters[0].dtype, device=parameters[0].device)
        self.views = () if host else flat_views(self.flat, parameters)
        self.is_last = self.is_ready = self.rests = False
        """`rests`: there are no gradients in this step."""
        self.missing = 0
        self.work: dist.Work | None = None


class Buckets(Exchange):
    """The buckets of every unit that has trained parameters."""

    def __init__(
        self,
        units: Iterable[ParameterUnit],
        group: dist.ProcessGroup,
        zero_filled: set[int],
        host_units: Sequence[HostUnit],
        algorithm: AllReduce | None = None,
        tables: Sequence[LookedUp] = (),
    ):
        """`zero_filled` and `host_units`: as in `Build`. With an `algorithm`, which waits for other ranks round by
        round, sums are made when the backward passes are over. Of `tables` that it pays for, rows are gathered."""
        leaving = {id(host.parameters[0]): host for host in host_units if host.leaves_summed}
        self.group, self.zero_filled, self.algorithm = group, zero_filled, algorithm
        table_of = {id(table.weight): table for table in tables}
        self.buckets: list[Bucket] = []
        # Weakly: autograd's hooks are out of the garbage collector's sight, and would keep the group for ever.
        arrived = weakref.WeakMethod(self._arrived)
        for unit in units:
            trained = [parameter for parameter in unit.parameters if parameter.requires_grad]
            if not trained:
                continue
            trained.sort(key=lambda parameter: len(parameter) if id(parameter) in table_of else 0)
            own = [table_of[id(parameter)] for parameter in trained if id(parameter) in table_of]
            at = len(self.buckets)
            for parameter in trained:
                parameter.register_post_accumulate_grad_hook(lambda p, at=at: (arrived() or _gone)(p, at))
            self.buckets.append(Bucket(trained, unit.chunk, leaving.get(id(trained[0])), own))
        self.order = list(reversed(range(len(self.buckets))))
        self.num_left = 0
        """Buckets of the order that are under way in this step."""
        self.arrivals: list[int] | None = []
        """In the first step, buckets as they became ready; None afterwards."""

    def begin_step(self) -> None:
        self.num_left = 0
        for bucket in self.buckets:
            for table in bucket.tables:
                table.ids.clear()
            bucket.is_ready = bucket.rests = not any(parameter.requires_grad for parameter in bucket.parameters)
            if bucket.rests:
                continue
            bucket.flat.zero_()
            for parameter, view in zip(bucket.parameters, bucket.views, strict=False):
                parameter.grad = view
            self.zero_filled.update(map(id, bucket.parameters))

    def before_backward(self, chunk: int, *, is_last: bool) -> None:
        """Gradients are whole after the last backward of the chunk where the bucket's layers begin."""
        for bucket in self.buckets:
            bucket.is_last, bucket.missing = is_last and chunk == bucket.chunk, len(bucket.parameters)

    def _arrived(self, parameter: Tensor, at: int) -> None:
        bucket = self.buckets[at]
        self.zero_filled.discard(id(parameter))
        bucket.missing -= 1
        if bucket.is_last and bucket.missing == 0:
            bucket.is_ready = True
            if self.arrivals is not None:
                self.arrivals.append(at)
            while (
                self.algorithm is None
                and self.num_left < len(self.order)
                and self.buckets[self.order[self.num_left]].is_ready
            ):
                self._send_next()

    def _send_next(self) -> None:
        bucket = self.buckets[self.order[self.num_left]]
        if bucket.rests:
            self.num_left += 1
            return
        if bucket.host is not None:
            for other in self.buckets:  # at most one is under way while the next one's gradients are made
                if other.host is not None:
                    self._end(other)
            given = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket.parameters]
            bucket.flat = torch.cat([gradient.flatten() for gradient in given])
            for parameter in bucket.parameters:
                parameter.grad = None
        if self.algorithm is None:
            bucket.gathered = list(takewhile(lambda table: table.pays, reversed(bucket.tables)))  # the largest
            num_summed = bucket.flat.numel() - sum(table.weight.numel() for table in bucket.gathered)
            if num_summed:
                bucket.work = dist.all_reduce(bucket.flat[:num_summed], group=self.group, async_op=True)
        else:
            all_reduce_by_sends(bucket.flat, self.group, self.algorithm)
        self.num_left += 1

    def _end(self, bucket: Bucket) -> None:
        """Wait for a sum, and send it where it is to be."""
        if bucket.work is None:
            return
        bucket.work.wait()
        bucket.work = None
        if bucket.host is not None:
            for at, gradient in enumerate(flat_views(bucket.flat, bucket.parameters)):
                bucket.host.take(at, gradient)
            bucket.flat = bucket.flat.new_empty(0)

    def finish(self) -> None:
        while self.num_left < len(self.order):
            self._send_next()
        for bucket in self.buckets:
            if bucket.gathered and not bucket.rests:
                gather_rows(bucket.gathered, self.group)
            self._end(bucket)
        if self.arrivals is not None and self.buckets:
            arrived = self.arrivals + [at for at in self.order if at not in self.arrivals]
            order = torch.tensor(arrived, device=self.buckets[0].flat.device)
            dist.broadcast(order, group=self.group, group_src=0)
            self.order, self.arrivals = order.tolist(), None


class CodedBuckets(Buckets):
    """Each bucket's sum in few bits, when the backward passes are over."""

    def __init__(self, build: Build, coding: CompressGradients, axis: str):
        super().__init__(build.units(), build.mesh.group(axis), build.zero_filled, ())
        names = {id(parameter): name for name, parameter in build.named_parameters()}
        self.sums = [
            CodedSum(build, coding, axis, [names[id(p)] for p in bucket.parameters], bucket.views)
            for bucket in self.buckets
        ]

    def _arrived(self, parameter: Tensor, at: int) -> None:
        self.zero_filled.discard(id(parameter))

    def finish(self) -> None:
        for bucket, coded in zip(self.buckets, self.sums, strict=True):
            coded(bucket.views)

    def after_update(self, count: int) -> None:
        for coded in self.sums:
            coded.commit()

    def kept(self) -> Iterable[OptimizerState]:
        return chain.from_iterable(coded.kept() for coded in self.sums)


def _gone(*_: Any) -> None:
    raise AssertionError("a gradient arrived after its bucket was given up")


class LateSums(Exchange):
    """Sums that several techniques ask for, made when the backward passes are over: one message for each group."""

    def __init__(self, build: Build):
        self.build: Build = weakref.proxy(build)  # the build holds this: a model must go when nobody needs it
        self.groups: dict[str, list[dist.ProcessGroup]] = {}
        """Parameter -> the groups that its gradient is summed over."""

    def add(self, name: str, group: dist.ProcessGroup) -> None:
        self.groups.setdefault(name, []).append(group)

    def finish(self) -> None:
        gradients = {}
        for name, parameter in self.build.named_parameters():
            if name not in self.groups or not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
                self.build.zero_filled.add(id(parameter))
            gradients[name] = local(parameter.grad)
        by_group: dict[int, tuple[dist.ProcessGroup, list[Tensor]]] = {}
        for name, groups in self.groups.items():
            for group in groups if name in gradients else ():  # a frozen one has none
                by_group.setdefault(id(group), (group, []))[1].append(gradients[name])
        for group, tensors in by_group.values():
            flat = torch.cat([tensor.flatten() for tensor in tensors])
            dist.all_reduce(flat, group=group)
            for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                tensor.copy_(part.view_as(tensor))
