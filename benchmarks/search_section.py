"""The section "The search" of docs/benchmarks.md, from what is kept in benchmarks/results. Worst first."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.search_speed import badness

FOLDER = Path(__file__).parent / "results"
SPEED, REGRET, GPU, CPU = (
    FOLDER / f"{name}.json" for name in ("search_speed", "search_regret", "gpu_regret_h200", "cpu_regret")
)
ABOUT = """
## The search

Made again by `python -m benchmarks.search_speed --repeats 3 --json benchmarks/results/search_speed.json`,
`python -m benchmarks.search_regret FILE.csv --json benchmarks/results/search_regret.json`,
`python -m benchmarks.gpu regret --json benchmarks/results/gpu_regret_h200.json` (on a GPU) and
`python -m benchmarks.cpu_regret` (two CPU ranks), then `python -m benchmarks.run --render`. A regret is how much longer
the plan we pick takes, measured, than the best measured.
"""


def section(folder: Path = FOLDER) -> list[str]:
    """Lines; what was not measured is left out."""
    speed, regret, gpu, cpu = (_kept(folder / path.name) for path in (SPEED, REGRET, GPU, CPU))
    lines = [*_speed(speed), *_published(regret), *_on_machines(gpu, cpu)]
    return [*ABOUT.splitlines(), *lines] if lines else []


def _kept(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _grid(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    made = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in (titles, *rows)]
    return ["", made[0], "|" + "---|" * len(titles), *made[1:]]


def _speed(found: Mapping[str, Any]) -> list[str]:
    if not found:
        return []
    most_gap, most_mib = found["goals"]["gap_fraction"], found["goals"]["peak_mib"]

    def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
        goal = f"{row['goal_seconds']:g} s"
        if "failed" in row:
            return row["asked"], goal, "–", "–", "–", "–", "–", row["failed"], "missed"
        whole = "–" if row["command_seconds"] is None else f"{row['command_seconds']:.2f} s"
        gap = "–" if row["gap_fraction"] is None else f"{row['gap_fraction']:.2%}"
        seconds = f"{row['search_seconds']:.2f} s ({row['search_cpu_seconds']:.2f} s)"
        plan = f"{row['plan']}; MFU {row['mfu']:.1%}" if row["plan"] else "nothing fits"
        kept = "kept" if badness(row) <= 1 else "missed"
        return row["asked"], goal, seconds, whole, gap, f"{row['peak_mib']:.0f}", str(row["candidates"]), plan, kept

    titles = ("asked", "goal", "search (processor)", "`mw plan --json`", "gap", "MiB", "candidates", "plan", "")
    rows = sorted(found["questions"], key=badness, reverse=True)
    head = f"Seconds of a search in a fresh process; gap at most {most_gap:.0%}, memory at most {most_mib} MiB."
    return ["", head, *_grid(titles, map(cells, rows))]


def _published(found: Mapping[str, Any]) -> list[str]:
    if not found or not found["groups"]:
        return []
    goals = found["goals"]
    kept = "kept" if found["mean"] <= goals["mean"] and found["worst"] <= goals["worst"] else "missed"
    head = (
        f"Published sweeps, {found['groups']} of them: mean regret {found['mean']:.1%} (goal {goals['mean']:.0%}), "
        f"worst {found['worst']:.1%} (goal {goals['worst']:.0%}): {kept}."
    )

    def cells(source: str, one: Mapping[str, Any]) -> tuple[str, ...]:
        numbers = (f"{one[name]:.1%}" for name in ("mean", "median", "worst"))
        return source, str(one["groups"]), str(one["plans"]), *numbers, str(one["best_picked"])

    titles = ("source", "sweeps", "plans", "mean", "median", "worst", "best picked")
    worst = [
        (
            f"{one['regret']:.1%}",
            f"{one['model']} on {one['gpus']}, batch {one['batch']} x {one['sequence']}",
            *(f"{one[name]['plan']}: {one[name]['measured_seconds']:.3g} s" for name in ("picked", "best")),
        )
        for one in found["worst_groups"]
    ]
    return [
        "",
        head,
        *_grid(titles, [cells(source, one) for source, one in found["sources"].items()]),
        *_grid(("regret", "sweep", "picked", "best"), worst),
    ]


def _on_machines(gpu: Mapping[str, Any], cpu: Mapping[str, Any]) -> list[str]:
    rows = [
        (
            f"{gpu['device']}: {one['model']}, the best of our first 2 of {one['plans']} plans",
            "–" if one["regret"] is None else f"{one['regret']:.1%}",
            f"{gpu['goal']:.0%}",
            one.get("fastest", "–"),
        )
        for one in gpu.get("models", ())
    ]
    cpus = sorted(cpu.get("models", ()), key=lambda one: -one["regret"])
    rows += [
        (
            f"two CPU ranks: {one['model']}, the plan picked of {len(one['cases'])} run, {one['enumerated']} possible",
            f"{one['regret']:.1%}",
            f"{cpu['goal']:.0%}",
            one["fastest"],
        )
        for one in cpus
    ]
    return _grid(("measured here", "regret", "at most", "fastest"), rows) if rows else []
