"""Rows of the scorecard about determinism."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.scorecard import RowResult, clean_environment, final_state, toy_run, train_words

QUESTION = ("plan", "--model", "byte-3m", "--cluster", "laptop", "--batch", "16", "--json")


def r32(count: int) -> RowResult:
    """`mw plan --json` under other hash seeds, numbers of threads and locales, byte by byte but for its seconds; and a
    toy run of two ranks under other hash seeds and locales, one for every four plans, to the last bit."""

    def surroundings(number: int) -> dict[str, str]:
        return clean_environment(PYTHONHASHSEED=str(number), LC_ALL=("C", "C.UTF-8", "POSIX")[number % 3])

    def answer(number: int) -> str:
        environment = surroundings(number) | {"OMP_NUM_THREADS": str(1 + number % 4)}
        words = [sys.executable, "-m", "meshwright.cli.main", *QUESTION]
        done = subprocess.run(words, capture_output=True, text=True, env=environment, check=True)
        found = json.loads(done.stdout)
        found.pop("search_seconds", None)
        return json.dumps(found)

    def trained(number: int, folder: Path) -> dict[str, Any]:
        run_file = toy_run(folder, steps=8, save_every=4)
        subprocess.run(train_words(run_file), env=surroundings(number), capture_output=True, check=True)
        return final_state(folder / "run")

    first = answer(0)
    failures = [f"PYTHONHASHSEED={number}" for number in range(1, count) if answer(number) != first]
    with tempfile.TemporaryDirectory(prefix="meshwright-r32-") as made:
        runs = [trained(number, Path(made) / str(number)) for number in range(max(2, count // 4))]
    failures += [f"run with PYTHONHASHSEED={number}" for number, state in enumerate(runs) if state != runs[0]]
    figures = f"{count} answers of mw plan and {len(runs)} trained runs, {len(failures)} differ"
    return RowResult(passed=not failures, count=count, figures=figures, failures=tuple(failures[:5]))
