"""Claims: what training in fewer bits costs in loss, on a small model over some hundred steps.

Measured: a byte-level decoder (0.9 M parameters) on the package's own sources, the same weights and batches in every
case; the loss on bytes that no case has trained on, against that of float32 everywhere. Another seed of the weights,
in float32, says what a gap of chance is.

Run: python -m benchmarks.loss_gap [--steps 400] [--lr 1e-3] [--device cuda] [--small] [CASE ...]

A CPU without bf16 units takes an hour for each case in 16 bits, and minutes with `--small` (0.2 M parameters, 512
tokens a step).
"""

from __future__ import annotations

import argparse
from dataclasses import replace
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
    num_layers=4, hidden_size=128, num_heads=4, num_kv_heads=4, ffn_size=352, vocab_size=256, max_sequence=128
)
SMALL = replace(MODEL, hidden_size=64, ffn_size=176)
BATCH, SEQUENCE, EVALUATED = 16, 128, 16
CASES = {
    "float32": (),
    "another seed": (),
    "precision": (("precision", {}),),
    "fp16": (("precision", {"dtype": "fp16"}),),
    "weights bf16": (("precision", {"weights": "bf16"}),),
    "fp8_tensorwise": (("precision", {"matmul": "fp8_tensorwise"}),),
    "fp8_rowwise": (("precision", {"matmul": "fp8_rowwise"}),),
    "fp8_tensorwise everywhere": (("precision", {"matmul": "fp8_tensorwise", "edge_blocks": 0, "weights": "bf16"}),),
    "lowbit_optimizer 8": (("lowbit_optimizer", {"bits": 8}),),
    "lowbit_optimizer 4": (("lowbit_optimizer", {"bits": 4}),),
    **{f"compress_activations {bits}": (("compress_activations", {"bits": bits}),) for bits in (8, 4, 2)},
}


def bytes_of_the_package() -> np.ndarray:
    files = sorted((Path(__file__).parents[1] / "meshwright").rglob("*.py"))
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)


def samples(text: np.ndarray, seed: int, batch: int, device: str) -> Samples:
    length = SEQUENCE * batch // BATCH
    starts = np.random.default_rng(seed).integers(len(text) - length, size=batch)
    rows = torch.from_numpy(np.stack([text[start : start + length + 1] for start in starts]).astype(np.int64)).to(
        device
    )
    weights = torch.ones(batch, length, device=device)
    return Samples(inputs=rows[:, :-1], targets=rows[:, 1:], weights=weights, num_tokens=float(weights.sum()))


def held_out_loss(case: str, steps: int, optimizer: OptimizerConfig, device: str, is_small: bool) -> float:
    text = bytes_of_the_package()
    cut = len(text) * 19 // 20
    techniques = tuple(technique_named(name)(**settings) for name, settings in CASES[case])
    batch = BATCH // 2 if is_small else BATCH
    plan = Plan(techniques=techniques, batch=batch, microbatch=batch)
    opened = open_config(SMALL if is_small else MODEL, "bytes", 1 if case == "another seed" else 0)
    session = open_session(plan, opened, optimizer, dtype="float32", device=torch.device(device))
    for step in range(steps):
        session.loop.step(samples(text[:cut], step, batch, device), optimizer.lr_at(step, steps))
    total, tokens, _ = session.loop.evaluate(samples(text[cut:], step, batch, device) for step in range(EVALUATED))
    return total / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("cases", nargs="*", default=[*CASES])
    given = parser.parse_args()
    optimizer = OptimizerConfig(lr=given.lr, warmup=20)
    first = None
    for case in given.cases:
        loss = held_out_loss(case, given.steps, optimizer, given.device, given.small)
        first = loss if first is None else first
        print(
            f"{case:24} held-out loss {loss:.4f}   gap {loss - first:+.4f} ({(loss / first - 1) * 100:+.2f} %)",
            flush=True,
        )


if __name__ == "__main__":
    main()
