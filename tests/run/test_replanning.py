"""Another plan in flight: asked for, after a step that ran out of memory, and with fewer ranks; the same samples once.

Tests of `run/replanning.py`, `cli/replan.py`.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command import RUN, losses, write_plan, write_run
from test_troubled_runs import found_by_ranks

from meshwright.checkpoint.step_folders import newest_good, read_manifest, step_folder
from meshwright.cli.main import main
from meshwright.core.codec import encode, load_artefact
from meshwright.core.files import is_locked
from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named
from meshwright.core.time_ledger import read_marks, time_ledger
from meshwright.launch.local_ranks import StopRequests
from meshwright.machine.named_clusters import cluster
from meshwright.run.prepare import PreparedRun, prepare, write_prepared
from meshwright.run.replanning import (
    REQUEST,
    PlanChange,
    Replanned,
    devices_left,
    is_slow,
    leave_request,
    search_again,
    take_request,
)
from meshwright.run.run import MessageEvent, RestartEvent, Run, StepEvent
from meshwright.run.run_file import RunConfig, read_run

__all__ = ["found_by_ranks"]
SHARD = {"name": "shard", "size": 2, "stage": 2}
REPLICATE = {"name": "replicate", "size": 2}


@pytest.fixture
def begun(tmp_path: Path) -> tuple[RunConfig, PreparedRun]:
    """A run that was planned, and has made no step."""
    config = read_run(write_run(tmp_path, RUN))
    made = prepare(config, write_plan(tmp_path, REPLICATE), lambda text: None)
    Path(config.run.folder).mkdir()
    write_prepared(config, made)
    return config, made


def test_a_request_is_taken_once_and_only_from_a_plain_file_with_a_plan_that_can_run(
    begun: tuple[RunConfig, PreparedRun], tmp_path: Path
) -> None:
    config, made = begun
    folder, told = Path(config.run.folder), list[str]()

    def take() -> PlanChange | None:
        return take_request(config, made.description, told.append)

    other = load_artefact(Plan, write_plan(tmp_path, SHARD))
    wanted = prepare(config, other, told.append, description=made.description, on=made.cluster)
    assert take() is None
    leave_request(folder, PlanChange(prepared=wanted, why="because"))
    taken = take()
    assert taken is not None
    assert (taken.prepared.plan, taken.why) == (other, "because")
    assert taken.prepared.forecast == wanted.forecast
    assert (take(), told) == (None, [])
    good = {"plan": encode(other), "cluster": encode(made.cluster), "why": ""}
    for bad in (b"", b"[]", b"\xff", json.dumps(good | {"plan": {"batch": 8, "microbatch": 1}}).encode()):
        (folder / REQUEST).write_bytes(bad)
        assert take() is None
        assert not (folder / REQUEST).exists()
        assert "is not used" in told.pop()
    (tmp_path / "elsewhere").write_text(json.dumps(good))
    (folder / REQUEST).symlink_to(tmp_path / "elsewhere")
    assert take() is None
    assert "is not followed" in told.pop()
    os.mkfifo(folder / REQUEST)
    assert take() is None
    assert "is not a plain file" in told.pop()


def test_a_stopped_run_gets_the_plan_of_its_next_start(
    begun: tuple[RunConfig, PreparedRun], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, made = begun
    folder = Path(config.run.folder)
    assert not is_locked(folder)
    path = str(config.origin.path)
    assert main(["replan", str(folder), "--plan", write_plan(tmp_path, SHARD)]) == 0
    assert "the next start of the run uses it" in capsys.readouterr().out
    kept = prepare(config, "", lambda text: None, description=made.description)
    assert kept.plan == load_artefact(Plan, tmp_path / "shard.plan.json")
    assert kept.found is None
    assert main(["replan", path, "--ranks", "1"]) == 0
    assert load_artefact(Plan, folder / "plan.json").num_ranks == 1
    assert main(["replan", path, "--ranks", "-1"]) == 2
    assert "--ranks: is -1" in capsys.readouterr().err
    assert main(["replan", path, "--ban", "nonsense"]) == 2
    assert "nonsense" in capsys.readouterr().err
    alike = search_again(config, made.description, made.plan, cluster("2xlaptop"), pin=["replicate=2"])
    assert alike.current_forecast.step_seconds == pytest.approx(made.forecast.step_seconds)
    assert not alike.is_worth(steps_left=0)


def test_a_plan_whose_steps_teach_less_must_be_faster_by_that_too(begun: tuple[RunConfig, PreparedRun]) -> None:
    _, made = begun
    islands = Plan(techniques=(technique_named("local_steps")(size=2, every=16),), batch=made.plan.batch)
    seconds = made.forecast.step_seconds
    for share, is_worth in ((0.9, False), (0.5, True)):
        faster = replace(made, plan=islands, forecast=replace(made.forecast, step_seconds=share * seconds))
        change = Replanned(prepared=faster, current=made.plan, current_forecast=made.forecast, learned=())
        assert change.is_worth(10**6) == is_worth
        back = Replanned(prepared=made, current=islands, current_forecast=faster.forecast, learned=())
        assert back.is_worth(10**6) != is_worth


def test_steps_are_slow_where_both_halves_of_the_last_ones_are_beyond_the_interval(
    begun: tuple[RunConfig, PreparedRun], tmp_path: Path
) -> None:
    _, made = begun
    high = made.forecast.step_seconds_high

    def slow(*seconds: float) -> bool:
        rows = [json.dumps({"step": at + 1, "seconds": each}) for at, each in enumerate(seconds)]
        (tmp_path / "metrics.jsonl").write_text("\n".join([*rows, '{"torn'][: len(rows) + 1]))
        return is_slow(tmp_path, made, 0)

    usual, late = [0.9 * high] * 20, [1.1 * high] * 20
    assert slow(*usual, *late)
    assert not slow(*late, *usual)
    assert not slow(*late), "too few"
    assert not slow(*usual, *usual[:10], *late[:10]), "a moment of something else"


def test_ranks_do_not_see_gpus_that_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    assert devices_left([]) == {}
    assert devices_left([1]) == {"CUDA_VISIBLE_DEVICES": "4,7"}


def test_requests_of_the_whole_run_are_also_those_of_its_ranks() -> None:
    whole = StopRequests()
    ranks = StopRequests(whole)
    ranks.request()
    assert whole.first_seconds > ranks.first_seconds
    whole.request(is_urgent=True)
    assert ranks.is_urgent
    assert ranks.first_seconds < whole.first_seconds


def copied_run(tmp_path: Path, name: str, text: str, source: Path, step: int) -> str:
    """Another run that goes on from one checkpoint of the first, with the same data."""
    path = write_run(tmp_path / name, text)
    checkpoints = tmp_path / name / "run" / "checkpoints"
    shutil.copytree(step_folder(source / "run" / "checkpoints", step), step_folder(checkpoints, step))
    return path


@pytest.mark.slow
def test_a_step_that_ran_out_of_memory_is_made_again_in_smaller_microbatches(tmp_path: Path) -> None:
    text = RUN.replace('name = "byte-tiny"', 'factory = "sanity_jobs:hungry"').replace("= 32", "= 32\nseed = 1", 1)
    text = text.replace("save_every = 4", "save_every = 2\nsave_async = false")  # the one of step 2 is there in step 4
    path = write_run(tmp_path / "first", text)
    with Run(path, plan=write_plan(tmp_path, REPLICATE, microbatch=2), changes=["run.on_oom=retry"]) as run:
        events = list(run.start().follow())
        assert run.result().exit_code == 0
    (restart,) = (event for event in events if isinstance(event, RestartEvent))
    assert (restart.step, restart.cause) == (2, "Going on in microbatches of 1 in place of 2")
    small = write_plan(tmp_path, REPLICATE, microbatch=1)
    again = copied_run(tmp_path, "again", text, tmp_path / "first", 2)
    with Run(again, plan=small) as run:
        assert run.start().result().exit_code == 0
    found, wanted = losses(tmp_path / "first" / "run"), losses(tmp_path / "again" / "run")
    assert sorted(found) == list(range(1, 9))
    assert {step: found[step] for step in wanted} == wanted, "other numbers than the smaller microbatches give"
    assert sorted(wanted) == list(range(3, 9))


@pytest.mark.slow
def test_a_run_under_way_changes_its_plan_and_makes_every_step_once(tmp_path: Path) -> None:
    text = RUN.replace("steps = 8", "steps = 400").replace("save_every = 4", "save_every = 0")
    path = write_run(tmp_path, text)
    told: dict[str, Any] = {"steps": [], "restarts": [], "messages": []}
    with Run(path, plan=write_plan(tmp_path, REPLICATE)) as run:
        for event in run.start().follow():
            if isinstance(event, StepEvent):
                told["steps"].append(event.step)
                if event.step == 5:
                    assert is_locked(run.folder)
                    assert main(["replan", path, "--plan", write_plan(tmp_path, SHARD)]) == 0
            elif isinstance(event, RestartEvent):
                told["restarts"].append(event)
            elif isinstance(event, MessageEvent):
                told["messages"].append(event.text)
        assert run.result().exit_code == 0
    assert told["steps"] == list(range(1, 401)), "a step was lost, or made twice"
    (restart,) = told["restarts"]
    assert "Changing to shard" in restart.cause
    assert any(f"from the last step to here (step {restart.step})" in text for text in told["messages"])
    newest = newest_good(tmp_path / "run" / "checkpoints", report=print)
    assert newest is not None
    assert read_manifest(newest).state["cursor"] == 1600
    ledger = time_ledger(read_marks(tmp_path / "run"))
    assert ledger.num_starts == 2
    assert ledger.seconds["lost"] == 0
    assert load_artefact(Plan, tmp_path / "run" / "plan.json") == load_artefact(Plan, tmp_path / "shard.plan.json")


@pytest.mark.slow
def test_a_rank_that_fails_again_and_again_is_left_out(tmp_path: Path) -> None:
    text = RUN.replace('name = "byte-tiny"', 'factory = "sanity_jobs:frail"').replace(
        "save_every = 4", "save_every = 2"
    )
    path = write_run(tmp_path, text)
    changes = ["run.elastic=true", "run.restarts=1"]
    with Run(path, plan=write_plan(tmp_path, REPLICATE), changes=changes) as run:
        events = list(run.start().follow())
        assert run.result().exit_code == 0
    causes = [event.cause for event in events if isinstance(event, RestartEvent)]
    assert len(causes) == 2
    assert causes[-1] == "Going on with 1 rank in place of 2"
    assert sorted(losses(tmp_path / "run")) == list(range(1, 9))
    newest = newest_good(tmp_path / "run" / "checkpoints", report=print)
    assert newest is not None
    assert read_manifest(newest).state["cursor"] == 32
