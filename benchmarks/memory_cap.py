"""Steps of a 1B decoder under a memory cap on one GPU: how fast, how much memory, and are the numbers the same?

    python -m benchmarks.memory_cap [--model llama3.2-1b] [--batch 16] [--sequence 2048] [--shares 0.8,0.6,0.45]

One process: first without a cap, then with caps that are shares of the peak that was allocated then. The cap is the
limit of torch's allocator, so that no more can be reserved. The learning rate is 0: every step starts from the same
weights, and loss and gradient norm must be equal to the last bit. Docs: docs/memory.md.
"""

from __future__ import annotations

import argparse
import gc
import time
from statistics import median
from typing import Any

import torch

from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named
from meshwright.core.units import GIB
from meshwright.models.presets import preset
from meshwright.runtime.api import build

STEPS, WARM_UP = 5, 2


def steps(made: Any, tokens: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    seconds, told, failed = [], [], torch.cuda.memory_stats()["num_ooms"]
    for _ in range(STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        told.append(made.step(tokens, targets, lr=0.0))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {
        "seconds": median(seconds[WARM_UP:]),
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "failed": torch.cuda.memory_stats()["num_ooms"] - failed,
        "numbers": {(each.loss, each.gradient_norm) for each in told},
        "evicted": told[-1].evicted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3.2-1b")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--shares", default="0.8,0.6,0.45")
    given = parser.parse_args()
    techniques = technique_named("precision")(dtype="bf16"), technique_named("chunked_loss")(chunks=8)
    plan = Plan(batch=given.batch, microbatch=given.batch, techniques=techniques)
    made = build(plan, given.model, device="cuda")
    blocks = made.model.block_modules()  # type: ignore[operator]
    forwards = [block.forward for block in blocks]
    rows = torch.randint(preset(given.model).vocab_size, (given.batch, given.sequence + 1))  # type: ignore[union-attr]
    tokens, targets = rows[:, :-1].contiguous().cuda(), rows[:, 1:].contiguous().cuda()
    free = steps(made, tokens, targets)
    print(f"{given.model}, {given.batch} x {given.sequence}, {torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("cap GiB  share  step s   times  allocated  reserved  evictions  again GiB  host GiB  failures  equal")
    whole = free["allocated"]
    print(f"   none   1.00  {free['seconds']:6.3f}  {1:6.2f}  {whole / GIB:9.2f}  {free['reserved'] / GIB:8.2f}")
    for share in map(float, given.shares.split(",")):
        for block, forward in zip(blocks, forwards, strict=True):
            block.forward = forward
        gc.collect()
        torch.cuda.empty_cache()
        made._loop.cap_memory(int(share * whole))
        try:
            row = steps(made, tokens, targets)
        except MeshwrightError as error:
            print(f"{share * whole / GIB:7.2f}  {share:5.2f}  {error}")
            break
        found, is_equal = row["evicted"], row["numbers"] == free["numbers"] and len(free["numbers"]) == 1
        times = row["seconds"] / free["seconds"]
        print(
            f"{share * whole / GIB:7.2f}  {share:5.2f}  {row['seconds']:6.3f}  {times:6.2f}  "
            f"{row['allocated'] / GIB:9.2f}  {row['reserved'] / GIB:8.2f}  {found['evictions']:9.0f}  "
            f"{found['dropped_bytes'] / GIB:9.2f}  {found['swapped_bytes'] / GIB:8.2f}  {row['failed']:8d}  "
            f"{is_equal}"
        )
        assert row["reserved"] <= share * whole


if __name__ == "__main__":
    main()
