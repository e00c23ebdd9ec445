"""A run driven from Python: events as they come, a stop that saves, a resume, two at once, nothing printed.

Tests of `run/result.py`.
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from command import RUN, write_plan, write_run

from meshwright.checkpoint.step_folders import list_steps
from meshwright.core.cluster import Cluster
from meshwright.core.codec import load_artefact, to_json
from meshwright.core.errors import MeshwrightError
from meshwright.core.ledger import Entry
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.timeline import Timeline
from meshwright.planner.scoreboard import SearchResult
from meshwright.run.result import RunSummary
from meshwright.run.run import EvaluationEvent, MessageEvent, Run, SaveEvent, StepEvent
from meshwright.run.run_file import read_run
from meshwright.simulator.forecast import Forecast

ENDLESS = RUN.replace("steps = 8", "steps = 100000").replace("save_every = 4", "save_every = 0")


def test_a_run_is_prepared_started_followed_and_asked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    with Run(write_run(tmp_path), changes=["train.evaluate_every=4"]) as run:
        assert not run.is_finished
        prepared = run.prepare()
        assert prepared.forecast.step_seconds > 0
        assert prepared.plan.num_ranks == 2
        assert run.start() is run
        assert handlers == {number: signal.getsignal(number) for number in handlers}
        with pytest.raises(MeshwrightError, match="in use by process"):
            Run(run.config).prepare()
        events = list(run.follow())
        result = run.result()
    assert [event.step for event in events if isinstance(event, StepEvent)] == list(range(1, 9))
    assert [event.step for event in events if isinstance(event, EvaluationEvent)] == [4, 8]
    saves = [event for event in events if isinstance(event, SaveEvent)]
    assert [event.step for event in saves] == [4, 8]
    assert all(event.path.is_dir() for event in saves)
    assert [event.text for event in events if isinstance(event, MessageEvent)]
    assert result.exit_code == 0
    assert result.summary is not None
    assert result.summary.step == 8
    assert result.summary.loss == next(e.loss for e in events if isinstance(e, StepEvent) and e.step == 8)
    said = capfd.readouterr()
    assert said.out == said.err == ""
    assert run.is_finished
    again = Run(write_run(tmp_path), changes=["train.evaluate_every=4"]).start()
    assert list(again.follow()) == []
    assert again.result().summary == result.summary
    assert again.is_finished
    artefacts = {
        "plan": Plan,
        "forecast": Forecast,
        "profile": Profile,
        "cluster": Cluster,
        "comparison": Entry,
        "summary": RunSummary,
        "predicted.timeline": Timeline,
        "measured.timeline": Timeline,
    }
    for name, kind in artefacts.items():
        assert load_artefact(kind, result.paths[name]), name
    assert load_artefact(Profile, result.paths["profile"]) == prepared.profile
    assert load_artefact(Forecast, result.paths["forecast"]) == prepared.forecast
    assert load_artefact(SearchResult, result.paths["search"]) == prepared.found
    # The start that made the last step was killed before it could sum up: what is there is of the start before.
    earlier = replace(result.summary, step=4, stopped=True)
    result.paths["summary"].write_text(to_json(earlier), encoding="utf-8")
    with Run(run.config) as killed:
        assert killed.start().result().summary is None


def test_a_run_does_not_start_inside_anothers_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with Run(write_run(tmp_path)) as run, pytest.raises(MeshwrightError, match="is rank 1 of 2 of torchrun"):
        run.start()
    assert not run.folder.exists()


def test_a_stop_saves_and_the_next_start_goes_on_beside_another_run(tmp_path: Path) -> None:
    plan = Plan.from_json(Path(write_plan(tmp_path, {"name": "replicate", "size": 1})).read_text(encoding="utf-8"))
    first = Run(write_run(tmp_path / "a", ENDLESS), changes=["run.ranks=1"], plan=plan)
    second = Run(write_run(tmp_path / "b"), changes=["run.ranks=1"], plan=plan)
    with first, second:
        first.start()
        second.start()
        assert first.is_running
        assert second.result().exit_code == 0
        for event in first.follow():
            if isinstance(event, StepEvent) and event.step >= 2:
                first.stop()
        result = first.result()
    assert result.is_stopped
    assert result.summary is not None
    assert result.summary.checkpoints == (result.summary.step,)
    steps = result.summary.step + 2
    config = read_run(write_run(tmp_path / "a", ENDLESS), ["run.ranks=1", f"train.steps={steps}"])
    with Run(config, plan=plan).start() as resumed:
        events = list(resumed.follow())
        assert resumed.result().exit_code == 0
    assert [event.step for event in events if isinstance(event, StepEvent)] == [steps - 1, steps]


def test_what_fails_is_raised_by_result(tmp_path: Path) -> None:
    config = read_run(write_run(tmp_path))
    with pytest.raises(MeshwrightError, match="was not started"):
        Run(config).result()
    run = Run(replace(config, run=replace(config.run, ranks=1, restarts=0))).start()
    with pytest.raises(MeshwrightError, match="started before"):
        run.start()
    os.kill(_first_child(run), signal.SIGKILL)
    with pytest.raises(MeshwrightError, match="rank 0"):
        run.result()
    with pytest.raises(MeshwrightError, match="is for 8 samples") as caught:
        Run(config, plan=Plan(batch=8)).prepare()
    assert caught.value.problems[0].where.startswith("plan: ")
    with pytest.raises(MeshwrightError, match="changes"):
        Run(config, changes=["train.steps=1"])


def _first_child(run: Run) -> int:
    import time

    while True:
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                words = path.read_text(encoding="utf-8").rpartition(")")[2].split()
                command = (path.parent / "cmdline").read_bytes()
            except OSError:
                continue
            if int(words[1]) == os.getpid() and b"runtime.rank" in command:
                return int(path.parent.name)
        assert run.is_running
        time.sleep(0.05)


def test_who_lost_the_folder_to_somebody_else_ends_and_commits_nothing_more(tmp_path: Path) -> None:
    """As a host that was cut off, and comes back after another one has taken its run."""
    root = tmp_path / "run" / "checkpoints"
    with Run(write_run(tmp_path, ENDLESS), changes=["train.save_every=4"]) as run:
        for event in run.start().follow():
            if isinstance(event, SaveEvent) and event.step == 4:
                saved = list_steps(root)[-1]
                (tmp_path / "run" / ".lock").write_text("process 7 on elsewhere since today, token 1", encoding="utf-8")
        with pytest.raises(MeshwrightError, match="now belongs to process 7 on elsewhere since today"):
            run.result()
    assert list_steps(root)[-1] <= saved + 4, "one may have been past the fence"
