"""A step of a run again: the same bits, the tensor and the samples that were to blame, and nothing changed on disk.

Tests of `run/replay.py`, `runtime/replay.py`, `cli/replay.py`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path

import pytest
from command import RUN, write_plan, write_run
from rich.console import Console
from test_troubled_runs import BAD_STEP, TEXT, found_by_ranks, spoiled_run

from meshwright.checkpoint.step_folders import step_folder
from meshwright.cli.main import main
from meshwright.cli.replay import show
from meshwright.core.errors import MeshwrightError
from meshwright.data.open_data import open_data
from meshwright.run.replay import config_of_run, replay, troubled_steps
from meshwright.run.run import Run
from meshwright.run.run_file import read_run

__all__ = ["found_by_ranks"]


def content(folder: Path) -> dict[str, tuple[int, str]]:
    """When each file was changed, and its bytes."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (os.stat(path).st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files}


def recorded(folder: Path) -> dict[int, tuple[float, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: (row["loss"], row["gradient_norm"]) for row in rows if "loss" in row}


@pytest.mark.slow
def test_a_step_again_gives_the_bits_that_were_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path, RUN)
    with Run(path, plan=write_plan(tmp_path, {"name": "shard", "size": 2, "stage": 2})) as run:
        run.start().result()
    folder = tmp_path / "run"
    before, told = content(folder), recorded(folder)
    second, seventh = replay(folder, [2, 7])
    for found, start in ((second, 0), (seventh, 4)):
        assert (found.loss, found.gradient_norm) == told[found.step], "not the numbers of the run"
        assert (found.recorded_loss, found.recorded_gradient_norm) == told[found.step]
        assert (found.from_step, found.cursor, found.first_bad) == (start, (found.step - 1) * 4, ())
        norms = [layer.gradients for layer in found.layers]
        assert math.hypot(*norms) == pytest.approx(found.gradient_norm, rel=1e-5)
        assert [layer.name for layer in found.layers][:2] == ["embed", "blocks.0"]
    config = config_of_run(folder)
    order = open_data(config.data, cache=folder / "data").order(24, 4)
    assert seventh.samples == tuple(map(int, order))
    assert main(["replay", path, "7", "--one-rank", "--json"]) == 0
    (alone,) = json.loads(capsys.readouterr().out)["steps"]
    assert alone["plan"].startswith("one device")
    assert alone["loss"] == pytest.approx(told[7][0], rel=1e-5)
    show(Console(width=120), seventh)
    text = capsys.readouterr().out
    assert "step 7, samples from 24 on, replayed from the checkpoint of step 4" in text
    assert "(as recorded)" in text
    assert "everything is finite" in text
    assert content(folder) == before, "the run's folder was changed"


@pytest.mark.slow
def test_the_samples_that_were_to_blame_are_named_also_after_a_roll_back(tmp_path: Path) -> None:
    path = spoiled_run(tmp_path, TEXT)
    with Run(path, changes=["train.on_nan=roll_back", "train.save_every=4"]) as run:
        run.start().result()
    folder = tmp_path / "run"
    assert troubled_steps(folder) == (BAD_STEP,)
    before = content(folder)
    (found,) = replay(path)
    data = open_data(read_run(path).data, cache=tmp_path / "cache")
    guilty = int(data.order((BAD_STEP - 1) * 4, 4)[1])
    assert (found.step, found.from_step, found.cursor) == (BAD_STEP, 4, (BAD_STEP - 1) * 4)
    assert math.isnan(found.loss)
    assert found.bad_samples == (guilty,)
    assert len(found.first_bad) == 1, "one rank had that sample"
    assert "output of module.blocks.1," in found.first_bad[0]
    assert content(folder) == before


def test_what_cannot_be_replayed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match=r"no run\.json is there, so no run was started in it"):
        replay(tmp_path)
    path = write_run(tmp_path, RUN)
    with pytest.raises(MeshwrightError, match=r"plan\.json"):
        replay(path)
    config = read_run(path)
    folder = Path(config.run.folder)
    folder.mkdir()
    (folder / "plan.json").write_text(Path(write_plan(tmp_path, {"name": "replicate", "size": 2})).read_text())
    with pytest.raises(MeshwrightError, match="has no troubled step"):
        replay(path)
    with pytest.raises(MeshwrightError, match="The first step is 1"):
        replay(path, [0])
    with pytest.raises(MeshwrightError, match="is 9, and the run has 8 steps"):
        replay(path, [1, 9])
    (folder / "cluster.json").write_text("[")
    with pytest.raises(MeshwrightError, match=r"cluster\.json"):
        replay(path, [1])
    assert not step_folder(folder / "checkpoints", 0).exists()
