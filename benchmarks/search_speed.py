"""How long the search takes and how sure it is: models and machines from 8 to 131,072 devices, worst first.

Each is asked in a fresh process, twice: `search` alone (its wall and processor seconds, its gap, the resident memory
at its peak) and the whole command `mw plan --json`, from start to exit. On a machine that others use, processor seconds
tell more than wall seconds; goals are about wall seconds.

Run: python -m benchmarks.search_speed [--only WORDS] [--repeats 3] [--json RESULT.json]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.machine.named_clusters import cluster
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.planner.search import search
from meshwright.run.model import describe
from meshwright.run.run_file import ModelSection

MOST_GAP, MOST_MIB = 0.01, 2048
TOP = 8
"""Plans ranked: as many as the command shows."""
TIMEOUT_SECONDS = 900


@dataclass(frozen=True, kw_only=True)
class Question:
    name: str
    model: str
    cluster: str
    batch: int
    sequence: int
    goal_seconds: float


QUESTIONS = (
    Question(name="8b on 8", model="llama3-8b", cluster="8xh100", batch=128, sequence=8192, goal_seconds=1.0),
    Question(name="70b on 64", model="llama3-70b", cluster="8x8xh100", batch=512, sequence=8192, goal_seconds=3.0),
    Question(
        name="405b on 16,384", model="llama3-405b", cluster="2048x8xh100", batch=2048, sequence=8192, goal_seconds=6.0
    ),
    Question(
        name="mixtral on 128", model="mixtral-8x7b", cluster="16x8xh100", batch=1024, sequence=8192, goal_seconds=4.0
    ),
    Question(
        name="1T MoE on 131,072",
        model="kimi-k2-like",
        cluster="16384x8xh100",
        batch=16384,
        sequence=4096,
        goal_seconds=60.0,
    ),
    Question(
        name="deepseek on 2,048",
        model="deepseek-v3-like",
        cluster="256x8xh800",
        batch=15360,
        sequence=4096,
        goal_seconds=20.0,
    ),
)
COMMANDS = {
    "front": ("--model llama3-8b --cluster 8xh100 --front", 5.0),
    "devices": ("--model llama3-8b --cluster 8xh100 --devices 8..64", 5.0),
    "nothing fits": ("--model llama3-70b --cluster 8xh100", 5.0),
    "mixed": ("--model llama3-8b --cluster 8xh100+8xa100-80", 5.0),
}
"""Questions that take several searches: flags of `mw plan` and the goal, in seconds of the whole command."""


def searched(question: Question) -> dict[str, Any]:
    """In this process, which must have done nothing else."""
    section = ModelSection(name=question.model)
    profile = describe(section, question.sequence).profile
    machines = cluster(question.cluster)
    start, own = time.perf_counter(), time.process_time()
    # As the command asks: the default optimizer, and roundings allowed.
    found = search(
        profile,
        machines,
        batch=question.batch,
        sequence=question.sequence,
        optimizer=OptimizerConfig(),
        allow="rounded",
        top=TOP,
    )
    facts = {
        "search_seconds": time.perf_counter() - start,
        "search_cpu_seconds": time.process_time() - own,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "params": profile.num_params,
        "candidates": found.evaluated,
        "gap_fraction": found.gap_fraction,
        "plan": None,
    }
    if found.best is None:
        return facts
    plan, said = found.best
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
    return facts | {"plan": str(plan), "mesh": mesh, "step_seconds": said.step_seconds, "mfu": said.mfu}


def _child(question: Question) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.search_speed", "--only", question.name, "--here"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    return json.loads(done.stdout)


def command_of(question: Question) -> list[str]:
    machine = ["--model", question.model, "--cluster", question.cluster]
    size = ["--batch", str(question.batch), "--seq", str(question.sequence)]
    return [str(Path(sys.executable).with_name("mw")), "plan", "--json", "--top", str(TOP), *machine, *size]


def commanded(command: Sequence[str]) -> dict[str, Any]:
    """The command's wall and processor seconds."""
    start, own = time.perf_counter(), _children_seconds()
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        return {"command_seconds": None, "command_problem": f"took more than {TIMEOUT_SECONDS} s"}
    seconds, spent = time.perf_counter() - start, _children_seconds() - own
    if done.returncode not in (0, 1):
        return {"command_seconds": None, "command_problem": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return {"command_seconds": seconds, "command_cpu_seconds": spent}


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measured(question: Question, repeats: int) -> dict[str, Any]:
    """Medians; what does not change is told once."""
    runs: list[dict[str, Any]] = []
    for _ in range(repeats):
        try:
            runs.append(_child(question) | commanded(command_of(question)))
        except subprocess.TimeoutExpired:
            return _about(question) | {"failed": f"took more than {TIMEOUT_SECONDS} s"}
        except subprocess.CalledProcessError as error:
            return _about(question) | {"failed": (error.stderr.strip().splitlines() or ["no message"])[-1]}
    row = dict(runs[-1])
    for name in ("search_seconds", "search_cpu_seconds", "peak_mib", "command_seconds", "command_cpu_seconds"):
        values = [run[name] for run in runs if run.get(name) is not None]
        row[name] = statistics.median(values) if values else None
    row["is_deterministic"] = len({(run["plan"], run["gap_fraction"], run["candidates"]) for run in runs}) == 1
    return _about(question) | row


def _about(question: Question) -> dict[str, Any]:
    words = f"{question.model} on {question.cluster}, batch {question.batch} x {question.sequence}"
    return {"name": question.name, "asked": words, "goal_seconds": question.goal_seconds}


def badness(row: Mapping[str, Any]) -> float:
    """The largest of time, gap and memory over their goals; 1: just kept."""
    if "failed" in row or row["plan"] is None:
        return 1e9
    seconds = max(row["search_seconds"], row["command_seconds"] or 1e9)
    gap = 1e9 if row["gap_fraction"] is None else row["gap_fraction"]
    return max(seconds / row["goal_seconds"], gap / MOST_GAP, row["peak_mib"] / MOST_MIB)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        f"{'what':<19}{'goal':>7}{'search':>10}{'cpu':>10}{'mw plan':>10}{'gap':>8}{'MiB':>7}{'plans':>9}{'MFU':>7}"
    ]
    for row in sorted(rows, key=badness, reverse=True):
        if "failed" in row:
            lines.append(f"{row['name']:<19}{row['goal_seconds']:>5g} s  {row['failed']}  MISSED")
            continue
        whole = "failed" if row["command_seconds"] is None else f"{row['command_seconds']:.2f} s"
        gap = "-" if row["gap_fraction"] is None else f"{row['gap_fraction']:.2%}"
        mfu = "-" if row["plan"] is None else f"{row['mfu']:.1%}"
        own = f"{row['search_seconds']:>8.2f} s{row['search_cpu_seconds']:>8.2f} s"
        lines.append(
            f"{row['name']:<19}{row['goal_seconds']:>5g} s{own}{whole:>10}{gap:>8}"
            f"{row['peak_mib']:>7.0f}{row['candidates']:>9}{mfu:>7}"
            f"  {'kept' if badness(row) <= 1 else 'MISSED'}"
        )
        plan = "nothing fits" if row["plan"] is None else f"{row['plan']}; a step {row['step_seconds']:.3g} s"
        lines.append(f"    {plan}" + ("" if row["is_deterministic"] else "; NOT THE SAME EACH TIME"))
        if problem := row.get("command_problem"):
            lines.append(f"    mw plan: {problem}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search_speed")
    parser.add_argument("--only", default="", metavar="WORDS", help="questions whose names contain this")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="medians of so many runs")
    parser.add_argument("--json", type=Path, metavar="RESULT.json")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    questions = [question for question in QUESTIONS if asked.only in question.name]
    if asked.here:
        print(json.dumps(searched(questions[0])))
        return 0
    rows = []
    for question in questions:
        print(f"{question.name} ...", file=sys.stderr, flush=True)
        rows.append(measured(question, max(1, asked.repeats)))
    if rows:
        print(table(rows))
    several = []
    mw = str(Path(sys.executable).with_name("mw"))
    for name, (flags, goal) in COMMANDS.items():
        if asked.only in name:
            runs = [commanded([mw, "plan", "--json", *flags.split()]) for _ in range(max(1, asked.repeats))]
            row = {"name": name, "asked": flags, "goal_seconds": goal} | runs[-1]
            if all(run["command_seconds"] is not None for run in runs):
                for each in ("command_seconds", "command_cpu_seconds"):
                    row[each] = statistics.median(run[each] for run in runs)
            several.append(row)
            print(f"{name:<19}{goal:>5g} s  mw plan {flags}: {row['command_seconds'] or -1:.2f} s")
    if asked.json is not None:
        before = json.loads(asked.json.read_text(encoding="utf-8")) if asked.json.exists() and asked.only else {}
        result = {
            "goals": {"gap_fraction": MOST_GAP, "peak_mib": MOST_MIB},
            "questions": _updated(before.get("questions", []), rows),
            "commands": _updated(before.get("commands", []), several),
        }
        asked.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    is_slow = any((row["command_seconds"] or 1e9) > row["goal_seconds"] for row in several)
    return 0 if all(badness(row) <= 1 for row in rows) and not is_slow else 1


def _updated(before: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of before with what was measured now in the place of rows of the same name."""
    by_name = {row["name"]: row for row in (*before, *rows)}
    return list(by_name.values())


if __name__ == "__main__":
    sys.exit(main())
