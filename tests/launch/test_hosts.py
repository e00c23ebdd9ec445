"""Two and three hosts: one plan across them trains as on one host, and what happens when a host goes away.

Tests of `runtime/outside.py`, `runtime/host_agent.py`, `run/hosts.py`.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command import RUN, losses, mw, write_plan, write_run
from namespaces import Hosts, hosts_made, why_there_are_none

from meshwright.core.codec import load_artefact
from meshwright.core.plan import Plan

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


def supervised(path: str, hosts: str, *changes: str) -> tuple[str, ...]:
    """`mw train` to be started once on each host, with a rank on each."""
    settings = (f"run.hosts={hosts}", "run.rendezvous=10.77.0.1:29511", "run.ranks=1", *changes)
    return ("meshwright.cli.main", "train", path, *(word for each in settings for word in ("--set", each)))


def wait_for_step(folder: Path, step: int, started: list[subprocess.Popen[str]]) -> None:
    deadline, reached = time.monotonic() + 240, -1
    while time.monotonic() < deadline and reached < step:
        assert all(process.poll() is None for process in started), ended(started)
        time.sleep(0.1)
        with contextlib.suppress(OSError, ValueError):  # not there yet, or a line is being written
            reached = max(losses(folder / "run"), default=0)


def restarts(folder: Path) -> list[dict[str, object]]:
    rows = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["event"] == "start" and row.get("cause")]


def wait_for_restart(folder: Path, why: str, started: list[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and not any(why in str(row["cause"]) for row in restarts(folder)):
        wait_for_step(folder, 0, started)


@pytest.mark.slow
def test_hosts_join_and_die_and_the_run_goes_on_with_what_is_left(make_hosts: MakeHosts, tmp_path: Path) -> None:
    hosts, path = make_hosts(2), write_run(tmp_path, SMALL)
    rate = "train.optimizer.schedule=constant"  # whatever the number of steps
    every = ("train.steps=1000000", "train.save_every=20", "train.save_minutes=0", "train.keep_every=20", rate)
    quick = {"MESHWRIGHT_SILENT_SECONDS": str(SILENT_SECONDS)}
    first = hosts.start(0, *supervised(path, "1:2", *every), **quick)
    wait_for_step(tmp_path, 20, [first])
    (code, output), *_ = ended([hosts.start(1, *supervised(path, "1:3", *every), **quick)])
    assert code == 2
    assert "host node1: has run.hosts 1:3 (the run: 1:2)" in output
    hosts.start(1, *supervised(path, "1:2", *every), **quick)
    wait_for_restart(tmp_path, "in place of 1 host", [first])
    joined = restarts(tmp_path)[-1]
    assert "Going on with 2 hosts (2 ranks) in place of 1 host (1 rank)" in str(joined["cause"])
    wait_for_step(tmp_path, int(str(joined["step"])) + 40, [first])
    hosts.kill(1)
    wait_for_restart(tmp_path, "in place of 2 hosts", [first])
    died = restarts(tmp_path)[-1]
    step = int(str(died["step"]))
    wait_for_step(tmp_path, step + 30, [first])
    first.terminate()
    (code, output), *_ = ended([first])
    assert code == 75, output
    assert "Traceback" not in output
    assert "Going on with 1 host (1 rank) in place of 2 hosts (2 ranks)" in str(died["cause"])
    assert "rank 1 of 2 on node1 (10.77.0.2) is gone" in str(died["cause"])
    told = (tmp_path / "run" / "events.jsonl").read_text(encoding="utf-8")
    assert told.count("from the last step to here") == 2  # what the changes took
    # The same from the same checkpoint on one host, by hand.
    alone = tmp_path / "alone"
    write_run(alone, SMALL)
    name = Path("run") / "checkpoints" / f"step-{step:08d}"
    shutil.copytree(tmp_path / name, alone / name)
    changes = (f"train.steps={step + 30}", "train.save_every=0", "run.ranks=1", rate)
    words = [word for change in changes for word in ("--set", change)]
    done = mw("train", str(alone / "run.toml"), "--plan", str(tmp_path / "run" / "plan.json"), *words)
    assert done.returncode == 0, done.stderr
    here, there = losses(alone / "run"), losses(tmp_path / "run")
    assert sorted(there) == list(range(1, len(there) + 1))
    assert here == {number: loss for number, loss in there.items() if step < number <= step + 30}


@pytest.mark.slow
def test_a_rank_that_crashes_restarts_all_hosts_until_it_is_a_crash_loop(make_hosts: MakeHosts, tmp_path: Path) -> None:
    hosts, path = make_hosts(2), write_run(tmp_path, SMALL)
    settings = ("run.restarts=1", "train.steps=1000000", "train.save_every=0", "train.save_minutes=0")
    quick = {"MESHWRIGHT_SILENT_SECONDS": str(SILENT_SECONDS)}
    started = [hosts.start(host, *supervised(path, "2", *settings), **quick) for host in range(2)]
    wait_for_step(tmp_path, 20, started)
    before = {step: loss for step, loss in losses(tmp_path / "run").items() if step <= 20}
    hosts.kill_rank(1)
    wait_for_restart(tmp_path, "is gone", started)
    wait_for_step(tmp_path, 20, started)
    assert before.items() <= losses(tmp_path / "run").items()
    hosts.kill_rank(1)
    for code, output in ended(started):
        assert code == 70, output
        assert "Traceback" not in output
        assert "node1: rank 1 of 2 was killed by SIGKILL" in output
        assert "This is a crash loop: 2 failures in a row" in output


@pytest.mark.slow
def test_where_the_host_of_the_rendezvous_dies_the_next_endpoint_takes_over(
    make_hosts: MakeHosts, tmp_path: Path
) -> None:
    hosts, path = make_hosts(2), write_run(tmp_path, SMALL)
    places = "run.rendezvous=10.77.0.1:29511,10.77.0.2:29511"
    words = supervised(path, "1:2", "train.steps=1000000", "train.save_every=20", places)
    quick = {"MESHWRIGHT_SILENT_SECONDS": str(SILENT_SECONDS)}
    started = [hosts.start(host, *words, **quick) for host in range(2)]
    wait_for_checkpoint(tmp_path, started)
    while load_artefact(Plan, tmp_path / "run" / "plan.json").num_ranks < 2:  # one may have begun alone
        wait_for_step(tmp_path, 0, started)
        time.sleep(0.1)
    wait_for_step(tmp_path, max(losses(tmp_path / "run"), default=0) + 20, started)
    hosts.kill(0)
    wait_for_restart(tmp_path, "in place of 2 hosts", started[1:])
    step = int(str(restarts(tmp_path)[-1]["step"]))
    wait_for_step(tmp_path, step + 5, started[1:])
    started[1].terminate()
    code, output = ended(started[1:])[0]
    assert code == 75, output
    assert "node1 has lost the others" in output
    assert mw("ckpt", "verify", str(tmp_path / "run")).returncode == 0


def test_hosts_that_are_missing_are_waited_for_and_then_told(make_hosts: MakeHosts, tmp_path: Path) -> None:
    words = supervised(write_run(tmp_path, SMALL), "2:3", "run.wait_minutes=0.05")
    (code, output), *_ = ended([make_hosts(1).start(0, *words)])
    assert code == 1
    assert "run.hosts: 1 host of at least 2 came within 3.00 s" in " ".join(output.split())
