"""Published training jobs and the plans they ran with, beside the plan that we would recommend.

`published_jobs.csv` has one row for each job, in the columns of published/README.md: what was published, where, and in
`notes` what was not and is assumed. Each row is forecast with its own plan as its framework runs it, which is compared
with what was measured; then `mw plan` is asked for the same model, machines and batch, and both plans are forecast as
we would run them. `objections` are what an expert would object to in a recommendation.

Run: python -m benchmarks.published_jobs [--only TEXT] [--theirs]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import meshwright as mw
from benchmarks.published_machines import cluster
from benchmarks.published_models import profile
from benchmarks.published_plans import Case, Guess, case_of, explained, simulated
from benchmarks.published_rows import Row, measured, read_rows
from meshwright.core.cluster import Cluster
from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.simulator.forecast import Forecast

TABLE = Path(__file__).with_suffix(".csv")
RESULT = Path(__file__).parent / "results" / "published_jobs.json"
GOAL = 0.15
"""Median error of the forecasts of their plans."""
LONGEST_SECONDS, MOST_BYTES = 300, 8 << 30
"""That one recommendation may take."""
MOST_RANKS, FEWEST_TOKENS = 512, 2048
"""ZeRO-3 was measured to hide its gathers over at most so many ranks, with at least so many tokens on each: 175B on 128
to 512 A100s with 2048 and 4096 tokens at 173 and 186 TFLOP/s (Zhao et al. 2023), 7B and 30B on 512 H100s (llm-foundry),
both in the table. ZeRO-3 of 2021, a collective for each parameter, fell to 44 TFLOP/s on 1,536 A100s (Narayanan et al.
2021, table 2)."""
FULL_SHARE = 0.97
BEST_MFU = {"a100": 0.71, "h100": 0.55, "h800": 0.5}
"""The highest that any row of the calibration tables reaches on such devices, in bf16 with at least 64 of them."""


def jobs(path: Path = TABLE) -> list[Row]:
    return read_rows(path)[0]


def theirs(row: Row) -> tuple[Case, Guess, float]:
    """(what is forecast, its forecast as their framework runs it, measured seconds)."""
    real = measured(explained(row)).step_seconds
    assert real, row.text("row_id")
    case = case_of(row)
    return case, simulated(case), real


def our_answer(case: Case, theirs: Plan) -> dict[str, Any]:
    """The plan that `mw plan` recommends and its forecast, and that of their plan as we would run it."""
    model, machines = profile(case.config, replace(case.variant, again=())), cluster(case.machine)
    narrow = case.numerics.matmul in ("fp8", "fp4")
    begun = time.perf_counter()
    answer = mw.plan(
        model, machines, batch=theirs.batch, sequence=case.sequence, top=1, allow="lossy" if narrow else "rounded"
    )
    seconds = round(time.perf_counter() - begun, 1)
    same = mw.forecast(model, theirs, machines, sequence=case.sequence)
    found: dict[str, Any] = {"search_seconds": seconds, "their_plan_by_us_seconds": round(same.step_seconds, 4)}
    found["their_plan_fits_by_us"] = same.fits
    if answer.best is None:
        return found | {"our_plan": "", "objections": ["nothing fits"]}
    plan, forecast = answer.best
    return found | {
        "our_plan": str(plan),
        "our_seconds": round(forecast.step_seconds, 4),
        "our_interval": [round(forecast.step_seconds_low, 4), round(forecast.step_seconds_high, 4)],
        "our_mfu": round(forecast.mfu, 4),
        "our_memory_share": round(forecast.peak_bytes / forecast.memory_bytes, 4),
        "objections": objections(plan, forecast, machines, case.sequence, narrow),
    }


def objections(plan: Plan, forecast: Forecast, machines: Cluster, sequence: int, narrow: bool) -> list[str]:
    sizes = {technique.name: getattr(technique, "size", 1) for technique in plan.techniques}
    stage = {technique.name: getattr(technique, "stage", 0) for technique in plan.techniques}.get("shard", 0)
    found = []
    tokens = plan.microbatch * sequence // (sizes.get("tensor", 1) * sizes.get("context", 1))
    if stage == 3 and sizes["shard"] > MOST_RANKS:
        found.append(f"parameters gathered from {sizes['shard']} ranks, which nobody has published")
    if stage == 3 and sizes["shard"] > 128 and tokens < FEWEST_TOKENS:
        found.append(f"parameters gathered from {sizes['shard']} ranks for {tokens} tokens")
    if sizes.get("tensor", 1) > machines.devices_per_node:
        found.append(f"tensor over {sizes['tensor']} devices, nodes have {machines.devices_per_node}")
    if (share := forecast.peak_reserved_bytes / forecast.memory_bytes) > FULL_SHARE:
        found.append(f"{share:.0%} of the memory")
    best = next((most for name, most in BEST_MFU.items() if name in machines.name), 1.0)
    if forecast.mfu > best and not narrow:
        found.append(f"MFU {forecast.mfu:.0%}, above the {best:.0%} that anybody has published")
    return found


def told(row: Row, only_theirs: bool = False) -> dict[str, Any]:
    case, guess, real = theirs(row)
    found: dict[str, Any] = {
        "job": row.text("row_id"),
        "source": row.text("provenance"),
        "assumed": row.text("notes"),
        "their_plan": guess.plan,
        "published_seconds": round(real, 4),
        "forecast_seconds": round(guess.step_seconds, 4),
        "forecast_interval": [round(guess.low_seconds, 4), round(guess.high_seconds, 4)],
        "error": round(guess.step_seconds / real - 1, 4),
        "their_plan_fits": guess.fits,
    }
    if only_theirs:
        return found
    plan = next((each for each in case.plans if str(each) == guess.plan), case.plans[0])
    return found | our_answer(case, plan)


def report(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Worst first."""
    ordered = sorted(found, key=lambda job: -abs(job.get("error", 0.0)))
    errors = [abs(job["error"]) for job in ordered if "error" in job]
    return {"goal": GOAL, "median_error": round(statistics.median(errors), 4), "jobs": ordered}


def _one(name: str, only_theirs: bool) -> dict[str, Any]:
    """In a process of its own, whose memory and time are its own too."""
    command = [sys.executable, "-m", "benchmarks.published_jobs", "--child", name]
    try:
        done = subprocess.run(
            [*command, "--theirs"] if only_theirs else command, capture_output=True, text=True, timeout=LONGEST_SECONDS
        )
        why = "" if not done.returncode else (done.stderr.strip().splitlines() or ["killed"])[-1]
    except subprocess.TimeoutExpired:
        why = f"no answer in {LONGEST_SECONDS} s"
    if not why:
        return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]
    return {"job": name, "failed": why} if only_theirs else _one(name, True) | {"our_plan": "", "objections": [why]}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published_jobs")
    parser.add_argument("--only", default="", help="jobs whose name has this text; nothing is written")
    parser.add_argument("--theirs", action="store_true", help="forecast their plans alone, in seconds")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    try:
        rows = {row.text("row_id"): row for row in jobs()}
    except MeshwrightError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if asked.child:
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
        print(json.dumps(told(rows[asked.child], asked.theirs)))
        return 0
    found = []
    for name in rows:
        if asked.only.lower() in name.lower():
            found.append(one := told(rows[name], True) if asked.theirs else _one(name, False))
            text = f"{one['error']:+.0%}" if "error" in one else one["failed"]
            print(f"{name}: {text}; ours: {one.get('our_plan', '')} {one.get('objections', '')}", flush=True)
    result = report(found)
    print(f"median error of their plans {result['median_error']:.1%} (goal {GOAL:.0%})")
    if not asked.only:
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
