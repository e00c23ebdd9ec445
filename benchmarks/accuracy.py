"""How far forecasts are from what was measured, all in one page, worst first: docs/accuracy.md.

Three sources, each kept in benchmarks/results so that the page can be made again without them:

    published.json            what others measured and published: CSV files scored by benchmarks.published
    gpu_frozen_h200.json      one GPU, by benchmarks.gpu forecast --list frozen
    cpu_forecast.json         two CPU ranks, by benchmarks.cpu_forecast

Run: python -m benchmarks.accuracy                     the page again, from the results
     python -m benchmarks.accuracy FILE.csv [...]      score these first, and keep the scores
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.accuracy_more import sections
from benchmarks.accuracy_tables import cpu_section, gpu_section, grid, number, published_section
from benchmarks.published import report
from benchmarks.published_plans import remembering, simulated
from benchmarks.published_rows import read_rows
from benchmarks.published_scores import ScoredPlan, score, summary
from meshwright.core.errors import MeshwrightError

FOLDER = Path(__file__).parent / "results"
PAGE = FOLDER.parents[1] / "docs" / "accuracy.md"
PUBLISHED, GPU, CPU = (FOLDER / name for name in ("published.json", "gpu_frozen_h200.json", "cpu_forecast.json"))
VALIDATE = "validate.csv"
"""The table that goals are about: nothing was fitted to it."""
MOST_WORST = 10
COVER = (0.85, 0.95)


@dataclass(frozen=True, kw_only=True)
class Goal:
    what: str
    least: float = 0.0
    most: float | None = None
    """None: no bound above."""
    result: float | None
    """None: not measured."""
    as_number: bool = False
    """Not a percentage."""

    @property
    def is_kept(self) -> bool:
        return self.result is not None and self.least <= self.result <= (
            self.result if self.most is None else self.most
        )

    @property
    def shortfall(self) -> float:
        """How far off, as a share of the goal; what is still open comes after what is missed."""
        if self.is_kept:
            return 0.0
        if self.result is None:
            return 1e-6
        bound = self.most if self.most is not None and self.result > self.most else self.least
        return abs(self.result / bound - 1) if bound else 1.0

    def cells(self) -> tuple[str, ...]:
        def show(value: float) -> str:
            return f"{value:.3g}" if self.as_number else number(value)

        if self.most is None:
            wanted = f"at least {show(self.least)}"
        else:
            wanted = f"{show(self.least)} to {show(self.most)}" if self.least else f"at most {show(self.most)}"
        result = "not measured" if self.result is None else show(self.result)
        verdict = "open" if self.result is None else "kept" if self.is_kept else "MISSED"
        return self.what, wanted, result, verdict


SOURCES = {
    "hagemann2023_layouts": ("Hagemann", 0.08),
    "vtrain_measured": ("vTrain", 0.10),
    "mosaic_llmfoundry": ("Mosaic", 0.05),
    "hf_ultrascale_playbook": ("playbook", 0.15),
}
SWEEPS = ("hagemann2023_layouts", "vtrain_measured", "hf_ultrascale_playbook")
MEMORY = {"megatron_ci_golden": "Megatron CI", "torchtune": "torchtune", "litgpt": "litgpt"}


def published_goals(tables: Mapping[str, Any]) -> list[Goal]:
    table = tables.get(VALIDATE, {"sources": {}, "all": {}})

    def of(source: str, name: str) -> Any:
        return table["sources"].get(source, {}).get(name)

    goals = [
        Goal(what=f"step time, {title}: median error", most=most, result=of(source, "time_median_error"))
        for source, (title, most) in SOURCES.items()
    ]
    for source in SWEEPS:
        title = SOURCES[source][0]
        tau, regret = of(source, "kendall_tau"), of(source, "regret_mean")
        goals.append(Goal(what=f"ranking in a sweep, {title}: tau", least=0.85, result=tau, as_number=True))
        goals.append(Goal(what=f"regret of the plan picked, {title}: mean", most=0.03, result=regret))
    hagemann = "hagemann2023_layouts"
    goals.append(Goal(what="out-of-memory labels, Hagemann: right", least=0.97, result=of(hagemann, "oom_accuracy")))
    fits = of(hagemann, "false_fit_fraction")
    goals.append(Goal(what="out-of-memory labels, Hagemann: false fits", most=0.02, result=fits))
    for source, title in MEMORY.items():
        goals.append(Goal(what=f"memory, {title}: median error", most=0.06, result=of(source, "memory_median_error")))
    dense, inside = table["all"].get("dense_scored_fraction"), table["all"].get("coverage")
    goals.append(Goal(what="published rows of dense transformers: scored", least=0.9, result=dense))
    goals.append(Goal(what="published rows: inside the 90 % interval", least=COVER[0], most=COVER[1], result=inside))
    return goals


def gpu_goals(found: Mapping[str, Any]) -> list[Goal]:
    cases = [case for case in found.get("cases", ()) if case.get("measured_seconds")]
    times = _errors(cases, "seconds")
    allocated, reserved = _errors(cases, "allocated_bytes"), _errors(cases, "reserved_bytes")
    inside = [c["forecast_low_seconds"] <= c["measured_seconds"] <= c["forecast_high_seconds"] for c in cases]
    count = float(len(found.get("cases", ()))) or None
    return [
        Goal(what="GPU: cases", least=30, result=count, as_number=True),
        Goal(what="GPU: step time, median error", most=0.05, result=_median(times)),
        Goal(what="GPU: step time, p90 error", most=0.10, result=_quantile(times, 0.9)),
        Goal(what="GPU: peak allocated, median error", most=0.02, result=_median(allocated)),
        Goal(what="GPU: peak reserved, median error", most=0.05, result=_median(reserved)),
        Goal(what="GPU: inside the 90 % interval", least=COVER[0], most=COVER[1], result=_mean(inside)),
    ]


def cpu_goals(found: Mapping[str, Any]) -> list[Goal]:
    tau = found.get("kendall_tau")
    inside = found.get("coverage")
    return [
        Goal(what="CPU, 2 ranks: step time, median error", most=0.15, result=found.get("median_error")),
        Goal(what="CPU, 2 ranks: ranking, tau", least=0.7, result=tau, as_number=True),
        Goal(what="CPU, 2 ranks: inside the 90 % interval", least=COVER[0], most=COVER[1], result=inside),
    ]


def _errors(cases: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    pairs = [(case.get(f"forecast_{name}"), case.get(f"measured_{name}")) for case in cases]
    return [abs(said / real - 1) for said, real in pairs if said is not None and real]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _mean(values: Sequence[float]) -> float | None:
    return statistics.mean(values) if values else None


def _quantile(values: Sequence[float], share: float) -> float | None:
    return sorted(values)[round(share * (len(values) - 1))] if values else None


def scored_table(path: Path) -> dict[str, Any]:
    """What is kept of a CSV: scores by source and of all rows, and the rows furthest off."""
    rows, warnings = read_rows(path)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    all_scored = score(rows, remembering(simulated))
    timed = sorted((each for each in all_scored if each.time_error is not None), key=lambda e: -(e.time_error or 0.0))
    return {
        "sources": report(all_scored),
        "all": summary(all_scored),
        "worst": [_worst(each) for each in timed[:MOST_WORST]],
    }


def _worst(each: ScoredPlan) -> dict[str, Any]:
    names = ("model", "hardware", "gpus")
    return {
        "source": each.source,
        **{name: each.row.text(name) for name in names},
        "plan": each.guess.plan if each.guess else "",
        "measured_seconds": each.real_seconds,
        "forecast_seconds": each.guess.step_seconds if each.guess else None,
    }


def page(published: Mapping[str, Any], gpu: Mapping[str, Any], cpu: Mapping[str, Any], more: Sequence[str] = ()) -> str:
    """From the numbers alone: the same numbers give the same page. `more`: lines of other sections."""
    goals = [*published_goals(published), *gpu_goals(gpu), *cpu_goals(cpu)]
    goals.sort(key=lambda goal: (goal.is_kept, -goal.shortfall, goal.what))
    verdicts = Counter(goal.cells()[-1] for goal in goals)
    lines = [
        "# Accuracy of forecasts",
        "",
        "Made by `python -m benchmarks.accuracy`; do not edit. Worst first, everywhere. An error is how far forecast",
        "over measured is from 1. Forecasts are made before anything runs.",
        "",
        "## Goals",
        "",
        f"{verdicts['kept']} kept, {verdicts['MISSED']} missed, {verdicts['open']} open (not measured).",
        "",
        *grid(("what", "goal", "result", ""), [goal.cells() for goal in goals], right=(1, 2)),
        "",
        *published_section(published),
        *gpu_section(gpu),
        *cpu_section(cpu),
        *more,
        "## Making it again",
        "",
        "```",
        "python -m benchmarks.published FILE.csv --rows OUT.csv   one table, every row with its forecast",
        "python -m benchmarks.gpu forecast --list frozen --json benchmarks/results/gpu_frozen_h200.json",
        "python -m benchmarks.cpu_forecast                        this machine, two ranks, about five minutes",
        "python -m benchmarks.accuracy FILE.csv [...]             scores the tables, then writes this page",
        "python -m benchmarks.accuracy                            the page alone, from benchmarks/results",
        "```",
    ]
    return "\n".join(lines) + "\n"


def _kept(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.csv", help="published measurements to score first")
    asked = parser.parse_args(arguments)
    published = _kept(PUBLISHED)
    try:
        for path in asked.files:
            published[path.name] = scored_table(path)
    except MeshwrightError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if asked.files:
        PUBLISHED.write_text(json.dumps(published, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(published, _kept(GPU), _kept(CPU), sections()), encoding="utf-8")
    print(f"{PAGE.name} is made of {len(published)} published tables and what is in benchmarks/results")
    return 0


if __name__ == "__main__":
    sys.exit(main())
