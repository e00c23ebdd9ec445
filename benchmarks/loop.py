"""Claim: our loop costs nothing. One process trains at least 0.97 times as fast as a plain PyTorch loop.

Measured: `Trainer` on real text against a hand-written loop over the same batches with the same model,
weights, fused AdamW, clipping and microbatches; reading the data counts on both sides. Both live in one process
of two threads and take turns in blocks of a few steps. The losses must agree, or the measurement does not count.

Run: python -m benchmarks.loop [--quick]
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks import plain
from benchmarks.claims import Claim, alone, difference, interleave, ratios
from meshwright.core.plan import Plan
from meshwright.data.open_data import Data, open_text
from meshwright.models.presets import DecoderConfig
from meshwright.ops.device_mesh import Mesh
from meshwright.run.model import open_config
from meshwright.run.run_file import OptimizerConfig, TrainSection
from meshwright.runtime.trainer import Trainer

# 9.8M parameters.
MODEL = DecoderConfig(
    num_layers=6, hidden_size=256, num_heads=4, num_kv_heads=4, ffn_size=1792, vocab_size=256, max_sequence=256
)
SEQUENCE, BATCH, MICROBATCH = 256, 8, 4
RATES = OptimizerConfig(lr=3e-4, clip=1.0, warmup=10)
STEPS, SEED, THREADS = 10_000, 0, 2
ROUNDS, BLOCK, WARM_UP = 30, 1, 2
GOAL, LOSS_TOLERANCE = 0.97, 1e-3


def our_steps(data: Data) -> Iterator[float]:
    plan = Plan(batch=BATCH, microbatch=MICROBATCH)
    settings = TrainSection(batch=BATCH, steps=STEPS, optimizer=RATES, seed=SEED)
    mesh = Mesh.make(plan.mesh, torch.device("cpu"))
    trainer = Trainer(plan, open_config(MODEL, "bench", SEED), data, settings, mesh)
    return (step.loss for step in trainer.steps())


def plain_steps(data: Data) -> Iterator[float]:
    model = plain.decoder(MODEL, SEED)
    optimizer = plain.adamw(model.parameters(), RATES)
    model.train()
    for step in range(STEPS):
        batch = data.batch(step * BATCH, BATCH)
        arrays = (batch.inputs, batch.targets, batch.weights)
        parts = list(zip(*(torch.from_numpy(array).split(MICROBATCH) for array in arrays), strict=True))
        optimizer.zero_grad(set_to_none=True)
        loss = plain.accumulate(model, parts, batch.num_tokens)
        plain.update(optimizer, model, RATES, RATES.lr_at(step, STEPS))
        yield loss.item()


def block_of(steps: Iterator[float], losses: list[float]) -> Callable[[], float]:
    def block() -> float:
        start = time.perf_counter()
        losses.extend(next(steps) for _ in range(BLOCK))
        return time.perf_counter() - start

    return block


def measure(quick: bool = False) -> list[Claim]:
    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
        data = open_text("stdlib", sequence=SEQUENCE, held_out_fraction=0.02, seed=SEED, cache=Path(folder))
        sides = {"ours": our_steps(data), "plain": plain_steps(data)}
        losses: dict[str, list[float]] = {name: [] for name in sides}
        blocks = {name: block_of(steps, losses[name]) for name, steps in sides.items()}
        interleave(blocks, 1 if quick else WARM_UP)
        seconds = interleave(blocks, 3 if quick else ROUNDS)
    apart = difference(losses["ours"], losses["plain"])
    problem = "" if apart <= LOSS_TOLERANCE else f"losses differ by {apart:.1e} of their size."
    what = "one process, against a plain PyTorch loop (tokens per second)"
    claim = Claim(name="loop", what=what, unit="ratio", goal=GOAL, measured=ratios(seconds), problem=problem)
    return [claim]


if __name__ == "__main__":
    sys.exit(alone(measure("--quick" in sys.argv)))
