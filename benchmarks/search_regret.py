"""What it costs to run the plan we would pick: published sweeps, in which nothing but the plan differs.

In each sweep (rows of one model, hardware, devices, sequence and batch, three or more) the fastest forecast of those
that we say fit is picked; its regret is its measured time over the best measured, less 1. Of equal forecasts the one
that measured worst counts. Picks among rows that ran out of memory are counted apart: they have no time. Where a source
tried several attention kernels, which no plan of ours chooses, `same kernel` tells the regret within each.

Why: how far each setting's forecasts are off from those of the other plans of their sweep (a constant error of a whole
sweep costs nothing), and what regret would be left if that one setting's error were known from the other sweeps.

Run: python -m benchmarks.search_regret FILE.csv [--json RESULT.json]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.published_plans import remembering, simulated
from benchmarks.published_rows import Row, read_rows
from benchmarks.published_scores import ScoredPlan, by_source, mean_tau, regret, score, sweeps
from meshwright.core.errors import MeshwrightError

SOURCES = {"hagemann2023_layouts": "Hagemann", "hf_ultrascale_playbook": "playbook", "vtrain_measured": "vTrain"}
GOAL_MEAN, GOAL_WORST = 0.03, 0.10
MOST_WORST = 10

Sweep = list[ScoredPlan]
Fact = Callable[[ScoredPlan], str]


def _column(name: str) -> Fact:
    return lambda each: each.row.text(name) or "-"


def _fullness(each: ScoredPlan) -> str:
    """How much of the device the plan takes, by our forecast."""
    assert each.guess is not None
    share = each.guess.allocated_bytes / (float(each.row.text("gpu_mem_gb") or 80) * 2**30)
    return f"{min(9, int(10 * share)) * 10} %"


FACTS: dict[str, Fact] = {
    "tensor": _column("tp"),
    "stages": _column("pp"),
    "replicas": _column("dp"),
    "microbatch": _column("micro_batch"),
    "microbatches": _column("grad_accum"),
    "recompute": _column("recompute"),
    "sequence split": _column("sp"),
    "zero": _column("zero_stage"),
    "kernel": _column("attention_kernel"),
    "memory": _fullness,
    "tensor and microbatch": lambda each: f"{each.row.text('tp')} and {each.row.text('micro_batch')}",
    "stages and microbatches": lambda each: f"{each.row.text('pp')} and {each.row.text('grad_accum')}",
}
"""By which errors are told apart; the last are pairs: latency where microbatches are small, and the bubble."""


def seconds(each: ScoredPlan) -> tuple[float, float]:
    """Forecast and measured, of a row that has both."""
    assert each.guess is not None
    assert each.real_seconds
    return each.guess.step_seconds, each.real_seconds


def picked(sweep: Sequence[ScoredPlan]) -> ScoredPlan:
    """As `regret` picks."""
    fitting = [each for each in sweep if each.guess and each.guess.fits] or list(sweep)
    return min(fitting, key=lambda each: (seconds(each)[0], -seconds(each)[1]))


def best(sweep: Sequence[ScoredPlan]) -> ScoredPlan:
    return min(sweep, key=lambda each: seconds(each)[1])


def by_kernel(members: Iterable[ScoredPlan]) -> list[Sweep]:
    """Sweeps in which the attention kernel is the same too."""
    groups: dict[str, Sweep] = defaultdict(list)
    for each in members:
        groups[each.row.text("attention_kernel")].append(each)
    return [sweep for own in groups.values() for sweep in sweeps(own)]


def facts_of(sweep: Sweep) -> dict[str, Any]:
    """A sweep in words."""
    ours, first = picked(sweep), best(sweep)
    row = first.row

    def told(each: ScoredPlan) -> dict[str, Any]:
        said, real = seconds(each)
        kernel = each.row.text("attention_kernel")
        plan = (each.guess.plan if each.guess else "") + (f" ({kernel})" if kernel else "")
        return {"plan": plan, "forecast_seconds": said, "measured_seconds": real}

    return {
        "source": first.source,
        "model": row.text("model"),
        "hardware": row.text("hardware"),
        "gpus": row.whole("gpus"),
        "sequence": row.whole("seq_len"),
        "batch": row.batch if row.has_batch else None,
        "plans": len(sweep),
        "regret": regret(sweep),
        "picked": told(ours),
        "best": told(first),
        "differ_in": [name for name, fact in FACTS.items() if " and " not in name and fact(ours) != fact(first)],
    }


def ran_out(rows: Sequence[ScoredPlan], sweep: Sweep) -> bool:
    """Whether a plan of the sweep that ran out of memory would have been picked before any that ran."""
    key, ours = sweep[0].sweep, seconds(picked(sweep))[0]
    return any(
        each.verdict == "false_fit" and each.sweep == key and each.guess is not None and each.guess.step_seconds < ours
        for each in rows
    )


def source_scores(rows: Sequence[ScoredPlan]) -> dict[str, Any]:
    found = sweeps(rows)
    regrets = [regret(sweep) for sweep in found]
    same = [regret(sweep) for sweep in by_kernel(rows)]
    return {
        "groups": len(found),
        "plans": sum(map(len, found)),
        "mean": statistics.mean(regrets),
        "median": statistics.median(regrets),
        "worst": max(regrets),
        "best_picked": sum(each == 0 for each in regrets),
        "within_goal": sum(each <= GOAL_MEAN for each in regrets),
        "out_of_memory_picked": sum(ran_out(rows, sweep) for sweep in found),
        "kendall_tau": mean_tau(rows),
        "same_kernel": {"groups": len(same), "mean": statistics.mean(same), "worst": max(same)} if same else None,
    }


def offsets(found: Sequence[Sweep]) -> dict[str, float]:
    """Row -> ln(forecast / measured), less its sweep's mean."""
    made: dict[str, float] = {}
    for sweep in found:
        logs = {each.row.text("row_id"): math.log(seconds(each)[0] / seconds(each)[1]) for each in sweep}
        middle = statistics.mean(logs.values())
        made |= {key: value - middle for key, value in logs.items()}
    return made


