"""Claim: a core that shares experts out with another trains at least 0.85 times as fast as a core that has them all.

Measured: `expert` on two ranks of one thread each against the same model on one rank of one thread, the other waiting
meanwhile; tokens per second and core. Both train the same batches, each rank in microbatches of the same size, and take
turns, a step at a time. The losses must agree, or the measurement does not count.

Run: python -m benchmarks.experts [--quick]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.claims import Claim, alone, difference, interleave, ratios
from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named
from meshwright.launch.rank_pool import RankPool
from meshwright.models.presets import DecoderConfig
from meshwright.run.model import open_config
from meshwright.run.run_file import OptimizerConfig
from meshwright.verify import parity

# 55M parameters, 50M of them experts.
MODEL = DecoderConfig(
    num_layers=4,
    hidden_size=512,
    num_heads=8,
    num_kv_heads=8,
    ffn_size=1024,
    vocab_size=256,
    max_sequence=256,
    num_experts=8,
    experts_per_token=2,
    expert_ffn_size=1024,
    balance=0.01,
)
SEQUENCE, BATCH, MICROBATCH = 256, 8, 4
RATES = OptimizerConfig(lr=3e-4, clip=1.0)
NUM_RANKS, SEED, WARM_UP, ROUNDS = 2, 0, 1, 12
GOAL, LOSS_TOLERANCE, TIMEOUT_SECONDS = 0.85, 1e-3, 1800

Step = Callable[[int], float]


def steps_of(plan: Plan) -> Step:
    session = parity.open_session(
        plan, open_config(MODEL, "bench", SEED), RATES, dtype="float32", device=torch.device("cpu")
    )
    make = parity.random_samples(MODEL.vocab_size, BATCH, SEQUENCE, masked=False)
    part = session.mesh.part(plan.sample_axes)

    def step(number: int) -> float:
        made = make(number, *part)
        samples = replace(made, weights=made.weights.float())
        return session.loop.step(samples, RATES.lr).loss

    return step


def sides(rank: int) -> dict[str, Step]:
    kind: Any = technique_named("expert")
    shared_out = kind(size=NUM_RANKS)
    ours = steps_of(Plan(techniques=(shared_out,), batch=BATCH, microbatch=MICROBATCH))
    one = steps_of(Plan(batch=BATCH, microbatch=MICROBATCH)) if rank == 0 else (lambda step: 0.0)
    return {"ours": ours, "one rank": one}


def turn_of(step: Step, losses: list[float]) -> Callable[[], float]:
    """One step, as long as on its slowest rank."""

    def turn() -> float:
        dist.barrier()
        start = time.perf_counter()
        losses.append(step(len(losses)))
        elapsed = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
        return elapsed.item()

    return turn


def race(*, rounds: int, rank: int, num_ranks: int, rendezvous: str) -> dict[str, dict[str, list[float]]]:
    """Seconds and losses of every step, by side."""
    assert num_ranks == NUM_RANKS
    parity.enter(rank, num_ranks, rendezvous)
    losses: dict[str, list[float]] = {"ours": [], "one rank": []}
    turns = {side: turn_of(step, losses[side]) for side, step in sides(rank).items()}
    interleave(turns, WARM_UP)
    seconds = interleave(turns, rounds)
    del turns
    parity.leave()
    return {"seconds": seconds, "losses": losses}


def measure(quick: bool = False) -> list[Claim]:
    arguments: dict[str, Any] = {"rounds": 2 if quick else ROUNDS}
    with RankPool(NUM_RANKS, threads_per_rank=1) as pool:
        first, *_ = pool.run("benchmarks.experts:race", arguments, NUM_RANKS, timeout_seconds=TIMEOUT_SECONDS)
    apart = difference(first["losses"]["ours"], first["losses"]["one rank"])
    problem = "" if apart <= LOSS_TOLERANCE else f"losses differ by {apart:.1e} of their size."
    by_core = tuple(ratio / NUM_RANKS for ratio in ratios(first["seconds"]))
    what = "experts shared out over 2 ranks, against all on one rank (tokens per second and core)"
    return [Claim(name="experts", what=what, unit="ratio", goal=GOAL, measured=by_core, problem=problem)]


if __name__ == "__main__":
    sys.exit(alone(measure("--quick" in sys.argv)))
