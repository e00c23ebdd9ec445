"""Attention in which a token sees a run of tokens that ends with itself: its document, a window, or both.

Documents lie side by side, so what a token sees is told by one number: the first token that it may see. On CUDA
torch's `flex_attention` computes the tiles of scores in which anything is seen, and no others:

    first token seen   0 0 0 0 | 4 4 4 4 4 4 | 10 10       tiles of 4 x 4    p . .     p: looks at every score
                                                                              . p .     f: everything is seen
                                                                              . p p     .: not computed

The cost is that of the documents' own squares, and no mask of sequence x sequence is in memory. Elsewhere, and for
heads that the kernel does not take, the mask is dense.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

TILE = 128
"""Tokens along each side of a tile."""
HEAD_SIZES = range(16, 257)
"""That the kernel takes."""

Numbers = tuple[Tensor, Tensor]
"""Of each tile row (or column), how many tiles, and which: (rows, 1, tiles) and (rows, 1, tiles, tiles)."""


class VisibleTokens(NamedTuple):
    """What tokens see, for the fused kernel. One row for all samples, or one each."""

    first: Tensor
    """(rows, sequence): the first token that each may see."""
    by_query: tuple[Numbers, Numbers]
    """Tiles of a row of tiles: seen in part, and as a whole."""
    by_key: tuple[Numbers, Numbers]
    """Tiles of a column."""

    def dense(self) -> Tensor:
        return dense_mask(self.first)


Mask: TypeAlias = Tensor | VisibleTokens


def places_in_documents(documents: Tensor) -> Tensor:
    """Position of each token in its own document; documents: (batch, sequence), equal numbers side by side."""
    index = torch.arange(documents.shape[1], device=documents.device).expand(documents.shape)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(begins, index, 0).cummax(dim=1).values


def attention_mask(
    sequence: int, window: int, documents: Tensor | None, device: torch.device, head_size: int
) -> Mask | None:
    """Who may look at whom; None: all that came before."""
    if documents is None and not 0 < window < sequence:
        return None
    index = torch.arange(sequence, device=device).unsqueeze(0)
    first = torch.zeros_like(index) if documents is None else index - places_in_documents(documents)
    if 0 < window < sequence:
        first = torch.maximum(first, index - window + 1)
    return visible_tokens(first) if has_kernel(device, head_size) else dense_mask(first)


def has_kernel(device: torch.device, head_size: int) -> bool:
    """Whether the fused kernel takes heads of this size here; a warning, once, where only the size is in the way."""
    if device.type == "cuda" and head_size not in HEAD_SIZES:
        what = f"Attention heads have {head_size} elements; the fused kernel for packed documents and windows takes "
        takes = f"{HEAD_SIZES.start} to {HEAD_SIZES.stop - 1}. A mask of sequence x sequence is used instead."
        warnings.warn(what + takes, stacklevel=2)
    return device.type == "cuda" and head_size in HEAD_SIZES


def dense_mask(first: Tensor) -> Tensor:
    """(sequence, sequence), or with a batch and heads before: whether a token (row) may see another (column)."""
    index = torch.arange(first.shape[1], device=first.device)
    mask = (index <= index.unsqueeze(1)) & (index >= first.unsqueeze(-1))
    return mask.unsqueeze(1) if len(first) > 1 else mask[0]


def visible_tokens(first: Tensor) -> VisibleTokens:
    sequence, device = first.shape[1], first.device
    begins = torch.arange(0, sequence, TILE, device=device)
    ends = (begins + TILE - 1).clamp_(max=sequence - 1)
    # What is seen first never goes back from one token to the next: a row's first token says where its tiles begin,
    # and its last one from where on they are seen by all. On the diagonal tokens do not see those after them.
    column = torch.arange(len(begins), device=device)
    row, lowest, whole = column.unsqueeze(1), first[:, begins] // TILE, -(-first[:, ends] // TILE)
    full = (column >= whole.unsqueeze(-1)) & (column < row)
    partial = (column >= lowest.unsqueeze(-1)) & (column <= row) & ~full

    def numbers(tiles: Tensor) -> Numbers:
        # The kernel for gradients of keys and values takes rows of the list to lie side by side.
        order = tiles.to(torch.int32).contiguous().argsort(dim=-1, descending=True, stable=True)
        return tiles.sum(-1, dtype=torch.int32).unsqueeze(1), order.to(torch.int32).unsqueeze(1)

    by_query = numbers(partial), numbers(full)
    return VisibleTokens(first.to(torch.int32), by_query, (numbers(partial.mT), numbers(full.mT)))


def is_fused(query: Tensor) -> bool:
    """Whether to use the kernel here. In float32 it is no faster than a mask; and a mode that watches operators would
    see it as its parts."""
    is_watched = not torch.compiler.is_compiling() and is_in_torch_dispatch_mode(include_infra_modes=False)
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and not is_watched


@functools.cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=False)


def attend_visible(query: Tensor, key: Tensor, value: Tensor, visible: VisibleTokens) -> Tensor:
    """(batch, heads, sequence, head) each; keys and values may have fewer heads."""
    sequence = query.shape[2]
    first, stride = visible.first.flatten(), sequence if len(visible.first) > 1 else 0

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (k >= first[b * stride + q])

    tiles = [each for pair in (*visible.by_query, *visible.by_key) for each in pair]
    mask = BlockMask((sequence, sequence), *tiles, (TILE, TILE), sees)
    run = flex_attention if torch.compiler.is_compiling() else _compiled()
    return run(query, key, value, block_mask=mask, enable_gqa=query.shape[1] != key.shape[1])
