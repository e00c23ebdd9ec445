"""Bad input: one clear message for each, all problems at once, the right exit code, no traceback, nothing written.

Tests of `cli/arguments.py`.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from command import RUN, clean_environment, mw, write_plan, write_run


def refused(done: subprocess.CompletedProcess[str], *words: str, code: int = 2) -> None:
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


def test_every_wrong_key_of_a_run_file_is_told_with_its_line(tmp_path: Path) -> None:
    text = RUN.replace("batch = 4", "bacth = 4").replace("steps = 8", 'steps = "many"').replace("sequence", "sequance")
    done = mw("train", write_run(tmp_path, text))
    refused(
        done,
        'run.toml:8: train.bacth: unknown key. Did you mean "batch"?',
        "run.toml:9: train.steps: expected a whole number",
        'run.toml:5: data.sequance: unknown key. Did you mean "sequence"?',
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("model.name=llama-8b", ('no model is called "llama-8b"', "llama3-8b")),
        ("train.batch=0", ("train.batch", "at least 1")),
        ("train.optimizer.beta1=2.0", ("beta1", "less than 1")),
        ("train.optimizr.lr=1", ("optimizr", "optimizer")),
        ("data.sequence=4096", ("data.sequence", "positions for 64")),
        ("data.train=nowhere/*.txt", ("nowhere/*.txt",)),
        ("run.cluster=8xh1000", ("h1000", "h100")),
        ("run.cluster=0xh100", ("0",)),
        ("model.change={num_heads=3}", ("3 heads",)),
        ("model.change={head_size=-2}", ("head_size", "-2")),
        ("nonsense", ("a.b=c",)),
    ],
)
def test_a_wrong_value_is_told(tmp_path: Path, change: str, words: tuple[str, ...]) -> None:
    refused(mw("train", write_run(tmp_path), "--set", change), *words)


def test_missing_unreadable_and_malformed_run_files(tmp_path: Path) -> None:
    refused(mw("train", str(tmp_path / "none.toml")), "none.toml", "No such file")
    (tmp_path / "bad.toml").write_text("[model\nname = 1")
    refused(mw("train", str(tmp_path / "bad.toml")), "not valid TOML", "line 1")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    refused(mw("train", str(tmp_path / "binary.toml")), "not UTF-8")


@pytest.mark.parametrize(
    ("content", "word"), [(b"", "empty"), (b"text\x00\x01\x02" * 100, "not a text file"), (b"short", "tokens")]
)
def test_data_that_cannot_be_used(tmp_path: Path, content: bytes, word: str) -> None:
    path = write_run(tmp_path)
    (tmp_path / "corpus.txt").write_bytes(content)
    done = mw("train", path, "--plan", write_plan(tmp_path, {"name": "replicate", "size": 2}))
    refused(done, "corpus" if word != "tokens" else "data", word)


@pytest.mark.parametrize(
    ("techniques", "words"),
    [
        ([{"name": "tensor", "size": 3}], ("cannot be cut 3 ways", "Use 1 or 2")),
        ([{"name": "pipeline", "size": 2, "stages": [1, 2]}], ("add up to 2 blocks",)),
        ([{"name": "pipeline", "size": 3}], ("3 stages for 2 blocks", "at most 2")),
        ([{"name": "replicate", "size": 3}], ("4 samples cannot be shared", "multiple of 3")),
        ([{"name": "replicate", "size": 4}], ("needs 4 ranks", "has 2", "smaller axes")),
        ([{"name": "pipeline", "size": 2, "schedule": "interleavd"}], ('Did you mean "interleaved"',)),
        ([{"name": "pipeline", "size": 2, "most_held": 2}], ("greedy's, not 1f1b's", 'Use schedule = "greedy"')),
        ([{"name": "pipeline", "size": 2, "stages": [1, 0, 1]}], ("lists 3 stages, size is 2", "List 2")),
        ([{"name": "replicat", "size": 2}], ('Did you mean "replicate"',)),
        ([{"name": "replicate", "sise": 2}], ('Did you mean "size"', "missing")),
        ([{"name": "replicate", "size": 0}], ("size is 0",)),
        ([{"name": "shard", "size": 2, "stage": 4}], ("4", "stage")),
        ([{"name": "recompute", "layers": "first 9"}], ('layers is "first 9"', "2 blocks")),
    ],
)
def test_a_plan_that_cannot_run_is_refused_before_any_process_starts(
    tmp_path: Path, techniques: list[dict[str, object]], words: tuple[str, ...]
) -> None:
    path, plan = write_run(tmp_path), write_plan(tmp_path, *techniques)
    refused(mw("train", path, "--plan", plan), *words)
    assert not (tmp_path / "run" / "logs").exists()


def test_a_plan_that_cannot_run_this_model_leaves_no_run_folder(tmp_path: Path) -> None:
    path, plan = write_run(tmp_path), write_plan(tmp_path, {"name": "expert", "size": 2})
    refused(mw("train", path, "--plan", plan), "no experts")
    assert not (tmp_path / "run").exists()


def test_a_plan_file_from_a_newer_version_or_damaged(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    newer = tmp_path / "newer.plan.json"
    newer.write_text(json.dumps({"version": 99, "techniques": [], "dimensions": 11}))
    refused(mw("train", path, "--plan", str(newer)), "version 99", "Upgrade meshwright")
    newer.write_text('{"version": 1, "batch": NaN}')
    refused(mw("train", path, "--plan", str(newer)), "NaN")
    newer.write_text("{")
    refused(mw("train", path, "--plan", str(newer)), "not valid JSON")
    refused(mw("train", path, "--plan", str(tmp_path / "missing.json")), "missing.json")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    (tmp_path / "file").write_text("in the way")
    refused(mw("train", path, "--set", f"run.folder={tmp_path}/file/run"), "cannot write there")
    refused(mw("train", path, "--set", "run.folder=/proc/run"), "cannot write there")


def test_flags_and_commands_are_suggested() -> None:
    refused(mw("plan", "--modle", "llama3-8b"), "--model")
    refused(mw("trian", "x"), '"train"')
    refused(mw("plan"), "--model", "--cluster")
    refused(mw("plan", "--model", "lama3-8b", "--cluster", "8xh10O"), "llama3-8b", "h100")
    refused(mw("plan", "--model", "llama3-8b", "--cluster", "8xh100", "--seq", "0"), "--seq")
    refused(mw("plan", "--model", "llama3-8b", "--cluster", "8xh100", "--pin", "tensr=2"), "tensor")
    refused(mw("techniques", "tensr"), "tensor")
    refused(mw("profile", "lama3-8b"), "llama3-8b")
    refused(mw("ckpt", "list", "/nowhere"), "/nowhere")
    refused(mw("simulate", "/nowhere.json", "--model", "llama3-8b", "--cluster", "8xh100"), "/nowhere.json")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--cluster", "8xh100", "--seq", "-5"), ("--seq: is -5",)),
        (("--cluster", "8xh100", "--seq", "99999"), ("positions for 8192",)),
        (("--cluster", "8xv100", "--json"), ("do not compute in bf16", "--ban precision")),
        (("--cluster", "1000000000xh100"), ("at most 1048576 devices",)),
    ],
)
def test_a_plan_that_cannot_be_simulated_is_told(
    tmp_path: Path, flags: tuple[str, ...], words: tuple[str, ...]
) -> None:
    plan = write_plan(tmp_path, {"name": "precision"}, {"name": "replicate", "size": 2})
    done = mw("simulate", plan, "--model", "llama3-8b", *flags)
    refused(done, *words)
    assert done.stdout == ""


def test_a_timeline_is_not_overwritten_by_its_trace(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, {"name": "replicate", "size": 2}, batch=10**8)
    for name, trace in (("x.trace.json", "x.trace.trace.json"), ("y.timeline.json", "y.trace.json")):
        done = mw("simulate", plan, "--model", "byte-tiny", "--cluster", "8xh100", "-o", str(tmp_path / name))
        assert done.returncode == 0, done.stderr
        assert "source" in json.loads((tmp_path / name).read_text())
        assert "traceEvents" in json.loads((tmp_path / trace).read_text())
        assert "microbatches: 2048 of 50000000" in done.stdout


def test_a_run_file_plans_as_it_trains(tmp_path: Path) -> None:
    text = RUN.replace("[run]", '[plan]\npin = ["replicate=2"]\nban = ["chunked_loss"]\n[run]')
    done = mw("plan", write_run(tmp_path, text), "--pin", "microbatch=2", "--json")
    assert done.returncode == 0, done.stderr
    for each in json.loads(done.stdout)["ranked"]:
        techniques = {technique["name"]: technique for technique in each["plan"]["techniques"]}
        assert techniques["replicate"]["size"] == 2
        assert "chunked_loss" not in techniques
        assert each["plan"]["microbatch"] == 2
    refused(mw("plan", write_run(tmp_path, text), "--ban", "replicate"), "banned too")


def test_a_port_in_use_is_told(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        place = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        done = subprocess.run(
            [sys.executable, "-m", "meshwright.cli.main", "train", path],
            capture_output=True,
            text=True,
            timeout=600,
            env=clean_environment() | place,
            check=False,
        )
    refused(done, port, "cannot meet the others")


def test_no_plan_fits_says_what_came_closest() -> None:
    done = mw("plan", "--model", "llama3-405b", "--cluster", "rtx4090", "--json")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["best"] is None
    assert found["nearest_miss"]["forecast"]["fits"] is False
    assert found["nearest_miss"]["plan"]["techniques"]
