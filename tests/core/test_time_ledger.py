"""Time ledger: categories sum to the wall time of any history; steps made again are lost; clocks may be set."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from meshwright.core.time_ledger import CATEGORIES, TIME_FILE, TimeMark, note_time, read_marks, time_ledger


class History:
    """A run as an outsider sees it, second by second, and the marks it leaves."""

    def __init__(self, dice: random.Random):
        self.dice, self.now, self.unix = dice, dice.uniform(0, 1e6), 1.8e9
        self.boot, self.marks = "a", list[TimeMark]()
        self.true: Counter[str] = Counter()
        self.cost: dict[int, float] = {}
        """Step -> seconds, of steps that are part of the result."""

    def mark(self, event: str, step: int = 0, seconds: dict[str, float] | None = None, **about: object) -> None:
        self.marks.append(
            TimeMark(
                event=event,  # type: ignore[arg-type]
                unix_seconds=self.unix,
                monotonic_seconds=self.now,
                boot=self.boot,
                step=step,
                seconds=dict(seconds or {}),
                about=about,
            )
        )

    def wait(self, seconds: float) -> float:
        self.now += seconds
        self.unix += seconds
        return seconds

    def spend(self, category: str, seconds: float) -> None:
        self.true[category] += self.wait(seconds)

    def attempt(self, first: int, steps: int, save_every: int, *, crashes: bool) -> int:
        """Train from a step; the step that a checkpoint holds at the end."""
        dice, total, saved = self.dice, Counter[str](), first
        self.mark("start", model="toy", steps=100)
        self.spend("restart", dice.uniform(1, 5))
        self.mark("resume", first)
        for step in [step for step in self.cost if step > first]:
            self.true["lost"] += self.cost[step]
            self.true["productive"] -= self.cost.pop(step)
        for step in range(first + 1, first + steps + 1):
            self.cost[step] = dice.uniform(0.5, 1.5)
            for name, seconds in (("productive", self.cost[step]), ("data", 0.1)):
                total[name] += seconds
                self.spend(name, seconds)
            self.spend("idle", 0.01)
            if step % save_every == 0:
                self.mark("time", step, dict(total))
                total["checkpoint"] += 0.3
                self.spend("checkpoint", 0.3)
                saved = step
        self.mark("time", first + steps, dict(total))
        if crashes:
            self.spend("lost", dice.uniform(0, 1))
        else:
            saved = first + steps
        self.mark("end", exit_code=1 if crashes else 75, cause="signal 9" if crashes else "")
        return saved


@pytest.mark.parametrize("seed", range(20))
def test_any_history_sums_to_its_wall_time_and_loses_what_was_made_again(seed: int) -> None:
    dice = random.Random(seed)
    history = History(dice)
    begin, step = history.now, 0
    for _ in range(dice.randrange(1, 8)):
        step = history.attempt(step, dice.randrange(0, 30), dice.choice((1, 5, 7)), crashes=dice.random() < 0.7)
        if dice.random() < 0.5:
            history.unix += dice.choice((-86_400, 86_400))  # somebody sets the clock
        history.spend("idle", dice.uniform(0, 100))
    history.mark("start")
    ledger = time_ledger(history.marks)
    assert ledger.wall_seconds == pytest.approx(history.now - begin, abs=1e-6)
    for name in CATEGORIES:
        assert ledger.seconds[name] == pytest.approx(history.true[name], abs=1e-6), name
    assert ledger.goodput == pytest.approx(history.true["productive"] / (history.now - begin))


def test_after_a_reboot_the_time_of_day_counts_and_never_runs_backwards() -> None:
    history = History(random.Random(0))
    history.attempt(0, 5, 1, crashes=False)
    before = time_ledger(history.marks).wall_seconds
    history.boot, history.now = "b", 3.0
    history.unix += 1000
    history.attempt(5, 5, 1, crashes=False)
    after = time_ledger(history.marks)
    assert after.seconds["idle"] == pytest.approx(1000 + 0.1, abs=1e-6)
    history.boot, history.now = "c", 0.0
    history.unix -= 86_400
    history.mark("start")
    assert time_ledger(history.marks).wall_seconds == pytest.approx(after.wall_seconds)
    assert after.wall_seconds > before


def test_a_rollback_inside_a_start_loses_steps_too() -> None:
    history = History(random.Random(1))
    history.attempt(0, 10, 5, crashes=False)
    kept = sum(history.cost[step] for step in range(1, 6))
    history.mark("resume", 5)
    ledger = time_ledger(history.marks)
    assert ledger.seconds["productive"] == pytest.approx(kept)
    assert ledger.seconds["lost"] == pytest.approx(sum(history.cost.values()) - kept)


def test_damaged_lines_are_left_out_and_a_torn_one_is_ended(tmp_path: Path) -> None:
    assert read_marks(tmp_path) == []
    assert time_ledger([]).goodput == 0
    note_time(tmp_path, "start", model="toy", steps=3)
    path = tmp_path / TIME_FILE
    for text in (
        '{"event": "ti',
        '\n{"event": "other"}\n[1]\n',
        '{"event": "time", "seconds": {"data": NaN}}\n' + "[" * 9999,
    ):
        with path.open("a") as file:
            file.write(text)
        note_time(tmp_path, "end", exit_code=1, cause="signal 9")
    marks = read_marks(tmp_path)
    assert [mark.event for mark in marks] == ["start", "end", "end", "end"]
    assert marks[0].about == {"model": "toy", "steps": 3}
    assert json.loads(path.read_text().splitlines()[0])["event"] == "start"
    note_time(tmp_path / "missing", "start")  # no folder: nothing happens


def test_the_line_names_what_costs_most_first() -> None:
    history = History(random.Random(2))
    history.attempt(0, 50, 5, crashes=False)
    text = time_ledger(history.marks).text()
    assert text.startswith("goodput ")
    assert text.index("data") < text.index("idle")
    assert "lost" not in text


def test_the_page_lists_the_categories() -> None:
    page = (Path(__file__).parents[2] / "docs" / "runs.md").read_text(encoding="utf-8")
    assert [name for name, what in CATEGORIES.items() if f"| {name} | {what} |" not in page] == []
