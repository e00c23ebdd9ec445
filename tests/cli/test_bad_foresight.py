"""Bad input to what forecasts stand on: machines, profiles, plans, ledgers. One clear message, nothing written.

Tests of `cli/probe.py`.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import clean_environment, write_plan

from benchmarks.published_rows import NEEDED
from meshwright.cli.main import main
from meshwright.core.errors import MeshwrightError
from meshwright.core.profile import Profile
from meshwright.machine.named_clusters import preset
from meshwright.models.presets import profile

ROOT = Path(__file__).parents[2]
DELETED = object()


def changed(facts: dict[str, Any], place: str, value: Any) -> str:
    """As JSON, with one thing another."""
    made = json.loads(json.dumps(facts))
    *outer, last = place.split(".")
    inside = made
    for key in outer:
        inside = inside[int(key)] if key.isdigit() else inside[key]
    if value is DELETED:
        del inside[last]
    else:
        inside[last] = value
    return json.dumps(made)


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    for word in words:
        assert word in done.stderr, done.stderr


def mw_here(*words: str) -> subprocess.CompletedProcess[str]:
    """As `mw`, in this process: most of what is refused here needs no other."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


LAPTOP = json.loads(preset("laptop").to_json())


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("inner.bytes_per_second", 0, ("inner.bytes_per_second: is 0.0; it must be above zero",)),
        ("device.memory_bytes_per_second", 0, ("device.memory_bytes_per_second: is 0.0",)),
        ("inner", DELETED, ("inner: missing",)),
        ("outer", DELETED, ("outer: missing",)),
        ("inner", {"name": "cable"}, ("inner.bytes_per_second: missing", "inner.latency_seconds: missing")),
        ("device.launch_seconds", math.nan, ("NaN is not a number",)),
        ("inner.bytes_per_second", math.inf, ("Infinity is not a number",)),
        ("device.memory_bytes", -1, ("device.memory_bytes: is -1; it must be above zero",)),
        ("inner.latency_seconds", -1e-6, ("inner.latency_seconds: is -1e-06; it must be zero or more",)),
        ("errors.compute", -0.1, ("errors.compute: is -0.1",)),
        ("jitter_fraction", -0.1, ("jitter_fraction: is -0.1",)),
        ("device.flops_per_second.fp32", "fast", ('fp32: expected a number, found "fast"',)),
        ("device.matmul_fraction", 3, ("matmul_fraction: is 3.0", "at most 1.5")),
        ("device.flops_per_second.fp32", 1e19, ("device.flops_per_second.fp32: is 1e+19", "no device has that")),
        ("outer.bytes_per_second", 1e17, ("outer.bytes_per_second: is 1e+17", "no link has that")),
        (
            "topology",
            {"switches": [4, -1], "oversubscription": 0.5},
            ("topology.switches[1]: is -1", "topology.oversubscription: is 0.5", "covers 3 nodes, there are 1"),
        ),
        ("topology", {"rails": 8}, ("topology.switches: missing", "topology.rails")),
        ("version", 1, ("version 1; this program reads from 2 on", "Write the file again")),
    ],
)
def test_a_cluster_that_no_machine_is(tmp_path: Path, place: str, value: Any, words: tuple[str, ...]) -> None:
    machines, output = tmp_path / "made.cluster.json", tmp_path / "best.plan.json"
    machines.write_text(changed(LAPTOP, place, value))
    done = mw_here("plan", "--model", "byte-tiny", "--cluster", str(machines), "-o", str(output))
    refused(done, "made.cluster.json", *words)
    assert os.listdir(tmp_path) == ["made.cluster.json"]


