"""Everything that `mw` prints, at several widths: no line is wider than the terminal, no word is cut.

Tests of `core/wrapping.py`, `report/terminal.py`, `report/answer_text.py`.
"""

from __future__ import annotations

import contextlib
import io
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from meshwright.ask.answer import Answer, answers, read_request
from meshwright.cli import main as command_line
from meshwright.cli.train import close
from meshwright.core.wrapping import wrapped
from meshwright.machine.named_clusters import cluster
from meshwright.models.presets import profile
from meshwright.report import terminal
from meshwright.report.answer_text import print_answer
from meshwright.run.result import RunResult, RunSummary
from meshwright.run.run_file import DataSection, ModelSection, RunConfig, RunSection, TrainSection

WIDTHS = (40, 60, 80, 120, 200)
PICTURE = re.compile(r"[─-▟]|\.\.\.\.|-----")
WORD = re.compile(r"[A-Za-z]{2,}")


def unbroken(text: str, width: int, whole: str) -> None:
    """Checks what was printed at a width beside what is printed where nothing needs to be broken."""
    words = {*WORD.findall(whole), "us", "ms", "and", "more", "node"}  # how long it took; nodes that are not drawn
    for line in text.splitlines():
        assert len(line) <= width or wide(line, width), line
        assert "…" not in line
        if not PICTURE.search(line):
            assert set(WORD.findall(line)) <= words, line


def wide(line: str, width: int) -> bool:
    """One token that no line has space for, after its indentation and the mark of a continued command."""
    tokens = line.removesuffix(" \\").split()
    return len(tokens) == 1 and len(tokens[0]) + len(line) - len(line.lstrip()) > width - 2


