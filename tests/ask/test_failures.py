"""`mw plan --failures`: what is read, everything wrong at once, and the answer in words and JSON."""

from __future__ import annotations

import json

import pytest

from meshwright.ask.failures import read_failures
from meshwright.cli.main import main
from meshwright.core.errors import Problem

QUESTION = ["plan", "--model", "byte-3m", "--cluster", "4x1xh100", "--batch", "8", "--ban", "precision", "--failures"]


def test_times_are_read_in_any_unit() -> None:
    problems: list[Problem] = []
    read = read_failures("mtbf=0.5d/device, restart=90s,checkpoint=2min,repair=1h,spares=3", problems)
    assert problems == []
    assert read.seconds == {"mtbf": 43_200, "restart": 90, "checkpoint": 120, "repair": 3600}
    assert (read.of, read.spares) == ("device", 3)


def test_everything_wrong_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUESTION, "mtbf=8x/rack,restart=+3min,spares=-1,foo,mtbf=3h,repair=0s", "--pin", "nonsense"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    for part in (
        *('"x" is no unit', '"/rack" is none of them', "+3min changes a time", '"-1" is no number of nodes'),
        *('"foo" is not of the form', "mtbf: is given twice", "repair: 0 cannot be", "nonsense"),
    ):
        assert part in said, part
    assert main([*QUESTION, ","]) == 2
    said = capsys.readouterr().err
    assert "mtbf is missing" in said
    assert "restart is missing" in said


def test_the_answer_has_goodput_interval_and_spares(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUESTION, "mtbf=8h/node,restart=3min,checkpoint=20s", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["failures"]
    seconds = found["ledger"]["seconds"]
    assert found["num_nodes"] == 4
    assert found["young_seconds"] == pytest.approx((2 * 20 * 7200) ** 0.5)
    assert found["interval_seconds"] == pytest.approx(found["young_seconds"], rel=0.1)
    assert 0 < seconds["productive"] / sum(seconds.values()) < 0.95
    assert found["spares"] == found["best_spares"] > 0
    assert main([*QUESTION, "mtbf=8h/run,restart=3min,spares=0"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "one every 8 h 00 min" in said
    assert "with 0 spare nodes" in said
    assert "estimated" in said
    assert "Young's first guess" in said


def test_a_checkpoint_comes_at_most_each_step_and_nothing_is_said_of_steps_that_never_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for interval, chosen in (("1e-5s", "(1 step; the least there can be)"), ("9d", "as given")):
        assert main([*QUESTION, f"mtbf=1s/run,restart=3min,interval={interval}"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert chosen in said
    assert "goodput 0.0% with 0 spare nodes" in said
    assert "no step outlasts a failure" in said
