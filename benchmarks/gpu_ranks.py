"""The parity suite's plans of two and four ranks on the one GPU at hand: are they equal to one device?

    python -m benchmarks.gpu ranks [--json RESULT.json] [--only pipeline]

All ranks share the GPU, with its streams and events; gloo carries their messages through the host
(`meshwright/ops/staged_collectives.py`), because NCCL refuses two ranks on one device. Each plan trains three steps of
a tiny model in float64, compared with a plain loop on the CPU element by element, and sends what `price` says; those in
bf16 are compared with bf16 on one device within its rounding. A result that is read before it is waited for shows as a
wrong number, and one that nobody waits for is a problem too. With --tiny two plans run on the CPU, staged by force.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.launch.rank_pool import RankPool
from meshwright.ops.staged_collectives import VARIABLE

Row = dict[str, Any]
PARITY = Path(__file__).parents[1] / "tests" / "parity"
LIMIT_SECONDS = 120.0
"""Of one plan; a hang ends then, with every rank's stack."""


def cases() -> dict[str, tuple[Plan, dict[str, Any], str, tuple[Any, ...]]]:
    """Name -> plan, model, dtype and the techniques that the one device has too."""
    import tiny

    listed: dict[str, tuple[Plan, dict[str, Any], str, tuple[Any, ...]]] = {}
    for techniques in (*tiny.SHARING, (tiny.COMPILE, tiny.SHARD3), (tiny.COMPILE, tiny.TENSOR)):
        plan = tiny.plan_of(*techniques)
        listed[tiny.joined(techniques)] = (plan, tiny.model_for_sharing(plan), "float64", ())
    for techniques in tiny.IN_BF16[1:]:
        plan = tiny.plan_of(tiny.BF16, *techniques, microbatch=4)
        listed[f"{tiny.joined(techniques)} in bf16"] = (plan, tiny.LLAMA, "float32", (tiny.BF16.encode_self(),))
    plan = tiny.plan_of(tiny.ALL_FP8, tiny.SHARD3, microbatch=4)
    listed["8-bit products and gathers"] = (plan, tiny.WIDE, "float32", (tiny.ALL_FP8.encode_self(),))
    return listed


class Comparison:
    """Runs plans in a pool of ranks, and one device's runs beside them."""

    def __init__(self, pool: RankPool, folder: Path, device: str):
        self.pool, self.folder, self.device = pool, folder, device
        self.references: dict[str, str] = {}

    def run(self, plan: Plan, config: dict[str, Any], dtype: str, like: tuple[Any, ...]) -> Row:
        import tiny

        sizes = {"sequence": tiny.SEQUENCE, "steps": tiny.STEPS, "dtype": dtype}
        question: Row = {"config": config, "optimizer": tiny.ADAMW, **sizes}
        alone = question | {"batch": plan.batch, "techniques": list(like)}
        key = json.dumps(alone, sort_keys=True)
        if key not in self.references:
            self.references[key] = str(self.folder / str(len(self.references)))
            self.pool.run("rank_jobs:reference_job", alone | {"folder": self.references[key]}, num_ranks=1)
        job = question | {"plan": json.loads(plan.to_json()), "reference": self.references[key], "device": self.device}
        job["prices"] = self.device == "cuda" and not like
        answers = self.pool.run("rank_jobs:plan_job", job, plan.num_ranks, timeout_seconds=LIMIT_SECONDS)
        bounds = tiny.ROUNDED if like else tiny.bounds(tiny.EXACT)
        bounds = tiny.LOSSY if config == tiny.WIDE else bounds
        problems = tiny.departures(answers, bounds)
        if job["prices"]:
            problems += tiny.price_differences(answers)
        if not all(answer["num_staged"] for answer in answers):
            problems.append("a rank staged nothing")
        if any(answer["num_unwaited"] for answer in answers):
            problems.append("a result was never waited for")
        worst = max(error for answer in answers for name, (error, _) in answer["errors"].items() if name in bounds)
        return {"error": worst, "problems": problems, "messages": max(answer["num_staged"] for answer in answers)}


def run(output: Path | None, tiny_run: bool, only: str = "") -> int:
    """1: a plan is not equal to one device, or did not run."""
    sys.path.insert(0, str(PARITY))  # children import from there too
    os.environ[VARIABLE] = "1"
    listed = {name: case for name, case in cases().items() if only in name}
    if tiny_run:
        listed = dict(list(listed.items())[:2])
    rows: list[Row] = []
    with RankPool(4, threads_per_rank=1) as pool, tempfile.TemporaryDirectory() as folder:
        compared = Comparison(pool, Path(folder), "staged" if tiny_run else "cuda")
        for name, case in listed.items():
            begin = time.perf_counter()
            row: Row = {"name": name, "ranks": case[0].num_ranks}
            try:
                row |= compared.run(*case)
            except MeshwrightError as error:  # a plan that fails is a result too, and the next must still run
                row["problems"] = [str(error)[-3000:]]
            row["seconds"] = round(time.perf_counter() - begin, 1)
            rows.append(row)
            end = "equal" if not row["problems"] else f"NOT EQUAL\n    {chr(10).join(row['problems'][:6])}"
            error = f"{row['error']:.0e}" if "error" in row else ""
            print(f"{row['seconds']:6.1f} s  {row['ranks']} ranks  {error:6s} {name}: {end}", flush=True)
            if output:
                output.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    bad = sum(bool(row["problems"]) for row in rows)
    print(f"{len(rows) - bad} of {len(rows)} plans are equal to one device")
    return 1 if bad or not rows else 0
