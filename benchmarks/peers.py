"""Claim: each technique keeps up with PyTorch's own. At least 0.97 times the speed of its best-known counterpart.

    replicate   DistributedDataParallel, the faster of its defaults and gradient_as_bucket_view
    shard       fully_shard (FSDP2) on every block and the root, as in PyTorch's tutorial
    pipeline    torch.distributed.pipelining: PipelineStage and Schedule1F1B, eight microbatches

Measured: two rank processes of one thread each; both sides are built in the same ranks and take turns in blocks
of a few steps, a barrier before each; a block takes as long as its slowest rank. Same weights, samples,
microbatches, clipping and fused AdamW. The losses must agree, or the measurement does not count.

Run: python -m benchmarks.peers [--quick] [replicate] [shard] [pipeline]
"""

from __future__ import annotations

import sys

from benchmarks.claims import Claim, alone, difference, ratios
from meshwright.launch.rank_pool import RankPool

PEERS = {
    "replicate": "against DistributedDataParallel, 2 ranks (tokens per second)",
    "shard": "stage 3, against fully_shard (FSDP2), 2 ranks (tokens per second)",
    "pipeline": "1f1b, against torch.distributed.pipelining, 2 ranks (tokens per second)",
}
ROUNDS, BLOCK = 16, 2
GOAL, LOSS_TOLERANCE = 0.97, 1e-3
TIMEOUT_SECONDS = 1800


def measure_one(pool: RankPool, name: str, quick: bool) -> Claim:
    arguments = {"name": name, "rounds": 2 if quick else ROUNDS, "block": 1 if quick else BLOCK}
    ranks = pool.run("benchmarks.peer_ranks:race", arguments, 2, timeout_seconds=TIMEOUT_SECONDS)
    seconds, losses = ranks[0]["seconds"], ranks[0]["losses"]
    apart = max(difference(losses["ours"], theirs) for side, theirs in losses.items() if side != "ours")
    problem = "" if apart <= LOSS_TOLERANCE else f"losses differ by {apart:.1e} of their size."
    return Claim(name=name, what=PEERS[name], unit="ratio", goal=GOAL, measured=ratios(seconds), problem=problem)


def measure(quick: bool = False, names: tuple[str, ...] = tuple(PEERS)) -> list[Claim]:
    with RankPool(2, threads_per_rank=1) as pool:
        return [measure_one(pool, name, quick) for name in names]


if __name__ == "__main__":
    chosen = tuple(name for name in PEERS if name in sys.argv) or tuple(PEERS)
    sys.exit(alone(measure("--quick" in sys.argv, chosen)))
