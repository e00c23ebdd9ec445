"""Rows of the reliability scorecard, the result of one, and toy runs for the functions that measure them.

A row R<n> is measured by functions `r<n>(count: int) -> RowResult` in `benchmarks/reliability_*.py`; several modules
may have a part of the same row. Or its cases are kept one by one and later runs add to them:

    @case_by_case(judge)
    def r1(numbers: range) -> Iterator[Case]: ...

`benchmarks/reliability.py` finds and runs them.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.checkpoint.step_folders import committed_folders, read_manifest


@dataclass(frozen=True, kw_only=True)
class ScorecardRow:
    test: str
    passes: str
    """When it passes."""
    full: int = 1
    """How many cases a full run has."""
    smoke: int = 1
    later: str = ""
    """Why the row, or a part of it, cannot be run yet."""


@dataclass(frozen=True, kw_only=True)
class RowResult:
    """What a function of a row found."""

    passed: bool
    count: int
    """How many cases were really run."""
    figures: str
    """What was measured, in one line for the table."""
    failures: tuple[str, ...] = field(default=())
    """The first few cases that failed, each with what is needed to repeat it."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One case of a row whose cases are kept."""

    what: str
    """What was done, in words."""
    problem: str = ""
    values: Mapping[str, float] = field(default_factory=dict)
    """What was measured, by name."""


Values = Mapping[str, Sequence[float]]
"""Name -> what all cases have measured so far."""
Judge = Callable[[Values], tuple[str, list[str]]]
"""From all values, figures for the table and what they fall short of."""


@dataclass(frozen=True)
class CaseByCase:
    """How a row is measured whose cases are kept one by one; a case is the same whenever its number is."""

    run: Callable[[range], Iterator[Case]]
    judge: Judge


def case_by_case(judge: Judge) -> Callable[[Callable[[range], Iterator[Case]]], CaseByCase]:
    return lambda run: CaseByCase(run, judge)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed; 0 without any."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else 0.0


ROWS: dict[str, ScorecardRow] = {
    "R1": ScorecardRow(
        test="kill -9 of any process at a random instant",
        passes="all resume by themselves, bit-identical, at most one checkpoint interval lost",
        full=200,
        smoke=20,
    ),
    "R2": ScorecardRow(
        test="kill at every system call of a commit",
        passes="always a valid checkpoint, never half of one accepted",
        full=186,
        smoke=20,
    ),
    "R3": ScorecardRow(
        test="power cut: writes without fsync lost, legal reorderings", passes="0 bad states", full=5000, smoke=300
    ),
    "R4": ScorecardRow(
        test="bit flip, truncation, zeroed page, swapped or stale shard",
        passes="all found before a tensor reaches the model; the previous checkpoint is used",
        full=1000,
        smoke=100,
    ),
    "R5": ScorecardRow(
        test="disk full, EIO, read-only during a save",
        passes="the run goes on, the old checkpoint is never deleted first; space forecast at the start",
        full=12,
        smoke=3,
    ),
    "R6": ScorecardRow(
        test="hang of one rank: SIGSTOP, endless loop, deadlocked collective",
        passes="found in 3 x the median step + 3 s (p99); rank and phase right >= 95 %; 0 false alarms in 10,000 steps",
        full=60,
        smoke=3,
    ),
    "R7": ScorecardRow(
        test="crash: segv, abort, exit 1, out-of-memory killer",
        passes="detected in 0.5 s (p99); next step in 3 s (p95) on the toy",
        full=40,
        smoke=4,
    ),
    "R8": ScorecardRow(
        test="straggler of 1.3x", passes="flagged in 20 steps, precision and recall >= 95 %", full=40, smoke=4
    ),
    "R9": ScorecardRow(
        test="partition, reset, slow link", passes="at most 5 s, never two checkpoint lineages", full=12, smoke=2
    ),
    "R10": ScorecardRow(
        test="SIGTERM at any instant (start-up, compile, evaluation, save)",
        passes="all saved within the grace, exit 75, resume bit-identical",
        full=200,
        smoke=20,
    ),
    "R11": ScorecardRow(
        test="Ctrl-C, SIGHUP, death of the parent",
        passes="0 orphans, ports and shared memory after 5 s",
        full=30,
        smoke=3,
    ),
    "R12": ScorecardRow(
        test="two jobs in one run folder; stale lock",
        passes="the second refuses in 2 s and names the owner; fencing token",
        full=10,
        smoke=2,
    ),
    "R13": ScorecardRow(test="clock jumps by a day", passes="no false time-out; order by step", full=10, smoke=2),
    "R14": ScorecardRow(
        test="data file missing, truncated, flipped, changed since the start",
        passes="file and place named; never trains on wrong bytes",
        full=2000,
        smoke=60,
    ),
    "R15": ScorecardRow(
        test="samples over random histories of kills and resizes (1, 2, 4, 3 ranks)",
        passes="0 duplicates, 0 missing",
        full=500,
        smoke=50,
    ),
    "R16": ScorecardRow(
        test="save under every plan on at most 4 ranks, load under every other",
        passes="bit-equal after gathering",
        full=100,
        smoke=6,
    ),
    "R17": ScorecardRow(
        test="NaN or Inf in gradient, loss, data; loss spike",
        passes="caught before the update on all ranks, state untouched; skip, roll back or stop",
        full=24,
        smoke=3,
    ),
    "R18": ScorecardRow(
        test="silent corruption of one rank's state",
        passes="found in 50 steps, rank named, <= 1 % overhead",
        full=40,
        smoke=3,
    ),
    "R19": ScorecardRow(
        test="out of memory in a step",
        passes="post-mortem by category, three ranked fixes; retry with the same global batch",
        full=10,
        smoke=1,
    ),
    "R20": ScorecardRow(
        test="crash loop", passes="stops after N restarts without progress, own exit code, cause told", full=8, smoke=1
    ),
    "R21": ScorecardRow(
        test="tracker hangs, dashboard dies",
        passes="<= 1 % step time, 0 metrics lost",
        full=6,
        smoke=1,
        later="the dashboard's part comes with the page",
    ),
    "R22": ScorecardRow(
        test="soak: toy steps with kills",
        passes="memory and file handles flat; goodput >= 97 % (>= 90 % at one failure a minute)",
        full=100_000,
        smoke=300,
    ),
    "R23": ScorecardRow(test="checkpoint cost at the chosen interval", passes="<= 3.5 % slower", full=5, smoke=1),
    "R24": ScorecardRow(test="simulated against real goodput", passes="within 3 points", full=30, smoke=1),
    "R25": ScorecardRow(
        test="fuzzed configs, command lines and data files",
        passes="0 tracebacks, 0 hangs > 2 s; every accepted plan runs",
        full=100_000,
        smoke=200,
    ),
    "R26": ScorecardRow(
        test="malicious checkpoint or Hugging Face folder",
        passes="0 executions, 0 escapes",
        full=1_000_000,
        smoke=20_000,
    ),
    "R27": ScorecardRow(
        test="static gate",
        passes="no pickle, torch.load, yaml.load, eval, shell=True, 0.0.0.0; <= 10 hard dependencies; audit clean",
    ),
    "R28": ScorecardRow(
        test="web attacks: Host, rebinding, Origin, methods, traversal, XSS, slow clients",
        passes="all blocked; loopback only",
        later="comes with the page",
    ),
    "R29": ScorecardRow(
        test="control plane: open ports, random bytes, wrong secret",
        passes="nothing off loopback unless asked; 0 crashes",
        full=20,
        smoke=2,
    ),
    "R30": ScorecardRow(test="released checkpoints and plans load", passes="all, bit-equal", full=10, smoke=2),
    "R31": ScorecardRow(test="object-store faults", passes="all commits correct", full=100, smoke=10),
    "R32": ScorecardRow(
        test="determinism: same seed, other hash seeds, threads, locales",
        passes="identical; `mw plan` byte-identical",
        full=20,
        smoke=3,
    ),
}


