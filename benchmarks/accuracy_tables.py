"""The tables of docs/accuracy.md, from kept results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MOST_REASONS = 5
"""Reasons shown for each source that rows were not scored."""
COLUMNS = (
    ("rows", "rows"),
    ("scored", "scored"),
    ("median", "time_median_error"),
    ("p90", "time_p90_error"),
    ("tau", "kendall_tau"),
    ("regret", "regret_mean"),
    ("worst regret", "regret_max"),
    ("steady tau", "steady_tau"),
    ("steady regret", "steady_regret_mean"),
    ("worst", "steady_regret_max"),
    ("memory", "memory_median_error"),
    ("OOM right", "oom_accuracy"),
    ("false fit", "false_fit_fraction"),
    ("false OOM", "false_oom_fraction"),
    ("inside", "coverage"),
)


def number(value: float) -> str:
    """A fraction as people read it."""
    return f"{value:.1%}".replace("%", " %")


def grid(titles: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """A table of Markdown; `right` are the columns of numbers."""
    bars = ["---:" if place in set(right) else "---" for place in range(len(titles))]
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (titles, bars, *cells)]


def _cell(name: str, value: float | int | None) -> str:
    if value is None:
        return "–"
    if name in ("rows", "scored"):
        return str(value)
    return f"{value:.2f}" if name.endswith("_tau") else number(value)


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def _error(said: float | None, real: float | None) -> str:
    return "–" if said is None or not real else f"{said / real - 1:+.1%}".replace("%", " %")


def published_section(tables: Mapping[str, Any]) -> list[str]:
    lines = ["## Published by others", ""]
    if not tables:
        return [*lines, "Not scored yet.", ""]
    lines += [
        "Rows that others measured with other programs; each becomes a model, a cluster and a plan. Nothing was fitted",
        "to `validate.csv`. Median and p90 are errors of the step time; tau and regret are of sweeps of equal model,",
        "hardware, devices and batch; inside is the share of rows within the 90 % interval. One exception: how much",
        "memory the loss of other frameworks takes was set again on 18 November 2026, when ours was fused, while",
        "looking at the out-of-memory labels of `validate.csv` (InternEvo's above all): those labels are no proof.",
        "Steady tau and regret leave out runs flagged for an MFU below 5 % and pipelines that took longer than other",
        "measured runs of the sweep allow (`steady_rows`; no forecast has a say). Of nanotron's 501 calibration runs",
        "with stages on several nodes, those below 1 % MFU included, 195 take 0.2 to 0.5 s more than forecast for each",
        "message between stages, whatever its size, and 305 less than 0.1 s more: 15 % stall on 2 nodes, 39 % on 32,",
        "all on 64. Plans do not tell which: on 256 GPUs 4 stages of 8 ranks ran well with microbatches of 1, 4 and 8",
        "(4.5, 1.1 and 0.7 s) and not of 2 (20.6 s).",
        "",
    ]
    for name in sorted(tables, reverse=True):
        lines += _one_table(name, tables[name])
    return lines


def _one_table(name: str, table: Mapping[str, Any]) -> list[str]:
    everything = {"all rows": table["all"], **table["sources"]}
    rows = [[source, *(_cell(key, scores.get(key)) for _, key in COLUMNS)] for source, scores in everything.items()]
    titles = ("source", *(title for title, _ in COLUMNS))
    worst = [
        [
            each["source"],
            f"{each['model']}, {each['gpus']} x {each['hardware']}",
            each["plan"],
            _seconds(each["measured_seconds"]),
            _seconds(each["forecast_seconds"]),
            _error(each["forecast_seconds"], each["measured_seconds"]),
        ]
        for each in table["worst"]
    ]
    reasons = [
        [source, str(count), reason]
        for source, scores in table["sources"].items()
        for reason, count in list(scores["unscored"].items())[:MOST_REASONS]
    ]
    reasons.sort(key=lambda row: -int(row[1]))
    return [
        f"### {name}",
        "",
        *grid(titles, rows, right=range(1, len(titles))),
        "",
        "Furthest off:",
        "",
        *grid(("source", "what", "plan", "measured", "forecast", "error"), worst, right=(3, 4, 5)),
        "",
        "Not scored, by reason (the most frequent of each source):",
        "",
        *grid(("source", "rows", "reason"), reasons, right=(1,)),
        "",
    ]


def gpu_section(found: Mapping[str, Any]) -> list[str]:
    lines = ["## One GPU", ""]
    if not found.get("cases"):
        return [*lines, "Not measured yet.", ""]
    lines += [
        "`benchmarks.gpu forecast --list frozen`: cases nobody looked at before, on a GPU probed just before.",
        "",
    ]
    ran = [case for case in found["cases"] if case.get("measured_seconds")]
    ran.sort(key=lambda case: -abs(case["forecast_seconds"] / case["measured_seconds"] - 1))
    rows = [
        [
            case["name"],
            _seconds(case["measured_seconds"]),
            _seconds(case["forecast_seconds"]),
            *(_error(case.get(f"forecast_{key}"), case.get(f"measured_{key}")) for key in KEYS),
            _inside(case),
        ]
        for case in ran
    ]
    titles = ("case", "measured", "forecast", "step", "allocated", "reserved", "inside")
    lines += grid(titles, rows, right=range(1, 6))
    rest = [case for case in found["cases"] if not case.get("measured_seconds")]
    if rest:
        lines += ["", "Without a step:", ""]
        told = [[case["name"], _ending(case), "no" if case.get("forecast_fits", True) else "yes"] for case in rest]
        lines += grid(("case", "ended", "forecast said it does not fit"), told)
    return [*lines, ""]


KEYS = ("seconds", "allocated_bytes", "reserved_bytes")


def _inside(case: Mapping[str, Any]) -> str:
    return "yes" if case["forecast_low_seconds"] <= case["measured_seconds"] <= case["forecast_high_seconds"] else "no"


def _ending(case: Mapping[str, Any]) -> str:
    return "out of memory" if case.get("out_of_memory") else "failed" if "failed" in case else "not run"


def cpu_section(found: Mapping[str, Any]) -> list[str]:
    lines = ["## Two CPU ranks", ""]
    if not found.get("cases"):
        return [*lines, "Not measured yet.", ""]
    busy = sum(not case["is_quiet"] for case in found["cases"])
    lines += [
        "`benchmarks/cpu_forecast.py`: twelve plans of two models in turn, on the machine that was probed before.",
        "",
    ]
    if busy:
        lines += [f"Other processes were at work during {busy} of {len(found['cases'])} cases (marked busy).", ""]
    cases = sorted(found["cases"], key=lambda case: -abs(case["error"]))
    rows = [
        [
            case["name"],
            _seconds(case["measured_seconds"]),
            _seconds(case["forecast_seconds"]),
            _error(case["forecast_seconds"], case["measured_seconds"]),
            _inside(case),
            "" if case["is_quiet"] else "busy",
        ]
        for case in cases
    ]
    return [*lines, *grid(("case", "measured", "forecast", "error", "inside", ""), rows, right=(1, 2, 3)), ""]