def test_everything_wrong_with_a_cluster_is_told_at_once(tmp_path: Path) -> None:
    machines = tmp_path / "made.cluster.json"
    wrong = json.loads(changed(LAPTOP, "inner.bytes_per_second", 0))
    machines.write_text(changed(wrong, "device.memory_bytes", -5))
    plan = write_plan(tmp_path, {"name": "replicate", "size": 2})
    done = mw_here("simulate", plan, "--model", "byte-tiny", "--cluster", str(machines), "--seq", "32")
    refused(done, "inner.bytes_per_second: is 0.0", "device.memory_bytes: is -5")


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("batch", -4, ("batch: is -4", "at least 1")),
        ("batch", math.nan, ("NaN is not a number",)),
        ("batch", 10**30, ("batch: expected at most",)),
        ("microbatch", 0, ("microbatch: is 0",)),
        ("microbatch", 1.5, ("microbatch: expected a whole number",)),
        ("techniques.0.size", -2, ("size is -2",)),
        ("techniques.0.size", 64, ("needs 64 ranks", "has 2", "smaller axes")),
    ],
)
def test_a_plan_that_no_machine_runs(tmp_path: Path, place: str, value: Any, words: tuple[str, ...]) -> None:
    path = tmp_path / "made.plan.json"
    facts = {"techniques": [{"name": "replicate", "size": 2}], "batch": 128, "microbatch": 1, "version": 1}
    path.write_text(changed(facts, place, value))
    output = tmp_path / "made.timeline.json"
    done = mw_here(
        "simulate", str(path), "--model", "byte-tiny", "--cluster", "2xlaptop", "--seq", "32", "-o", str(output)
    )
    refused(done, *words)
    assert os.listdir(tmp_path) == ["made.plan.json"]


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("hidden_size", -64, r"hidden_size: is -64; it must be above zero"),
        ("layers.1.repeat", 0, r"layers\[1\]\.repeat: is 0"),
        ("imbalance", 0.5, r"imbalance: is 0\.5; it must be at least 1"),
        ("layers.0.params.0.shape", [256, -1], r"params\.tokens\.weight: is -1"),
        ("layers.1.ops.0.moved.bs", -3.0, r"ops\.attention_norm\.moved: is -\d"),
        ("layers.1.ops.0.moved.bs", math.nan, "NaN is not a number"),
        ("layers.1.ops.0.moved.bs", "many", 'bs: expected a number, found "many"'),
    ],
)
def test_a_profile_that_no_model_has(place: str, value: Any, words: str) -> None:
    text = profile("byte-tiny").to_json()
    assert Profile.from_json(text) == profile("byte-tiny")
    with pytest.raises(MeshwrightError, match=words):
        Profile.from_json(changed(json.loads(text), place, value), "made.profile.json")


def published(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.published", str(path), "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ("has no column file, hardware", "0 columns")),
        (b"\x00\xff\xfe\x80" * 64, ("cannot be read as CSV",)),
        (",".join(NEEDED[:-1]).encode() + b"\n", ("has no column status", "Add them")),
    ],
    ids=["empty", "binary", "a column is missing"],
)
def test_a_table_that_is_none(tmp_path: Path, content: bytes, words: tuple[str, ...]) -> None:
    path = tmp_path / "made.csv"
    path.write_bytes(content)
    refused(published(path), "made.csv", *words)


def test_columns_that_nobody_knows_are_told_and_left(tmp_path: Path) -> None:
    path = tmp_path / "made.csv"
    path.write_text(",".join([*NEEDED, "colour"]) + "\n")
    done = published(path)
    assert (done.returncode, json.loads(done.stdout)) == (0, {})
    assert "ignoring unknown columns: colour" in done.stderr


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ("cannot be read: No such file",)),
        (b"", ("has 0 runs of this machine", "3 are needed")),
        (b"\x00\xff" * 50 + b'\n{"version": 1}\nnot JSON\n', ("3 lines are no entries", "has 0 runs")),
    ],
    ids=["missing", "empty", "corrupt"],
)
def test_a_ledger_that_teaches_nothing(tmp_path: Path, content: bytes | None, words: tuple[str, ...]) -> None:
    path, output = tmp_path / "ledger.jsonl", tmp_path / "out.cluster.json"
    if content is not None:
        path.write_bytes(content)
    refused(mw_here("probe", "--from-runs", str(path), "-o", str(output)), *words)
    assert not output.exists()


def test_without_a_file_the_users_own_ledger_is_read(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "meshwright.cli.main", "probe", "--from-runs"],
        capture_output=True,
        text=True,
        timeout=600,
        env=clean_environment() | {"XDG_STATE_HOME": str(tmp_path)},
        check=False,
    )
    refused(done, str(tmp_path / "meshwright" / "ledger.jsonl"), "`mw train` makes it")
    refused(mw_here("probe", "--from-runs", "--quick"), "measures nothing")
