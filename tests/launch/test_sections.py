"""Hangs of real processes that stamp where they are; the limits, on rows written by hand."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from test_rank_launch import pids_in, run, wait_until

from meshwright.core.files import memory_file
from meshwright.launch.sections import HangWatch, SectionStamp


def test_the_rank_that_hangs_is_named_with_its_section_and_not_those_that_wait_for_it(tmp_path: Path) -> None:
    outcome = run(tmp_path, "train", "hang_in_backward", "train", patience_seconds=60, waits=True)
    assert outcome.exit_code == 1
    failure = outcome.failures[1]
    assert (failure.kind, failure.is_secondary) == ("hang", False)
    assert outcome.message().startswith("rank 1 of 3 hangs in backward of step 111: no sign of life for ")
    assert [each.is_secondary for each in outcome.failures] == [True, False, True]
    assert outcome.steps == 10
    for rank in range(3):
        assert "launched_rank.py" in (tmp_path / "logs" / f"rank-{rank}.log").read_text(), "stacks"
    assert " in train" in (tmp_path / "logs/rank-1.log").read_text()


def test_a_stopped_rank_is_found(tmp_path: Path) -> None:
    def stop() -> None:
        wait_until(lambda: len(pids_in(tmp_path)) == 2)
        os.kill(int((tmp_path / "pid-0").read_text()), signal.SIGSTOP)

    thread = threading.Thread(target=stop)
    thread.start()
    outcome = run(tmp_path, "train", "train", patience_seconds=60, waits=False)
    thread.join()
    assert outcome.message().startswith("rank 0 of 2 was stopped by a signal (SIGSTOP) in ")


def test_ranks_that_save_for_long_do_not_hang(tmp_path: Path) -> None:
    assert run(tmp_path, "train", "train", patience_seconds=60, waits=False).exit_code == 0


def test_limits_come_from_observed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("meshwright.launch.sections.time.monotonic", lambda: now)
    with memory_file() as path:
        watch, stamp = HangWatch(path, 1, 600.0), SectionStamp(path, 0)

        def hangs(seconds: float) -> bool:
            """Whether a hang was found meanwhile."""
            nonlocal now
            for _ in range(round(seconds * 10)):
                now += 0.1
                if watch.look([os.getpid()]) is not None:
                    return True
            return False

        stamp.begin(0)
        assert not hangs(590), "it starts"
        for step in range(8):
            for kind in ("data", "forward", "backward", "exchange", "update"):
                stamp.look(kind)
                assert not hangs(0.2)
            stamp.end_step(step + 1)
        assert watch.median_seconds == pytest.approx(1.0)
        stamp.look("data")
        assert not hangs(4.8)
        now += 86_400.0
        assert not hangs(0.1), "this process was stopped as well, or the machine slept"
        assert hangs(0.3)
        with stamp.within("evaluation"):
            assert not hangs(500), "the first one may compile"
        with stamp.within("evaluation"):
            assert not hangs(1000)
            stamp.look("forward")
            assert not hangs(0.1)
    with memory_file() as path:
        watch, stamp = HangWatch(path, 1, 600.0, first_rank=4, has_others=True), SectionStamp(path, 0)
        stamp.begin(0)
        for step in range(8):
            assert not hangs(1.0)
            stamp.end_step(step + 1)
        stamp.look("exchange")
        assert not hangs(14.8), "it waits for a rank on another machine, which is found there"
        stamp.look("backward")
        assert not hangs(4.8)
        assert hangs(0.4)
        assert (found := watch.look([os.getpid()])) is not None
        assert found.rank == 4