TOY = """\
[model]
name = "byte-tiny"
[data]
train = "{folder}/corpus.txt"
sequence = 32
held_out_fraction = 0.1
[train]
batch = 4
steps = {steps}
save_every = {save_every}
keep = 3
optimizer = {{ lr = 1e-2, warmup = 2 }}
[run]
folder = "{folder}/run"
cluster = "laptop"
ranks = {ranks}
timeline_steps = 0
"""


def toy_run(folder: Path, *, steps: int = 20, save_every: int = 5, ranks: int = 2) -> Path:
    """Write a run file of a toy decoder with its text and a plan for its ranks; the file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog; " * 200, encoding="utf-8")
    path = folder / "run.toml"
    path.write_text(TOY.format(folder=folder, steps=steps, save_every=save_every, ranks=ranks), encoding="utf-8")
    techniques = [{"name": "replicate", "size": ranks}] if ranks > 1 else []
    plan = {"techniques": techniques, "batch": 4, "microbatch": 1, "version": 1}
    (folder / "toy.plan.json").write_text(json.dumps(plan), encoding="utf-8")
    return path


def train_words(run_file: Path, *words: str) -> list[str]:
    """The command that trains a toy run with its plan."""
    plan = str(run_file.parent / "toy.plan.json")
    return [sys.executable, "-m", "meshwright.cli.main", "train", str(run_file), "--plan", plan, *words]


def clean_environment(**more: str) -> dict[str, str]:
    """Without the variables by which torchrun and Slurm make themselves known."""
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID")
    return {key: value for key, value in os.environ.items() if key not in hidden} | more


def train(run_file: Path, *words: str, timeout_seconds: float = 600) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        train_words(run_file, *words),
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        env=clean_environment(),
        check=False,
    )


def final_state(run: Path) -> dict[str, Any]:
    """Hashes of the files of the newest checkpoint, its step and the loss of every step: equal for equal runs."""
    checkpoint = list(committed_folders(run / "checkpoints").values())[-1]
    manifest = read_manifest(checkpoint)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        "step": manifest.step,
        "files": {name: entry.xxh3 for name, entry in sorted(manifest.files.items())},
        "losses": {row["step"]: row["loss"] for row in rows if "loss" in row},
    }
