"""Run `mw` as a user would: another process, its output and exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

RUN = """\
[model]
name = "byte-tiny"
[data]
train = "{folder}/corpus.txt"
sequence = 32
held_out_fraction = 0.1
[train]
batch = 4
steps = 8
save_every = 4
keep = 4
optimizer = {{ lr = 1e-2, warmup = 2 }}
[run]
folder = "{folder}/run"
cluster = "laptop"
ranks = 2
timeline_steps = 1
"""


def clean_environment() -> dict[str, str]:
    """Without the variables by which torchrun and Slurm make themselves known."""
    return {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID")}


def mw(*words: str, timeout_seconds: float = 600) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "meshwright.cli.main", *words],
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        env=clean_environment(),
        check=False,
    )


def write_run(folder: Path, text: str = RUN) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog; " * 200, encoding="utf-8")
    path = folder / "run.toml"
    path.write_text(text.format(folder=folder), encoding="utf-8")
    return str(path)


def write_plan(folder: Path, *techniques: dict[str, object], microbatch: int = 1, batch: int = 4) -> str:
    path = folder / ("-".join(str(t["name"]) for t in techniques) + ".plan.json")
    value = {"techniques": list(techniques), "batch": batch, "microbatch": microbatch, "version": 1}
    path.write_text(json.dumps(value), encoding="utf-8")
    return str(path)


def losses(folder: Path) -> dict[int, float]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}
