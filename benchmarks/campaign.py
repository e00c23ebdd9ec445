"""Many cases on rank pools, in parallel, each with a verdict: what `benchmarks.fuzz` and `benchmarks.zoo` share.

A case is run by one of `workers` processes, each with a pool of its own. A hang is bounded, and a pool that dies with
its case is replaced. Results are JSON lines in a folder, one file for each worker, and the verdicts are

    exact     trains as the plain loop does, and moves what was priced
    refused   by problems with a place and a text, before anything runs
    departs   other numbers than the plain loop's
    price     the same numbers, other traffic or state than priced
    late      refused while it ran, after `check` had nothing against it
    crash     an exception that is no `MeshwrightError`, or a process that died
    hang      no answer in time
    absent    the installed packages do not make this model
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.launch.rank_pool import RankError, RankPool

Case = dict[str, Any]
Result = dict[str, Any]
GOOD = ("exact", "refused")
BAD = ("departs", "price", "late", "crash", "hang")
MOST_RANKS = 8
ROOT = Path(__file__).parents[1]
ROUNDED_DISTANCE = 0.03
ROUNDED_LENGTH = 0.01
"""In bf16, beyond what one device in bf16 has: distance of the first gradient from the plain one over its norm, and
error of its length along it."""


class Runner:
    """Cases one after another, on one pool: its own, or one that is given."""

    def __init__(self, patience: float = 60.0, pool: RankPool | None = None):
        self.patience, self.owns_pool = patience, pool is None
        if str(ROOT) not in os.environ.get("PYTHONPATH", "").split(os.pathsep):  # ranks import `benchmarks` too
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        self.pool = pool or RankPool(MOST_RANKS, threads_per_rank=1)
        self.scratch = Path(tempfile.mkdtemp(prefix="mw-campaign-"))

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.owns_pool:
            self.pool.close()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def run(self, case: Case) -> Result:
        start = time.monotonic()
        folder = self.scratch / f"{os.getpid()}-{time.monotonic_ns()}"
        try:
            verdict, lines = self._verdict(case, folder)
        except RankError as error:
            verdict, lines = _of_failure(error)
        except MeshwrightError as error:  # the plan's own constructor
            verdict, lines = "refused", [str(problem) for problem in error.problems]
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return {**case, "verdict": verdict, "why": lines, "seconds": round(time.monotonic() - start, 2)}

    def _verdict(self, case: Case, folder: Path) -> tuple[str, list[str]]:
        patience = self.patience * (4 if any(t["name"] == "compile" for t in case["plan"]["techniques"]) else 1)
        plan = Plan.from_json(json.dumps(case["plan"]))
        arguments = {"case": {**case, "patience": patience}, "folder": str(folder)}
        (first,) = self.pool.run("benchmarks.oracle:reference_job", arguments, 1, timeout_seconds=2 * patience)
        if "absent" in first:
            return "absent", [first["absent"]]
        if "refused" in first:
            bare = [p for p in first["refused"] if not (p["where"] and p["what"])]
            lines = [f"{p['where']}: {p['what']} {p['fix']}".rstrip() for p in first["refused"]]
            return ("crash", [f"a problem without a place or a text: {bare[0]}"]) if bare else ("refused", lines)
        answers = self.pool.run("benchmarks.oracle:plan_job", arguments, plan.num_ranks, timeout_seconds=patience)
        errors = [f"rank {rank}: {line}" for rank, answer in enumerate(answers) for line in answer["errors"]]
        errors += _uncovered(answers, first["elements"])
        if case.get("dtype") == "float32":
            errors += _rounded([answer["sums"] for answer in answers if "sums" in answer], first["sums"])
        if errors:
            return "departs", errors[:12]
        lines = [f"rank {rank}: {line}" for rank, answer in enumerate(answers) for line in answer["traffic"]]
        return ("price", lines[:12]) if lines else ("exact", [])


def _of_failure(error: RankError) -> tuple[str, list[str]]:
    lines = str(error).strip().splitlines()
    if any("no answer from" in failure.message for failure in error.failures):
        stacks = [f.details.partition("Current thread")[2].splitlines()[1:16] for f in error.failures]
        return "hang", [f.message for f in error.failures] + [line for stack in stacks for line in stack]
    first = min(error.failures, key=lambda f: (f.is_secondary, f.rank))
    if "MeshwrightError" in first.details:
        is_step = any(word in first.details for word in ("built.feed", "built.evaluate", "built.flush"))
        return "late" if is_step else "refused", [first.message, *([] if not is_step else lines[-8:])]
    if all(f.is_secondary for f in error.failures) and "timed out" in str(error).lower():
        return "hang", lines[:2] + lines[-12:]
    return "crash", lines[:2] + lines[-16:]


def _uncovered(answers: list[dict[str, Any]], elements: int) -> list[str]:
    """Every element of every parameter must lie on some rank."""
    boxes: dict[str, set[str]] = {}
    for answer in answers:
        for name, box in answer["boxes"].items():
            boxes.setdefault(name, set()).add(json.dumps(box))
    total = sum(math.prod(json.loads(text)[1]) for found in boxes.values() for text in found)
    return [f"{total} elements of parameters lie on the ranks, {elements} exist"] if total != elements else []


def _rounded(ranks: list[list[float]], alone: list[list[float]]) -> list[str]:
    """The first gradient of all ranks together, against the plain one and one device's runs in the same precision."""
    if not ranks or not alone[0][1]:
        return []
    length, distance = _apart([sum(each) for each in zip(*ranks, strict=True)])
    usual = max(_apart(each)[1] for each in alone)
    most = ROUNDED_DISTANCE + max(2.5 * _apart(alone[0])[1], 1.25 * usual)  # the second where a control is routed apart
    usual_length = min((_apart(each)[0] for each in alone), key=lambda each: abs(each - length))
    found = []
    if not abs(length - usual_length) <= ROUNDED_LENGTH + 0.2 * usual:
        found.append(f"the gradient is {length:.4f} times as long along the plain one, alone {usual_length:.4f}")
    if not distance <= most:
        found.append(f"the gradient is {distance:.4f} of its norm away from the plain one, alone {usual:.4f}")
    return found


def _apart(sums: list[float]) -> tuple[float, float]:
    """(length along the plain gradient, distance from it), of its norm; from the sums of a·b, b·b and a·a."""
    dot, plain, own = sums
    return dot / plain, max(0.0, (own - 2 * dot + plain) / plain) ** 0.5


def each_in_turn(cases: Iterable[Case], until: float, patience: float) -> Iterator[Result]:
    with Runner(patience) as runner:
        for case in cases:
            if time.monotonic() > until:
                return
            yield runner.run(case)


def spawn(module: str, words: list[str], workers: int, out: Path) -> int:
    """The same command in `workers` processes, each with its share of the cases; the worst exit code."""
    out.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    processes = []
    for worker in range(workers):
        log = (out / f"worker-{worker}.log").open("wb")
        own = [*words, "--share", f"{worker}/{workers}", "--out", str(out)]
        command = [sys.executable, "-m", module, *own]
        processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
        log.close()
    try:
        return max(abs(process.wait()) for process in processes)
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()


def read_results(folder: Path) -> list[Result]:
    return [
        json.loads(line)
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]


def counts(results: Iterable[Result]) -> str:
    found = Counter(result["verdict"] for result in results)
    total = sum(found.values())
    return f"{total} cases: " + ", ".join(f"{found[name]} {name}" for name in (*GOOD, *BAD, "absent") if found[name])
