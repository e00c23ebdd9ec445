"""Every kind of model on the one GPU at hand: does it train, how fast, and what was predicted; and our decoder against
transformers' own module of the same dimensions, run by us and in a plain loop.

    python -m benchmarks.gpu_models [-o RESULT.json]
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import meshwright as mw
from meshwright.models.presets import DecoderConfig, preset, profile_of
from meshwright.ops.device_mesh import join
from meshwright.runtime.api import build
from meshwright.runtime.run_record import peak_bytes

BF16, COMPILE, SHARD = {"name": "precision"}, {"name": "compile"}, {"name": "shard", "size": 1}
LLAMA = replace(preset("llama3.2-1b"), num_layers=8, tied=False, rope_scaling="none", max_sequence=4096)
MOE = replace(preset("mixtral-8x7b"), num_layers=4, hidden_size=2048, expert_ffn_size=4096, balance=0.01)
SEQUENCE = 4096
Make = Callable[[int], tuple[Any, torch.Tensor]]


def tokens(vocab: int) -> Make:
    def make(batch: int) -> tuple[Any, torch.Tensor]:
        drawn = torch.randint(vocab, (batch, SEQUENCE + 1))
        return drawn[:, :-1], drawn[:, 1:]

    return make


def images(size: int) -> Make:
    return lambda batch: (torch.randn(batch, 3, size, size), torch.randint(1000, (batch,)))


def table(batch: int) -> tuple[Any, torch.Tensor]:
    config: Any = preset("dlrm-small")
    ids = torch.stack([torch.randint(rows, (batch,)) for rows in config.tables], dim=1)
    return (torch.randn(batch, config.num_dense), ids), torch.randint(2, (batch,)).float()


CASES: dict[str, tuple[Any, Make, int]] = {
    "decoder": (LLAMA, tokens(LLAMA.vocab_size), 4),
    "moe": (MOE, tokens(MOE.vocab_size), 4),
    "vit-l": (preset("vit-l"), images(224), 128),
    "resnet50": (preset("resnet50"), images(224), 256),
    "vgg16": (preset("vgg16"), images(224), 128),
    "dlrm-small": (preset("dlrm-small"), table, 8192),
}
PLANS = {"bf16": [BF16], "bf16 + compile": [BF16, COMPILE], "bf16 + shard": [BF16, SHARD]}


def plan_of(batch: int, techniques: list[dict[str, Any]]) -> mw.Plan:
    value = {"version": 1, "batch": batch, "microbatch": batch, "techniques": techniques}
    return mw.Plan.from_json(json.dumps(value))


def timed(step: Callable[[], Any], steps: int = 10) -> tuple[float, int, float]:
    """(median seconds, peak bytes, last loss)."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    loss = 0.0
    for _ in range(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = float(step())
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    kept = sorted(seconds[4:])
    return kept[len(kept) // 2], peak_bytes(torch.device("cuda", 0)), loss


def ours(config: Any, make: Make, batch: int, techniques: list[dict[str, Any]]) -> tuple[float, int, float]:
    built = build(plan_of(batch, techniques), config, device="cuda")
    inputs, targets = make(batch)
    return timed(lambda: built.step(inputs, targets).loss)


def theirs(batch: int, by_us: bool) -> tuple[float, int, float]:
    """transformers' Llama: as a module of ours, or in the loop a user would write."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from meshwright.hf.config_json import config_for

    settings = LlamaConfig(**config_for(LLAMA))
    settings.use_cache = False
    inputs, targets = tokens(LLAMA.vocab_size)(batch)
    model = LlamaForCausalLM(settings)
    if by_us:
        built = build(plan_of(batch, [BF16]), model, inputs=inputs[:1], device="cuda")
        return timed(lambda: built.step(inputs, targets).loss)
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    inputs, targets = inputs.cuda(), targets.cuda()

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(inputs).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss)

    return timed(step)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    cluster = mw.probe(num_devices=1, report=lambda text: print(text, file=sys.stderr), quick=True)
    join(0, 1, torch.device("cuda", 0), rendezvous=tempfile.mktemp())
    rows = []

    def run(name: str, measure: Callable[[], tuple[float, int, float]], count: int, predicted: Any) -> None:
        row: dict[str, Any] = {"case": name}
        try:
            seconds, peak, loss = measure()
            row |= {
                "per_second": round(count / seconds),
                "step_seconds": seconds,
                "peak_gib": peak / 2**30,
                "loss": loss,
            }
            if predicted is not None:
                row["time_error"] = predicted.step_seconds / seconds - 1
                row["memory_error"] = predicted.peak_allocated_bytes / peak - 1
        except Exception as error:  # a case that fails is a result too
            row["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
        gc.collect()

    for name, (config, make, batch) in CASES.items():
        is_text = isinstance(config, DecoderConfig)
        for label, techniques in PLANS.items():
            sequence = SEQUENCE if is_text else 1
            predicted = mw.forecast(profile_of(config, name), plan_of(batch, techniques), cluster, sequence=sequence)
            run(f"{name}, {label}", lambda: ours(config, make, batch, techniques), batch * sequence, predicted)  # noqa: B023
    for by_us in (True, False):
        label = "transformers' Llama, by us, bf16" if by_us else "transformers' Llama, plain loop, bf16"
        run(label, lambda: theirs(4, by_us), 4 * SEQUENCE, None)  # noqa: B023
    text = json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, indent=1)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    dist.destroy_process_group()
    return 1 if any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
