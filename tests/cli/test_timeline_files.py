"""`mw simulate` and the files it reads and writes: what is asked for is there, what is wrong is told (exit code 2).

Tests of `cli/simulate.py`, `core/timeline.py`, `run/result.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from command import write_plan

from meshwright.cli.main import main
from meshwright.core.timeline import Timeline
from meshwright.run.result import PICTURE, overlay

REPLICATE = {"name": "replicate", "size": 2}
STAGES = {"name": "pipeline", "size": 2}


def simulate(plan: str, *flags: str, cluster: str = "8xh100") -> int:
    return main(["simulate", plan, "--model", "byte-tiny", "--cluster", cluster, *flags])


def test_pictures_and_traces_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = write_plan(tmp_path, STAGES, REPLICATE)
    svg, trace, line = (str(tmp_path / name) for name in ("p.svg", "p.json", "p.timeline.json"))
    assert simulate(plan, "--svg", svg, "--perfetto", trace, "-o", line) == 0
    told = capsys.readouterr().out
    assert "byte-tiny on 8xh100: pipeline(size=2)" in " ".join(ElementTree.parse(svg).getroot().itertext())
    assert json.loads(Path(trace).read_text())["traceEvents"]
    assert Timeline.from_json(Path(line).read_text()).environment["ranks_each"] == "2"
    assert "each row stands for 2 equal ranks of 4" in told
    assert "bound by" in told
    drawing = told[told.index("each row") :].splitlines()
    assert max(map(len, drawing[:-1])) <= 100  # but for the path
    assert "\x1b[" not in told


def test_what_a_run_measured_is_drawn_below(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, line, svg = write_plan(tmp_path, STAGES), str(tmp_path / "p.timeline.json"), str(tmp_path / "p.svg")
    assert simulate(plan, "-o", line) == 0
    capsys.readouterr()
    assert simulate(plan, "--measured", line, "--svg", svg) == 0
    assert "differs most: 0 s" in capsys.readouterr().out
    assert "predicted" in Path(svg).read_text()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not valid JSON"),
        ('{"source": "measured", "plan_fingerprint": "x", "spans": [], "version": 1}', "has no spans"),
        ('{"source": "guessed", "plan_fingerprint": "x", "spans": []}', "'guessed' is not one of its values"),
        ('{"plan_fingerprint": "x", "source": "measured", "spans": [], "version": 99}', "version 99"),
        ("[]", "expected a table of keys and values"),
        ("\0\1", "is not valid JSON"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_timeline_that_is_none_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, words: str
) -> None:
    path = tmp_path / "m.timeline.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    assert simulate(write_plan(tmp_path, STAGES), "--measured", str(path)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert str(path) in said.err
    assert words in said.err


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "-1.0", '"soon"', "1e999"])
def test_numbers_of_a_timeline_must_be_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str) -> None:
    span = f'{{"device": 0, "lane": "compute", "name": "forward 0", "start_seconds": 0.0, "seconds": {value}}}'
    path = tmp_path / "m.timeline.json"
    path.write_text(f'{{"source": "measured", "plan_fingerprint": "x", "spans": [{span}]}}', encoding="utf-8")
    assert simulate(write_plan(tmp_path, STAGES), "--measured", str(path)) == 2
    assert str(path) in capsys.readouterr().err


def test_files_that_cannot_be_written_are_told_at_once_and_nothing_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, line = write_plan(tmp_path, STAGES), tmp_path / "p.timeline.json"
    missing = str(tmp_path / "missing" / "p.svg")
    assert simulate(plan, "--svg", missing, "--perfetto", str(tmp_path), "-o", str(line)) == 2
    said = capsys.readouterr().err
    assert f"--svg: {missing} cannot be written" in said
    assert f"--perfetto: {tmp_path} is a folder" in said
    assert not line.exists()


def test_a_plan_for_more_ranks_than_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg = tmp_path / "p.svg"
    plan = write_plan(tmp_path, {"name": "replicate", "size": 16}, batch=16)
    assert simulate(plan, "--svg", str(svg)) == 2
    assert "dp 16 needs 16 ranks; 8xh100 has 8" in capsys.readouterr().err
    assert not svg.exists()


def test_the_end_of_a_run_is_not_spoiled_by_its_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    predicted, measured = tmp_path / "predicted.timeline.json", tmp_path / "measured.timeline.json"
    assert simulate(write_plan(tmp_path, STAGES), "-o", str(predicted)) == 0
    assert overlay(tmp_path, "t") == ""  # no step was recorded
    measured.write_text(predicted.read_text().replace('"predicted"', '"measured"'), encoding="utf-8")
    assert overlay(tmp_path, "t").startswith("timeline: a step of ")
    told = " ".join(ElementTree.parse(tmp_path / PICTURE).getroot().itertext())
    assert told.index("predicted: ") < told.index("measured: ")
    (tmp_path / PICTURE).unlink()
    (tmp_path / PICTURE).mkdir()
    assert overlay(tmp_path, "t") == f"{PICTURE} is not written: Is a directory"
    measured.write_text("{", encoding="utf-8")
    assert f"{PICTURE} is not written: {measured}: is not valid JSON" in overlay(tmp_path, "t")
