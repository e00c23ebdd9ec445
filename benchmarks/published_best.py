"""The best MFU that somebody has published, by kind of run: dense or experts, generation of GPUs, number of devices.

`mw plan` says so where a forecast is above it. Every row's MFU is computed anew from its step time by our one
definition (`Profile.model_flops`), since conventions differ; rows flagged in `quality`, and fine-tuning of few
parameters, are left out. Only files that may be fitted to are read.

Run: python -m benchmarks.published_best CALIBRATE.csv ... -o meshwright/ask/published_best.json
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.published_machines import cluster, machine
from benchmarks.published_models import model, profile, sequence, variant
from benchmarks.published_numerics import numerics_of
from benchmarks.published_plans import explained
from benchmarks.published_rows import Row, Unscored, measured, read_rows
from meshwright.ask.explain import SCALES, generation_of
from meshwright.models.dimensions import DecoderConfig

MOST_MFU = 0.85
"""Above it a row was recorded wrong: no large matmul runs as fast."""


def run_of(row: Row) -> dict[str, Any] | None:
    """A row as an entry; None where it tells no such figure."""
    is_other = re.search(r"bert|vision|nlp|DeepLearningExamples", f"{row.text('family')} {row.text('model')}")
    if is_other or row.text("quality") or "lora" in row.text("task") or row.text("split") != "calibrate":
        return None
    try:
        row = explained(row)
        config = model(row)
        if not isinstance(config, DecoderConfig):
            return None
        machines, told = cluster(machine(row)), measured(row)
        numerics, tokens = numerics_of(row, machines.device), sequence(row, config)
        seconds = told.step_seconds / row.batch if told.step_seconds else told.sample_seconds
        if not seconds or not numerics.is_16_bit or variant(row, config).lora is not None:
            return None
        peak = machines.device.peak(numerics.matmul or "bf16")
        flops = profile(config).model_flops(tokens, tokens).published
    except Unscored:
        return None
    generation = generation_of(machines)
    if not peak or not generation:
        return None
    return {
        "family": "experts" if config.num_experts else "dense",
        "generation": generation,
        "scale": next(scale for scale in SCALES if row.gpus <= scale),
        "dtype": numerics.matmul or "bf16",
        "mfu": round(flops / seconds / row.gpus / peak, 4),
        "model": row.text("model"),
        "devices": row.gpus,
        "source": row.text("source"),
        "url": row.text("url"),
        "row": row.text("row_id"),
    }


def best_of(runs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The best of each kind."""
    best: dict[tuple[str, str, int, str], dict[str, Any]] = {}
    for run in runs:
        kind = (run["family"], run["generation"], run["scale"], run["dtype"])
        if run["mfu"] <= MOST_MFU and run["mfu"] > best.get(kind, {"mfu": 0.0})["mfu"]:
            best[kind] = run
    return [best[kind] for kind in sorted(best)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="published_best", description="The best published MFU by kind of run.")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args(arguments)
    rows = [row for file in asked.files for row in read_rows(file)[0]]
    found = best_of(run for run in map(run_of, rows) if run is not None)
    lines = ",\n".join(json.dumps(run) for run in found)
    if asked.output:
        asked.output.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    for run in found:
        kind = f"{run['family']:8}{run['generation']:8}{run['scale']:>8}{run['dtype']:>6}{run['mfu']:>8.1%}"
        print(f"{kind}  {run['model']} on {run['devices']}, {run['source']}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
