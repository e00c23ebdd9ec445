"""Attention's kernels beside each other on the GPU at hand: which backend does torch take, and is it the fastest?

    python -m benchmarks.attention_backends [RESULT.json]

Milliseconds forward and backward of 16,384 tokens and a width of 2,048 in bf16, by head size and length. `default` is
what torch takes by itself, which is what the models here use.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

WIDTH, TOKENS = 2048, 16384
CAUSAL = [(head, length, 4, True) for head in (64, 128, 256) for length in (512, 1024, 2048, 4096, 16384)]
OTHERS = [(64, 197, 1, False), (80, 257, 1, False), (64, 512, 1, False), (64, 1024, 1, True), (128, 1024, 1, True)]
ALL = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
BACKENDS = {"default": ALL, "cudnn": ALL[:1], "flash": ALL[1:2]}


def milliseconds(run: Any, count: int = 5) -> float:
    """The best of three."""
    for _ in range(3):
        run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(3):
        begin.record()
        for _ in range(count):
            run()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / count)
    return min(found)


def compared(head: int, length: int, group: int, causal: bool) -> dict[str, Any]:
    heads, batch = WIDTH // head, max(1, TOKENS // length)

    def drawn(count: int) -> Tensor:
        made = torch.randn(batch, length, count, head, device="cuda", dtype=torch.bfloat16)
        return made.transpose(1, 2).requires_grad_()

    query, key, value = drawn(heads), drawn(heads // group), drawn(heads // group)
    slope = torch.randn_like(query)

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=group > 1)

    row: dict[str, Any] = {"head": head, "length": length, "group": group, "causal": causal}
    for name, backends in BACKENDS.items():
        try:
            with sdpa_kernel(backends):
                with torch.no_grad():
                    ahead = milliseconds(forward)
                out = forward()
            back = milliseconds(lambda out=out: torch.autograd.grad(out, (query, key, value), slope, retain_graph=True))
            row[name] = [round(ahead, 3), round(back, 3)]
        except RuntimeError as error:  # no kernel takes this shape
            row[name] = str(error)[:100]
    return row


def main() -> int:
    if not torch.cuda.is_available():
        print("skipped: there is no CUDA device here")
        return 2
    rows = []
    for case in (*CAUSAL, *OTHERS):
        rows.append(compared(*case))
        print(rows[-1], flush=True)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(
            json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