def corrected_regret(found: Sequence[Sweep], fact: Fact, off: Mapping[str, float]) -> float:
    """Mean regret if forecasts were divided by the mean error of their setting in all other sweeps."""
    total: dict[str, list[float]] = defaultdict(list)
    for sweep in found:
        for each in sweep:
            total[fact(each)].append(off[each.row.text("row_id")])
    regrets = []
    for sweep in found:
        own: dict[str, list[float]] = defaultdict(list)
        for each in sweep:
            own[fact(each)].append(off[each.row.text("row_id")])

        def corrected(each: ScoredPlan, own: Mapping[str, list[float]] = own) -> float:
            value = fact(each)
            count = len(total[value]) - len(own[value])
            known = (sum(total[value]) - sum(own[value])) / count if count else 0.0
            return seconds(each)[0] * math.exp(-known)

        fitting = [each for each in sweep if each.guess and each.guess.fits] or sweep
        chosen = min(fitting, key=corrected)
        regrets.append(seconds(chosen)[1] / seconds(best(sweep))[1] - 1)
    return statistics.mean(regrets)


def causes(rows: Sequence[ScoredPlan]) -> list[dict[str, Any]]:
    """Settings by the regret that would go if their own error did, most first."""
    found = sweeps(rows)
    off, before = offsets(found), statistics.mean(map(regret, found))
    made = []
    for name, fact in FACTS.items():
        groups: dict[str, list[float]] = defaultdict(list)
        for sweep in found:
            for each in sweep:
                groups[fact(each)].append(off[each.row.text("row_id")])
        if len(groups) < 2:
            continue
        errors = {value: {"error": math.expm1(statistics.mean(own)), "rows": len(own)} for value, own in groups.items()}
        after = corrected_regret(found, fact, off)
        made.append({"setting": name, "regret_left": after, "regret_gone": before - after, "errors": errors})
    return sorted(made, key=lambda each: each["regret_left"])


