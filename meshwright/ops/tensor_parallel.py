"""What a layer split over ranks says to itself: at the entry of a region, at its exit, in the embedding, in the loss.

    without `sequence`              forward       backward
      enter (input is whole)        nothing       all_reduce
      exit  (output is partial)     all_reduce    nothing
    with `sequence` (outside a region each rank holds a part of the sequence, dim 1)
      enter                         all_gather    reduce_scatter
      exit                          reduce_scatter all_gather

With `overlap` an exit leaves in pieces, each on its way while the linear before it works on the next; going backward,
pieces arrive while the linear's gradient is worked out from those before.

Plain tensors and our own autograd functions rather than DTensor: no dispatch cost per op, every message known.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.ops.collectives import all_gather, all_gather_single, reduce_scatter, reduce_scatter_single
from meshwright.ops.model_interface import Inside
from meshwright.ops.routing import fresh


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(batch, part, ...) of every rank -> (batch, sequence, ...)."""
    count = group.size()
    x = x.contiguous()
    out = torch.empty((count * x.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device)
    all_gather(out, x, group)
    return out.unflatten(0, (count, x.shape[0])).transpose(0, 1).flatten(1, 2)


def _scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(batch, sequence, ...), partial on every rank -> the sum's own (batch, part, ...)."""
    count = group.size()
    stacked = x.unflatten(1, (count, -1)).transpose(0, 1).contiguous().flatten(0, 1)
    out = torch.empty((stacked.shape[0] // count, *stacked.shape[1:]), dtype=x.dtype, device=x.device)
    reduce_scatter(out, stacked, group)
    return out


class _Border(torch.autograd.Function):
    """An entry spreads going forward and sums going backward, an exit the other way round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, sequence: bool, is_exit: bool) -> Tensor:
        ctx.group, ctx.sequence, ctx.is_exit = group, sequence, is_exit
        return _crossed(x, group, sequence, sums=is_exit)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _crossed(grad, ctx.group, ctx.sequence, sums=not ctx.is_exit), None, None, None


def _crossed(x: Tensor, group: dist.ProcessGroup, sequence: bool, *, sums: bool) -> Tensor:
    if sums:
        return fresh((_scatter if sequence else _sum)(x, group))
    return fresh(_gather(x, group)) if sequence else x.view_as(x)


class _PiecewiseExit(torch.autograd.Function):
    """x (batch, sequence, features) through a linear with split columns, summed: this rank's (batch, part, out).

    Piece j holds the j-th share of every rank's part, so what is sent lies in the order of the ranks:

    sequence   | rank 0: p0 p1 | rank 1: p0 p1 |      piece 0 = (rank 0: p0, rank 1: p0)
    """

    @staticmethod
    def forward(ctx: Any, door: Tensor, x: Tensor, weight: Tensor, group: dist.ProcessGroup, num_pieces: int) -> Tensor:
        leaving = []
        for piece in _pieces(x, group.size(), num_pieces):
            partial = F.linear(piece.contiguous(), weight)
            out = torch.empty_like(partial[0])
            leaving.append((out, partial, reduce_scatter_single(out, partial.flatten(0, 1), group=group, **_on())))
        return torch.cat([_arrived(out, work) for out, _, work in leaving], dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return grad, None, None, None, None


class _PiecewiseLinear(torch.autograd.Function):
    """What the linear needs going backward; its result has the shape of what leaves, and no numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: dist.ProcessGroup, num_pieces: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.num_pieces = group, num_pieces
        return x.new_zeros(()).expand(x.shape[0], x.shape[1] // group.size(), weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        ways = ctx.group.size()
        coming = []
        for part in grad.chunk(ctx.num_pieces, dim=1):
            part = part.contiguous()
            out = torch.empty((ways * part.shape[0], *part.shape[1:]), dtype=part.dtype, device=part.device)
            coming.append((out, part, all_gather_single(out, part, group=ctx.group, **_on())))
        into_x = torch.empty_like(x, memory_format=torch.contiguous_format) if ctx.needs_input_grad[0] else None
        whole = torch.empty((*x.shape[:-1], grad.shape[-1]), dtype=grad.dtype, device=grad.device)
        for j, (out, part, work) in enumerate(coming):
            piece = _arrived(out, work).unflatten(0, (ways, part.shape[0]))
            if into_x is not None:
                _pieces(into_x, ways, ctx.num_pieces)[j].copy_(piece @ weight)
            _pieces(whole, ways, ctx.num_pieces)[j].copy_(piece)
        # In one go, so that the sum over tokens is rounded as without pieces.
        into_weight = whole.flatten(0, -2).t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return into_x, into_weight, None, None


def _pieces(x: Tensor, ways: int, num_pieces: int) -> tuple[Tensor, ...]:
    """Views (ways, batch, tokens, ...) of the j-th share of each rank's part of the sequence."""
    return x.unflatten(1, (ways, num_pieces, -1)).transpose(0, 1).unbind(2)


def _on() -> dict[str, bool]:
    """A compiler takes no handles: it places the collectives and the waits itself."""
    return {} if torch.compiler.is_compiling() else {"async_op": True}


def _arrived(out: Tensor, work: dist.Work | None) -> Tensor:
    if work is not None:
        work.wait()
    return out


class Region:
    """The two borders of a split region, as functions of a tensor."""

    def __init__(self, group: dist.ProcessGroup, sequence: bool, dtype: torch.dtype | None = None, num_pieces: int = 1):
        """`dtype`: what is summed, at exits and of gradients at entries, where it is not what was computed."""
        assert num_pieces == 1 or (sequence and dtype is None), "only along a sequence, of what was computed"
        self.group, self.sequence, self.dtype, self.num_pieces = group, sequence, dtype, num_pieces

    def enter(self, x: Tensor) -> Tensor:
        return _Border.apply(x if self.dtype is None else x.to(self.dtype), self.group, self.sequence, False)

    def exit(self, x: Tensor) -> Tensor:
        return _Border.apply(x if self.dtype is None else x.to(self.dtype), self.group, self.sequence, True)

    def wrap(self, inside: Inside) -> None:
        """The input enters, and exits after `row`, whose bias is added once, to the sum."""
        row, before = inside.row, inside.row.forward
        entered: list[tuple[Tensor, Tensor]] = []

        def once(x: Tensor) -> Tensor:
            for given, whole in entered:  # query, key and value read one tensor: one sum of its gradients
                if given is x:
                    return whole
            entered.append((x, self.enter(x)))
            return entered[-1][1]

        def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return ((self.enter if len(inside.entries) == 1 else once)(args[0]), *args[1:])

        def enter_every(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            def change(x: Any) -> Any:
                return self.enter(x) if isinstance(x, Tensor) and x.requires_grad else x

            return tuple(map(change, args)), {name: change(value) for name, value in kwargs.items()}

        for module in inside.entries:
            if inside.every:
                module.register_forward_pre_hook(enter_every, with_kwargs=True)
            else:
                module.register_forward_pre_hook(enter)

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            if entered:  # compiled checkpoints refuse even an idle change of it
                entered.clear()
            bias = getattr(row, "bias", None)
            if self.num_pieces > 1 and isinstance(row, nn.Linear):
                # Two nodes, as a linear and an exit are: a replay that only wants what the linear saves ends before
                # any message.
                x, weight = args[0], row.weight.to(args[0].dtype)
                door = _PiecewiseLinear.apply(x, weight, self.group, self.num_pieces)
                out = _PiecewiseExit.apply(door, x.detach(), weight.detach(), self.group, self.num_pieces)
            elif bias is None:
                return self.exit(before(*args, **kwargs))
            elif hasattr(row, "without_bias"):
                out = self.exit(row.without_bias(args[0]))
            else:
                x = args[0]
                weight = row.weight.to(x.dtype)
                # A linear whose weight lies the other way round (transformers' Conv1D) is no nn.Linear.
                product: Any = getattr(row, "product", F.linear)
                out = self.exit(product(x, weight, None) if isinstance(row, nn.Linear) else x @ weight)
            return out if bias is None else out + bias.to(out.dtype)

        row.forward = forward


class VocabLookup:
    """An embedding whose rows are split: each rank looks up its own tokens, the sum is the lookup."""

    def __init__(self, table: nn.Embedding, first: int, region: Region, dtype: torch.dtype | None):
        self.table, self.first, self.region, self.dtype = table, first, region, dtype

    def __call__(self, tokens: Tensor) -> Tensor:
        weight = self.table.weight
        local = tokens - self.first
        mine = (local >= 0) & (local < weight.shape[0])
        rows = F.embedding(torch.where(mine, local, 0), weight)
        if self.dtype is not None:
            rows = rows.to(self.dtype)  # every rank but one adds zeros, so rounding before the sum is exact
        return self.region.exit(rows * mine.unsqueeze(-1).to(rows.dtype))
