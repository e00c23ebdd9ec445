"""Cross entropy of rows of logits, and its gradient written over them.

A row is read once for its maximum and the sum of exponentials (an online softmax), and once more, mostly from the
cache, to be replaced by the gradient. Logits keep their dtype in memory; float32 exists only in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rows_kernel(
    logits,
    row_stride,
    out,
    out_stride,
    targets,
    first_word,
    scales,
    scores,
    statistics,
    num_words,
    HAS_STATISTICS: tl.constexpr,
    WRITES_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    out += row * out_stride
    target = tl.load(targets + row) - first_word
    has_target = (target >= 0) & (target < num_words)
    offsets = tl.arange(0, BLOCK)
    if HAS_STATISTICS:
        log_sum = tl.load(statistics + row)
    else:
        largest = -float("inf")
        total = 0.0
        for start in range(0, num_words, BLOCK):
            inside = start + offsets < num_words
            values = tl.load(logits + start + offsets, mask=inside, other=-float("inf")).to(tl.float32)
            bigger = tl.maximum(largest, tl.max(values, 0))
            total = total * tl.exp(largest - bigger) + tl.sum(tl.exp(values - bigger), 0)
            largest = bigger
        log_sum = largest + tl.log(total)
        score = tl.load(logits + target, mask=has_target, other=0.0).to(tl.float32)
        tl.store(scores + row, score)
        tl.store(statistics + row, log_sum)
    if WRITES_GRADIENT:
        scale = tl.load(scales + row).to(tl.float32)
        for start in range(0, num_words, BLOCK):
            inside = start + offsets < num_words
            values = tl.load(logits + start + offsets, mask=inside, other=-float("inf")).to(tl.float32)
            gradient = tl.exp(values - log_sum)
            gradient = tl.where((start + offsets == target) & has_target, gradient - 1.0, gradient) * scale
            tl.store(out + start + offsets, gradient.to(out.dtype.element_ty), mask=inside)


def log_sums(
    logits: Tensor, targets: Tensor, first_word: int = 0, *, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Log of the sum of exponentials of each row, and the score of its target (0 where that is another rank's).

    With `scales`, logits are replaced by the gradient of scale x loss in the same launch.
    """
    rows = logits.shape[0]
    log_sum, score = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    _launch(logits, logits, targets, first_word, scales, log_sum, score)
    return log_sum, score


def write_gradient(
    logits: Tensor, out: Tensor, targets: Tensor, first_word: int, scales: Tensor, log_sum: Tensor
) -> None:
    """The gradient of scale x loss, row by row, into `out`, which may be `logits`."""
    _launch(logits, out, targets, first_word, scales, log_sum, None)


def _launch(
    logits: Tensor,
    out: Tensor,
    targets: Tensor,
    first_word: int,
    scales: Tensor | None,
    log_sum: Tensor,
    score: Tensor | None,
) -> None:
    rows, words = logits.shape
    assert logits.stride(1) == out.stride(1) == 1
    _rows_kernel[(rows,)](
        logits,
        logits.stride(0),
        out,
        out.stride(0),
        targets,
        first_word,
        log_sum if scales is None else scales,
        log_sum if score is None else score,
        log_sum,
        words,
        HAS_STATISTICS=score is None,
        WRITES_GRADIENT=scales is not None,
        BLOCK=min(8192, triton.next_power_of_2(words)),
        num_warps=16 if words > 4096 else 4,
    )
