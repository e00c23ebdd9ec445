"""On one GPU: how much slower than the best of eight plans is the better of the two that we say are fastest?

Three models cut in depth, eight plans each, of one batch: precision, compiling, recomputation, the loss in pieces,
microbatches. All are forecast from a probe made there before anything runs. Then all are measured in two rounds, the
second in the other order, so that a machine that grows slower does so to all; a plan's step is the median over both. A
second round that would take the script beyond its time is left out from there on, and said to be.

Run: python -m benchmarks.gpu_regret [--cluster C.cluster.json | --readings R.json] [--json RESULT.json]
     python -m benchmarks.gpu_regret --again RESULT.json [--cluster C.cluster.json]    no GPU: forecasts made anew
     python -m benchmarks.gpu_regret --dry                                             no GPU: tiny models, on the CPU
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any, cast

import torch

import meshwright as mw
from benchmarks.gpu_cases import BF16, CHUNKED, COMPILE, RECOMPUTE, Case, Technique
from benchmarks.gpu_forecast import Row, built, cluster_for, forecast_row, free_all, sample, say, timed
from benchmarks.published_scores import kendall_tau
from meshwright.core.cluster import Cluster
from meshwright.core.codec import decode, encode
from meshwright.models.presets import Config, DecoderConfig, preset

GOAL, TOP, ROUNDS = 0.03, 2, 2
WARM_STEPS, LEAST_STEPS, MOST_STEPS, STEPS_SECONDS = 2, 3, 15, 1.5
LIMIT_SECONDS = 450
"""From the start, the probe too: after this no second round is begun."""

SELECTIVE: Technique = {**RECOMPUTE, "layers": 0, "selective": "0-{last}"}
FIRST: Technique = {**RECOMPUTE, "layers": "0"}


def _plans(batch: int, last: int) -> dict[str, tuple[int, tuple[Technique, ...]]]:
    """Name -> (microbatch, techniques)."""
    selective = {**SELECTIVE, "selective": SELECTIVE["selective"].format(last=last)}
    return {
        "bf16": (batch, (BF16,)),
        "bf16, in 4": (batch // 4, (BF16,)),
        "bf16, in 8, chunked loss": (batch // 8, (BF16, CHUNKED)),
        "bf16, recompute": (batch, (BF16, RECOMPUTE)),
        "bf16, selective, in 2": (batch // 2, (BF16, selective)),
        "compiled": (batch, (BF16, COMPILE)),
        "compiled, the first block recomputed, in 2": (batch // 2, (BF16, COMPILE, FIRST)),
        "fp32, in 4": (batch // 4, ()),
    }


def _cut(name: str, layers: int, **changes: Any) -> DecoderConfig:
    return replace(cast(DecoderConfig, preset(name)), num_layers=layers, **changes)


def _cases(models: Mapping[str, tuple[Config, int, int]]) -> dict[str, list[Case]]:
    return {
        model: [
            Case(
                name=f"{model}: {name}",
                config=config,
                batch=batch,
                sequence=sequence,
                microbatch=microbatch,
                techniques=techniques,
            )
            for name, (microbatch, techniques) in _plans(batch, cast(DecoderConfig, config).num_layers - 1).items()
        ]
        for model, (config, batch, sequence) in models.items()
    }


CASES = _cases(
    {
        "llama-8b x3": (_cut("llama3-8b", 3), 8, 2048),
        "gpt2-xl x8": (_cut("gpt2-xl", 8), 16, 1024),
        "mixtral-8x7b x2": (_cut("mixtral-8x7b", 2), 8, 2048),
    }
)
DRY = _cases({"moe-tiny": (preset("moe-tiny"), 8, 32)})
"""Prove the script itself, where there is no GPU."""


def steps_of(case: Case, device: torch.device) -> Row:
    """Seconds of the steps of one visit; a failure is a result too."""
    start, row = time.perf_counter(), Row()
    try:
        run = built(case, device)
        inputs, targets = sample(case, device)

        def step() -> None:
            run.step(inputs, targets)

        first = [timed(step, device) for _ in range(WARM_STEPS)]
        count = max(LEAST_STEPS, min(MOST_STEPS, int(STEPS_SECONDS / first[-1])))
        row["seconds"] = [timed(step, device) for _ in range(count)]
        if device.type == "cuda":
            row["measured_reserved_bytes"] = torch.cuda.max_memory_reserved()
    except torch.OutOfMemoryError:
        row["out_of_memory"] = True
    except Exception as error:  # the next must still run
        row["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
    free_all(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    return row | {"visit_seconds": round(time.perf_counter() - start, 1)}


def measured(cases: Sequence[Case], rows: dict[str, Row], device: torch.device, start: float) -> None:
    """Adds to the rows what each plan's visits give."""
    for number in range(ROUNDS):
        for case in cases if number % 2 == 0 else cases[::-1]:
            row = rows[case.name]
            since = time.perf_counter() - start
            if number and (since > LIMIT_SECONDS or "failed" in row or "out_of_memory" in row):
                continue
            visit = steps_of(case, device)
            row["visits"] = [*row.get("visits", []), visit.pop("seconds", [])]
            row.update({name: value for name, value in visit.items() if name != "visit_seconds"})
            took = row["visits"][-1]
            end = f"{median(took) * 1e3:.2f} ms" if took else row.get("failed", "out of memory")
            say(f"[{since:5.0f} s] {case.name}: {end} ({visit['visit_seconds']} s)")
    for case in cases:
        seconds = [each for visit in rows[case.name]["visits"] for each in visit]
        if seconds:
            rows[case.name]["measured_seconds"] = median(seconds)


