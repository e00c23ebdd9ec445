"""Run the covering array of `tests/parity/covering.py`: three settings of techniques, or two and a kind of model.

    python benchmarks/triples.py --state FILE [--seconds 280]

Rows that are done are in FILE, a line of JSON each, so that it can be run in pieces. Their date and counts are written
into docs/techniques/matrix.md. Exit code 1 while a row is wrong.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "parity")]

import covering  # noqa: E402

from meshwright.launch.rank_pool import RankPool  # noqa: E402

MATRIX = ROOT / "docs" / "techniques" / "matrix.md"
TITLE = "## Three at a time"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=280.0)
    parser.add_argument("--again", action="store_true", help="run rows again that were wrong")
    asked = parser.parse_args()
    array = covering.covering()
    lines = asked.state.read_text().splitlines() if asked.state.exists() else []
    done = {line["row"]: line["faults"] for line in map(json.loads, lines)}
    done = {row: faults for row, faults in done.items() if not (asked.again and faults)}
    left = [row for row in array.rows if _named(row) not in done]
    left.sort(key=lambda row: "compile" in dict(row))  # the quick ones first
    until = time.monotonic() + asked.seconds
    with tempfile.TemporaryDirectory() as folder, RankPool(covering.MOST_RANKS, threads_per_rank=1) as pool:
        references = _References(pool, Path(folder))
        for row in left:
            if time.monotonic() > until:
                break
            start = time.monotonic()
            try:
                faults = covering.faults(row, pool.run, references)
            except Exception as error:  # a rank that crashed or hung is a fault of this row
                faults = [str(error)[-2000:]]
            done[_named(row)] = faults
            with asked.state.open("a") as file:
                file.write(json.dumps({"row": _named(row), "faults": faults}) + "\n")
            print(f"{time.monotonic() - start:5.1f} s  {_named(row)}", *faults[:4], sep="\n        ", flush=True)
    wrong = sum(bool(done.get(_named(row))) for row in array.rows)
    missing = sum(_named(row) not in done for row in array.rows)
    print(f"{len(array.rows)} rows, {missing} left, {wrong} wrong")
    right = [row for row in array.rows if done.get(_named(row)) == []]
    MATRIX.write_text(MATRIX.read_text().partition(f"\n{TITLE}")[0] + "\n" + _section(array, right, wrong))
    return 1 if wrong else 0


class _References:
    def __init__(self, pool: RankPool, root: Path):
        self.pool, self.root = pool, root

    def __call__(self, **asked: Any) -> str:
        folder = self.root / hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
        if not folder.exists():
            self.pool.run("rank_jobs:reference_job", asked | {"folder": str(folder)}, num_ranks=1)
        return str(folder)


def _named(row: covering.Row) -> str:
    return ", ".join(f"{name} {which}" for name, which in sorted(row))


def _section(array: covering.Covering, right: list[covering.Row], wrong: int) -> str:
    rounded = sum(("precision", "bf16") in row for row in right)
    triples = len(covering.all_triples())
    date = datetime.datetime.now(datetime.UTC).date()
    reasons = Counter(_reason(reasons[0]) for reasons in array.refused.values())
    lines = [
        TITLE,
        "",
        "Every three settings of different techniques, or two and a kind of model: `tests/parity/covering.py`. A",
        "slice of it runs in the tests, the whole with `python benchmarks/triples.py`. Each row of the array is a plan",
        "on at most 8 ranks, trained beside one device; what it sends and holds is what its price says.",
        "",
        f"Run on {date}: {triples:,} triples; {len(array.refused):,} are refused by `check`, the others are in",
        f"{len(array.rows)} rows, of which {len(right) + wrong} were run: {len(right) - rounded} exact (float64),",
        f"{rounded} in bf16 (beside one device in bf16), {wrong} wrong.",
        "",
        "Most frequent reasons for a refusal:",
        "",
        *(f"- {count}: {reason}" for reason, count in reasons.most_common(12)),
        "",
        f"Kinds of models: {', '.join(covering.KINDS)}.",
    ]
    return "\n".join(lines) + "\n"


def _reason(text: str) -> str:
    """Without numbers, so that equal reasons are one."""
    return re.sub(r"\d+", "n", text)


if __name__ == "__main__":
    sys.exit(main())
