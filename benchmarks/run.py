"""Every claim, measured: the table (worst first), benchmarks/results.json, and docs/benchmarks.md made from it.

Run: python -m benchmarks.run            about ten minutes; leave the machine alone meanwhile
     python -m benchmarks.run --quick    do they run at all? Prints the table, writes nothing
     python -m benchmarks.run --render   the page again, from results.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import (
    cpu_forecast,
    data_pipeline,
    decoder,
    experts,
    gloo_collectives,
    hf_import,
    loop,
    peers,
    schedules,
    startup,
)
from benchmarks.claims import Claim, table, worst_first
from benchmarks.search_section import section

RESULTS = Path(__file__).with_name("results.json")
PAGE = RESULTS.parents[1] / "docs" / "benchmarks.md"
BENCHMARKS: dict[str, Callable[[bool], list[Claim]]] = {
    "startup": startup.measure,
    "loop": loop.measure,
    "peers": peers.measure,
    "decoder": decoder.measure,
    "experts": experts.measure,
    "schedules": schedules.measure,
    "gloo_collectives": gloo_collectives.measure,
    "data_pipeline": data_pipeline.measure,
    "hf_import": hf_import.measure,
    "cpu_forecast": cpu_forecast.measure,
}


def machine() -> dict[str, Any]:
    names = [line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    cpu = names[0] if names else platform.processor() or platform.machine()
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def measure(quick: bool) -> list[Claim]:
    claims: list[Claim] = []
    for name, benchmark in BENCHMARKS.items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        claims += benchmark(quick)
    return claims


def render(results: Mapping[str, Any]) -> str:
    """The page, from the numbers alone: the same numbers give the same page."""
    on = results["machine"]
    lines = [
        "# Benchmarks",
        "",
        f"Measured on {on['cores']} cores of {on['cpu']}, Python {on['python']}, torch {on['torch']}.",
        "Made by `python -m benchmarks.run`; do not edit. Worst first.",
        "",
        "A ratio is our tokens per second over theirs: both sides run in the same processes, in turn, in short blocks;",
        "the claim is about the median of the pairs. Seconds are wall time from start to exit.",
        "Sums of gradients by each algorithm, by formulas and measured: [collectives.md](collectives.md).",
        "Time to a loss over slow links, forecast and measured: [search.md](search.md#time-to-target).",
        "",
        "| claim | what | median | worst | goal | |",
        "|---|---|---:|---:|---:|---|",
    ]
    claims = [Claim.decode(facts) for facts in results["claims"]]
    lines += [_row(claim) for claim in worst_first(claims)]
    problems = [f"- {claim.name}: {claim.problem}" for claim in worst_first(claims) if claim.problem]
    if problems:
        lines += ["", *problems]
    return "\n".join([*lines, *section()]) + "\n"


def _row(claim: Claim) -> str:
    unit = " s" if claim.unit == "seconds" else ""
    bound = "at most " if claim.unit == "seconds" else "at least "
    numbers = ("–", "–")
    if claim.measured:
        numbers = (f"{claim.median:.3f}{unit}", f"{claim.worst:.3f}{unit}")
    what = f"`{claim.what}`" if claim.unit == "seconds" else claim.what
    cells = (claim.name, what, *numbers, f"{bound}{claim.goal:g}{unit}", "kept" if claim.is_kept else "missed")
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few rounds; writes nothing")
    parser.add_argument("--render", action="store_true", help="only make docs/benchmarks.md again")
    chosen = parser.parse_args()
    if chosen.render:
        PAGE.write_text(render(json.loads(RESULTS.read_text())))
        return 0
    claims = measure(chosen.quick)
    print(table(claims))
    if not chosen.quick:
        results = {"machine": machine(), "claims": [claim.encode() for claim in worst_first(claims)]}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        PAGE.write_text(render(results))
    return 0 if all(claim.is_kept for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
