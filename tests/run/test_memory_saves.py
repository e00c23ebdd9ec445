"""Copies of a run's state in memory: a killed rank costs the steps since the last one, and nothing of them is left.

Tests of `checkpoint/memory_folder.py`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from command import RUN, clean_environment, losses, write_plan, write_run
from test_recovery import rank_of_run
from test_trainer import MadeData, assert_same, run, trainer_of

from benchmarks.scorecard import final_state
from meshwright.checkpoint.memory_folder import CheckpointMemory, MemoryFolder, copies_in_memory
from meshwright.checkpoint.step_folders import list_steps, verify_all
from meshwright.core.errors import MeshwrightError
from meshwright.launch.rank_job import StopFlag
from meshwright.run.run import MessageEvent, RestartEvent, Run, StepEvent
from meshwright.runtime import rank
from meshwright.runtime.rank import RankTraining

SECONDS = 0.02
LONGER = (
    RUN.replace("steps = 8", "steps = 300")
    .replace("save_every = 4", f"save_every = 100\nmemory_save_seconds = {SECONDS}")
    .replace("timeline_steps = 1", "timeline_steps = 0")
)


def memory_files() -> dict[int, int]:
    """Descriptor -> bytes of the files in memory that this process holds."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:meshwright"):
                found[int(name)] = os.fstat(int(name)).st_size
        except OSError:  # the descriptor of the listing itself
            continue
    return found


def children(process: int) -> set[str]:
    return set(Path(f"/proc/{process}/task/{process}/children").read_text().split())


@pytest.mark.slow
def test_a_killed_rank_costs_the_steps_since_the_last_copy_and_damaged_copies_are_not_used(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, {"name": "replicate", "size": 2})
    whole = write_run(tmp_path / "whole", LONGER)
    with Run(whole, plan=plan, changes=["train.memory_save_seconds=0"]) as reference:
        reference.start().result()
    files_before, children_before = memory_files(), children(os.getpid())
    path = write_run(tmp_path / "killed", LONGER)
    steps: list[StepEvent] = []
    restarts: list[RestartEvent] = []
    said: list[str] = []
    lost_seconds = -1.0
    with Run(path, plan=plan, report=said.append) as killed:
        for event in killed.start().follow():
            if isinstance(event, MessageEvent):
                said.append(event.text)
            elif isinstance(event, RestartEvent):
                restarts.append(event)
                if len(restarts) == 1:
                    lost_seconds = sum(each.seconds for each in steps if each.step > event.step)
            elif isinstance(event, StepEvent):
                steps.append(event)
                if not restarts and event.step == 20:
                    assert list_steps(killed.folder / "checkpoints") == ()
                    os.kill(rank_of_run(1), signal.SIGKILL)
                if len(restarts) == 1 and event.step == 230:
                    damage_copies()
        assert killed.result().exit_code == 0
    first, second = restarts
    usual = statistics.median(each.seconds for each in steps)
    assert 0 < first.step < 100, "nothing was on disk"
    assert lost_seconds <= SECONDS + 5 * usual + 0.3
    assert any(f"Going on from the copy of step {first.step} in memory" in line for line in said)
    assert second.step in (100, 200)
    assert sum("in memory is damaged and is not used" in line for line in said) >= 1
    assert final_state(killed.folder) == final_state(reference.folder)
    assert memory_files() == files_before
    assert children(os.getpid()) == children_before


