"""The scorecard's frame: rows are found, kept when they end, not run again; and a few rows for real."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from namespaces import why_there_are_none

from benchmarks import reliability
from benchmarks.scorecard import ROWS, Case, RowResult, Values, case_by_case


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text(f"before\n{reliability.BEGIN}old\n{reliability.END}after\n")
    return path


def test_rows_are_kept_when_they_end_and_run_once(tmp_path: Path, page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []

    def good(count: int) -> RowResult:
        calls.append(("R1", count))
        return RowResult(passed=True, count=count, figures=f"{count} kills | 0 lost")

    def broken(count: int) -> RowResult:
        calls.append(("R2", count))
        raise ValueError("no such thing")

    monkeypatch.setattr(reliability, "functions", lambda: {"R1": [good], "R2": [good, broken]})
    path = tmp_path / "results.json"
    first = reliability.run(smoke=True, path=path, page=page)
    assert calls == [("R1", 20), ("R1", 20), ("R2", 20)]
    assert (first["R1"]["passed"], first["R2"]["passed"], first["R2"]["count"]) == (True, False, 0)
    assert "no such thing" in first["R2"]["failures"][0]
    assert len(path.read_text().splitlines()) == 2 + 2, "one row a line"
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "1 pass with fewer cases than a full run has, 1 fail, 30 were not run." in text
    assert "| pass, part | 20 of 200 | 20 kills / 0 lost |" in text
    calls.clear()
    reliability.run(smoke=True, path=path, page=page)
    assert calls == []
    reliability.run(["R1"], path=path, page=page)
    assert calls == [("R1", 200)]
    reliability.run(path=path, page=page)
    assert calls == [("R1", 200), ("R1", 186), ("R2", 186)], "R2 had no full result, R1 has"


def test_cases_are_kept_one_by_one_and_later_runs_add_to_them(
    tmp_path: Path, page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def judge(values: Values) -> tuple[str, list[str]]:
        return f"{sum(values['seconds']):g} s", ["too slow"] if max(values["seconds"]) > 90 else []

    @case_by_case(judge)
    def r1(numbers: range) -> Iterator[Case]:
        for number in numbers:
            if number == ends_at:
                raise KeyboardInterrupt
            seen.append(number)
            yield Case(what="made", problem="lost" if number == 12 else "", values={"seconds": number})

    ends_at, path, version = 3, tmp_path / "results.json", "a"
    monkeypatch.setattr(reliability, "functions", lambda: {"R1": [r1]})
    monkeypatch.setattr(reliability, "code_digest", lambda made: version)
    with pytest.raises(KeyboardInterrupt):
        reliability.run(["R1"], count=5, path=path, page=page)
    kept = reliability.read_results(path)["R1"]
    assert (kept["count"], kept["values"], kept["code"]) == (3, {"seconds": [0, 1, 2]}, {"a": 3})
    ends_at, version = -1, "b"
    kept = reliability.run(["R1"], count=5, path=path, page=page)["R1"]
    assert (seen, kept["count"], kept["passed"]) == ([*range(8)], 8, True)
    assert kept["figures"] == "8 of 8 as they should be; 28 s; by 2 versions of the code"
    kept = reliability.run(["R1"], count=5, path=path, page=page)["R1"]
    assert (kept["count"], kept["passed"], kept["failures"]) == (13, False, ["case 12, made: lost"])
    kept = reliability.run(["R1"], count=1, path=path, page=page)["R1"]
    assert (kept["count"], kept["passed"]) == (14, False), "by the same code it stays as it is"
    version = "c"
    kept = reliability.run(["R1"], count=2, path=path, page=page)["R1"]
    assert (kept["count"], kept["passed"], kept["code"]) == (2, True, {"c": 2})
    kept = reliability.run(["R1"], path=path, page=page)["R1"]
    assert (kept["count"], kept["passed"], seen[-1]) == (200, False, 199), "until there are as many as a full run has"
    assert "too slow" in kept["figures"]
    assert reliability.run(["R1"], count=1, fresh=True, path=path, page=page)["R1"]["count"] == 1


def test_the_page_is_what_the_kept_results_give(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(reliability.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    reliability.render(reliability.read_results(reliability.RESULTS), page)
    assert page.read_text(encoding="utf-8") == reliability.PAGE.read_text(encoding="utf-8")
    assert list(ROWS) == [f"R{number}" for number in range(1, 33)]


def failures_of(rows: dict[str, int]) -> dict[str, Any]:
    found = reliability.functions()
    results = {row: reliability.measure(row, found[row], count) for row, count in rows.items()}
    return {row: result for row, result in results.items() if not result["passed"]}


def test_some_rows_for_real() -> None:
    """`make reliability --smoke` has the others."""
    assert failures_of({"R32": 2}) == {}


@pytest.mark.slow
def test_more_rows_for_real() -> None:
    if why_there_are_none():
        pytest.skip("no network namespaces here")
    assert failures_of({"R17": 4, "R21": 1, "R26": 2000, "R29": 4}) == {}
