"""Attention of some queries over some keys, with the logarithm of the sum of exponents, so that pieces add up.

    out = sum over pieces of out_i x exp(lse_i - lse),   lse = log sum exp(lse_i)

Going backward a piece needs the whole's `out` and `lse` only (Dao et al. 2022). Shapes: (batch, heads, sequence, head);
keys and values may have fewer heads than queries. A mask is added to the scores.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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
