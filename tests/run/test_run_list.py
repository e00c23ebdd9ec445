"""`mw runs`: states of runs that end in every way, hundreds at once, folders that are damaged or none.

Tests of `cli/runs.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.core.time_ledger import TIME_FILE, mark_now, note_time
from meshwright.run.prepare import open_folder
from meshwright.run.run_list import list_runs


def make_run(
    folder: Path, *, steps_done: int = 4, steps: int = 8, saved: int = 0, exit_code: int | None = None
) -> Path:
    """A run folder as `mw train` leaves it, without what `mw runs` does not read."""
    folder.mkdir(parents=True)
    note_time(folder, "start", model="byte-tiny", steps=steps)
    marks = [mark_now("resume"), mark_now("time", step=steps_done, seconds={"productive": 3.0, "evaluation": 1.5})]
    with (folder / TIME_FILE).open("a") as file:
        file.writelines(json.dumps(mark.to_row()) + "\n" for mark in marks)
    rows = [{"step": step + 1, "loss": 2.0 - step / 10, "seconds": 2.0} for step in range(steps_done)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if saved:
        checkpoint = folder / "checkpoints" / f"step-{saved:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text("{}")
    if exit_code is not None:
        note_time(folder, "end", exit_code=exit_code, cause="rank 1 was killed by signal 9.\nSee logs")
    return folder


def test_every_state_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "a" / "finished", steps_done=8, saved=8, exit_code=0)
    make_run(tmp_path / "a" / "stopped", exit_code=75)
    make_run(tmp_path / "b" / "failed", exit_code=1)
    make_run(tmp_path / "b" / "crashed")
    running = make_run(tmp_path / "running", exit_code=1)
    note_time(running, "start", model="byte-tiny", steps=10)
    lock = open_folder(running)
    (make_run(tmp_path / "damaged1") / TIME_FILE).write_text("\0\0\0")
    (make_run(tmp_path / "damaged2", saved=3) / "checkpoints" / "step-00000003" / "manifest.json").unlink()
    (make_run(tmp_path / "damaged3", exit_code=0) / "summary.json").write_text("{")
    (make_run(tmp_path / "damaged4", exit_code=0) / "metrics.jsonl").write_text('{"loss": "x", "step": []}\n')
    (make_run(tmp_path / "damaged5", exit_code=0) / "metrics.jsonl").write_text('{"loss": 1.0, "step": Infinity}\n')
    (tmp_path / "loop").symlink_to(tmp_path)
    assert main(["runs", str(tmp_path), "--json"]) == 0
    rows = {Path(row["folder"]).name: row for row in json.loads(capsys.readouterr().out)["runs"]}
    assert {name: row["state"] for name, row in rows.items()} == {
        **{name: name for name in ("finished", "stopped", "failed", "crashed", "running")},
        **{f"damaged{number}": "damaged" for number in range(1, 6)},
    }
    assert rows["failed"]["failure"] == "rank 1 was killed by signal 9."
    assert rows["running"]["failure"] == "rank 1 was killed by signal 9.", "the last one there was"
    assert rows["running"]["seconds_left"] == pytest.approx((10 - 4) * 2.0 * 1.5)
    assert (rows["running"]["step"], rows["running"]["steps"], rows["running"]["loss"]) == (4, 10, 1.7)
    assert rows["stopped"]["seconds_left"] is None
    assert 0 < rows["finished"]["goodput"] < 1
    assert main(["runs", str(tmp_path)]) == 0
    assert "no line that can be read" in capsys.readouterr().out.replace("\n", " ")
    lock.close()
    assert {row.state for row in list_runs(running)} == {"crashed"}, "a lock whose process is gone"


def test_hundreds_of_runs_are_listed_at_once(tmp_path: Path) -> None:
    first = make_run(tmp_path / "0", exit_code=1)
    marks = (first / TIME_FILE).read_text()
    (first / TIME_FILE).write_text(marks * 20)
    for number in range(1, 300):
        shutil.copytree(first, tmp_path / str(number))
    start = time.process_time()
    assert len(list_runs(tmp_path)) == 300
    assert time.process_time() - start < 10


def test_what_is_no_folder_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for wrong in (file, tmp_path / "missing"):
        assert main(["runs", str(wrong)]) == 2
        assert f"{wrong}: cannot be listed" in capsys.readouterr().err
    assert main(["runs", str(tmp_path)]) == 0
    assert "no runs below" in capsys.readouterr().out
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    if os.geteuid():  # root reads everything
        assert [row.state for row in list_runs(tmp_path)] == ["damaged"]
        with pytest.raises(Exception, match="Permission denied"):
            list_runs(closed)
