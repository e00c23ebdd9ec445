"""The table of 90 % intervals that `mw plan` ships: residuals of measured rows by domain, never typed by hand.

Residuals (measured over forecast) are those of the published calibration tables as forecast today, of our GPU cases and
of our CPU cases (benchmarks/results). A domain is a kind of device, a number of nodes and a kind of model. The interval
of a domain with rows is the pair of quantiles that leaves out a tenth, sources weighing by the root of their rows, then
widened until nine in ten rows of a source lie inside when that source had no say, but not so far that more than 95 % of
all rows do. Where there is a single published source, models on a number of devices are held out instead, and since
nothing says how another source would do, the interval is widened by a step and no side is less than half of the other.
A domain without rows has the widest of its nearest neighbours', widened for each step away from them.

Run: python -m benchmarks.intervals CALIBRATE.csv CALIBRATE-MORE.csv [--check VALIDATE.csv]
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.published_machines import cluster
from benchmarks.published_models import profile
from benchmarks.published_plans import remembering, simulated
from benchmarks.published_rows import read_rows
from benchmarks.published_scores import ScoredPlan, score
from meshwright.core.errors import MeshwrightError
from meshwright.simulator.forecast import (
    CPUS,
    OTHER_GPUS,
    PROBED_CPUS,
    PROBED_GPUS,
    SCALES,
    Domain,
    domain_of,
    interval_of,
    interval_table,
)

FOLDER = Path(__file__).parent / "results"
GPU, CPU, RESULT = (FOLDER / f"{name}.json" for name in ("gpu_frozen_h200", "cpu_forecast", "intervals"))
SHIPPED = Path(__file__).parent.parent / "meshwright" / "simulator" / "intervals.json"
COVERAGE, MOST_COVERAGE = 0.9, 0.95
LEAST_ROWS = 10
"""Of a domain that has an interval of its own: of fewer a twentieth is less than a row."""
LEAST_WIDTH = math.log(1.05)
STEP = 1.25
"""Times as wide for each step away from rows: a larger scale, another kind of device or model."""
WIDEST = math.log(4.0)
KINDS = {
    "A100s": ("a100", "a800"),
    "H100s": ("h100", "h200", "h800", "gh200", "h20"),
    "B200s": ("b200", "b300", "gb200", "gb300"),
}
"""Generations, by words in the names of clusters; `domain_of` takes the longest that it finds."""
MODELS = ("decoders", "experts", "other models")


@dataclass(frozen=True, kw_only=True)
class Residual:
    source: str
    group: str
    """Rows that are held out together where a domain has one source: a model on a number of devices."""
    domain: Domain
    log: float
    """Of measured over forecast."""
    sweep: tuple[Any, ...] = ()
    """What plans have in common that were measured side by side."""
    forecast: float = 0.0


def published(path: Path) -> Iterator[Residual]:
    for each in score(read_rows(path)[0], remembering(simulated)):
        if each.time_error is not None:
            yield residual_of(each)


def residual_of(each: ScoredPlan) -> Residual:
    assert each.case
    assert each.guess
    assert each.real_seconds
    case = each.case
    domain = domain_of(profile(case.config, case.variant), cluster(case.machine), case.plans[0].num_ranks)
    group = f"{each.source} {each.row.text('model')} {each.row.text('gpus')}"
    return Residual(
        source=each.source,
        group=group,
        domain=domain,
        log=math.log(each.real_seconds / each.guess.step_seconds),
        sweep=(each.source, *each.sweep),
        forecast=each.guess.step_seconds,
    )


def ours() -> Iterator[Residual]:
    """Cases of benchmarks.gpu and benchmarks.cpu_forecast, on machines that were probed just before."""
    for path, kind, scale in ((GPU, PROBED_GPUS, 0), (CPU, PROBED_CPUS, 1)):
        for case in json.loads(path.read_text(encoding="utf-8"))["cases"] if path.exists() else ():
            if not case.get("measured_seconds"):
                continue
            name = case["name"]
            model = "experts" if re.search(r"mixtral|deepseek|kimi|moe", name) else "decoders"
            model = "other models" if re.match(r"dlrm|vit|vgg|resnet|transformers' (BERT|ViT)", name) else model
            log = math.log(case["measured_seconds"] / case["forecast_seconds"])
            group = re.split(r" x\d|[,:]", name)[0]
            yield Residual(source=path.stem, group=group, domain=Domain(kind, scale, model), log=log)


def quantiles(rows: Sequence[Residual]) -> tuple[float, float]:
    """(low, high) of the logarithms, around 0."""
    logs = np.array([row.log for row in rows])
    counts = defaultdict(int)
    for row in rows:
        counts[row.source] += 1
    weights = np.array([1 / math.sqrt(counts[row.source]) for row in rows])
    order = np.argsort(logs)
    logs, shares = logs[order], np.cumsum(weights[order]) / weights.sum()
    tail = (1 - COVERAGE) / 2
    low, high = (logs[min(len(rows) - 1, int(np.searchsorted(shares, place)))] for place in (tail, 1 - tail))
    return min(float(low), -LEAST_WIDTH), max(float(high), LEAST_WIDTH)


def inside(rows: Iterable[Residual], bounds: tuple[float, float], widened: float = 1.0) -> list[bool]:
    return [widened * bounds[0] <= row.log <= widened * bounds[1] for row in rows]


def held_out(rows: Sequence[Residual], widened: float = 1.0) -> float | None:
    """Share of rows inside the interval that the others give: by source, or in a single source by group."""
    key = "source" if len({row.source for row in rows}) > 1 else "group"
    names = sorted({getattr(row, key) for row in rows})
    found: list[float] = []
    for name in names:
        mine = [row for row in rows if getattr(row, key) == name]
        others = [row for row in rows if getattr(row, key) != name]
        if len(others) >= LEAST_ROWS // 2:
            found += inside(mine, quantiles(others), widened)
    return float(np.mean(found)) if found else None


def fitted(rows: Sequence[Residual]) -> dict[str, Any]:
    bounds, widened = quantiles(rows), 1.0
    while (held_out(rows, widened) or 1.0) < COVERAGE and np.mean(
        inside(rows, bounds, widened + 0.05)
    ) <= MOST_COVERAGE:
        widened += 0.05
    if {row.source for row in rows} <= {rows[0].source} - {GPU.stem, CPU.stem}:
        widened *= STEP
        bounds = min(bounds[0], -bounds[1] / 2), max(bounds[1], -bounds[0] / 2)
    return {
        "measured": len(rows),
        "sources": len({row.source for row in rows}),
        "low": widened * bounds[0],
        "high": widened * bounds[1],
        "inside": float(np.mean(inside(rows, bounds, widened))),
        "held_out": held_out(rows, widened),
    }


def distance(domain: Domain, other: Domain) -> float:
    """Steps from one to another; upwards in scale counts twice: what is larger has more that can go wrong."""
    up = domain.scale - other.scale
    steps = up * 2.0 if up > 0 else -up * 1.0
    if other.devices in (PROBED_GPUS, PROBED_CPUS) and domain.devices != other.devices:
        return math.inf  # a machine that was measured is known better
    if domain.models != other.models:
        steps += 3.0
    if domain.devices != other.devices:
        cpus = (CPUS, PROBED_CPUS)
        steps += 2.0 if (domain.devices in cpus) == (other.devices in cpus) else 4.0
    return steps


def ship(made: dict[str, Any]) -> None:
    SHIPPED.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    interval_table.cache_clear()


def whole_table(rows: Sequence[Residual]) -> dict[str, Any]:
    by_domain: dict[Domain, list[Residual]] = defaultdict(list)
    for row in rows:
        by_domain[row.domain].append(row)
    known = {domain: fitted(some) for domain, some in by_domain.items() if len(some) >= LEAST_ROWS}
    domains: dict[str, Any] = {}
    for kind in (*KINDS, OTHER_GPUS, PROBED_GPUS, CPUS, PROBED_CPUS):
        for scale in range(len(SCALES)):
            for model in MODELS:
                domain = Domain(kind, scale, model)
                domains[str(domain)] = known.get(domain) or neighbours(domain, known)
    for found in domains.values():
        for name in ("low", "high"):
            found[name] = round(math.exp(max(-WIDEST, min(WIDEST, found[name]))), 3)
        for name in ("inside", "held_out"):
            if found.get(name) is not None:
                found[name] = round(found[name], 3)
    return domains


def tie_fraction(rows: Sequence[Residual]) -> float:
    """By how much two plans of one sweep must differ in their forecasts for the order to be right nine times in ten."""
    sweeps: dict[tuple[Any, ...], list[Residual]] = defaultdict(list)
    for row in rows:
        if row.sweep:
            sweeps[row.sweep].append(row)
    gaps, right, weights = [], [], []
    for some in sweeps.values():
        for at, one in enumerate(some):
            for other in some[at + 1 :]:
                gap = math.log(one.forecast / other.forecast)
                gaps.append(abs(gap))
                right.append((gap > 0) == (gap + one.log - other.log > 0))
                weights.append(1 / len(some))
    edges = [math.log(1 + percent / 100) for percent in range(60)]
    known = np.array(gaps), np.array(right, dtype=float), np.array(weights)
    for low in edges:
        near = (known[0] >= low) & (known[0] < low + 0.05)
        if near.any() and np.average(known[1][near], weights=known[2][near]) >= COVERAGE:
            return round(math.expm1(low), 3)
    return round(math.expm1(edges[-1]), 3)


def neighbours(domain: Domain, known: dict[Domain, dict[str, Any]]) -> dict[str, Any]:
    """The widest of the nearest domains with rows, widened by how far away they are."""
    if not known:
        return {"measured": 0, "from": "nothing", "low": -WIDEST, "high": WIDEST}
    least = min(distance(domain, other) for other in known)
    near = [other for other in known if distance(domain, other) == least]
    widened = STEP**least
    return {
        "measured": 0,
        "from": " and ".join(map(str, near)),
        "low": widened * min(known[each]["low"] for each in near),
        "high": widened * max(known[each]["high"] for each in near),
    }


def checked(rows: Sequence[Residual]) -> dict[str, Any]:
    """Of rows that no interval was made of: share inside by domain. Nothing is said of single rows."""
    found: dict[str, list[bool]] = defaultdict(list)
    for row in rows:
        interval = interval_of(row.domain)
        found[str(row.domain)].append(math.log(interval.low) <= row.log <= math.log(interval.high))
    return {name: {"rows": len(some), "inside": round(float(np.mean(some)), 3)} for name, some in sorted(found.items())}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.intervals")
    parser.add_argument("files", nargs="+", type=Path, metavar="CALIBRATE.csv", help="published rows to take")
    parser.add_argument("--check", type=Path, metavar="VALIDATE.csv", help="published rows to count, never to take")
    asked = parser.parse_args(arguments)
    try:
        words = {word: devices for devices, some in KINDS.items() for word in some}
        # Forecasts look up their interval while they are compared: a first table has every domain.
        before = json.loads(SHIPPED.read_text(encoding="utf-8"))["domains"] if SHIPPED.exists() else {}
        ship({"devices": words, "domains": {**whole_table(()), **before}})
        rows = [row for path in asked.files for row in published(path)] + list(ours())
        ship(made := {"devices": words, "domains": whole_table(rows)})
        more = checked(list(published(asked.check))) if asked.check else {}
    except MeshwrightError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    ties = tie_fraction(rows)
    print(f"of plans whose forecasts differ by {ties:.0%} the order is right nine times in ten")
    for name, found in made["domains"].items():
        if found["measured"]:
            held = "-" if found["held_out"] is None else f"{found['held_out']:.0%}"
            print(
                f"{name:60s} {found['measured']:5d} rows of {found['sources']} sources, x {found['low']:.2f} to "
                f"{found['high']:.2f}; inside {found['inside']:.0%}, of what is held out {held}"
            )
    known = {name: found for name, found in made["domains"].items() if found["measured"]}
    last = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    result = {"ties": ties, "calibrate": known, "validate": more or last.get("validate", {})}
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if more:
        total = sum(found["rows"] for found in more.values())
        share = sum(found["rows"] * found["inside"] for found in more.values()) / total
        print(f"{asked.check.name}: {share:.1%} of {total} rows inside")
        for name, found in more.items():
            print(f"  {name:60s} {found['rows']:5d} rows, inside {found['inside']:.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
