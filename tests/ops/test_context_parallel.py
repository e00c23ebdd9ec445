"""Attention in pieces is attention: on every kernel, and for the pieces of a ring."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from meshwright.ops import context_parallel as attention
from meshwright.ops.context_parallel import HIDDEN, attend_piece, piece_backward, piece_of

SEQUENCE = 64
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_ranks_of_a_ring_are_equally_busy_and_see_every_pair_once(num_ranks: int) -> None:
    chunk, length = 3, 6 * num_ranks
    times_seen = torch.zeros(length, length, dtype=torch.int64)
    chunks = torch.arange(length).chunk(2 * num_ranks)
    places = [torch.cat((chunks[rank], chunks[-1 - rank])) for rank in range(num_ranks)]
    for turn in range(num_ranks):
        work = set()
        for rank in range(num_ranks):
            other = (rank - turn) % num_ranks
            piece = piece_of(rank, other, chunk)
            queries, keys = places[rank][piece.queries].unsqueeze(1), places[other][piece.keys]
            seen = (queries >= keys) | (not piece.is_causal)
            times_seen[queries, keys] += seen
            work.add(int(seen.sum()))
        assert len(work) == 1, "some rank waits for another"
    assert torch.equal(times_seen, torch.ones_like(times_seen).tril())


def _drawn(dtype: torch.dtype, device: str, head: int, length: int = SEQUENCE) -> list[torch.Tensor]:
    """Query, key, value and the gradient of the output; two queries' heads to a key's."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, length, head) for heads in (4, 2, 2, 4)]
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def _whole(drawn: list[torch.Tensor], seen: torch.Tensor) -> list[torch.Tensor]:
    """The output in float64, and the gradients of query, key and value."""
    query, key, value = (each.double().requires_grad_() for each in drawn[:3])
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, (query, key, value), drawn[3].double())]


def _in_pieces(drawn: list[torch.Tensor], mask: torch.Tensor, is_plain: bool) -> list[torch.Tensor]:
    """The same from four pieces; those on the diagonal are causal without a mask where that is all there is."""
    half = drawn[0].shape[2] // 2
    halves = (slice(0, half), slice(half, 2 * half))
    found = [torch.zeros_like(each, dtype=torch.float64) for each in (drawn[3], *drawn[:3])]
    for rows in halves:
        query, grad = drawn[0][:, :, rows], drawn[3][:, :, rows]
        seen = [(keys, None if keys == rows and is_plain else mask[None, None, rows, keys]) for keys in halves]
        pieces = [attend_piece(query, *_of(drawn, keys), hidden is None, hidden) for keys, hidden in seen]
        lse = torch.stack([lse for _, lse in pieces]).logsumexp(0)
        out = sum(out * (each - lse).exp().unsqueeze(-1) for out, each in pieces)
        out = torch.as_tensor(out).to(query.dtype)
        found[0][:, :, rows] = out.double()
        for keys, hidden in seen:
            parts = piece_backward(grad, query, *_of(drawn, keys), out, lse, hidden is None, hidden)
            for total, part, where in zip(found[1:], parts, (rows, keys, keys), strict=True):
                total[:, :, where] += part
    return found


def _of(drawn: list[torch.Tensor], keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
    return drawn[1][:, :, keys], drawn[2][:, :, keys]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-13), ("float32", 1e-5), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("head", [16, 12])
@pytest.mark.parametrize("kernel", ["chosen", "plain"])
def test_pieces_add_up(
    device: str, dtype: str, bound: float, has_documents: bool, head: int, kernel: str, monkeypatch: Any
) -> None:
    if kernel == "plain":
        monkeypatch.setattr(attention, "_kernel", lambda *_: "plain")
    drawn = _drawn(getattr(torch, dtype), device, head)
    places = torch.arange(SEQUENCE, device=device)
    seen = places.unsqueeze(1) >= places
    if has_documents:  # some rows of some pieces see nothing
        seen = seen & (places.unsqueeze(1) // 24 == places // 24)
    mask = torch.zeros(seen.shape, dtype=drawn[0].dtype, device=device).masked_fill_(~seen, HIDDEN)
    for got, wanted in zip(_in_pieces(drawn, mask, not has_documents), _whole(drawn, seen), strict=True):
        assert float((got - wanted).norm() / wanted.norm()) < bound


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("head", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("which", range(4), ids=["query", "key", "value", "grad"])
def test_any_layout_in_memory(device: str, head: int, which: int) -> None:
    """Kernels are called directly, so nobody else makes their inputs fit."""
    drawn = _drawn(torch.float32 if device == "cuda" else torch.float64, device, head, length=16)
    places = torch.arange(16, device=device)
    seen = places.unsqueeze(1) >= places
    mask = torch.zeros(seen.shape, dtype=drawn[0].dtype, device=device).masked_fill_(~seen, HIDDEN)
    whole = _whole([each.clone() for each in drawn], seen)
    for order in itertools.permutations(range(4)):
        back = [order.index(dim) for dim in range(4)]
        laid = [each.permute(order).contiguous().permute(back) if i == which else each for i, each in enumerate(drawn)]
        for mine, theirs in zip(_in_pieces(laid, mask, is_plain=True), whole, strict=True):
            assert float((mine - theirs).norm() / theirs.norm().clamp(min=1e-9)) < 1e-5, order


@GPU
@pytest.mark.parametrize("head", [64, 128])
def test_large_pieces_on_a_gpu(head: int) -> None:
    drawn = _drawn(torch.bfloat16, "cuda", head, length=1024)
    places = torch.arange(1024, device="cuda")
    seen = places.unsqueeze(1) >= places
    mask = torch.zeros(seen.shape, dtype=torch.bfloat16, device="cuda").masked_fill_(~seen, HIDDEN)
    whole, found = _whole(drawn, seen), _in_pieces(drawn, mask, is_plain=True)
    for mine, theirs in zip(found, whole, strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < 2e-2
