"""Plans on the one GPU at hand: predicted against measured step time and memory, worst first.

    python -m benchmarks.gpu_smoke [--model llama3.2-1b] [--sequence 4096] [--batch 4]

Axes of size one run the same code as larger ones (NCCL included), so each technique's CUDA path is exercised too.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import meshwright as mw
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.presets import preset
from meshwright.ops.device_mesh import join
from meshwright.runtime.api import build
from meshwright.runtime.run_record import peak_bytes

BF16 = {"name": "precision"}
COMPILE = {"name": "compile"}
PLANS: dict[str, list[dict[str, Any]]] = {
    "fp32": [],
    "bf16": [BF16],
    "bf16 + compile": [BF16, COMPILE],
    "bf16 + compile + recompute": [BF16, COMPILE, {"name": "recompute"}],
    "bf16 + compile + recompute half": [BF16, COMPILE, {"name": "recompute", "layers": 8}],
    "bf16 + compile + chunked_loss": [BF16, COMPILE, {"name": "chunked_loss"}],
    "bf16 + compile + replicate": [BF16, COMPILE, {"name": "replicate", "size": 1}],
    "bf16 + compile + shard": [BF16, COMPILE, {"name": "shard", "size": 1}],
    "bf16 + tensor (sequence)": [BF16, {"name": "tensor", "size": 1, "sequence": True}],
    "bf16 + compile + tensor": [BF16, COMPILE, {"name": "tensor", "size": 1}],
    "bf16 + pipeline": [BF16, {"name": "pipeline", "size": 1}],
}


def measure(plan: mw.Plan, model: str, sequence: int, steps: int) -> tuple[float, int]:
    """(median step seconds, peak bytes)."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    built = build(plan, model, device="cuda")
    vocab = preset(model).vocab_size
    seconds = []
    for _ in range(steps):
        tokens = torch.randint(vocab, (plan.batch, sequence + 1))
        torch.cuda.synchronize()
        start = time.perf_counter()
        built.step(tokens[:, :-1], tokens[:, 1:])
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    kept = sorted(seconds[4:])
    return kept[len(kept) // 2], peak_bytes(torch.device("cuda", 0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="llama3.2-1b")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", choices=PLANS, help="one plan instead of all")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    cluster = mw.probe(num_devices=1, report=lambda text: print(text, file=sys.stderr), quick=True)
    profile = decoder_profile(preset(arguments.model), arguments.model)
    join(0, 1, torch.device("cuda", 0), rendezvous=tempfile.mktemp())
    rows = []
    for name, techniques in PLANS.items():
        if arguments.only not in (None, name):
            continue
        value = {"version": 1, "batch": arguments.batch, "microbatch": arguments.batch, "techniques": techniques}
        plan = mw.Plan.from_json(json.dumps(value))
        predicted = mw.forecast(profile, plan, cluster, sequence=arguments.sequence)
        row: dict[str, Any] = {"plan": name, "predicted_seconds": predicted.step_seconds}
        row["predicted_gib"] = predicted.peak_bytes / 2**30
        try:
            seconds, peak = measure(plan, arguments.model, arguments.sequence, arguments.steps)
            tokens = arguments.batch * arguments.sequence
            row |= {"tokens_per_second": round(tokens / seconds), "step_seconds": seconds, "peak_gib": peak / 2**30}
            row["time_error"] = predicted.step_seconds / seconds - 1
            # The forecast includes what the driver and the allocator keep; the measurement is of tensors alone.
            row["memory_error"] = predicted.peak_allocated_bytes / peak - 1
        except Exception as error:  # a plan that fails is a result too, and the next must still run
            row["failed"] = f"{type(error).__name__}: {str(error)[:200]}"
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
        gc.collect()
    rows.sort(key=lambda row: -abs(row.get("time_error", 9)))
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    result = {**machine, "model": arguments.model, "rows": rows}
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    dist.destroy_process_group()
    return 1 if any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
