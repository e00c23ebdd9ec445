"""The run folder of `mw train`: links in it, damaged files in it, a disk that refuses; and signals before it trains.

Tests of `cli/main.py`, `core/files.py`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command import RUN, clean_environment, write_plan, write_run

from meshwright.cli.main import main
from meshwright.core.cluster import Cluster
from meshwright.core.files import link_problems, write_whole
from meshwright.machine.named_clusters import cluster
from meshwright.run.prepare import open_folder, prepare, write_prepared
from meshwright.run.run_file import read_run

REPLICATE = {"name": "replicate", "size": 2}


@pytest.mark.parametrize("name", ["metrics.tmp", "metrics.jsonl", ".lock", "plan.json", "logs/rank-0.log"])
def test_a_link_in_the_folder_is_named_and_not_followed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    link = tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(victim)
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path)
    assert main(["train", write_run(tmp_path), "--plan", write_plan(tmp_path, REPLICATE)]) == 2
    said = capsys.readouterr().err
    assert f"{link}: is a symbolic link" in said
    assert f"{tmp_path}/run/checkpoints: is a symbolic link" in said, "all at once"
    assert victim.read_text() == "mine"


def test_commands_that_only_read_do_not_follow_links_either(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    (run / "data").mkdir(parents=True)
    (run / "checkpoints").symlink_to(run / "data")
    (run / "comparison.json").symlink_to(tmp_path / "run.toml")
    question = ("--model", "byte-tiny", "--cluster", "laptop", "--batch", "4")
    for words in (
        ("ckpt", "list", str(run)),
        ("ckpt", "verify", str(run)),
        ("plan", *question, "--from-run", str(run)),
    ):
        assert main(words) == 2
        assert "is a symbolic link" in capsys.readouterr().err


def test_tools_may_have_links_of_their_own_and_the_folder_may_be_one(tmp_path: Path) -> None:
    (tmp_path / "run" / "track").mkdir(parents=True)
    (tmp_path / "run" / "track" / "latest-run").symlink_to(tmp_path)
    assert link_problems(tmp_path / "run") == ()
    (tmp_path / "named").symlink_to(tmp_path / "run")
    open_folder(tmp_path / "named").close()


def test_a_file_is_whole_or_as_it_was_and_a_link_is_replaced(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "plan.json"
    victim.write_text("mine")
    path.symlink_to(victim)
    write_whole(path, "new")
    assert (path.read_text(), victim.read_text(), path.is_symlink()) == ("new", "mine", False)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_whole(path, "x" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == "new"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["plan.json", "victim"]


DAMAGES = [b"{", b"\xff\xfe", b"[" * 100_000]


@pytest.mark.parametrize("name", ["wishes.json", "plan.json", "cluster.json"])
def test_damaged_derived_files_are_made_again_and_it_is_said(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def probe(*, num_devices: int | None, report: Any, quick: bool) -> Cluster:
        return replace(cluster("2xlaptop"), sources={"measured": "made"})

    monkeypatch.setattr("meshwright.machine.probe.probe", probe)
    config = read_run(write_run(tmp_path), ["run.cluster="])
    open_folder(tmp_path / "run").close()
    first = prepare(config, "", lambda text: None)
    write_prepared(config, first)
    whole = (tmp_path / "run" / name).read_bytes()
    lines: list[str] = []
    assert prepare(config, "", lines.append).found is None, "the plan of the start before"
    assert lines == []
    for damage in DAMAGES:
        (tmp_path / "run" / name).write_bytes(damage)
        lines.clear()
        again = prepare(config, "", lines.append)
        assert (again.plan, again.cluster) == (first.plan, first.cluster)
        assert [line for line in lines if line.startswith(f"{tmp_path}/run/{name} is damaged, so ")], lines
        write_prepared(config, again)
        assert (tmp_path / "run" / name).read_bytes() == whole


def test_an_empty_last_checkpoint_is_no_finished_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path)
    (tmp_path / "run" / "checkpoints" / "step-00000008").mkdir(parents=True)
    assert main(["train", path, "--plan", write_plan(tmp_path, REPLICATE)]) == 1
    said = capsys.readouterr().err
    assert "every checkpoint here is damaged" in said
    assert "has its" not in said


def test_an_unreadable_lock_names_no_owner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_folder(tmp_path / "run"):
        (tmp_path / "run" / ".lock").write_bytes(b"\xff\xfe\x00")
        assert main(["train", write_run(tmp_path), "--plan", write_plan(tmp_path, REPLICATE)]) == 2
    assert "is in use by" in capsys.readouterr().err


def test_a_folder_in_use_is_refused_before_the_model_is_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path, RUN.replace('name = "byte-tiny"', 'factory = "there_is_none:such"'))
    with open_folder(tmp_path / "run"):
        assert main(["train", path]) == 2
    assert f"is in use by process {os.getpid()} on" in " ".join(capsys.readouterr().err.split())
    assert main(["train", path]) == 2
    assert "there_is_none" in capsys.readouterr().err


def start(*words: str, **options: Any) -> subprocess.Popen[str]:
    def default_signals() -> None:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        if "most_bytes" in options:
            resource.setrlimit(resource.RLIMIT_FSIZE, (options["most_bytes"],) * 2)

    return subprocess.Popen(
        [sys.executable, "-m", "meshwright.cli.main", *words],
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
        preexec_fn=default_signals,
    )


def catches(pid: int, number: signal.Signals) -> bool:
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(status["SigCgt"], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP])
def test_a_signal_before_any_rank_exists_exits_75(number: signal.Signals, tmp_path: Path) -> None:
    """As early as Python lets us: while the first large module is imported."""
    started = start("train", write_run(tmp_path), "--plan", write_plan(tmp_path, REPLICATE))
    deadline = time.monotonic() + 120
    while not catches(started.pid, number) and time.monotonic() < deadline:
        assert started.poll() is None, started.communicate()
    os.kill(started.pid, number)
    _, errors = started.communicate(timeout=120)
    assert started.returncode == 75, errors
    assert errors.endswith("mw train: stopped, nothing is lost; the same command goes on\n")
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_disk_that_refuses_a_checkpoint_is_told_as_it_is_and_the_run_goes_on(tmp_path: Path) -> None:
    """On both ranks at once, each of which writes a part."""
    plan = write_plan(tmp_path, {"name": "shard", "size": 2})
    changes = ("--set", "train.steps=4", "--set", "train.save_every=3", "--set", "run.timeline_steps=0")
    started = start("train", write_run(tmp_path), "--plan", plan, *changes, most_bytes=150_000)
    _, errors = started.communicate(timeout=240)
    assert started.returncode == 1, errors
    told = [line for line in errors.splitlines() if "checkpoint not written, training goes on" in line]
    assert len(told) == 2, errors
    assert all("failed: File too large." in line and "Raise the limit on the size of files" in line for line in told)
    assert "the last checkpoint was not written" in errors
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == [1, 2, 3, 4]
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == [], "the space is given back"


def test_a_folder_in_place_of_a_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, plan = write_run(tmp_path), tmp_path / "run" / "plan.json"
    plan.mkdir(parents=True)
    assert main(["train", path]) == 1
    assert f"mw train: {plan}: Is a directory." in capsys.readouterr().err
    assert not list(plan.parent.glob(".*.tmp"))
