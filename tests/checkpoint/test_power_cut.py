"""After a power cut at any moment of a save there is a valid checkpoint, and a new one once it was said to be there."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from checkpoint_ranks import holds, save, toy
from power_cut import Disk

from meshwright.checkpoint.step_folders import newest_good, usable_folders, verify
from meshwright.core.errors import MeshwrightError


def bad_states(folder: Path, step: int, states: int, seed: int) -> tuple[int, list[str]]:
    """How many states were looked at, and those without a checkpoint, with half of one, or without one that was said
    to be there. The save of `step` finds a checkpoint of step 1."""
    start = folder / "start"
    save(start, 1, toy(1), keep=1)
    with pytest.MonkeyPatch.context() as patch:
        shutil.copytree(start, folder / "count")
        disk = Disk(folder / "count", patch)
        save(folder / "count", step, toy(7), keep=1)
    bad, count, calls = [], 0, disk.num_changes
    for at in range(calls + 1):
        root = folder / "run"
        shutil.copytree(start, root)
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(root, patch, at)
            save(root, step, toy(7), keep=1)
        for number in range(-(-states // (calls + 1))):
            dice = random.Random(f"{seed}/{step}/{at}/{number}")
            left = folder / "left"
            disk.root.survive(left, dice, share=(0.0, 1.0, 0.5, 0.8, 0.2)[number % 5])
            count += 1
            try:
                found = newest_good(left, report=lambda _: None)
            except MeshwrightError:  # all are damaged
                found = None
            is_good = found is not None and (holds(found, toy(7)) or (at < calls and holds(found, toy(1))))
            is_whole = all(verify(each) == () for each in usable_folders(left).values())
            if not is_good or not is_whole:
                bad.append(f"step {step}, cut before change {at}, state {number} of seed {seed}")
            shutil.rmtree(left)
        shutil.rmtree(root)
    return count, bad


@pytest.mark.parametrize("step", [1, 2], ids=["replace the only one", "next step"])
def test_power_cuts(step: int, tmp_path: Path) -> None:
    count, bad = bad_states(tmp_path, step, 150, seed=0)
    assert count >= 150
    assert not bad


def test_the_model_finds_a_save_that_does_not_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.checkpoint.save.fsync_folder", lambda folder: None)
    _, bad = bad_states(tmp_path, 2, 300, seed=0)
    assert bad