def report(all_scored: Sequence[ScoredPlan]) -> dict[str, Any]:
    groups = {source: rows for source, rows in by_source(all_scored).items() if sweeps(rows)}
    every = [facts_of(sweep) for rows in groups.values() for sweep in sweeps(rows)]
    regrets = [each["regret"] for each in every]
    return {
        "groups": len(every),
        "mean": statistics.mean(regrets) if regrets else None,
        "worst": max(regrets, default=None),
        "goals": {"mean": GOAL_MEAN, "worst": GOAL_WORST},
        "sources": dict(
            sorted(((s, source_scores(rows)) for s, rows in groups.items()), key=lambda item: -item[1]["mean"])
        ),
        "worst_groups": sorted(every, key=lambda each: -each["regret"])[:MOST_WORST],
        "causes": {source: causes(rows) for source, rows in groups.items()},
    }


def _sources_table(found: Mapping[str, Any]) -> list[str]:
    lines = [f"{'source':<12}{'groups':>7}{'plans':>7}{'mean':>8}{'median':>8}{'worst':>8}{'best':>6}{'<= 3%':>7}"]
    lines[0] += f"{'oom':>5}{'tau':>6}   same kernel"
    for source, one in found["sources"].items():
        same = one["same_kernel"]
        end = f"{same['mean']:.1%} mean, {same['worst']:.1%} worst of {same['groups']}" if same else "-"
        tau = "-" if one["kendall_tau"] is None else f"{one['kendall_tau']:.2f}"
        lines.append(
            f"{SOURCES.get(source, source):<12}{one['groups']:>7}{one['plans']:>7}{one['mean']:>8.1%}"
            f"{one['median']:>8.1%}{one['worst']:>8.1%}{one['best_picked']:>6}{one['within_goal']:>7}"
            f"{one['out_of_memory_picked']:>5}{tau:>6}   {end}"
        )
    return lines


def table(found: Mapping[str, Any]) -> str:
    if not found["groups"]:
        return "no sweep: nothing to pick from"
    verdict = "kept" if found["mean"] <= GOAL_MEAN and found["worst"] <= GOAL_WORST else "MISSED"
    lines = [
        f"{found['groups']} sweeps: mean regret {found['mean']:.1%} (goal {GOAL_MEAN:.0%}), "
        f"worst {found['worst']:.1%} (goal {GOAL_WORST:.0%}): {verdict}",
        "",
        *_sources_table(found),
        "",
        "worst:",
    ]
    for each in found["worst_groups"]:
        source, differing = SOURCES.get(each["source"], each["source"]), ", ".join(each["differ_in"])
        lines.append(
            f"{each['regret']:>7.1%}  {source}: {each['model']} on {each['gpus']}, "
            f"batch {each['batch']} x {each['sequence']}, {each['plans']} plans; differ in {differing}"
        )
        for name in ("picked", "best"):
            one = each[name]
            times = f"forecast {one['forecast_seconds']:.3g} s, measured {one['measured_seconds']:.3g} s"
            lines.append(f"         {name}: {one['plan']}: {times}")
    for source, own in found["causes"].items():
        lines += [
            "",
            f"{SOURCES.get(source, source)}: regret left if one setting's mean error (in the other sweeps) went",
        ]
        for one in own:
            errors = ", ".join(f"{value}: {e['error']:+.0%} ({e['rows']})" for value, e in one["errors"].items())
            lines.append(f"{one['regret_left']:>7.1%}  {one['setting']}: {errors[:220]}")
    return "\n".join(lines)


def wanted(row: Row) -> bool:
    return row.text("file") in SOURCES


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search_regret")
    parser.add_argument("file", type=Path, metavar="FILE.csv", help="published measurements")
    parser.add_argument("--json", type=Path, metavar="RESULT.json", help="write all numbers")
    asked = parser.parse_args(arguments)
    try:
        rows, warnings = read_rows(asked.file)
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr)
        found = report(score(filter(wanted, rows), remembering(simulated)))
    except MeshwrightError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(table(found))
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
