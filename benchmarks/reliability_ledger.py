"""Rows of the scorecard about inputs, determinism, the static gate, and the time ledger."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

from benchmarks.scorecard import RowResult, clean_environment

ROOT = Path(__file__).parents[1]
MOST_DEPENDENCIES = 10
QUESTION = ("plan", "--model", "byte-3m", "--cluster", "laptop", "--batch", "16", "--json")


def r27(count: int) -> RowResult:
    """The static gate of tests/house, the number of hard dependencies, and `pip check`.

    An audit against a database of known vulnerabilities needs the network, which is not asked for here.
    """
    gate = [sys.executable, "-m", "pytest", "-q", str(ROOT / "tests" / "house" / "test_style.py"), "-k"]
    house = subprocess.run([*gate, "unsafe or guard"], capture_output=True, text=True, cwd=ROOT, check=False)
    pip = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    num = len(project["dependencies"])
    problems = [done.stdout[-500:] for done in (house, pip) if done.returncode]
    if num > MOST_DEPENDENCIES:
        problems.append(f"{num} hard dependencies")
    figures = f"{num} hard dependencies; pip check {'clean' if not pip.returncode else 'not clean'}; no online audit"
    return RowResult(passed=not problems, count=1, figures=figures, failures=tuple(problems))


def r32(count: int) -> RowResult:
    """`mw plan --json` under other hash seeds, numbers of threads and locales, byte by byte but for its seconds."""

    def answer(number: int) -> str:
        locale = ("C", "C.UTF-8", "POSIX")[number % 3]
        environment = clean_environment(PYTHONHASHSEED=str(number), OMP_NUM_THREADS=str(1 + number % 4), LC_ALL=locale)
        words = [sys.executable, "-m", "meshwright.cli.main", *QUESTION]
        done = subprocess.run(words, capture_output=True, text=True, env=environment, check=True)
        found = json.loads(done.stdout)
        found.pop("search_seconds", None)
        return json.dumps(found)

    first = answer(0)
    failures = tuple(f"PYTHONHASHSEED={number}" for number in range(1, count) if answer(number) != first)
    figures = f"{count} answers of mw plan, {len(failures)} differ"
    return RowResult(passed=not failures, count=count, figures=figures, failures=failures[:5])
