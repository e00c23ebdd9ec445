"""What the host's part in an op costs, and a whole decoder block to hold the rest against."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from meshwright.machine.measured_blocks import TINY, BlockSize, num_kernels, whole_block
from meshwright.machine.timing import Bench
from meshwright.models.dimensions import DecoderConfig
from meshwright.zoo.layers import SwiGLU, TransformerBlock, rope_table


def kernel_seconds(bench: Bench) -> float:
    """Of the smallest kernel, others right before and after it."""
    one, other = torch.ones(8, device=bench.device), torch.ones(8, device=bench.device)
    out = torch.empty_like(one)
    return bench.device_seconds(lambda: torch.add(one, other, out=out), bench.section_seconds / 4)


def launch_seconds(bench: Bench) -> tuple[float, float]:
    """The host's time for one op of a step, and how many launches a block really has.

    From forward and backward of a block too small to keep any device busy: modules and autograd count, too.
    """
    step = _step_of(bench, TINY)
    seconds = bench.median_seconds(step, bench.section_seconds / 2)
    declared = num_kernels(TINY)
    if not bench.on_gpu:
        return seconds / declared, declared
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        step()
        bench.finish()
    events = recorded.profiler.kineto_results.events() if recorded.profiler is not None else []
    launched = sum(event.device_type() == torch.autograd.DeviceType.CUDA for event in events)
    return seconds / max(launched, 1), float(launched)


def block_seconds(bench: Bench) -> dict[str, float]:
    """Forward and backward of a decoder block, as it is and (on a GPU) compiled."""
    size = whole_block(bench.device.type)
    budget = bench.section_seconds / 2
    found = {"eager": bench.device_seconds(_step_of(bench, size), budget)}
    if bench.on_gpu and not bench.is_quick:
        bench.together("a compiled block")
        try:
            found["compiled"] = bench.device_seconds(_step_of(bench, size, is_compiled=True), budget)
        except Exception as error:  # no compiler on this machine: the forecast does without
            print(f"no block was compiled: {str(error)[:300]}", file=sys.stderr)
    return found


def _step_of(bench: Bench, size: BlockSize, *, is_compiled: bool = False) -> Callable[[], Any]:
    config: DecoderConfig = size.config
    dtype = torch.bfloat16 if bench.on_gpu else torch.float32
    with torch.device(bench.device):
        block = TransformerBlock(config, SwiGLU(config.hidden_size, config.ffn_size))
    with torch.no_grad():
        for each in block.parameters():
            each.fill_(1.0) if each.dim() == 1 else each.normal_(std=each.shape[1] ** -0.5)
    x = torch.randn(size.batch, size.sequence, config.hidden_size, device=bench.device).to(dtype).requires_grad_()
    table = rope_table(config, torch.arange(size.sequence, device=bench.device), x)
    slope = torch.randn_like(x)
    parameters = list(block.parameters())
    run: Any = torch.compile(block) if is_compiled else block

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(run(x, *table), (x, *parameters), slope)

    return step