def said(words: list[str], width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    with contextlib.suppress(SystemExit):
        command_line.main(words)
    out, err = capsys.readouterr()
    return out + err


COMMANDS = [
    "--help",
    *(f"{name} --help" for name in command_line.COMMANDS),
    "techniques",
    "techniques recompute",
    "profile",
    "profile byte-3m",
    "plan --model nothing --cluster 9xnothing --pin tensor=x --ban y",
    "plan --modle byte-3m",
    "simulate none.json --model byte-3m --cluster 8xh100",
    "train none.toml",
]


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_fit_every_width(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = said(words.split(), 1000, monkeypatch, capsys)
    assert whole
    for width in WIDTHS:
        unbroken(said(words.split(), width, monkeypatch, capsys), width, whole)


def drawn(show: object, width: int, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    stream = io.StringIO()
    console = terminal._console(stream, width)
    assert isinstance(console, Console)
    show(console)  # type: ignore[operator]
    return stream.getvalue()


ASKED: dict[str, dict[str, object]] = {
    "which plan": {},
    "why": {"why": ["tensor", "microbatch"]},
    "what if": {"what_if": ["nodes=+1"]},
    "front": {"front": True},
    "devices": {"devices": "4..16"},
    "auto": {"batch": "auto", "target_tokens": "1B"},
    "nothing fits": {"max_memory": "800MiB"},
}


@cache
def answered(name: str) -> Answer:
    given = {"batch": 16, "sequence": 128, "top": 3, **ASKED[name]}
    request = read_request(profile("byte-3m"), cluster("2x4xh100"), **given)  # type: ignore[arg-type]
    *_, answer = answers(request, lambda text: None)
    return answer


@pytest.mark.parametrize("name", ASKED)
def test_answers_fit_every_width(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def show(console: Console) -> None:
        print_answer(console, answered(name))

    whole = drawn(show, 1000, monkeypatch)
    for width in WIDTHS:
        unbroken(drawn(show, width, monkeypatch), width, whole)


def result(folder: Path, **changes: object) -> RunResult:
    told = {"step_seconds": 0.142, "tokens_per_second": 28_900.0, "peak_bytes": 1.21e9}
    measured = {"step_seconds": 0.199, "tokens_per_second": 20_600.0, "peak_bytes": 1.67e9}
    lines = [
        "slower than forecast: a step takes 199 ms (eight in ten 190 ms to 210 ms) over 44 steps; forecast 142 ms.",
        "Likely reason: compute takes 180 ms of a step (90% of a profiled one), 120 ms by the forecast.",
        "Next: `mw probe -o this.cluster.json` measures this machine with care; set run.cluster to that file.",
    ]
    about: dict[str, Any] = {"model": "byte-3m", "plan": "one device", "step": 50, "steps_now": 50, "stopped": False}
    about |= {"seconds": 12.0, "counts": "tokens", "seen_now": 2e6, "samples_in_all": 800, "loss": 2.1, "held_out": {}}
    about |= {"steps": 50, "predicted": told, "interval_seconds": (0.12, 0.16), "measured": measured}
    about |= {"checkpoints": (25, 50), "files": ("metrics.jsonl", "checkpoints/"), "comparison": {"lines": lines}}
    summary = RunSummary(**about | changes)
    return RunResult(exit_code=0, folder=folder, summary=summary, comparison=None, overlay="timeline: a step of 199 ms")


def verdict(width: int, monkeypatch: pytest.MonkeyPatch, folder: Path, **changes: object) -> str:
    config = RunConfig(
        model=ModelSection(name="byte-3m"),
        data=DataSection(train="corpus.txt", sequence=128),
        train=TrainSection(batch=16, steps=50),
        run=RunSection(folder="runs/laptop"),
    )
    words = ["examples/laptop.toml", "--set", "train.steps=50"]
    return drawn(lambda console: close(console, words, config, result(folder, **changes)), width, monkeypatch)


def test_the_verdict_is_three_lines_under_a_head_at_60_columns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = verdict(60, monkeypatch, Path("runs/laptop")).splitlines()
    assert [line.split() for line in lines[1:5]] == [
        ["step", "tokens/s", "peak", "memory"],
        ["forecast", "142.0", "ms", "28.9", "k", "1.1", "GiB"],
        ["measured", "199.0", "ms", "20.6", "k", "1.6", "GiB"],
        ["difference", "+40%", "-29%", "+38%"],
    ]
    assert lines[5].startswith("slower than forecast: ")
    assert any(line.startswith("Likely reason: compute takes 180 ms") for line in lines)
    whole = verdict(1000, monkeypatch, Path("runs/laptop"))
    for width in WIDTHS:
        unbroken(verdict(width, monkeypatch, Path("runs/laptop")), width, whole)


def test_what_was_not_measured_has_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = verdict(80, monkeypatch, Path("runs/a"), measured={"peak_bytes": 1.21e9}, comparison={}).splitlines()
    assert lines[3].split() == ["measured", "-", "-", "1.1", "GiB"]
    assert lines[4].split() == ["difference", "-", "-", "+0%"]
    assert any(line.startswith("too few steps to compare") for line in lines)


def test_wrapping_by_hand() -> None:
    assert wrapped("  one two three", 9) == "  one two\n  three"
    assert wrapped("one two", 0) == "one two"
    assert wrapped("layers 0-56,58,60,62,64,66", 12) == "layers 0-56,\n58, 60, 62,\n64, 66"
    assert wrapped("mw plan --model x", 13, "  ", " \\") == "mw plan \\\n  --model x"
    assert wrapped("mw plan --train 'a b, c'", 13, "  ", " \\") == "mw plan \\\n  --train \\\n  'a b, c'"
    assert wrapped("unbreakable-word-of-31-letters ok", 10) == "unbreakable-word-of-31-letters\nok"


def test_a_batch_is_chosen_with_what_is_not_known_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def show(console: Console) -> None:
        print_answer(console, answered("auto"))

    text = drawn(show, 1000, monkeypatch)
    assert "only training shows" in text
    assert "Losses and learning rates are not modelled" in text
    assert "Memory sets no limit on the batch" in text
    goals = answered("auto").batch_goals
    assert goals is not None
    assert goals.knee is not None
    third, soonest, triple = goals.soonest_if(1 / 3), goals.soonest, goals.soonest_if(3)
    assert third is not None
    assert soonest is not None
    assert triple is not None
    assert third.batch <= soonest.batch <= triple.batch
    assert f"batch {third.batch} would end soonest, with one three times as large batch {triple.batch}." in text
    rates = {
        run.batch: run.outcome.best.forecast.tokens_per_second
        for run in goals.runs
        if run.outcome.best and run.devices == max(each.devices for each in goals.runs)
    }
    assert min(batch for batch, rate in rates.items() if rate >= 0.95 * max(rates.values())) == goals.knee