def verdict(model: str, rows: Sequence[Row]) -> Row:
    """Of the plans that ran; one that we say fits and does not, if it is in our first two, costs a place."""
    ran = [row for row in rows if "measured_seconds" in row]
    ranked = sorted((row for row in rows if row["forecast_fits"]), key=lambda row: row["forecast_seconds"])
    ours = [row for row in ranked[:TOP] if "measured_seconds" in row]
    fastest = min(ran, key=lambda row: row["measured_seconds"], default=None)
    if fastest is None or not ours:
        return {"model": model, "plans": len(ran), "regret": None}
    best = fastest["measured_seconds"]
    tau = kendall_tau([row["forecast_seconds"] for row in ran], [row["measured_seconds"] for row in ran])
    return {
        "model": model,
        "plans": len(ran),
        "rounds": min(len(row["visits"]) for row in ran),
        "fastest": fastest["name"],
        "picked": [row["name"] for row in ranked[:TOP]],
        "regret": min(row["measured_seconds"] for row in ours) / best - 1,
        "regret_of_first": ranked[0].get("measured_seconds", float("inf")) / best - 1,
        "kendall_tau": tau,
        "median_error": median(abs(row["forecast_seconds"] / row["measured_seconds"] - 1) for row in ran),
    }


def verdicts(rows: Mapping[str, Row]) -> list[Row]:
    models: dict[str, list[Row]] = {}
    for row in rows.values():
        models.setdefault(row["name"].split(": ")[0], []).append(row)
    found = [verdict(model, own) for model, own in models.items()]
    return sorted(found, key=lambda one: -(float("inf") if one["regret"] is None else one["regret"]))


