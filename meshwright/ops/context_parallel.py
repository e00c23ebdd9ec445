"""One sequence over several ranks: which tokens each has, and attention that still sees all of them.

    ring      keys and values go round: rank r sends what it holds to r + 1 while it attends to it. Going backward they
              go round again, followed by their gradients, which end where the keys are at home.
    ulysses   before attention every rank trades its tokens' heads for all tokens of some heads, and back after it.

A token sees what came before it, so later tokens are more work. For the ring a sequence of n ranks is cut into 2n
chunks and rank r has chunks r and 2n - 1 - r, which makes all ranks equally busy at every turn:

    keys of        this rank           an earlier one              a later one
    what is seen   all, causally       the first chunk, by both    both chunks, by the second

A piece of attention, of some queries over some keys, comes with the logarithm of its sum of exponents, so that pieces
add up:

    out = sum over pieces of out_i x exp(lse_i - lse),   lse = log sum exp(lse_i)

Going backward a piece needs the whole's `out` and `lse` only (Dao et al. 2022). Shapes: (batch, heads, sequence, head);
keys and values may have fewer heads than queries. A mask is added to the scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from meshwright.ops.attention import Mask
from meshwright.ops.collectives import all_gather_single
from meshwright.ops.routing import Travel, precise
from meshwright.ops.traffic import COMPOSITE_OPS, RING_TAG

Attend = Callable[[Tensor, Tensor, Tensor, Mask | None], Tensor]


@dataclass(frozen=True, kw_only=True)
class TokenSplit:
    """Which of a sequence's tokens each rank has."""

    group: dist.ProcessGroup
    index: int
    is_folded: bool
    """Two chunks a rank, one from each end; else one."""

    def chunks(self, rank: int) -> tuple[int, ...]:
        return (rank, 2 * self.group.size() - 1 - rank) if self.is_folded else (rank,)

    def of_rank(self, rank: int, x: Tensor, dim: int) -> Tensor:
        pieces = x.chunk(self.group.size() * len(self.chunks(rank)), dim)
        return torch.cat([pieces[chunk] for chunk in self.chunks(rank)], dim)

    def own(self, x: Tensor, dim: int) -> Tensor:
        return self.of_rank(self.index, x, dim)

    @torch.compiler.disable
    def all(self, x: Tensor) -> Tensor:
        """(batch, own tokens, ...) of every rank -> (batch, sequence, ...) in order."""
        count, x = self.group.size(), x.contiguous()
        out = torch.empty((count * x.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device)
        all_gather_single(out, x, group=self.group)
        placed: dict[int, Tensor] = {}
        for rank, part in enumerate(out.chunk(count)):
            chunks = self.chunks(rank)
            placed |= dict(zip(chunks, part.chunk(len(chunks), dim=1), strict=True))
        return torch.cat([placed[chunk] for chunk in sorted(placed)], dim=1)

    def all_choices(self, chosen: Tensor) -> Tensor:
        """The experts that every token of the sequences has chosen."""
        return self.all(chosen.to(torch.int32)).to(chosen.dtype)


class AttentionPiece(NamedTuple):
    """A part of attention: which of this rank's queries see which of another's keys."""

    queries: slice
    keys: slice
    is_causal: bool
    mask: Tensor | None = None


def piece_of(index: int, other: int, chunk: int) -> AttentionPiece:
    """What the queries of rank `index` see of the keys of rank `other`, with chunks of so many tokens."""
    both, first, second = slice(0, 2 * chunk), slice(0, chunk), slice(chunk, 2 * chunk)
    if other == index:
        return AttentionPiece(both, both, is_causal=True)
    return (
        AttentionPiece(both, first, is_causal=False) if other < index else AttentionPiece(second, both, is_causal=False)
    )


class Passing:
    """A message to the next rank of the ring and one from the rank before, under way."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup, tag: int):
        rank, count = group.rank(), group.size()
        self.sent, self.received = tensor, torch.empty_like(tensor)
        there = dist.P2POp(dist.isend, tensor, group=group, tag=tag, group_peer=(rank + 1) % count)
        here = dist.P2POp(dist.irecv, self.received, group=group, tag=tag, group_peer=(rank - 1) % count)
        self.works = dist.batch_isend_irecv([there, here])

    def arrived(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


class Ring:
    """Attention whose keys and values go round. Keys and values travel as one tensor, (2, batch, heads, ...)."""

    def __init__(self, tokens: TokenSplit, window: int):
        self.tokens, self.window = tokens, window
        self.index, self.count = tokens.index, tokens.group.size()
        self.group_name = tokens.group.group_name

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None) -> Tensor:
        """`documents` of all the tokens of the sequences, where a token sees its own only."""
        both = torch.stack((key, value))
        return torch.ops.meshwright.ring_attention(query, both, documents, self.group_name, self.window)[0]

    def forward(self, query: Tensor, both: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(query, dtype=precise(query))
        lse = torch.empty(query.shape[:3], dtype=out.dtype, device=out.device)
        for turn in range(self.count):
            coming = self._pass_on(both, RING_TAG) if turn < self.count - 1 else None
            piece = self._piece(turn, query, documents)
            if piece is not None:
                rows, (key, value) = piece.queries, (each[:, :, piece.keys] for each in both)
                result = attend_piece(query[:, :, rows], key, value, piece.is_causal, piece.mask)
                _merge(out[:, :, rows], lse[:, :, rows], *result, is_first=turn == 0)
            both = both if coming is None else coming.arrived()
        return out.to(query.dtype), lse

    def backward(
        self, grad: Tensor, query: Tensor, both: Tensor, out: Tensor, lse: Tensor, documents: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        # Sums over pieces in float32 at least, also on their way.
        into_query, into_both = (torch.zeros_like(each, dtype=lse.dtype) for each in (query, both))
        dtype, returning = both.dtype, None
        for turn in range(self.count):
            coming = self._pass_on(both, RING_TAG) if turn < self.count - 1 else None
            piece = self._piece(turn, query, documents)
            parts = None
            if piece is not None:
                rows, (key, value) = piece.queries, (each[:, :, piece.keys] for each in both)
                ours = grad[:, :, rows], query[:, :, rows], key, value, out[:, :, rows], lse[:, :, rows]
                parts = piece_backward(*ours, piece.is_causal, piece.mask)
            # Gradients of others' keys come one turn behind the keys, and go on with this rank's added.
            total = into_both
            if turn > 0:
                total = torch.zeros_like(into_both) if returning is None else returning.arrived()
            if piece is not None and parts is not None:
                into_query[:, :, piece.queries] += parts[0]
                total[0, :, :, piece.keys] += parts[1]
                total[1, :, :, piece.keys] += parts[2]
            returning = self._pass_on(total, RING_TAG + 1) if turn > 0 else None
            both = both if coming is None else coming.arrived()
        if returning is not None:
            into_both += returning.arrived()
        return into_query.to(query.dtype), into_both.to(dtype)

    def _pass_on(self, tensor: Tensor, tag: int) -> Passing:
        return Passing(tensor, self.tokens.group, tag)

    def _piece(self, turn: int, query: Tensor, documents: Tensor | None) -> AttentionPiece | None:
        """What there is to attend to at this turn; None: all of it is beyond the window."""
        other, chunk = (self.index - turn) % self.count, query.shape[2] // 2
        nearest = (abs(self.index - other) - 1) * chunk + 1
        if other != self.index and 0 < self.window <= nearest:
            return None
        piece = piece_of(self.index, other, chunk)
        if documents is None and not 0 < self.window < query.shape[2] * self.count:
            return piece
        return piece._replace(is_causal=False, mask=self._mask(piece, other, query, documents))

    def _mask(self, piece: AttentionPiece, other: int, query: Tensor, documents: Tensor | None) -> Tensor:
        """To be added to the scores of a piece in which more than the future is not seen."""
        places = torch.arange(query.shape[2] * self.count, device=query.device)
        ours = self.tokens.own(places, 0)[piece.queries].unsqueeze(1)
        theirs = self.tokens.of_rank(other, places, 0)[piece.keys]
        seen = (ours >= theirs)[None, None]
        if self.window:
            seen = seen & (ours - theirs < self.window)
        if documents is not None:
            reading = self.tokens.own(documents, 1)[:, None, piece.queries, None]
            seen = seen & (reading == self.tokens.of_rank(other, documents, 1)[:, None, None, piece.keys])
        return torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill_(~seen, HIDDEN)


# The ring is one operator each way: a compiler cannot move, drop or repeat its messages, and a block that is recomputed
# selectively keeps its result as a whole: its pieces and messages are neither kept nor run again.


def _ring_forward(
    query: Tensor, both: Tensor, documents: Tensor | None, group: str, window: int
) -> tuple[Tensor, Tensor]:
    return _ring_of(group, window).forward(query, both.contiguous(), documents)


def _ring_backward(
    grad: Tensor, query: Tensor, both: Tensor, out: Tensor, lse: Tensor, documents: Tensor | None, group: str,
    window: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _ring_of(group, window).backward(grad, query, both.contiguous(), out, lse, documents)


def _ring_of(group_name: str, window: int) -> Ring:
    group = _resolve_process_group(group_name)
    return Ring(TokenSplit(group=group, index=group.rank(), is_folded=True), window)


COMPOSITE_OPS.update(ring_attention=_ring_forward, ring_attention_backward=_ring_backward)
_forward_op, _backward_op = (
    torch.library.custom_op(f"meshwright::{name}", COMPOSITE_OPS[name], mutates_args=())
    for name in ("ring_attention", "ring_attention_backward")
)


@_forward_op.register_fake
def _(query: Tensor, both: Tensor, documents: Tensor | None, group: str, window: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=precise(query))


@_backward_op.register_fake
def _(grad: Tensor, query: Tensor, both: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(both, memory_format=torch.contiguous_format)


def _save_for_ring(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, both, documents, ctx.group, ctx.window = inputs
    ctx.save_for_backward(query, both, *output, documents)


def _back_through_ring(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    return *torch.ops.meshwright.ring_attention_backward(grad, *saved, ctx.group, ctx.window), None, None, None


_forward_op.register_autograd(_back_through_ring, setup_context=_save_for_ring)


def _merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor, *, is_first: bool) -> None:
    """Add a piece to the sum of those before, in place."""
    if is_first:  # every query sees itself, so it covers all rows
        out.copy_(more)
        lse.copy_(more_lse)
        return
    both = torch.logaddexp(lse, more_lse)
    out.mul_((lse - both).exp_().unsqueeze(-1))
    out.addcmul_(more.to(out.dtype), (more_lse - both).exp_().unsqueeze(-1))
    lse.copy_(both)


class Ulysses:
    """`attend` over whole sequences, for a share of the heads."""

    def __init__(self, group: dist.ProcessGroup, attend: Attend):
        self.group, self.attend = group, attend

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None) -> Tensor:
        def trade(x: Tensor) -> Tensor:
            """Row i of dim 0 goes to rank i, and what it sends comes in its place: its own inverse and backward."""
            x = x.contiguous()
            out = torch.empty_like(x)
            dist.all_to_all_single(out, x, group=self.group)
            return out

        count = self.group.size()
        shares = [each.unflatten(1, (count, -1)) for each in (query, key, value)]
        sent = torch.cat(shares, dim=2).transpose(0, 1)  # one message: (rank, batch, heads of all three, tokens, head)
        whole = Travel.apply(sent, trade, trade).permute(1, 2, 0, 3, 4).flatten(2, 3)
        query, key, value = whole.split([each.shape[2] for each in shares], dim=1)
        mixed = self.attend(query, key, value, mask)
        back = Travel.apply(mixed.unflatten(2, (count, -1)).movedim(2, 0), trade, trade)
        return back.transpose(0, 1).flatten(1, 2)


HIDDEN = -1e30
"""Added to what may not be seen. Finite, so that a row of a piece may see nothing: its share of the whole is then 0."""

_aten: Any = torch.ops.aten
_ROWS = 32
"""Of lse that CUDA's memory-efficient kernel fills up to."""
_LARGE = 128
"""Tokens from which on cuDNN's kernel is used."""


def attend_piece(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The output as if there were no other keys, and its lse."""
    kernel = _kernel(query, key, mask)
    query, key, value = map(_dense, (query, key, value))
    if kernel == "cudnn":
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, is_causal)
        return out, lse.squeeze(-1)
    key, value = _for_each_head(query, key), _for_each_head(query, value)
    if kernel == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, attn_mask=mask)
    if kernel == "flash":
        return _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal)[:2]
    if kernel == "efficient":
        bias = _each(query, key, mask)
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(query, key, value, bias, True, 0.0, is_causal)
        return out, lse[:, :, : query.shape[2]]
    scores = _scores(query, key, is_causal, mask)
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp() @ value, lse


def piece_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, is_causal: bool,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """A piece's gradients of query, key and value; `out` and `lse` are those of all pieces together."""
    heads, kernel = key.shape[1], _kernel(query, key, mask)
    grad, query, key, value, out = map(_dense, (grad, query, key, value, out))
    unused = torch.zeros((), dtype=torch.int64, device=query.device)  # of random numbers: nothing is dropped
    if kernel == "cudnn":
        given = grad.contiguous(), query, key, value, out.contiguous(), lse.unsqueeze(-1).contiguous(), unused, unused
        lengths = (None, None, None, query.shape[2], key.shape[2])
        return _aten._scaled_dot_product_cudnn_attention_backward(*given, *lengths, 0.0, is_causal)
    key, value = _for_each_head(query, key), _for_each_head(query, value)
    if kernel == "plain":
        share = (_scores(query, key, is_causal, mask) - lse.unsqueeze(-1)).exp().to(grad.dtype)
        along = (grad * out).sum(-1, keepdim=True)
        into_scores = share * (grad @ value.transpose(-1, -2) - along) * query.shape[-1] ** -0.5
        into = into_scores @ key, into_scores.transpose(-1, -2) @ query, share.transpose(-1, -2) @ grad
    elif kernel == "cpu":
        into = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, lse, 0.0, is_causal, attn_mask=mask
        )
    elif kernel == "flash":
        numbers = (None, None, query.shape[2], key.shape[2], 0.0, is_causal, unused, unused)
        into = _aten._scaled_dot_product_flash_attention_backward(
            grad, query, key, value, out, lse.contiguous(), *numbers
        )
    else:
        # In 16 bits the kernel reads `out` as one it made itself: a token's heads side by side, whatever the strides
        # say. Rows past the end of lse must stay without a share.
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        lse = F.pad(lse, (0, -lse.shape[-1] % _ROWS), value=torch.inf)
        wanted = (True, True, True, False)
        into = _aten._scaled_dot_product_efficient_attention_backward(
            grad, query, key, value, _each(query, key, mask), out, lse, unused, unused, 0.0, wanted, is_causal
        )
    return into[0], _summed(into[1], heads), _summed(into[2], heads)


def _kernel(query: Tensor, key: Tensor, mask: Tensor | None) -> str:
    if not query.is_cuda:
        return "cpu"
    if query.dtype == torch.float64 or query.shape[-1] % 8 or (mask is not None and key.shape[2] % 8):
        return "plain"
    if query.dtype == torch.float32 or mask is not None:
        return "efficient"
    # On Hopper and later cuDNN's takes half of flash's time and groups of heads as they are; small pieces go wrong.
    is_large = query.shape[-1] in (64, 128) and min(query.shape[2], key.shape[2]) >= _LARGE
    return "cudnn" if is_large and torch.cuda.get_device_capability(query.device) >= (9, 0) else "flash"


def _dense(x: Tensor) -> Tensor:
    """With a head's elements side by side: kernels called directly read them so, whatever the last stride says."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _scores(query: Tensor, key: Tensor, is_causal: bool, mask: Tensor | None) -> Tensor:
    scores = (query @ key.transpose(-1, -2)) * query.shape[-1] ** -0.5
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores = scores.masked_fill(later, HIDDEN)
    return scores if mask is None else scores + mask


def _for_each_head(query: Tensor, x: Tensor) -> Tensor:
    times = query.shape[1] // x.shape[1]
    return x if times == 1 else x.repeat_interleave(times, 1)


def _summed(x: Tensor, heads: int) -> Tensor:
    """Gradients of copies of a head -> of the head."""
    return x if x.shape[1] == heads else x.unflatten(1, (heads, -1)).sum(2)


def _each(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.expand(*query.shape[:3], key.shape[2])
