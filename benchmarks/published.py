"""The ledger: forecasts beside what others measured and published, per source, worst first.

Each row of the CSV becomes a model, a cluster and a plan; what the simulator says of them is compared with the step
time, the memory and the out-of-memory label that the row has. Nothing is fitted here. Rows that cannot be expressed are
counted by reason. Left out of times: steps that waited for the network (MFU below 1 %) and tiny CI models; of memory:
anything but torch's own count. Rows that do not say whether they recompute are taken to do so only if they must to fit,
rows that do not tell their microbatch to use the largest that fits; both are then scored on time alone. "dense" is the
share of plain transformers of known size, measured in any way, that are scored. Kendall's tau and regret are of sweeps:
rows of equal model, hardware, devices, sequence and batch, three or more; "steady" ones are without runs that are
flagged for their low MFU and without pipelines that took longer than other measured runs allow.

Run: python -m benchmarks.published FILE.csv [--json] [--rows OUT.csv]
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # `python benchmarks/published.py`
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.published_plans import Forecaster, remembering, simulated
from benchmarks.published_rows import read_rows
from benchmarks.published_scores import ScoredPlan, by_source, score, summary
from meshwright.core.errors import MeshwrightError, Problem

COLUMNS = (
    ("rows", "rows"),
    ("scored", "scored"),
    ("dense", "dense_scored_fraction"),
    ("median", "time_median_error"),
    ("p90", "time_p90_error"),
    ("tau", "kendall_tau"),
    ("regret", "regret_mean"),
    ("worst", "regret_max"),
    ("s.tau", "steady_tau"),
    ("s.regret", "steady_regret_mean"),
    ("s.worst", "steady_regret_max"),
    ("memory", "memory_median_error"),
    ("oom ok", "oom_accuracy"),
    ("f.fit", "false_fit_fraction"),
    ("f.oom", "false_oom_fraction"),
    ("inside", "coverage"),
)
MOST_REASONS = 6
"""Reasons shown for each source; --json has them all."""


def report(all_scored: Sequence[ScoredPlan]) -> dict[str, dict[str, Any]]:
    """Source -> scores, the worst median first; sources without times last."""
    found = {source: summary(rows) for source, rows in by_source(all_scored).items()}

    def badness(item: tuple[str, Mapping[str, Any]]) -> tuple[float, str]:
        median = item[1]["time_median_error"]
        return (-median if median is not None else math.inf), item[0]

    return dict(sorted(found.items(), key=badness))


def _cell(name: str, value: float | int | None) -> str:
    if value is None:
        return "-"
    if name in ("rows", "scored"):
        return str(value)
    return f"{value:.2f}" if name.endswith("_tau") else f"{value:.1%}"


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    width = max([len("source"), *map(len, found)]) + 1
    lines = [f"{'source':<{width}}" + "".join(f"{title:>9}" for title, _ in COLUMNS)]
    for source, scores in found.items():
        cells = "".join(f"{_cell(name, scores[name]):>9}" for _, name in COLUMNS)
        lines.append(f"{source:<{width}}{cells}")
    lines += ["", "unscored:"]
    for source, scores in found.items():
        reasons = list(scores["unscored"].items())
        shown = [f"  {source}: {count} x {reason}" for reason, count in reasons[:MOST_REASONS]]
        rest = sum(count for _, count in reasons[MOST_REASONS:])
        lines += [*shown, f"  {source}: {rest} x other reasons"] if rest else shown
    return "\n".join(lines)


def _facts(each: ScoredPlan) -> dict[str, Any]:
    guess, row = each.guess, each.row
    return {
        "file": each.source,
        "row_id": row.text("row_id"),
        "model": row.text("model"),
        "hardware": row.text("hardware"),
        "gpus": row.text("gpus"),
        "plan": guess.plan if guess else "",
        "status": row.text("status"),
        "measured_seconds": each.real_seconds,
        "forecast_seconds": guess.step_seconds if guess else None,
        "time_error": each.time_error,
        "is_inside": each.is_covered,
        "measured_bytes": each.real_bytes,
        "forecast_bytes": guess.allocated_bytes if guess else None,
        "memory_error": each.memory_error,
        "fits": guess.fits if guess else None,
        "verdict": each.verdict,
        "unscored": each.reason,
    }


def write_rows(all_scored: Sequence[ScoredPlan], path: Path) -> None:
    """Every row with its forecast and errors, worst time first, then worst memory, then what is unscored."""

    def badness(each: ScoredPlan) -> tuple[bool, float, float]:
        return bool(each.reason), -(each.time_error or 0.0), -(each.memory_error or 0.0)

    facts = [_facts(each) for each in sorted(all_scored, key=badness)]
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(facts[0]) if facts else ["file"])
            writer.writeheader()
            writer.writerows(facts)
    except OSError as error:
        what = f"cannot be written: {error.strerror}."
        raise MeshwrightError([Problem(where=str(path), what=what, fix="Give another --rows.")]) from None


def main(arguments: Sequence[str] | None = None, forecaster: Forecaster = simulated) -> int:
    parser = argparse.ArgumentParser(prog="published", description="Forecasts beside published measurements.")
    parser.add_argument("file", type=Path, help="a CSV of published measurements")
    parser.add_argument("--json", action="store_true", help="print {source: scores}")
    parser.add_argument("--rows", type=Path, metavar="OUT.csv", help="write each row with its forecast, worst first")
    asked = parser.parse_args(arguments)
    start = time.perf_counter()
    try:
        rows, warnings = read_rows(asked.file)
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr)
        all_scored = score(rows, remembering(forecaster))
        if asked.rows is not None:
            write_rows(all_scored, asked.rows)
    except MeshwrightError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    found = report(all_scored)
    if asked.json:
        print(json.dumps(found, indent=2))
        return 0
    seconds = time.perf_counter() - start
    print(table(found))
    dense = [each for each in all_scored if each.is_dense]
    print(f"\n{sum(not each.reason for each in dense)} of {len(dense)} measured dense transformers are scored.")
    print(f"{len(rows)} rows in {seconds:.1f} s ({len(rows) / max(seconds, 1e-9):.0f} a second).")
    return 0


if __name__ == "__main__":
    sys.exit(main())
