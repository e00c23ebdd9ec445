"""A ring's ranks one after the other in one process: the ring's own code, with others' keys taken from beside it."""

from __future__ import annotations

import functools
import gc
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from benchmarks.gpu_timing import BOUNDS, Row, Run, Sizes, Timing, drawn, error_of, timed
from meshwright.ops.context_parallel import Ring, TokenSplit, piece_of
from meshwright.ops.traffic import RING_TAG
from meshwright.zoo.layers import Attention, attention_mask


class Ranks:
    """In place of a process group: so many ranks, all in this process."""

    group_name = "of one process"

    def __init__(self, count: int):
        self.count = count

    def size(self) -> int:
        return self.count


class Arrived(NamedTuple):
    tensor: Tensor

    def arrived(self) -> Tensor:
        return self.tensor


class VirtualRing(Ring):
    """One rank of a ring, with everybody's keys and values beside it in `held`. Its gradients of others' are added to
    `left`; without it they come back as if sent round, which costs the same and means nothing: to be timed."""

    def __init__(self, index: int, held: list[Tensor], left: list[Tensor] | None):
        super().__init__(tokens_of(index, len(held)), window=0)
        self.held, self.left = held, left
        self.num_passed: Counter[int] = Counter()

    def _pass_on(self, tensor: Tensor, tag: int) -> Any:
        turn = self.num_passed[tag] % (self.count - 1) + 1  # that keys come for, or that gradients were made at
        self.num_passed[tag] += 1
        other = (self.index - turn) % self.count
        if tag == RING_TAG:
            return Arrived(self.held[other])
        if self.left is None:
            return Arrived(tensor)
        self.left[other] += tensor
        return Arrived(torch.zeros_like(tensor))


def tokens_of(index: int, count: int) -> TokenSplit:
    return TokenSplit(group=cast(Any, Ranks(count)), index=index, is_folded=True)


def num_blocks(count: int) -> set[tuple[float, ...]]:
    """Of chunk x chunk scores, by turn; the set of what ranks have: one thing if none ever waits."""
    work = set()
    for rank in range(count):
        pieces = [piece_of(rank, (rank - turn) % count, 1) for turn in range(count)]
        work.add(
            tuple(
                (each.queries.stop - each.queries.start) * (each.keys.stop - each.keys.start) / (1 + each.is_causal)
                for each in pieces
            )
        )
    return work


Drawn = tuple[Tensor, Tensor, Tensor]
"""Query, key and value in one tensor, and the gradient of the output."""


def attention_inputs(sizes: Sizes, dtype: torch.dtype) -> Drawn:
    config = sizes.config
    query = (1, config.num_heads, sizes.sequence, config.size_of_head)
    both = (2, 1, config.num_kv_heads, sizes.sequence, config.size_of_head)
    return tuple(drawn(*shape, sizes=sizes, dtype=dtype) for shape in (query, both, query))


def shares(inputs: Drawn, count: int) -> list[Drawn]:
    """Each rank's."""
    every = [tokens_of(rank, count) for rank in range(count)]
    query, both, grad = inputs
    return [(each.own(query, 2), each.own(both, 3), each.own(grad, 2)) for each in every]


def by_virtual_ranks(inputs: Drawn, count: int, documents: Tensor | None = None) -> list[Tensor]:
    """Output and gradients of query, key and value, put together from all ranks'."""
    parts = shares(inputs, count)
    held = [both for _, both, _ in parts]
    left = [torch.zeros_like(both, dtype=torch.promote_types(both.dtype, torch.float32)) for both in held]
    outs, into_queries = [], []
    for rank, (query, both, grad) in enumerate(parts):
        ring = VirtualRing(rank, held, left)
        out, lse = ring.forward(query, both, documents)
        into_query, into_both = ring.backward(grad, query, both, out, lse, documents)
        left[rank] += into_both
        outs.append(out)
        into_queries.append(into_query)
    places = torch.arange(inputs[0].shape[2], device=inputs[0].device)
    back = torch.cat([tokens_of(rank, count).own(places, 0) for rank in range(count)]).argsort()
    into_both = torch.cat(left, 3)[:, :, :, back]
    return [torch.cat(outs, 2)[:, :, back], torch.cat(into_queries, 2)[:, :, back], into_both[0], into_both[1]]


