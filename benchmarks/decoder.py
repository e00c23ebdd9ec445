"""Claims: our decoder is at least as fast as transformers' own of the same model, and reading data is free.

Measured: steps of one small Llama on CPU, forward, backward and update, in one process: ours, and transformers' module
with the same weights in a hand-written loop; then ours on packed documents from a mapped token file, and on tokens that
are made once and used again. Sides take turns, in short blocks. The losses of the first pair must agree.

Run: python -m benchmarks.decoder [--quick]
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks import plain
from benchmarks.claims import Claim, alone, difference, interleave, ratios
from meshwright.core.plan import Plan
from meshwright.data.data_section import DataSection
from meshwright.data.dataset import Batch
from meshwright.data.open_data import Data, open_data
from meshwright.data.token_files import write_index
from meshwright.models.presets import DecoderConfig
from meshwright.ops.device_mesh import Mesh
from meshwright.run.model import open_config
from meshwright.run.run_file import OptimizerConfig, TrainSection
from meshwright.runtime.trainer import Trainer

MODEL = DecoderConfig(
    num_layers=6, hidden_size=256, num_heads=4, num_kv_heads=2, ffn_size=704, vocab_size=8192, max_sequence=256
)
SEQUENCE, BATCH = 256, 8
RATES = OptimizerConfig(lr=3e-4, clip=1.0, warmup=10)
STEPS, SEED, THREADS = 10_000, 0, 2
ROUNDS, WARM_UP = 24, 2
NUM_TOKENS, DOCUMENT = 4_000_000, 400
GOAL, FREE, LOSS_TOLERANCE = 1.0, 0.98, 1e-3


class Ready:
    """The same data, each batch made once and then used for ever."""

    def __init__(self, data: Data):
        self.first = data.batch(0, BATCH)
        self.fingerprint, self.kind = data.fingerprint, data.kind

    def batch(self, cursor: int, batch: int, part: int = 0, num_parts: int = 1, shares: object = ()) -> Batch:
        return self.first


def our_steps(data: Data | Ready) -> Iterator[float]:
    plan = Plan(batch=BATCH, microbatch=BATCH)
    settings = TrainSection(batch=BATCH, steps=STEPS, optimizer=RATES, seed=SEED)
    mesh = Mesh.make(plan.mesh, torch.device("cpu"))
    trainer = Trainer(plan, open_config(MODEL, "bench", SEED), data, settings, mesh)  # type: ignore[arg-type]
    return (step.loss for step in trainer.steps())


def their_steps(data: Data, folder: Path) -> Iterator[float]:
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    from meshwright.hf.config_json import config_for
    from meshwright.hf.weights_read import parts_of_decoder

    ours = plain.decoder(MODEL, SEED)
    parts = parts_of_decoder(MODEL)
    save_file({parts[n][0].name: p.detach() for n, p in ours.named_parameters()}, folder / "model.safetensors")
    LlamaConfig(**config_for(MODEL)).save_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
    model.config.use_cache = False
    optimizer = plain.adamw(model.parameters(), RATES)
    for step in range(STEPS):
        batch = data.batch(step * BATCH, BATCH)
        inputs, targets = torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets)
        optimizer.zero_grad(set_to_none=True)
        logits = model(inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        plain.update(optimizer, model, RATES, RATES.lr_at(step, STEPS))
        yield float(loss)


def block_of(steps: Iterator[float], losses: list[float]) -> Callable[[], float]:
    def block() -> float:
        start = time.perf_counter()
        losses.append(next(steps))
        return time.perf_counter() - start

    return block


def write_tokens(stem: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab_size, NUM_TOKENS, dtype=np.uint16)
    Path(f"{stem}.bin").write_bytes(tokens.tobytes())
    with open(f"{stem}.idx", "wb") as file:
        write_index(file, np.dtype("uint16"), [np.full(NUM_TOKENS // DOCUMENT, DOCUMENT, dtype=np.int32)])


def measure(quick: bool = False) -> list[Claim]:
    torch.set_num_threads(THREADS)
    rounds, warm_up = (3, 1) if quick else (ROUNDS, WARM_UP)
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as name:
        folder = Path(name)
        write_tokens(folder / "tokens")
        section = DataSection(train=f"{folder}/tokens.bin", sequence=SEQUENCE)
        stream = open_data(section, cache=folder / "cache")
        sides = {"ours": our_steps(stream), "transformers": their_steps(stream, folder)}
        losses: dict[str, list[float]] = {side: [] for side in sides}
        blocks = {side: block_of(steps, losses[side]) for side, steps in sides.items()}
        interleave(blocks, warm_up)
        against = interleave(blocks, rounds)
        apart = difference(losses["ours"], losses["transformers"])
        packed = open_data(replace(section, packing="documents"), cache=folder / "cache")
        sides = {"ours": our_steps(packed), "ready": our_steps(Ready(packed))}
        blocks = {side: block_of(steps, []) for side, steps in sides.items()}
        interleave(blocks, warm_up)
        reading = interleave(blocks, rounds)
    problem = "" if apart <= LOSS_TOLERANCE else f"losses differ by {apart:.1e} of their size."
    what = "our decoder, against transformers' Llama of the same weights (tokens per second)"
    free = "packed documents from disk, against tokens made once (tokens per second)"
    return [
        Claim(name="decoder", what=what, unit="ratio", goal=GOAL, measured=ratios(against), problem=problem),
        Claim(name="reading", what=free, unit="ratio", goal=FREE, measured=ratios(reading)),
    ]


if __name__ == "__main__":
    sys.exit(alone(measure("--quick" in sys.argv)))
