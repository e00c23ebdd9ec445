"""Claims: what training in fewer bits costs in loss, on a small model over some hundred steps.

Measured: a byte-level decoder (0.9 M parameters) on the package's own sources, the same weights and batches in every
case; the loss on bytes that no case has trained on, against that of float32 everywhere. Another seed of the weights,
in float32, says what a gap of chance is.

Run: python -m benchmarks.loss_gap [--steps 400] [--lr 1e-3] [CASE ...]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named
from meshwright.models.presets import DecoderConfig
from meshwright.optimizers.update import OptimizerConfig
from meshwright.run.model import open_config
from meshwright.runtime.loop import Samples
from meshwright.verify.parity import open_session

MODEL = DecoderConfig(
    num_layers=4, hidden_size=128, num_heads=4, num_kv_heads=4, ffn_size=344, vocab_size=256, max_sequence=128
)
BATCH, SEQUENCE, EVALUATED = 16, 128, 16
CASES = {
    "float32": (),
    "another seed": (),
    "lowbit_optimizer 8": (("lowbit_optimizer", {"bits": 8}),),
    "lowbit_optimizer 4": (("lowbit_optimizer", {"bits": 4}),),
}


def bytes_of_the_package() -> np.ndarray:
    files = sorted((Path(__file__).parents[1] / "meshwright").rglob("*.py"))
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)


def samples(text: np.ndarray, seed: int) -> Samples:
    starts = np.random.default_rng(seed).integers(len(text) - SEQUENCE, size=BATCH)
    rows = torch.from_numpy(np.stack([text[start : start + SEQUENCE + 1] for start in starts]).astype(np.int64))
    weights = torch.ones(BATCH, SEQUENCE)
    return Samples(inputs=rows[:, :-1], targets=rows[:, 1:], weights=weights, num_tokens=float(weights.sum()))


def held_out_loss(case: str, steps: int, optimizer: OptimizerConfig) -> float:
    text = bytes_of_the_package()
    cut = len(text) * 19 // 20
    techniques = tuple(technique_named(name)(**settings) for name, settings in CASES[case])
    plan = Plan(techniques=techniques, batch=BATCH, microbatch=BATCH)
    opened = open_config(MODEL, "bytes", 1 if case == "another seed" else 0)
    session = open_session(plan, opened, optimizer, dtype="float32", device=torch.device("cpu"))
    for step in range(steps):
        session.loop.step(samples(text[:cut], step), optimizer.lr_at(step, steps))
    total, tokens, _ = session.loop.evaluate(samples(text[cut:], step) for step in range(EVALUATED))
    return total / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("cases", nargs="*", default=[*CASES])
    given = parser.parse_args()
    optimizer = OptimizerConfig(lr=given.lr, warmup=20)
    first = None
    for case in given.cases:
        loss = held_out_loss(case, given.steps, optimizer)
        first = loss if first is None else first
        print(
            f"{case:24} held-out loss {loss:.4f}   gap {loss - first:+.4f} ({(loss / first - 1) * 100:+.2f} %)",
            flush=True,
        )


if __name__ == "__main__":
    main()