def share_timing(inputs: Drawn, count: int) -> tuple[Timing, Timing]:
    """Forward and backward of the slower of the first rank and the last: one sees only later keys, one only earlier."""
    parts = shares(inputs, count)
    held = [both for _, both, _ in parts]
    found = []
    for rank in sorted({0, count - 1}):
        query, both, grad = parts[rank]
        ring = VirtualRing(rank, held, None)
        out, lse = ring.forward(query, both, None)
        forward = timed(functools.partial(ring.forward, query, both, None))
        found.append((forward, timed(functools.partial(ring.backward, grad, query, both, out, lse, None))))
    return max(forward for forward, _ in found), max(backward for _, backward in found)


def context_in(dtype: torch.dtype, sizes: Sizes) -> Iterator[Row]:
    with torch.device("meta"):
        attend = Attention(sizes.config).attend
    inputs = attention_inputs(sizes, dtype)
    query, key, value = leaves = [each.detach().requires_grad_() for each in (inputs[0], *inputs[1])]
    out = attend(query, key, value, None)
    backward: Run = functools.partial(torch.autograd.grad, out, leaves, inputs[2], retain_graph=True)
    wanted = [out.detach(), *backward()]
    whole = timed(lambda: attend(query, key, value, None)).ms, timed(backward).ms
    kernel = type(out.grad_fn).__name__.removesuffix("Backward0").removeprefix("ScaledDotProduct")
    row = {"dtype": str(dtype).removeprefix("torch."), "forward ms": whole[0], "backward ms": whole[1]}
    yield {"n": f"whole, {kernel}", **row, "efficiency to whole": 1.0}
    one_rank_ms = 0.0
    for count in (1, 2, 4, 8):
        work = num_blocks(count)
        error = error_of(by_virtual_ranks(inputs, count), wanted)
        first, second = share_timing(inputs, count)
        ms = first.ms + second.ms
        one_rank_ms = one_rank_ms or ms
        row |= {"forward ms": first.ms, "backward ms": second.ms, "launch ms": first.host_ms + second.host_ms}
        row |= {"blocks of each rank": sum(next(iter(work)))}
        row |= {"error": error, "equal": error < BOUNDS[dtype] and len(work) == 1}
        yield {
            "n": count,
            **row,
            "efficiency to n = 1": one_rank_ms / count / ms,
            "efficiency to whole": sum(whole) / count / ms,
        }


def documents_in(dtype: torch.dtype, sizes: Sizes) -> Iterator[Row]:
    """Equality alone, where a token sees its own document only: pieces with a mask are another kernel's."""
    with torch.device("meta"):
        attend = Attention(sizes.config).attend
    inputs = attention_inputs(sizes, dtype)
    documents = (torch.arange(sizes.sequence, device=sizes.device) * 3 // sizes.sequence).unsqueeze(0)
    mask = attention_mask(sizes.sequence, 0, documents, documents.device)
    leaves = [each.detach().requires_grad_() for each in (inputs[0], *inputs[1])]
    out = attend(leaves[0], leaves[1], leaves[2], mask)
    wanted = [out.detach(), *torch.autograd.grad(out, leaves, inputs[2])]
    for count in (2, 4):
        error = error_of(by_virtual_ranks(inputs, count, documents), wanted)
        name = f"{count}, documents"
        yield {"n": name, "dtype": str(dtype).removeprefix("torch."), "error": error, "equal": error < BOUNDS[dtype]}


def context(sizes: Sizes) -> Iterator[Row]:
    for dtype in sizes.dtypes:
        yield from context_in(dtype, sizes)
        yield from documents_in(dtype, replace(sizes, sequence=sizes.sequence // 4))
        gc.collect()
