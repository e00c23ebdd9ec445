"""Tools that follow a run may fail, hang, fall behind or run out of disk: no step is held up, and it is said once.

Tests of `run/trackers.py`.
"""

from __future__ import annotations

import importlib.util
import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from full_disk import files_of_at_most

from meshwright.core.errors import MeshwrightError
from meshwright.run.trackers import (
    PATIENCE_SECONDS,
    About,
    Board,
    Feed,
    Tracker,
    finish_all,
    flattened,
    require_trackers,
    run_key,
)
from meshwright.runtime.run_record import Metrics

SUMMARY = {"step": 3, "loss": 1.5, "held_out": {"held_out_loss": 2.0}}
LOSSES = [0.7301, 0.6302, 0.5303, 0.4304]
CONFIG = {"train": {"batch": 4, "optimizer": {"lr": 1e-3}}, "plan": {"pin": ["a=2"]}}


class Notes:
    """A tool that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def open(self, about: About) -> None:
        self.told.append(("open", about.config))

    def values(self, step: int, values: Mapping[str, float]) -> None:
        self.told.append(("values", step, dict(values)))

    def text(self, step: int, text: str) -> None:
        self.told.append(("text", step, text))

    def close(self, summary: Mapping[str, Any]) -> None:
        self.told.append(("close", summary))


class Failing(Notes):
    def values(self, step: int, values: Mapping[str, float]) -> None:
        if step == 0:
            raise ConnectionError("no route\nto host")
        super().values(step, values)


class Exiting(Notes):
    def open(self, about: About) -> None:
        raise SystemExit("not logged in")


class Hanging(Notes):
    def values(self, step: int, values: Mapping[str, float]) -> None:
        threading.Event().wait()


class Gated(Notes):
    """Goes on once it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def open(self, about: About) -> None:
        self.gate.wait(10)


def feed(tracker: Tracker, folder: Path, capacity: int = 100) -> tuple[Feed, list[str]]:
    said: list[str] = []
    about = About(folder=folder, key="k", config=CONFIG, first_step=0)
    return Feed("tool", tracker, about, said.append, capacity), said


def test_a_tool_is_told_everything_in_order(tmp_path: Path) -> None:
    tool = Notes()
    fed, said = feed(tool, tmp_path)
    for step in range(3):
        fed.put("values", step, {"loss": float(step)})
    fed.put("text", 2, "once")
    finish_all([fed], SUMMARY)
    steps = [("values", step, {"loss": float(step)}) for step in range(3)]
    assert tool.told == [("open", CONFIG), *steps, ("text", 2, "once"), ("close", SUMMARY)]
    assert said == []


@pytest.mark.parametrize(
    ("tool", "message", "survivors"),
    [
        (Failing(), "tool failed, training goes on: ConnectionError: no route", ["open", "values", "values", "close"]),
        (Exiting(), "tool failed, training goes on: SystemExit: not logged in", []),
    ],
    ids=["fails", "exits at its start"],
)
def test_what_a_tool_raises_is_told_in_one_line_once(
    tool: Notes, message: str, survivors: list[str], tmp_path: Path
) -> None:
    fed, said = feed(tool, tmp_path)
    for step in (0, 0, 1, 2):
        fed.put("values", step, {"loss": 1.0})
    finish_all([fed], SUMMARY)
    assert said == [message]
    assert [call for call, *_ in tool.told] == survivors
    assert not fed.thread.is_alive()


def test_tools_that_hang_hold_up_neither_a_step_nor_the_end(tmp_path: Path) -> None:
    healthy, several = Notes(), [feed(Hanging(), tmp_path) for _ in range(3)]
    several.append(feed(healthy, tmp_path))
    for step in range(1000):
        for fed, _ in several:
            fed.put("values", step, {"loss": 1.0})  # would not return if it waited for the tool
    start = time.monotonic()
    finish_all([fed for fed, _ in several], SUMMARY, seconds=1.0)
    assert time.monotonic() - start < 2.5, "they are waited for one after the other"
    assert healthy.told[-1] == ("close", SUMMARY)
    assert PATIENCE_SECONDS <= 5.0
    for _, said in several[:3]:
        assert "did not finish in time" in said[0]


def test_a_slow_tool_loses_its_oldest_entries_and_the_number_is_told(tmp_path: Path) -> None:
    tool = Gated()
    fed, said = feed(tool, tmp_path, capacity=10)
    for step in range(25):
        fed.put("values", step, {})
    tool.gate.set()
    finish_all([fed], SUMMARY)
    assert [step for call, step, *_ in tool.told if call == "values"] == list(range(16, 25))
    assert tool.told[-1] == ("close", SUMMARY), "the summary is not what is dropped"
    assert said == ["tool was slower than the run: its 16 oldest entries were dropped"]


