"""Optimizer states on the host: seconds and device memory of llama-3b (untied, 4 x 4096) by share and by when updates
begin.

    python -m benchmarks.offload_states                     two plans, about two minutes on an H200 with 16 cores
    python -m benchmarks.offload_states 1 0.97:ahead 0.5    others: share, and `:ahead` for updates during backward
    python -m benchmarks.offload_states --tiny              a tiny model on a CPU, to prove the script

update: what the updating thread works in a step. waits: what the launching thread waits for it in a step. copies: bytes
both ways in a step, and the time that they take by themselves at 50 GB/s each way.
"""

from __future__ import annotations

import argparse
import gc
import time
from typing import Any

import torch

import meshwright as mw
from benchmarks.gpu_cases import BF16, CHUNKED, COMPILE, RECOMPUTE, Case
from benchmarks.gpu_child import sample, weights_drawn_on
from meshwright.optimizers.host_states import HostStatesRule
from meshwright.optimizers.optimizer_config import OptimizerConfig

GIB = 2**30
COPY_RATE = 50e9
SHAPE = {"tied": False}


def case_of(text: str, tiny: bool) -> Case:
    share, _, when = text.partition(":")
    states = {"name": "offload_states", "share": float(share), "ahead": when == "ahead"}
    techniques: Any = (BF16, RECOMPUTE, COMPILE, CHUNKED, states)
    if tiny:
        change = {"num_layers": 3, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 128}
        change |= {"vocab_size": 256} | SHAPE
        return Case(name=text, model="llama3.2-3b", change=change, batch=2, sequence=64, techniques=(states,))
    return Case(name=text, model="llama3.2-3b", change=SHAPE, batch=4, sequence=4096, techniques=techniques)


def timed(owner: Any, name: str, seconds: dict[str, float]) -> None:
    """Add up the seconds of all calls of a method."""
    inner = getattr(owner, name)

    def call(*given: Any, **named: Any) -> Any:
        start = time.perf_counter()
        try:
            return inner(*given, **named)
        finally:
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start

    setattr(owner, name, call)


def measured(case: Case, device: torch.device, clip: float, warm: int, steps: int) -> str:
    description = case.describe()
    with weights_drawn_on(device):
        built = mw.build(case.plan, description, device=device.type, optimizer=OptimizerConfig(clip=clip))
    rule = built._loop.optimizer.rule
    assert isinstance(rule, HostStatesRule)
    inputs, targets = sample(case, description, device)
    for _ in range(warm):
        built.feed(inputs, targets)
    seconds: dict[str, float] = {}
    timed(rule, "wait", seconds)
    for states in rule.units:
        timed(states, "update", seconds)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before, start = sum(rule.lanes.moved.values()), time.perf_counter()
    for _ in range(steps):
        built.feed(inputs, targets)
    rule.finish()
    if device.type == "cuda":
        torch.cuda.synchronize()
    step = (time.perf_counter() - start) / steps
    moved = (sum(rule.lanes.moved.values()) - before) / steps
    peak = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else 0.0
    tokens = case.batch * case.sequence / step
    update, waits = (seconds.get(name, 0.0) / steps for name in ("update", "wait"))
    return (
        f"{case.name:>12} {step * 1e3:8.0f} ms {tokens:9.0f} tok/s {peak:6.1f} GiB   update {update * 1e3:6.0f} ms   "
        f"waits {waits * 1e3:6.0f} ms   copies {moved / 1e9:5.1f} GB ({moved / 2 / COPY_RATE * 1e3:.0f} ms)"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", nargs="*", default=["0.97:ahead", "0.97"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--clip", type=float, default=100.0, help="1: most steps of a new model are clipped")
    parser.add_argument("--steps", type=int, default=6)
    given = parser.parse_args()
    device = torch.device("cpu") if given.tiny else torch.device("cuda", 0)
    for text in given.plans:
        start = time.perf_counter()
        line = measured(case_of(text, given.tiny), device, given.clip, warm=3, steps=given.steps)
        print(f"{line}   ({time.perf_counter() - start:.0f} s in all)", flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
