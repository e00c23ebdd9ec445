"""The loss a chunk of tokens at a time, so that logits are never whole in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def chunked_score(score: Any, num_chunks: int) -> Any:
    """`score` over pieces of each sequence; backward computes each piece's logits again."""

    def chunked(head: Any, x: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        pieces = zip(
            x.chunk(num_chunks, dim=1),
            targets.chunk(num_chunks, dim=1),
            weights.chunk(num_chunks, dim=1),
            strict=True,
        )
        total = x.new_zeros((), dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
        for hidden, target, weight in pieces:
            total = total + checkpoint(score, head, hidden, target, weight, use_reentrant=False)
        return total

    return chunked
