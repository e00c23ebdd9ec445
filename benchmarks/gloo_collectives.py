"""Claim: on gloo, all_gather and reduce_scatter made of messages between pairs are no slower than gloo's own.

Measured: both ways in the same ranks, in turn, for messages of 64 KiB, 1 MiB and 32 MiB over 2 and 4 ranks of one
thread each; gloo's seconds over ours, so that more is better. Shared sums of 32 MiB are promised to be half as fast
again; small messages, where waking a process costs more than the bytes, only not to be slower.

Run: python -m benchmarks.gloo_collectives [--quick]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.claims import Claim, alone, interleave, ratios
from meshwright.core.units import MIB
from meshwright.launch.rank_pool import RankPool

SIZES = {"64 KiB": MIB // 16, "1 MiB": MIB, "32 MiB": 32 * MIB}
NUM_RANKS = (2, 4)
ROUNDS = 15
GOALS = {"64 KiB": 0.9, "1 MiB": 0.9, "32 MiB": 1.5}
"""A tenth for the noise of messages that take less than a scheduler's turn."""


def timed_job(*, num_bytes: int, rounds: int, rank: int, num_ranks: int, rendezvous: str) -> dict[str, Any]:
    """Seconds of each collective, both ways."""
    import torch
    import torch.distributed as dist

    from meshwright.ops.collectives import all_gather, reduce_scatter
    from meshwright.ops.device_mesh import join

    torch.set_num_threads(1)
    join(rank, num_ranks, torch.device("cpu"), rendezvous=rendezvous, timeout_seconds=60)
    group = dist.group.WORLD
    assert group is not None
    whole, part = torch.ones(num_bytes // 4), torch.ones(num_bytes // 4 // num_ranks)
    num_calls = max(1, min(20, 8 * MIB // num_bytes))

    def side(collective: Callable[..., Any], *tensors: torch.Tensor) -> Callable[[], float]:
        def run() -> float:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(num_calls):
                collective(*tensors, group=group)
            return (time.perf_counter() - start) / num_calls

        return run

    sides = {
        "all_gather": {"ours": side(all_gather, whole, part), "gloo": side(dist.all_gather_into_tensor, whole, part)},
        "reduce_scatter": {
            "ours": side(reduce_scatter, part, whole),
            "gloo": side(dist.reduce_scatter_tensor, part, whole),
        },
    }
    seconds = {kind: interleave(both, rounds + 1) for kind, both in sides.items()}
    dist.destroy_process_group()
    return {kind: {name: taken[1:] for name, taken in both.items()} for kind, both in seconds.items()}


def measure(quick: bool = False) -> list[Claim]:
    claims = []
    for num_ranks in NUM_RANKS:
        pool = RankPool(num_ranks, threads_per_rank=1)
        try:
            for size, num_bytes in SIZES.items():
                arguments = {"num_bytes": num_bytes, "rounds": 3 if quick else ROUNDS}
                job = "benchmarks.gloo_collectives:timed_job"
                taken = pool.run(job, arguments, num_ranks, timeout_seconds=300)[0]
                claims += [
                    Claim(
                        name="gloo",
                        what=f"{kind} of {size} over {num_ranks} ranks: gloo's seconds over ours",
                        unit="ratio",
                        goal=GOALS[size],
                        measured=ratios(both),
                    )
                    for kind, both in taken.items()
                ]
        finally:
            pool.close()
    return claims


if __name__ == "__main__":
    sys.exit(alone(measure("--quick" in sys.argv)))
