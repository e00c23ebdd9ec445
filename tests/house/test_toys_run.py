"""Toys outside the package that drive runs through public names alone."""

from __future__ import annotations

import ast
from pathlib import Path

from command import RUN, write_run
from toy_scheduler import ScheduledRun, Scheduler

import meshwright as mw

HERE = Path(__file__).parent
LONGER = RUN.replace("steps = 8", "steps = 60").replace("save_every = 4", "save_every = 0")


def test_a_scheduler_drives_two_runs(tmp_path: Path) -> None:
    """Both are started, one is stopped, the other ends, and the first is resumed to its end."""
    long = ScheduledRun(Path(write_run(tmp_path / "long", LONGER)), ["run.ranks=1"], steps_in_a_turn=3)
    short = ScheduledRun(Path(write_run(tmp_path / "short")), ["run.ranks=1"])
    scheduler = Scheduler([long, short])
    scheduler.turn()
    assert scheduler.most_running == 2
    (stopped,), (ended,) = long.results, short.results
    assert stopped.is_stopped
    assert not ended.is_stopped
    assert ended.summary is not None
    assert ended.summary.step == 8
    long.steps_in_a_turn = None
    scheduler.run()
    assert long.errors == short.errors == []
    assert len(short.results) == 1
    assert sorted(long.losses) == list(range(1, 61))
    assert long.results[-1].summary is not None
    assert long.results[-1].summary.steps_now == 60 - stopped.summary.step  # type: ignore[union-attr]


def test_the_toys_are_short_and_use_public_names_alone() -> None:
    for path in (HERE / "toy_scheduler.py",):
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 120
        tree = ast.parse(text)
        names = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mw"
        }
        assert names
        assert names <= set(mw.__all__)
        modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        assert [module for module in modules if module.startswith("meshwright")] == []
