"""Tiles that the fused kernel computes are those in which anything is seen, and it makes of them what a mask would."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from meshwright.ops import attention
from meshwright.ops.attention import TILE, VisibleTokens, attention_mask, dense_mask, has_kernel, visible_tokens
from meshwright.ops.recompute import is_expensive

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CASES = [
    (2 * TILE, 0, [[TILE, TILE], [2 * TILE]]),
    (3 * TILE + 17, 0, [[1, TILE + 3, 2 * TILE + 13], [3 * TILE, 17]]),
    (3 * TILE + 17, 50, [[1, TILE + 3, 2 * TILE + 13], [3 * TILE, 17]]),
    (5 * TILE, TILE + 1, None),
    (40, 7, None),
    (40, 0, [[40]]),
]


def documents_of(lengths: list[list[int]] | None) -> Tensor | None:
    if lengths is None:
        return None
    return torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths])


def plain_mask(sequence: int, window: int, documents: Tensor | None) -> Tensor:
    mask = torch.ones(1, sequence, sequence, dtype=torch.bool).tril_()
    if window:
        mask = mask.triu_(1 - window)
    return mask if documents is None else mask & (documents.unsqueeze(2) == documents.unsqueeze(1))


def first_seen(mask: Tensor) -> Tensor:
    return mask.to(torch.int32).argmax(-1)


@pytest.mark.parametrize(("sequence", "window", "lengths"), CASES)
def test_a_dense_mask_is_documents_and_window(sequence: int, window: int, lengths: list[list[int]] | None) -> None:
    documents = documents_of(lengths)
    found, plain = attention_mask(sequence, window, documents, CPU, 64), plain_mask(sequence, window, documents)
    assert isinstance(found, Tensor)
    assert torch.equal(found.squeeze(1) if len(plain) > 1 else found.unsqueeze(0), plain)
    assert torch.equal(visible_tokens(first_seen(plain)).dense(), found)


def drawn_tiles(visible: VisibleTokens, is_by_key: bool) -> Tensor:
    """1: seen in part, 2: as a whole."""
    rows, count = len(visible.first), -(-visible.first.shape[1] // TILE)
    tiles = torch.zeros(rows, count, count, dtype=torch.int64)
    for kind, (numbers, which) in enumerate(visible.by_key if is_by_key else visible.by_query, 1):
        assert numbers.is_contiguous()
        assert which.is_contiguous()  # the kernel relies on it
        for sample in range(rows):
            for row in range(count):
                chosen = which[sample, 0, row, : numbers[sample, 0, row]]
                assert len(chosen.unique()) == len(chosen)
                tiles[sample, row, chosen.long()] += kind
    return tiles.mT if is_by_key else tiles


@pytest.mark.parametrize(("sequence", "window", "lengths"), CASES)
def test_tiles_are_those_of_the_mask(sequence: int, window: int, lengths: list[list[int]] | None) -> None:
    mask = plain_mask(sequence, window, documents_of(lengths))
    count = -(-sequence // TILE)
    # Tokens after the last one: seen as the rest of their tile is, so that only real ones decide.
    some, every = torch.zeros(len(mask), count, count, dtype=torch.bool), torch.ones(len(mask), count, count).bool()
    for row in range(count):
        for column in range(count):
            tile = mask[:, row * TILE : (row + 1) * TILE, column * TILE : (column + 1) * TILE].flatten(1)
            some[:, row, column], every[:, row, column] = tile.any(1), tile.all(1)
    visible = visible_tokens(first_seen(mask))
    for is_by_key in (False, True):
        tiles = drawn_tiles(visible, is_by_key)
        assert torch.equal(tiles > 0, some)
        # The diagonal is looked at score by score, whatever is in it.
        assert torch.equal(tiles == 2, every & ~torch.eye(count, dtype=torch.bool))


def test_the_kernel_sees_what_the_mask_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its unfused form, which the CPU has."""
    monkeypatch.setattr(attention, "_compiled", lambda: flex_attention)
    for sequence, window, lengths in CASES[1:5:2]:
        mask = plain_mask(sequence, window, documents_of(lengths))
        query, key, value = (torch.randn(2, heads, sequence, 16) for heads in (4, 2, 2))
        first = first_seen(mask)
        found = attention.attend_visible(query, key, value, visible_tokens(first))
        wanted = F.scaled_dot_product_attention(query, key, value, attn_mask=dense_mask(first), enable_gqa=True)
        torch.testing.assert_close(found, wanted)


def test_heads_that_the_kernel_does_not_take_are_told() -> None:
    assert has_kernel(CUDA, 128)
    assert not has_kernel(CPU, 512)
    for size in (8, 512):
        with pytest.warns(UserWarning, match=f"heads have {size} elements"):
            assert not has_kernel(CUDA, size)


def test_selective_recomputation_keeps_what_the_kernel_made() -> None:
    assert is_expensive(torch.ops.higher_order.flex_attention)
    assert not is_expensive(torch.ops.higher_order.flex_attention_backward)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("sequence", "window", "lengths"), CASES[1:4])
def test_gradients_of_the_kernel_are_those_of_a_mask(
    sequence: int, window: int, lengths: list[list[int]] | None
) -> None:
    mask = plain_mask(sequence, window, documents_of(lengths)).to(CUDA)
    first = first_seen(mask)
    made = [torch.randn(2, heads, sequence, 64, device=CUDA, dtype=torch.bfloat16) for heads in (4, 2, 2, 4)]
    wide = [each.double().requires_grad_() for each in made[:3]]
    plain = F.scaled_dot_product_attention(*wide, attn_mask=dense_mask(first), enable_gqa=True)
    narrow = [each.requires_grad_() for each in made[:3]]
    assert attention.is_fused(narrow[0])
    out = attention.attend_visible(narrow[0], narrow[1], narrow[2], visible_tokens(first))
    found = torch.autograd.grad(out, narrow, made[3])
    wanted = torch.autograd.grad(plain, wide, made[3].double())
    for mine, theirs in zip((out, *found), (plain, *wanted), strict=True):
        assert (mine.double() - theirs).norm() < 0.02 * theirs.norm()