def table(rows: Mapping[str, Row]) -> str:
    """Models by regret, worst first; their plans by what they measured."""
    lines, found = [], verdicts(rows)
    for one in found:
        if one["regret"] is None:
            lines.append(f"{one['model']}: no plan that we would pick has run")
        else:
            kept = "kept" if one["regret"] <= GOAL else "MISSED"
            lines.append(
                f"{one['model']}: the best of our first {TOP} is {one['regret']:.1%} slower than the fastest of "
                f"{one['plans']} (goal {GOAL:.0%}) {kept}; our first alone {one['regret_of_first']:.1%}"
            )
        own = [row for name, row in rows.items() if name.startswith(f"{one['model']}: ")]
        for row in sorted(own, key=lambda row: row.get("measured_seconds", float("inf"))):
            real, said = row.get("measured_seconds"), row["forecast_seconds"]
            shown = f"{real * 1e3:9.2f} ms" if real else f"{'no memory' if row.get('out_of_memory') else 'failed':>12}"
            off = f"{said / real - 1:+6.1%}" if real else ""
            mark = "*" if row["name"] in one.get("picked", ()) else " "
            fits = "" if row["forecast_fits"] else "  (said not to fit)"
            lines.append(f"  {mark} {shown}  forecast {said * 1e3:9.2f} ms {off:>7}  {row['name']}{fits}")
    known = [one["regret"] for one in found if one["regret"] is not None]
    if known:
        lines.append(f"{len(known)} models: mean regret {mean(known):.1%}, worst {max(known):.1%}")
    return "\n".join(lines)


def write(path: Path | None, about: Row, rows: Mapping[str, Row]) -> None:
    if path is None:
        return
    made = {**about, "goal": GOAL, "models": verdicts(rows), "cases": list(rows.values())}
    path.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


def again(asked: argparse.Namespace) -> int:
    """Forecasts of today against an earlier run's measurements."""
    stored = json.loads(asked.again.read_text(encoding="utf-8"))
    named = bool(asked.cluster or asked.readings)
    cluster = cluster_for(asked) if named else decode(Cluster, stored["cluster"], f"{asked.again}.cluster")
    cases = {case.name: case for own in (*CASES.values(), *DRY.values()) for case in own}
    known = [row for row in stored["cases"] if row["name"] in cases]
    rows = {row["name"]: row | forecast_row(cases[row["name"]], cluster) for row in known}
    about = {key: stored[key] for key in ("device", "torch")} | {"cluster": encode(cluster), "forecast_again": True}
    write(asked.json, about, rows)
    print(table(rows))
    return 0


def measure(asked: argparse.Namespace) -> int:
    start = time.perf_counter()
    device = torch.device("cpu") if asked.dry else torch.device("cuda", 0)
    cluster = mw.cluster("laptop") if asked.dry and not asked.cluster else cluster_for(asked)
    if asked.dry:
        torch.set_num_threads(1)
    models = DRY if asked.dry else CASES
    rows: dict[str, Row] = {}  # all forecasts before anything runs
    for case in (case for own in models.values() for case in own):
        rows[case.name] = {"name": case.name, **forecast_row(case, cluster)}
    named = "cpu" if asked.dry else torch.cuda.get_device_name()
    about = {"device": named, "torch": torch.__version__, "cluster": encode(cluster)}
    done: dict[str, Row] = {}
    for own in models.values():
        measured(own, rows, device, start)
        done |= {case.name: rows[case.name] for case in own}
        write(asked.json, about, done)
    print(table(rows))
    say(f"{time.perf_counter() - start:.0f} s in all")
    return 1 if any("failed" in row for row in rows.values()) else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_regret", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cluster", metavar="C.cluster.json", help="instead of probing now")
    parser.add_argument("--readings", type=Path, metavar="R.json", help="what the probe measured: kept, or read again")
    parser.add_argument("--quick", action="store_true", help="a quick probe")
    parser.add_argument("--json", type=Path, metavar="RESULT.json")
    parser.add_argument("--again", type=Path, metavar="RESULT.json", help="forecast anew, measure nothing")
    parser.add_argument("--dry", action="store_true", help="tiny models on the CPU: does the script run?")
    asked = parser.parse_args()
    if asked.again:
        return again(asked)
    if not asked.dry and not torch.cuda.is_available():
        say("There is no CUDA device here, and these are measurements of one; --dry runs without.")
        return 2
    return measure(asked)


if __name__ == "__main__":
    sys.exit(main())
