"""Sections of docs/accuracy.md beside the scores: rows held out, intervals by domain, others' forecasts, jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.accuracy_tables import grid, number

FOLDER = Path(__file__).parent / "results"
PEERS = ("ours", "Calculon", "llm-analysis")


def sections(folder: Path = FOLDER) -> list[str]:
    """Lines; what was not made is left out."""
    names = ("published_cross", "intervals", "peers_published", "published_jobs")
    made = {name: folder / f"{name}.json" for name in names}
    known = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in made.items() if path.exists()}
    return [
        *(_held_out(known["published_cross"]) if "published_cross" in known else ()),
        *(_intervals(known["intervals"]) if "intervals" in known else ()),
        *(_peers(known["peers_published"]) if "peers_published" in known else ()),
        *(_jobs(known["published_jobs"]) if "published_jobs" in known else ()),
    ]


def _share(value: float | None) -> str:
    return "–" if value is None else number(value)


def _held_out(found: dict[str, Any]) -> list[str]:
    rows = sorted(found["sources"].items(), key=lambda item: -item[1]["source"])
    cells = [[name, str(one["rows"]), *(number(one[key]) for key in ("now", "group", "source"))] for name, one in rows]
    return [
        "## Rows held out",
        "",
        "Made by `python -m benchmarks.published_cross CALIBRATE.csv CALIBRATE-MORE.csv`: median error of the step",
        f"time on rows of `calibrate-more.csv` when {found['constants']} constants of devices, links and frameworks",
        "are fitted again without a group (a model on a number of devices) or without a whole source. A framework",
        "that only the source left out tells of has the costs of one that nobody measured. What is modelled at all",
        "was chosen with all these rows in sight, so unseen sources may do worse. Of a source with more than 40 rows",
        "every n-th counts; rows that do not tell their plan do not.",
        "Goals: 12 % for each source, 15 % beyond 16 nodes.",
        "",
        *grid(("source", "rows", "as fitted", "without its group", "without its source"), cells, right=(1, 2, 3, 4)),
        "",
    ]


def _intervals(found: dict[str, Any]) -> list[str]:
    checked = found["validate"]
    rows = [
        [
            name,
            str(one["measured"]),
            str(one["sources"]),
            f"{one['low']:.2f} to {one['high']:.2f}",
            _share(one["inside"]),
            _share(one["held_out"]),
            str(checked.get(name, {}).get("rows", "–")),
            _share(checked.get(name, {}).get("inside")),
        ]
        for name, one in sorted(found["calibrate"].items(), key=lambda item: item[1]["held_out"] or 0.0)
    ]
    titles = ("domain", "rows", "sources", "times the forecast", "inside", "held out", "validate", "inside")
    rest = [[name, str(one["rows"]), _share(one["inside"])] for name, one in checked.items()]
    rest = [row for row in rest if row[0] not in found["calibrate"]]
    return [
        "## Intervals by domain",
        "",
        "Made by `python -m benchmarks.intervals CALIBRATE.csv CALIBRATE-MORE.csv --check VALIDATE.csv`, as is the",
        "table that the package ships. `inside` is the share of the rows that the interval was made of; `held out`",
        "that of rows whose source (or, with one source, model and number of devices) had no say in it.",
        "Of two plans of a sweep the order of forecasts is right nine times in ten where they differ by"
        f" {number(found['ties'])}.",
        "",
        *grid(titles, rows, right=range(1, len(titles))),
        "",
        "Domains without rows of their own, whose interval is that of their neighbours, widened:",
        "",
        *grid(("domain", "validate", "inside"), rest, right=(1, 2)),
        "",
    ]


def _peers(found: dict[str, Any]) -> list[str]:
    rows = [
        [f"{source} ({table})", str(one["rows"]), *(_share(one.get(name)) for name in PEERS), _winner(one)]
        for table, sources in found.items()
        for source, one in sources.items()
    ]
    return [
        "## Others' forecasts of the same rows",
        "",
        "Made by `python -m benchmarks.peers_published`: median error of the step time on the rows that all three can",
        "express, of sources with 20 of them or more. Calculon and llm-analysis have the settings that do best on the",
        "calibration rows of the source; ours are the forecasts of the tables above. BigScience is one model on one",
        "machine: an efficiency chosen on these very rows fits them; ours has no number of its own for that machine.",
        "",
        *grid(("source", "rows", *PEERS, "ahead"), rows, right=(1, 2, 3, 4)),
        "",
    ]


def _winner(one: dict[str, Any]) -> str:
    return min((name for name in PEERS if name in one), key=lambda name: one[name])


def _jobs(found: dict[str, Any]) -> list[str]:
    rows = [
        [
            job["job"],
            job["their_plan"],
            f"{job['published_seconds']:.2f} s",
            f"{job['forecast_seconds']:.2f} s",
            f"{job['error']:+.0%}".replace("%", " %"),
            job.get("our_plan", "") or "–",
            f"{job['our_seconds']:.2f} s" if "our_seconds" in job else "–",
            f"{job['their_plan_by_us_seconds']:.2f} s" if "their_plan_by_us_seconds" in job else "–",
            "; ".join(job.get("objections", ())),
        ]
        for job in found["jobs"]
        if "error" in job
    ]
    titles = (
        "job",
        "their plan",
        "published",
        "forecast",
        "error",
        "our plan",
        "forecast",
        "theirs by us",
        "objections",
    )
    return [
        "## Published jobs",
        "",
        "Made by `python -m benchmarks.published_jobs`; sources and what is assumed where a paper is silent are in",
        f"`benchmarks/published_jobs.csv`. Median error of the forecasts of their plans:"
        f" {number(found['median_error'])} (goal {number(found['goal'])}).",
        "`theirs by us` is their plan with our kernels and overlap, as `mw plan` ranks it; `objections` are what an",
        "expert would say against our plan.",
        "",
        *grid(titles, rows, right=(2, 3, 4, 6, 7)),
        "",
        "Parameters gathered from hundreds of ranks are recommended as far as they were measured: GPT-3 175B with FSDP",
        "on 128 to 512 A100s (2048 and 4096 tokens on each, 173 and 186 TFLOP/s), MPT 7B and 30B on 512 H100s, LLaMA",
        "65B and OPT-175B with tensor parallelism and FSDP over 256 and 124 nodes. ZeRO-3 of 2021 (SC21, table 2) was",
        "three times slower on 1,536 A100s: a collective for each parameter, at what one card of a node gives.",
        "",
    ]
