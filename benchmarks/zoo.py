"""Architectures of other libraries and in plain torch x plans, against a plain torch loop: docs/zoo.md is the table.

Run: python -m benchmarks.zoo --workers 14 --out DIR          all of them; results are JSON lines in DIR
     python -m benchmarks.zoo --names llama,lstm              some of them
     python -m benchmarks.zoo --render DIR                    docs/zoo.md again, from the results in DIR

Each is given to `mw.build` as a user would give it. Plans: replicate, shard, tensor and pipeline on two ranks, and one
mixed plan on four (tensor x pipeline, or replicate x shard where either is refused, with recomputation). torchvision
and timm join where they can be imported.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.campaign import BAD, Result, Runner, counts, read_results, spawn

PAGE = Path(__file__).parents[1] / "docs" / "zoo.md"
BATCH = 12
PLANS: dict[str, list[dict[str, Any]]] = {
    "replicate": [{"name": "replicate", "size": 2}],
    "shard": [{"name": "shard", "size": 2}],
    "tensor": [{"name": "tensor", "size": 2}],
    "pipeline": [{"name": "pipeline", "size": 2}],
}
MIXED = (
    [{"name": "tensor", "size": 2}, {"name": "pipeline", "size": 2}, {"name": "recompute"}],
    [{"name": "replicate", "size": 2}, {"name": "shard", "size": 2}, {"name": "recompute"}],
)
OPTIMIZER = {"name": "adamw", "lr": 0.01, "clip": 0.5}


def names() -> dict[str, dict[str, Any]]:
    """Architecture -> its model section. Without torch: what cannot be built is found out by whoever builds it."""
    from benchmarks import zoo_names

    found: dict[str, dict[str, Any]] = {}
    for name in zoo_names.PLAIN:
        found[name] = {"factory": f"benchmarks.zoo_plain:{name}"}
    for name in zoo_names.TRANSFORMERS:
        found[f"hf {name}"] = {"factory": "benchmarks.zoo_hf:make", "arguments": {"name": name}}
    for package, listed in (("torchvision", zoo_names.TORCHVISION), ("timm", zoo_names.TIMM)):
        if _installed(package):
            for name in listed:
                found[f"{package} {name}"] = {
                    "factory": f"benchmarks.zoo_vision:{package}_model",
                    "arguments": {"name": name},
                }
    return found


def _installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def case_of(model: dict[str, Any], techniques: list[dict[str, Any]], *, whole: bool) -> dict[str, Any]:
    replicas = 1
    for technique in techniques:
        replicas *= technique["size"] if technique["name"] in ("replicate", "shard") else 1
    share = BATCH // replicas
    plan = {"techniques": techniques, "batch": BATCH, "microbatch": share if whole else share // 3}
    return {"seed": 7, "model": model, "plan": plan, "optimizer": OPTIMIZER, "sequence": 8, "steps": 4, "mask": "parts",
            "dtype": "float64"}  # fmt: skip


def run_one(runner: Runner, name: str, model: dict[str, Any]) -> list[Result]:
    """Every plan of one architecture; of a refusal of microbatches, whole shares are tried."""
    results: list[Result] = []

    def attempt(label: str, techniques: list[dict[str, Any]]) -> Result:
        result = runner.run(case_of(model, techniques, whole=False))
        if result["verdict"] == "refused" and any(line.startswith("microbatch:") for line in result["why"]):
            result = runner.run(case_of(model, techniques, whole=True))
        result |= {"name": name, "label": label}
        results.append(result)
        print(
            f"{result['verdict']:8} {name:34} {label:10} {result['seconds']:6.1f} s  {' '.join(result['why'])[:150]}",
            flush=True,
        )
        return result

    for label, techniques in PLANS.items():
        if attempt(label, techniques)["verdict"] == "absent":
            return []
    refused = {result["label"] for result in results if result["verdict"] == "refused"}
    attempt("mixed", MIXED[1] if refused & {"tensor", "pipeline"} else MIXED[0])
    return results


def render(results: list[Result]) -> str:
    reasons: list[str] = []
    rows = []
    by_name: dict[str, dict[str, Result]] = {}
    for result in results:
        by_name.setdefault(result["name"], {})[result["label"]] = result
    for name in sorted(by_name):
        cells = []
        for label in (*PLANS, "mixed"):
            result = by_name[name].get(label)
            if result is None:
                cells.append("")
            elif result["verdict"] == "exact":
                cells.append("✓")
            elif result["verdict"] == "refused":
                reason = result["why"][0].replace("|", "\\|")
                if reason not in reasons:
                    reasons.append(reason)
                cells.append(f"refused ({reasons.index(reason) + 1})")
            else:
                cells.append(f"**{result['verdict']}**")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    day = datetime.date.today().isoformat()
    head = [
        "# Tests of other architectures",
        "",
        "Architectures of transformers, torchvision and timm, and others in plain torch, are given to `mw.build` as a",
        "user would, and trained for four steps in float64 against a plain torch loop (`python -m benchmarks.zoo`).",
        "Losses, gradients, parameters, buffers and an evaluation are compared, and every message with its price. ✓:",
        "exact; refused: by `check`, for the numbered reason below; late: refused by name in the first step, because",
        "it depends on the data; anything else is a finding. Names that begin with `hf` are modules of transformers",
        "with tiny configs. Plans have two ranks; the mixed one has four and recomputation: tensor x pipeline, or",
        "replicate x shard if either is refused.",
        "",
        f"{len(by_name)} architectures, {counts(results)} ({day}).",
        "",
        f"| architecture | {' | '.join((*PLANS, 'mixed'))} |",
        f"|---{'|---' * (len(PLANS) + 1)}|",
    ]
    listed = ["", "Reasons:", "", *(f"{number}. {text}" for number, text in enumerate(reasons, 1))] if reasons else []
    return "\n".join([*head, *rows, *listed]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", default="", help="only these, separated by commas")
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--share", default="0/1", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="folder for results as JSON lines")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds until a case hangs")
    parser.add_argument("--render", type=Path, help="write docs/zoo.md from the results in this folder")
    given = parser.parse_args()
    if given.render:
        PAGE.write_text(render(read_results(given.render)), encoding="utf-8")
        return 0
    words = ["--names", given.names, "--minutes", str(given.minutes), "--patience", str(given.patience)]
    if given.workers > 1:
        out = given.out or Path("zoo-results")
        spawn("benchmarks.zoo", words, given.workers, out)
        results = read_results(out)
        print("\n".join(f"{r['verdict']} {r['name']} {r['label']}: {r['why']}" for r in results if r["verdict"] in BAD))
    else:
        results = run_share(given)
    print(f"{len({r['name'] for r in results})} architectures, {counts(results)}")
    refusals = Counter(r["why"][0] for r in results if r["verdict"] == "refused")
    print("\n".join(f"  {count:4} {reason[:140]}" for reason, count in refusals.most_common(40)))
    return int(any(result["verdict"] in BAD for result in results))


def run_share(given: argparse.Namespace) -> list[Result]:
    mine, of = (int(part) for part in given.share.split("/"))
    known = names()
    wanted = given.names.split(",") if given.names else list(known)
    done = {r["name"] for r in read_results(given.out)} if given.out and given.out.exists() else set()
    results: list[Result] = []
    until = time.monotonic() + 60 * given.minutes
    with Runner(given.patience) as runner:
        for index, name in enumerate(wanted):
            if index % of != mine or name in done or time.monotonic() > until:
                continue
            found = run_one(runner, name, known[name])
            results += found
            if given.out:
                given.out.mkdir(parents=True, exist_ok=True)
                with (given.out / f"worker-{mine}-{os.getpid()}.jsonl").open("a", encoding="utf-8") as lines:
                    lines.write("".join(json.dumps(result) + "\n" for result in found))
    return results


if __name__ == "__main__":
    sys.exit(main())
