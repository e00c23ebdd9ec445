"""The reliability scorecard: every row measured, one after another; the table of docs/reliability.md.

A full run takes hours, so each row's result is kept (benchmarks/results/reliability.json, one row a line) and rows that
have one are not run again unless they are named.

Run: python -m benchmarks.reliability                    what has no full result yet (`make reliability`)
     python -m benchmarks.reliability --smoke            few cases, of rows that have no result at all
     python -m benchmarks.reliability --rows R1,R6       these, again; --count 50: with so many cases
     python -m benchmarks.reliability --rows R1 --fresh  without the cases that are kept
     python -m benchmarks.reliability --render           the table again, from what is kept

Functions `r<n>` of `benchmarks/reliability_*.py` measure; see benchmarks/scorecard.py. Where cases are kept one by one,
each is written down when it ends, and `--count 50` adds fifty to them. A digest of the code that matters is kept with
them: cases of other code count, and the figures say so, unless any of them has failed; then the row begins anew.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.scorecard import ROWS, CaseByCase, RowResult

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "reliability.json"
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- table: python -m benchmarks.reliability --render -->\n", "<!-- end of table -->\n"
Measure = Callable[[int], RowResult] | CaseByCase


def functions() -> dict[str, list[Measure]]:
    """Row -> the functions that measure it."""
    found: dict[str, list[Measure]] = {}
    for path in sorted(Path(__file__).parent.glob("reliability_*.py")):
        module = importlib.import_module(f"benchmarks.{path.stem}")
        for name, value in vars(module).items():
            is_own = isinstance(value, CaseByCase) or getattr(value, "__module__", "") == module.__name__
            if name[:1] == "r" and name[1:].isdigit() and is_own:
                if name.upper() not in ROWS:
                    raise KeyError(f"{module.__name__}.{name}: the scorecard has no row {name.upper()}")
                found.setdefault(name.upper(), []).append(value)
    return found


def code_digest(made: CaseByCase) -> str:
    """Of what runs ranks, and of the row itself."""
    folders = ("core", "checkpoint", "launch", "run", "runtime")
    paths = [path for folder in folders for path in sorted((ROOT / "meshwright" / folder).glob("*.py"))]
    paths.append(Path(made.run.__code__.co_filename))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:8]


def measure_cases(
    row: str,
    made: CaseByCase,
    kept: Mapping[str, Any] | None,
    keep: Callable[[dict[str, Any]], None],
    *,
    more: int = 0,
    until: int = 0,
) -> dict[str, Any]:
    """Add so many cases to those that are kept, or until there are so many; the row's line, which `keep` is given after
    each of them."""
    code, start = code_digest(made), time.monotonic()
    if kept is None or "code" not in kept or (not kept["passed"] and list(kept["code"])[-1] != code):
        kept = {"count": 0, "wrong": 0, "failures": [], "seconds": 0.0, "code": {}, "values": {}}
    wrong, failures, values = kept["wrong"], list(kept["failures"]), {k: list(v) for k, v in kept["values"].items()}
    codes, line = dict(kept["code"]), dict(kept)

    def note(problem: str) -> None:
        nonlocal wrong, line
        wrong += bool(problem)
        failures.extend([problem[:500]] if problem else [])
        codes[code] = codes.pop(code, 0) + 1  # the latest is last
        done = sum(codes.values())
        figures, short = made.judge(values)
        texts = [f"{done - wrong} of {done} as they should be", figures, *short]
        texts += [f"by {len(codes)} versions of the code"] if len(codes) > 1 else []
        line = {
            "row": row,
            "passed": not wrong and not short,
            "count": done,
            "figures": "; ".join(text for text in texts if text),
            "failures": failures[:10],
            "date": date.today().isoformat(),
            "seconds": round(kept["seconds"] + time.monotonic() - start, 1),
            "wrong": wrong,
            "code": codes,
            "values": values,
        }
        keep(line)

    first = kept["count"]
    try:
        for number, case in enumerate(made.run(range(first, first + more if more else until)), first):
            for name, value in case.values.items():
                values.setdefault(name, []).append(round(value, 4))
            print(
                f"{row}: case {number}: {case.what}: {case.problem or 'as it should be'} {dict(case.values)}",
                flush=True,
            )
            note(f"case {number}, {case.what}: {case.problem}" if case.problem else "")
    except Exception as error:
        traceback.print_exc()
        note(f"case {line['count']}: {type(error).__name__}: {error}")
    return line


def measure(row: str, made: Sequence[Measure], count: int) -> dict[str, Any]:
    """One row's line of the results. A function that raises has failed."""
    if isinstance(made[0], CaseByCase):
        return measure_cases(row, made[0], None, lambda line: None, until=count)
    start = time.monotonic()
    parts = []
    for function in made:
        assert not isinstance(function, CaseByCase), f"{row}: a row whose cases are kept has one function"
        try:
            parts.append(function(count))
        except Exception as error:
            what = f"{function.__module__}.{function.__name__}: {type(error).__name__}: {error}"
            traceback.print_exc()
            parts.append(RowResult(passed=False, count=0, figures="did not run to its end", failures=(what[:500],)))
    return {
        "row": row,
        "passed": all(part.passed for part in parts),
        "count": min(part.count for part in parts),
        "figures": "; ".join(part.figures for part in parts),
        "failures": [failure for part in parts for failure in part.failures][:10],
        "date": date.today().isoformat(),
        "seconds": round(time.monotonic() - start, 1),
    }


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    return {line["row"]: line for line in json.loads(path.read_text(encoding="utf-8"))}