def test_a_full_disk_is_told_once_for_each_file_and_writing_goes_on_after_it(tmp_path: Path) -> None:
    said: list[str] = []
    metrics = Metrics(tmp_path, 0, said.append)
    metrics.sample(0, "", "before")
    with files_of_at_most(2000):
        for step in range(100):
            metrics.write(step, {"loss": 1.0, "lr": 0.1})
        metrics.sample(99, "", "x" * 3000)
        deadline = time.monotonic() + 60
        while len(said) < 3 and time.monotonic() < deadline:
            metrics.write(100, {"loss": 1.0})
            time.sleep(0.3)
    metrics.write(101, {"loss": 2.0})
    metrics.close(SUMMARY)
    assert sorted(line.split()[0] for line in said) == ["TensorBoard", "metrics.jsonl", "samples.jsonl"], said
    assert "File too large" in " ".join(said)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1] == {"step": 101, "loss": 2.0}
    assert [row["step"] for row in rows][:100] == list(range(100)), "lines the disk refused came when it had room"


def test_tensorboard_files_hold_values_text_and_where_a_resumed_run_begins(tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import Event

    fed, said = feed(Board(), tmp_path)
    fed.put("values", 4, {"loss": 0.25, "lr": 2.0})
    fed.put("text", 4, "hello")
    finish_all([fed], SUMMARY)
    (path,) = (tmp_path / "tensorboard").glob("events.out.tfevents.*")
    data, events = path.read_bytes(), []
    while data:  # length, its checksum, the event, its checksum
        size = int.from_bytes(data[:8], "little")
        events.append(Event.FromString(data[12 : 12 + size]))
        data = data[16 + size :]
    assert said == []
    assert events[1].session_log.status == 1
    assert {value.tag: value.simple_value for value in events[2].summary.value} == {"loss": 0.25, "lr": 2.0}
    assert (events[3].step, events[3].summary.value[0].tensor.string_val[0]) == (4, b"hello")


def test_missing_packages_are_named_together_with_what_to_install() -> None:
    with pytest.raises(MeshwrightError) as caught:
        require_trackers(["no_such_tool", "json", "nor_this"])
    assert [problem.what for problem in caught.value.problems] == [
        "no_such_tool is not installed.",
        "nor_this is not installed.",
    ]
    assert all("pip install 'meshwright[track]'" in problem.fix for problem in caught.value.problems)
    assert caught.value.exit_code == 2


def test_a_run_keeps_its_key_until_it_starts_anew(tmp_path: Path) -> None:
    key = run_key(tmp_path, 0)
    assert run_key(tmp_path, 5) == key
    assert run_key(tmp_path, 0) != key
    assert flattened(CONFIG) == {"train.batch": 4, "train.optimizer.lr": 1e-3, "plan.pin": '["a=2"]'}


def needs(package: str) -> Any:
    missing = importlib.util.find_spec(package) is None
    return pytest.param(package, marks=pytest.mark.skipif(missing, reason=f"{package} is not installed"))


@pytest.mark.parametrize("package", [needs("wandb"), needs("mlflow"), needs("trackio")])
def test_a_real_tool_keeps_a_run_that_is_resumed(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    for name in ("NETRC", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "TRACKIO_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "own"))
    said: list[str] = []
    for start in (0, 2):
        metrics = Metrics(tmp_path, start, said.append, [package], CONFIG)
        for step in range(start, start + 2):
            metrics.write(step, {"loss": LOSSES[step]})
        metrics.sample(start + 1, "", f"<b> of step {start + 1}")
        finish_all(metrics.feeds, SUMMARY, seconds=60)  # its first import may take longer than the end of a run waits
    assert said == []
    assert capfd.readouterr().out == "", "stdout is for results"
    kept = {"wandb": _in_wandb, "mlflow": _in_mlflow, "trackio": _in_trackio}[package](tmp_path)
    assert kept == LOSSES


def _in_wandb(folder: Path) -> list[float]:
    starts = sorted((folder / "track" / "wandb").glob("offline-run-*"))
    assert len({path.name.split("-")[-1] for path in starts}) == 1, "a resumed run has another id"
    assert any("&lt;b&gt; of step 3" in page.read_text() for page in folder.rglob("sample_*.html"))
    written = b"".join(next(path.glob("run-*.wandb")).read_bytes() for path in starts)
    return [loss for loss in LOSSES if str(loss).encode() in written]


def _in_mlflow(folder: Path) -> list[float]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(folder / "track" / "mlflow").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("meshwright").experiment_id])
    assert run.data.params["train.optimizer.lr"] == "0.001"
    assert run.info.status == "FINISHED"
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"samples", "summary.json"}
    return [each.value for each in sorted(client.get_metric_history(run.info.run_id, "loss"), key=lambda m: m.step)]


def _in_trackio(folder: Path) -> list[float]:
    import sqlite3

    with sqlite3.connect(folder / "own" / "meshwright.db") as store:
        rows = store.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert len({name for name, _, _ in rows}) == 1
    return [json.loads(row)["loss"] for _, _, row in rows if "loss" in json.loads(row)]
