"""Two and three hosts: one plan across them trains as on one host, and what happens when a host goes away.

Tests of `runtime/outside.py`.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command import RUN, losses, mw, write_plan, write_run
from namespaces import Hosts, hosts_made, why_there_are_none

SMALL = RUN.replace('name = "byte-tiny"', 'name = "byte-tiny"\nchange = {{ num_layers = 3 }}').replace(
    "timeline_steps = 1", "timeline_steps = 0"
)
REPLICATE = {"name": "replicate", "size": 2}
SHARD = {"name": "shard", "size": 2, "stage": 3}
PIPELINE = {"name": "pipeline", "size": 2}
PIPELINE_3 = {"name": "pipeline", "size": 3}
ENDLESS = ("--set", "train.steps=1000000", "--set", "train.save_every=20")
SILENT_SECONDS = 6.0

MakeHosts = Callable[[int], Hosts]


@pytest.fixture(scope="module", autouse=True)
def _possible() -> None:
    if reason := why_there_are_none():
        pytest.skip(f"network namespaces cannot be made here: {reason}")


@pytest.fixture
def make_hosts(tmp_path: Path) -> Iterator[MakeHosts]:
    """Hosts that are removed whatever happens."""
    with contextlib.ExitStack() as stack:
        yield lambda count: stack.enter_context(hosts_made(count, tmp_path))


def ended(processes: list[subprocess.Popen[str]], timeout_seconds: float = 300) -> list[tuple[int, str]]:
    """Exit code and output of each."""
    outputs = [process.communicate(timeout=timeout_seconds)[0] for process in processes]
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def on_one_host(folder: Path, techniques: list[dict[str, object]], num_ranks: int) -> dict[int, float]:
    path = write_run(folder, SMALL)
    done = mw("train", path, "--plan", write_plan(folder, *techniques), "--set", f"run.ranks={num_ranks}")
    assert done.returncode == 0, done.stderr
    return losses(folder / "run")


@pytest.mark.parametrize(
    ("num_hosts", "ranks_each", "techniques"),
    [(2, 1, [REPLICATE]), (2, 2, [PIPELINE, SHARD]), (3, 1, [PIPELINE_3])],
    ids=["2 hosts replicate", "2x2 torchrun pipeline shard", "3 hosts pipeline"],
)
def test_a_plan_across_hosts_trains_as_on_one(
    num_hosts: int, ranks_each: int, techniques: list[dict[str, object]], make_hosts: MakeHosts, tmp_path: Path
) -> None:
    hosts = make_hosts(num_hosts)
    words = ("train", write_run(tmp_path / "there", SMALL), "--plan", write_plan(tmp_path / "there", *techniques))
    if ranks_each == 1:
        started = [hosts.start_rank(host, *words) for host in range(num_hosts)]
    else:
        started = [hosts.start_torchrun(host, ranks_each, *words) for host in range(num_hosts)]
    for code, output in ended(started):
        assert code == 0, output
    here = on_one_host(tmp_path / "here", techniques, num_hosts * ranks_each)
    assert losses(tmp_path / "there" / "run") == here  # to the last bit
    assert sorted(here) == list(range(1, 9))


def wait_for_checkpoint(folder: Path, started: list[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and not list((folder / "run" / "checkpoints").glob("step-*[0-9]")):
        assert all(process.poll() is None for process in started), ended(started)
        time.sleep(0.1)
    time.sleep(0.5)


def told(output: str) -> list[str]:
    assert "Traceback" not in output
    return [line for line in output.splitlines() if line.startswith("mw train:")]


def test_a_host_that_dies_ends_the_others_and_one_that_is_left_goes_on_alone(
    make_hosts: MakeHosts, tmp_path: Path
) -> None:
    """The host that dies is the one where the ranks met."""
    hosts, path = make_hosts(2), write_run(tmp_path, SMALL)
    words = ("train", path, "--plan", write_plan(tmp_path, REPLICATE), *ENDLESS)
    started = [hosts.start_rank(host, *words) for host in range(2)]
    wait_for_checkpoint(tmp_path, started)
    hosts.kill(0)
    code, output = ended(started)[1]
    assert code == 1
    assert len(told(output)) == 1, output
    assert "rank 0 of 2 on node0 (10.77.0.1) is gone" in told(output)[0]
    assert mw("ckpt", "verify", str(tmp_path / "run")).returncode == 0
    before = losses(tmp_path / "run")
    step = max(int(each.name[5:]) for each in (tmp_path / "run" / "checkpoints").glob("step-*[0-9]"))
    alone = (f"train.steps={step + 2}", "run.ranks=1")
    changes = [word for change in alone for word in ("--set", change)]
    plan = write_plan(tmp_path, {"name": "recompute", "layers": "first 1"})
    (code, output), *_ = ended([hosts.start(1, "meshwright.cli.main", "train", path, "--plan", plan, *changes)])
    assert code == 0, output
    assert f"resuming from step {step}" in output
    after = losses(tmp_path / "run")
    assert max(after) == step + 2
    assert after[step] == before[step]


@pytest.mark.parametrize("techniques", [[REPLICATE], [PIPELINE]], ids=["replicate", "pipeline"])
def test_a_host_whose_cable_is_pulled_counts_as_gone_after_the_stated_time(
    techniques: list[dict[str, object]], make_hosts: MakeHosts, tmp_path: Path
) -> None:
    hosts = make_hosts(2)
    words = ("train", write_run(tmp_path, SMALL), "--plan", write_plan(tmp_path, *techniques), *ENDLESS)
    patience = {"MESHWRIGHT_SILENT_SECONDS": str(SILENT_SECONDS)}
    started = [hosts.start_rank(host, *words, **patience) for host in range(2)]
    wait_for_checkpoint(tmp_path, started)
    start = time.monotonic()
    hosts.pull_cable(1)
    outcomes = ended(started)
    seconds = time.monotonic() - start
    assert seconds > SILENT_SECONDS / 2
    for host, (code, output) in enumerate(outcomes):
        assert code == 1
        assert len(told(output)) == 1, output
        assert f"rank {1 - host} of 2 on node{1 - host} ({hosts.address(1 - host)}) is gone" in told(output)[0]
    assert mw("ckpt", "verify", str(tmp_path / "run")).returncode == 0


def test_a_rank_that_dies_under_torchrun_ends_both_hosts(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """Rank 3 of a pipeline over two hosts of two: the ranks of the other host say who it was, once."""
    hosts = make_hosts(2)
    words = ("train", write_run(tmp_path, SMALL), "--plan", write_plan(tmp_path, PIPELINE, SHARD), *ENDLESS)
    started = [hosts.start_torchrun(host, 2, *words) for host in range(2)]
    wait_for_checkpoint(tmp_path, started)
    hosts.kill_rank(3)
    outcomes = ended(started)
    assert [code for code, _ in outcomes] == [1, 1]
    lines = [[line for line in output.splitlines() if line.startswith("mw train:")] for _, output in outcomes]
    assert len(lines[0]) == 1, outcomes[0][1]
    assert "rank 3 of 4 on node1 (10.77.0.2) is gone" in lines[0][0]