def damage_copies() -> None:
    """Stop both ranks, flip a bit in each of their files, and kill one of them."""
    for number in (0, 1):
        os.kill(rank_of_run(number), signal.SIGSTOP)
    for file, num_bytes in memory_files().items():
        about = os.pread(file, 10, 0)
        if num_bytes > 10_000 and not about.startswith(b"{"):  # not a manifest
            byte = os.pread(file, 1, num_bytes // 2)[0]
            os.pwrite(file, bytes([byte ^ 4]), num_bytes // 2)
    os.kill(rank_of_run(1), signal.SIGKILL)


@pytest.mark.slow
def test_a_killed_supervisor_costs_as_little(tmp_path: Path) -> None:
    changes = ("train.save_every=0", "run.ranks=1")
    words = ["train", write_run(tmp_path, LONGER), *(word for change in changes for word in ("--set", change))]
    command = [sys.executable, "-m", "meshwright.cli.main", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=clean_environment()) as started:
        metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
        try:
            while not metrics.exists() or metrics.read_bytes().count(b"\n") < 60:
                assert started.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
            os.kill(int(children(started.pid).pop()), signal.SIGKILL)
            _, errors = started.communicate(timeout=120)
        finally:
            started.kill()
    assert started.returncode == 0, errors
    resumed = re.search(r"resuming from step (\d+) \(in memory\)", " ".join(errors.split()))
    assert resumed, errors
    assert 0 < int(resumed[1]) < 300
    assert sorted(losses(tmp_path / "run")) == list(range(1, 301))


def test_a_run_that_is_given_up_leaves_its_copy_on_disk(tmp_path: Path) -> None:
    path = write_run(tmp_path, LONGER)
    said: list[str] = []
    with Run(path, changes=["run.ranks=1", "run.restarts=0", "train.save_every=0"], report=said.append) as given_up:
        for event in given_up.start().follow():
            if isinstance(event, StepEvent) and event.step == 20:
                os.kill(rank_of_run(0), signal.SIGKILL)
        with pytest.raises(MeshwrightError, match="was killed by SIGKILL"):
            given_up.result()
    ((step, problems),) = verify_all(given_up.folder / "checkpoints").items()
    assert problems == ()
    assert f"The copy of step {step} in memory was written to disk." in said


def test_only_whole_copies_count_and_the_older_one_makes_room(tmp_path: Path) -> None:
    uninterrupted = trainer_of(MadeData(), steps=12)
    run(uninterrupted)
    with CheckpointMemory() as memory:
        folders = tuple(map(MemoryFolder, memory.fit(1)))
        trainer = trainer_of(MadeData(), steps=12)
        trainer.saving.use_memory(folders)
        known: list[set[int]] = []
        for _ in trainer.steps():
            if trainer.step % 3 == 0:
                assert trainer.save(tmp_path, behind=True, may_be_in_memory=True) == ""
                known.append(set(copies_in_memory(folders)) | {-trainer.step})
                assert trainer.saving.finish() == ""
            if trainer.step == 9:
                break
        assert known == [{-3}, {3, -6}, {6, -9}], "while one is written, the other one is whole"
        assert list(copies_in_memory(folders)) == [9, 6]
        assert list_steps(tmp_path) == ()
        assert sum(folder.held_bytes for folder in folders) > 2 * sum(
            each.numel() * each.element_size() for each in trainer.saving.copies
        )
        newest = copies_in_memory(memory.folders)[9]
        assert newest.verify(newest.read_manifest()) == ()
        resumed = trainer_of(MadeData(), steps=12, checkpoint=newest)
        resumed.saving.use_memory(folders)
        run(resumed)
        assert_same(resumed, uninterrupted)
        assert resumed.save(tmp_path, behind=True, may_be_in_memory=True) == ""
        assert resumed.saving.finish() == ""
        assert list(copies_in_memory(folders)) == [12, 9], "the older one was written over"
        file = folders[0] / "rank-00000.safetensors"
        os.truncate(file, file.stat().st_size - 1)
        assert [bool(each.verify(each.read_manifest())) for each in folders] == [True, False]
        resumed.interval.saved_seconds = -1e9
        assert resumed.save(tmp_path, behind=True, may_be_in_memory=True) == ""
        assert resumed.saving.finish() == ""
        assert list_steps(tmp_path) == (12,), "one on disk was due"
        resumed.saving.forget_memory()
        assert copies_in_memory(folders) == {}
        assert len(memory.fit(3)[0]) == 4
    assert not file.exists()


def test_without_room_no_copies_are_made_and_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_run(tmp_path, LONGER)
    with Run(path, changes=["run.ranks=1"]) as one, CheckpointMemory() as memory:
        arguments = {**one.adopt(one.prepare()), "memory": memory.fit(1)}
        plan = one.prepare().plan
        device = torch.device("cpu")

        def said() -> str:
            return json.loads((one.folder / "events.jsonl").read_text().splitlines()[-1])["text"]

        training = RankTraining(arguments, plan, device, StopFlag())
        assert training.trainer.saving.memory
        assert "a copy of the state in host memory every 20.0 ms: at most " in said()
        monkeypatch.setattr(rank, "available_host_bytes", lambda: 1 << 20)
        training = RankTraining(arguments, plan, device, StopFlag())
        assert not training.trainer.saving.memory
        assert "no copies in memory are made: they would take " in said()
        assert "of the 1.0 MiB available on this host; half may be" in said()
        monkeypatch.undo()
        RankTraining({**arguments, "memory": []}, plan, device, StopFlag())
        assert "only for ranks that `mw train` starts" in said()
