"""Real runs in trouble: a batch that is not finite is skipped, rolled back past, or ends the run with its state saved.

Tests of `runtime/rank.py`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from command import RUN, losses, write_run

from meshwright.checkpoint.step_folders import list_steps, read_manifest, step_folder
from meshwright.core.errors import MeshwrightError
from meshwright.data.open_data import open_data
from meshwright.run.run import MessageEvent, Run
from meshwright.run.run_file import read_run

TEXT = RUN.replace('name = "byte-tiny"', 'factory = "sanity_jobs:poisoned"')
BAD_STEP = 6
"""The first is 1."""


@pytest.fixture(autouse=True)
def found_by_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [str(Path(__file__).parents[1] / name) for name in ("runtime", "parity")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))


def spoiled_run(folder: Path, text: str = TEXT) -> str:
    """A run whose sixth batch has a Z in it."""
    path = write_run(folder, text)
    data = open_data(read_run(path).data, cache=folder / "cache")
    sample = int(data.order((BAD_STEP - 1) * 4, 4)[1])
    corpus = folder / "corpus.txt"
    letters = bytearray(corpus.read_bytes())
    letters[sample * 32 + 7] = ord("Z")
    corpus.write_bytes(letters)
    return path


def troubles(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "troubles.jsonl").read_text().splitlines()]


def test_the_good_state_is_saved_before_a_run_stops_and_it_can_go_on_past_the_batch(tmp_path: Path) -> None:
    path = spoiled_run(tmp_path)
    with Run(path, changes=["train.save_every=0"]) as run:
        run.start()
        with pytest.raises(MeshwrightError, match="this step was not taken") as caught:
            run.result()
    assert caught.value.exit_code == 1
    assert "`mw replay RUN 6`" in str(caught.value)
    checkpoints = tmp_path / "run" / "checkpoints"
    assert list_steps(checkpoints) == (5,)
    (trouble,) = troubles(tmp_path)
    assert {key: trouble[key] for key in ("step", "cursor", "reason", "action")} == {
        "step": 6,
        "cursor": 20,
        "reason": "not finite",
        "action": "stop",
    }
    assert trouble["loss"] == "nan"
    assert len(trouble["samples"]) == 4
    with Run(path, changes=["train.save_every=0", "train.on_nan=skip"]) as run:
        events = list(run.start().follow())
        assert run.result().exit_code == 0
    assert any("not finite, skip" in event.text for event in events if isinstance(event, MessageEvent))
    assert sorted(losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 7, 8]
    state = read_manifest(step_folder(checkpoints, 8)).state
    assert (state["cursor"], state["updates"]) == (32, 7)


def test_a_roll_back_goes_on_past_the_batch_and_so_does_a_resume(tmp_path: Path) -> None:
    path = spoiled_run(tmp_path)
    changes = ["train.on_nan=roll_back", "train.save_every=4"]
    with Run(path, changes=changes) as run:
        events = list(run.start().follow())
        assert run.result().exit_code == 0
    assert any("rolled back to step 4, 1 steps before" in e.text for e in events if isinstance(e, MessageEvent))
    checkpoints = tmp_path / "run" / "checkpoints"
    assert list_steps(checkpoints) == (0, 4, 8)
    assert read_manifest(step_folder(checkpoints, 4)).state["cursor"] == 24, "a resume would meet the batch again"
    assert read_manifest(step_folder(checkpoints, 8)).state["cursor"] == 40
    assert [each["action"] for each in troubles(tmp_path)] == ["roll_back"]
    assert sorted(losses(tmp_path / "run")) == list(range(1, 9))