def write_results(path: Path, results: Mapping[str, Mapping[str, Any]]) -> None:
    lines = [json.dumps(results[row]) for row in ROWS if row in results]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def state_of(row: str, result: Mapping[str, Any] | None) -> str:
    if result is None:
        return "later" if ROWS[row].later and ROWS[row].full == 1 else "not run"
    word = "pass" if result["passed"] else "FAIL"
    return word if result["count"] >= ROWS[row].full else f"{word}, part"


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["| row | test | passes when | result | cases | figures | date |", "|---|---|---|---|---|---|---|"]
    for row, about in ROWS.items():
        result = results.get(row)
        cases = f"{result['count'] if result else 0:,} of {about.full:,}"
        figures = "; ".join(text for text in (result["figures"] if result else "", about.later) if text)
        cells = (row, about.test, about.passes, state_of(row, result), cases, figures, result["date"] if result else "")
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    states = [state_of(row, results.get(row)) for row in ROWS]
    whole = (
        f"{states.count('pass')} rows pass, {states.count('pass, part')} pass with fewer cases than a full run has, "
    )
    whole += f"{sum(state.startswith('FAIL') for state in states)} fail, "
    whole += f"{states.count('not run') + states.count('later')} were not run."
    return whole + "\n\n" + "\n".join(lines) + "\n"


def render(results: Mapping[str, Mapping[str, Any]], page: Path) -> None:
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}{table(results)}{END}{after}", encoding="utf-8")


def run(
    rows: Sequence[str] = (),
    *,
    smoke: bool = False,
    count: int = 0,
    fresh: bool = False,
    path: Path = RESULTS,
    page: Path | None = PAGE,
) -> dict[str, dict[str, Any]]:
    """Run the rows named, or those that lack a result, and write each down when it ends; all results that are kept."""
    made = functions()
    results = read_results(path)

    def keep(line: dict[str, Any]) -> None:
        nonlocal results
        results = read_results(path) | {line["row"]: line}  # somebody else may have run other rows meanwhile
        write_results(path, results)

    for row in rows or ROWS:
        wanted = count or (ROWS[row].smoke if smoke else ROWS[row].full)
        if row not in made or (not rows and row in results and (smoke or results[row]["count"] >= wanted)):
            continue
        print(f"{row}: {ROWS[row].test} ({wanted:,})", flush=True)
        first = made[row][0]
        if isinstance(first, CaseByCase):
            line = measure_cases(row, first, None if fresh else results.get(row), keep, more=count, until=wanted)
        else:
            line = measure(row, made[row], wanted)
            keep(line)
        print(f"{row}: {state_of(row, line)} in {line['seconds']:.0f} s: {line['figures']}", flush=True)
        for failure in line["failures"]:
            print(f"    {failure}", flush=True)
    if page is not None:
        render(results, page)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(prog="reliability", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--smoke", action="store_true", help="few cases each")
    parser.add_argument("--rows", default="", help="such as R1,R6: run these, whether or not they have a result")
    parser.add_argument("--count", type=int, default=0, help="cases of each row, or more of them where they are kept")
    parser.add_argument("--fresh", action="store_true", help="without the cases that are kept")
    parser.add_argument("--render", action="store_true", help="only write the table into docs/reliability.md")
    given = parser.parse_args()
    rows = [row.strip().upper() for row in given.rows.split(",") if row.strip()]
    if unknown := [row for row in rows if row not in ROWS]:
        parser.error(f"no row is called {', '.join(unknown)}; they are R1 to R{len(ROWS)}.")
    if given.render:
        render(read_results(RESULTS), PAGE)
        return 0
    results = run(rows, smoke=given.smoke, count=given.count, fresh=given.fresh)
    return 0 if all(results[row]["passed"] for row in rows or results if row in results) else 1


if __name__ == "__main__":
    sys.exit(main())
