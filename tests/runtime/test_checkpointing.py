"""Checkpoints written behind training: the same bytes as those that training waits for, on one rank and on two."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from test_trainer import MadeData, assert_same, run, trainer_of

from benchmarks.scorecard import final_state, toy_run
from meshwright.checkpoint.step_folders import committed_folders, read_manifest, verify
from meshwright.core import files
from meshwright.run.run import Run
from meshwright.runtime import checkpointing
from meshwright.runtime.trainer import Trainer


def hashes(root: Path) -> dict[int, dict[str, str]]:
    folders = committed_folders(root)
    assert not [problem for folder in folders.values() for problem in verify(folder)]
    manifests = {step: read_manifest(folder) for step, folder in folders.items()}
    return {step: {name: entry.xxh3 for name, entry in each.files.items()} for step, each in manifests.items()}


def run_behind(trainer: Trainer, root: Path) -> list[str]:
    """Train, with a checkpoint behind every third step; what became of them."""
    outcomes = []
    for _ in trainer.steps():
        if trainer.saving.is_under_way and (outcome := trainer.saving.advance()) is not None:
            outcomes.append(outcome)
        if trainer.step % 3 == 0:
            outcomes += [trainer.saving.finish()] if trainer.saving.is_under_way else []
            outcomes += [reason] if (reason := trainer.save(root, behind=True)) else []
    return [*outcomes, trainer.saving.finish()] if trainer.saving.is_under_way else outcomes


def test_what_is_written_behind_training_is_what_was_there_when_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the file is written only after the next steps have changed every tensor."""
    waiting, behind = trainer_of(MadeData()), trainer_of(MadeData())
    run(waiting, tmp_path / "waiting")
    may_write, write = threading.Event(), checkpointing.write_rank_file

    def late(*given: Any) -> Any:
        assert may_write.wait(60)
        return write(*given)

    monkeypatch.setattr(checkpointing, "write_rank_file", late)
    for _ in behind.steps():
        if behind.step == 3:
            assert behind.save(tmp_path / "behind", behind=True) == ""
        if behind.step == 5:
            assert behind.saving.is_busy
            may_write.set()
            assert behind.saving.finish() == ""
            assert not behind.saving.is_under_way
    assert behind.save(tmp_path / "behind") == ""
    assert hashes(tmp_path / "behind") == hashes(tmp_path / "waiting")
    assert_same(behind, waiting)


def test_host_memory_of_the_copies_is_used_again(tmp_path: Path) -> None:
    trainer = trainer_of(MadeData(), steps=9)
    assert run_behind(trainer, tmp_path) == ["", "", ""]
    places = [copy.data_ptr() for copy in trainer.saving.copies]
    assert trainer.save(tmp_path, behind=True) == ""
    assert trainer.saving.finish() == ""
    assert [copy.data_ptr() for copy in trainer.saving.copies] == places
    assert len(places) == len(read_manifest(committed_folders(tmp_path)[9]).pieces)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_disk_that_refuses_is_told_and_training_goes_on(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, twin, fsync = trainer_of(MadeData()), trainer_of(MadeData()), os.fsync
    run(twin)
    failing = [True]

    def refuse(file: int) -> None:
        if failing.pop() if failing else False:
            raise OSError(code, os.strerror(code))
        fsync(file)

    monkeypatch.setattr(files.os, "fsync", refuse)
    (tmp_path / "checkpoints").mkdir()
    first, second = run_behind(trainer, tmp_path / "checkpoints")
    assert os.strerror(code) in first
    assert "Earlier checkpoints are untouched" in first
    assert second == ""
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000006"]
    assert_same(trainer, twin)


def test_two_ranks_write_behind_what_they_write_while_they_wait(tmp_path: Path) -> None:
    told = {}
    for mode in ("true", "false"):
        path = toy_run(tmp_path / mode, steps=13, save_every=4)
        changes = [f"train.save_async={mode}", "train.keep=1", "train.keep_every=4"]
        with Run(path, changes=changes, plan=tmp_path / mode / "toy.plan.json") as running:
            running.start().result()
        told[mode] = (hashes(tmp_path / mode / "run" / "checkpoints"), final_state(tmp_path / mode / "run"))
    assert told["true"] == told["false"]
    assert list(told["true"][0]) == [4, 8, 12, 13]
