"""Random plans x models x odd sizes against a plain torch loop: does every plan train exactly, or say why not?

Run: make fuzz MINUTES=10                                   new seeds for so long
     make fuzz SEED=123                                     one of them again
     python -m benchmarks.fuzz --count 1000 --workers 14 --out DIR     many at once; results are JSON lines in DIR
     python -m benchmarks.fuzz --case CASE.json             a case from a file, edited by hand
     python -m benchmarks.fuzz --seed 123 --shrink          the smallest case that fails in the same way

Exit code 0: every case is exact or refused with a reason; 1: findings, each with its seed, plan and command.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.campaign import BAD, Runner, counts, each_in_turn, read_results, spawn
from benchmarks.fuzz_cases import case_of

Case = dict[str, Any]


def seeds(first: int, count: int, share: str) -> Iterator[int]:
    mine, of = (int(part) for part in share.split("/"))
    for seed in range(first, first + count):
        if seed % of == mine:
            yield seed


def ranks_of(case: Case) -> int:
    return math.prod(technique.get("size", 1) for technique in case["plan"]["techniques"])


def command(result: Case) -> str:
    return f"make fuzz SEED={result['seed']}"


def tell(result: Case, *, details: bool) -> None:
    plan = result["plan"]
    names = " + ".join(f"{t['name']}" + (f"({t['size']})" if "size" in t else "") for t in plan["techniques"])
    model = result["model"].get("config") or result["model"]["factory"].partition(":")[2]
    print(
        f"{result['verdict']:8} seed {result['seed']}  {model}: {names or 'one device'}  {result['seconds']} s",
        flush=True,
    )
    if result["verdict"] in BAD or details:
        for line in result["why"]:
            print(f"    {line}")
    if result["verdict"] in BAD:
        print(f"    plan {json.dumps(plan)}")
        print(f"    model {json.dumps(result['model'])}")
        print(f"    optimizer {json.dumps(result['optimizer'])} sequence {result['sequence']} mask {result['mask']}")
        print(f"    {command(result)}", flush=True)


def smaller(case: Case) -> Iterator[Case]:
    """The same case with one thing less."""
    for index in range(len(case["plan"]["techniques"])):
        one = copy.deepcopy(case)
        gone = one["plan"]["techniques"].pop(index)
        one["plan"].pop("axis_order", None)
        if "shares" in gone:
            one["plan"]["batch"] = one["plan"]["microbatch"] * 3
        yield one
    for technique in range(len(case["plan"]["techniques"])):
        for key in list(case["plan"]["techniques"][technique]):
            if key not in ("name", "size"):
                one = copy.deepcopy(case)
                del one["plan"]["techniques"][technique][key]
                yield one
    for key in ("axis_order",):
        if key in case["plan"]:
            one = copy.deepcopy(case)
            del one["plan"][key]
            yield one
    for change in ({"optimizer": {"name": "sgd", "lr": 0.05, "clip": 0.0}}, {"mask": "none"}, {"documents": False}):
        if any(case[key] != value for key, value in change.items()):
            yield {**copy.deepcopy(case), **change}
    if case["model"].get("freeze"):
        one = copy.deepcopy(case)
        one["model"].pop("freeze")
        yield one
    for key, value in list(case["model"].get("change", {}).items()):
        plain = {"tied": False, "qk_norm": False, "bias": False, "qkv_bias": False, "sliding_window": 0, "norm": "rms",
                 "balance": 0.0, "capacity_factor": 0.0, "num_shared_experts": 0, "num_dense_layers": 0}  # fmt: skip
        if key in plain and value != plain[key]:
            one = copy.deepcopy(case)
            one["model"]["change"][key] = plain[key]
            yield one
        if key == "num_layers" and value > 1:
            one = copy.deepcopy(case)
            one["model"]["change"][key] = value - 1
            yield one


def shrink(case: Case, runner: Runner, minutes: float) -> Case:
    """Remove things as long as the verdict stays."""
    best = runner.run(case)
    until = time.monotonic() + 60 * minutes
    went_on = best["verdict"] in BAD
    while went_on and time.monotonic() < until:
        went_on = False
        for one in smaller({key: best[key] for key in case}):
            found = runner.run(one)
            if found["verdict"] == best["verdict"]:
                best, went_on = found, True
                break
    return best


def summary(results: list[Case]) -> None:
    print(counts(results))
    reasons = Counter(_gist(result["why"][0]) for result in results if result["verdict"] == "refused" and result["why"])
    for reason, count in reasons.most_common(25):
        print(f"  {count:5} refused: {reason}")


def _gist(text: str) -> str:
    return "".join("#" if letter.isdigit() else letter for letter in text)[:110]


def run_these(cases: list[Case], given: argparse.Namespace) -> int:
    worst = 0
    with Runner(given.patience) as runner:
        for case in cases:
            result = shrink(case, runner, given.minutes) if given.shrink else runner.run(case)
            tell(result, details=True)
            if given.shrink:
                print(json.dumps({key: result[key] for key in case}))
            worst |= int(result["verdict"] in BAD)
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--count", type=int, default=0, help="cases; 0: as many as the minutes allow")
    parser.add_argument("--first", type=int, default=0, help="first seed; 0: from the clock")
    parser.add_argument("--seed", default="0", help="this seed only, or several with commas between")
    parser.add_argument("--most-ranks", type=int, default=8, help="leave out plans with more ranks")
    parser.add_argument("--case", type=Path, help="a case as JSON")
    parser.add_argument("--shrink", action="store_true", help="look for the smallest case that fails alike")
    parser.add_argument("--workers", type=int, default=1, help="processes, each with a pool of its own")
    parser.add_argument("--share", default="0/1", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="folder for results as JSON lines")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds until a case hangs")
    given = parser.parse_args()
    if given.seed != "0" or given.case:
        cases = [json.loads(given.case.read_text())] if given.case else [case_of(int(s)) for s in given.seed.split(",")]
        return run_these(cases, given)
    first = given.first or int(time.time()) % 10**7 * 100
    count = given.count or 10**6
    if given.workers > 1:
        out = given.out or Path(f"fuzz-{first}")
        words = ["--first", str(first), "--count", str(count), "--patience", str(given.patience)]
        words += ["--most-ranks", str(given.most_ranks), "--minutes", str(given.minutes if not given.count else 10**6)]
        spawn("benchmarks.fuzz", words, given.workers, out)
        results = read_results(out)
        for result in results:
            if result["verdict"] in BAD:
                tell(result, details=True)
        summary(results)
        return int(any(result["verdict"] in BAD for result in results))
    until = time.monotonic() + 60 * given.minutes if not given.count or given.minutes < 10**5 else float("inf")
    results, lines = [], None
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        lines = (given.out / f"worker-{given.share.split('/')[0]}-{os.getpid()}.jsonl").open("a", encoding="utf-8")
    cases = (case_of(seed) for seed in seeds(first, count, given.share))
    small = (case for case in cases if ranks_of(case) <= given.most_ranks)
    for result in each_in_turn(small, until, given.patience):
        results.append(result)
        tell(result, details=False)
        if lines is not None:
            lines.write(json.dumps(result) + "\n")
            lines.flush()
    summary(results)
    return int(any(result["verdict"] in BAD for result in results))


if __name__ == "__main__":
    sys.exit(main())
