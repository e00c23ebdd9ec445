"""Every run leaves a line; nothing that goes wrong with the ledger hurts a run, and no line hurts another.

Tests of `core/ledger.py`, `run/prepare.py`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import pytest
from full_disk import files_of_at_most

from meshwright.core.cluster import Cluster
from meshwright.core.errors import MeshwrightError
from meshwright.core.ledger import Entry, Measured, Predicted, append, ledger_path, read
from meshwright.machine.named_clusters import cluster
from meshwright.run.comparison import Facts, entry_of, record
from meshwright.run.model import describe_run
from meshwright.run.prepare import load_plan, prepare, promise_of
from meshwright.run.run_file import DataSection, ModelSection, RunConfig, RunSection, TrainSection

CLUSTER: Cluster = cluster("2xlaptop")


def entry(number: int = 0) -> Entry:
    return Entry(
        unix_seconds=1e9 + number,
        versions={"torch": "2.11"},
        machine="made; 2 cores; 0 GPUs",
        device_name="",
        model=f"model {number}",
        model_fingerprint="m",
        plan={"techniques": []},
        plan_fingerprint="p",
        cluster=CLUSTER,
        sequence=128,
        batch=8,
        predicted=Predicted(
            step_seconds=1.0,
            step_seconds_low=0.9,
            step_seconds_high=1.1,
            peak_bytes=10,
            seconds_by_origin={"compute": 1.0},
            seconds_by_cause={"compute": 1.0},
        ),
        measured=Measured(step_seconds=1.2, step_seconds_p10=1.1, step_seconds_p90=1.3, num_steps=20, peak_bytes=12),
    )


def test_what_is_appended_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "not" / "yet" / "ledger.jsonl"
    assert [append(entry(number), path) for number in range(3)] == ["", "", ""]
    assert read(path) == ([entry(0), entry(1), entry(2)], 0)
    assert len(path.read_text().splitlines()) == 3
    assert path.stat().st_mode & 0o077 == 0, "others need not know what is trained here"


def test_the_ledger_lies_in_the_users_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert ledger_path() == tmp_path / "meshwright" / "ledger.jsonl"
    monkeypatch.setenv("HOME", "/home/somebody")
    for unusable in ("", "relative/folder"):
        monkeypatch.setenv("XDG_STATE_HOME", unusable)
        assert ledger_path() == Path("/home/somebody/.local/state/meshwright/ledger.jsonl")


def test_lines_that_are_no_entries_are_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    append(entry(0), path)
    good = json.loads(path.read_text())
    bad = [
        "{",
        "\x00\x01",
        "[]",
        "null",
        json.dumps(good | {"version": "one"}),
        json.dumps(good | {"measured": good["measured"] | {"step_seconds": float("nan")}}),
        json.dumps(good | {"measured": good["measured"] | {"step_seconds": -1.0}}),
        json.dumps(good | {"predicted": good["predicted"] | {"seconds_by_cause": {"compute": -1.0}}}),
        json.dumps(good | {"cluster": good["cluster"] | {"inner": {"bytes_per_second": 0}}}),
        "[" * 100_000,
    ]
    with path.open("a", encoding="utf-8") as file:
        file.write("\n".join(bad) + "\n\n")
    append(entry(1), path)
    assert read(path) == ([entry(0), entry(1)], len(bad))


def test_a_line_cut_short_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    append(entry(0), path)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    append(entry(1), path)
    assert read(path) == ([entry(0), entry(1)], 1)


def _append_many(path: Path, first: int) -> None:
    for number in range(first, first + 50):
        append(entry(number), path)


def test_runs_that_end_together_do_not_mix_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    fork = multiprocessing.get_context("fork")
    several = [fork.Process(target=_append_many, args=(path, 100 * number)) for number in range(4)]
    for process in several:
        process.start()
    for process in several:
        process.join(30)
    entries, num_bad = read(path)
    assert num_bad == 0
    wanted = {f"model {100 * number + each}" for number in range(4) for each in range(50)}
    assert {each.model for each in entries} == wanted
    assert len(entries) == 200


def test_what_cannot_be_written_is_a_reason_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger.jsonl"
    with files_of_at_most(100):
        assert append(entry(0), path) == "No space left on device"
        assert append(entry(0), path) == "File too large"
    (tmp_path / "file").write_text("in the way")
    assert append(entry(0), tmp_path / "file" / "ledger.jsonl") in ("Not a directory", "File exists")
    assert append(entry(0), Path("/proc/meshwright/ledger.jsonl")) == "No such file or directory"
    assert append(entry(0), path) == ""
    assert read(path) == ([entry(0)], 1)
    with pytest.raises(MeshwrightError, match=r"none\.jsonl: cannot be read"):
        read(tmp_path / "none.jsonl")


@pytest.mark.parametrize(("num_measured", "is_told"), [(9, False), (10, True)])
def test_a_run_is_told_with_its_forecast_once_it_has_ten_measured_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_measured: int, is_told: bool
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    config = RunConfig(
        model=ModelSection(name="byte-tiny"),
        data=DataSection(train="stdlib", sequence=32),
        train=TrainSection(batch=4, steps=20),
        run=RunSection(folder=str(tmp_path / "run"), cluster="laptop", ranks=2),
    )
    plan = tmp_path / "replicas.plan.json"
    plan.write_text('{"techniques": [{"name": "replicate", "size": 2}], "batch": 4, "microbatch": 1, "version": 1}')
    assert load_plan(config, "", describe_run(config).profile) is None
    prepared = prepare(config, str(plan), lambda text: None)
    facts = Facts(
        step_seconds=0.5,
        step_seconds_p10=0.4,
        step_seconds_p90=0.6,
        num_measured=num_measured,
        num_left_out=3,
        first_step_seconds=2.0,
        early_step_seconds=0.5,
        late_step_seconds=0.5,
        data_seconds=0.1,
        waited_fraction=0.0,
        parts={"compute": 0.75, "collective": 0.25, "idle": 0.0},
        peak_bytes=7,
        reserved_bytes=0,
        num_retries=0,
    )
    promise, told = promise_of(config, prepared), {"verdict": "slower"}
    assert record(entry_of(promise, facts, told, unix_seconds=5.0, torch="2.11", device_name="")) == ""
    assert ledger_path().exists() == is_told
    if not is_told:
        return
    (found,), _ = read(ledger_path())
    assert (found.model, found.batch, found.sequence) == ("byte-tiny", 4, 32)
    assert found.cluster == prepared.cluster
    assert found.plan_fingerprint == prepared.plan.fingerprint
    assert found.comparison == told
    assert found.measured == Measured(
        step_seconds=0.5,
        step_seconds_p10=0.4,
        step_seconds_p90=0.6,
        num_steps=10,
        peak_bytes=7,
        data_seconds=0.1,
        seconds_by_part={"compute": pytest.approx(0.3), "collective": pytest.approx(0.1)},
    )
    forecast = prepared.forecast
    assert found.predicted.step_seconds_high == forecast.step_seconds_high
    assert sum(found.predicted.seconds_by_cause.values()) == pytest.approx(forecast.step_seconds)
    assert sorted(os.listdir(tmp_path)) == ["meshwright", "replicas.plan.json"]
