"""Rows of the scorecard about runs in trouble: slow ranks, networks, clocks, bad numbers, silent corruption, trackers,
and the soak."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.scorecard import (
    Case,
    RowResult,
    Values,
    case_by_case,
    clean_environment,
    final_state,
    toy_run,
    train,
    train_words,
)
from meshwright.checkpoint.step_folders import committed_folders, verify
from meshwright.core.time_ledger import read_marks, time_ledger
from meshwright.launch.rank_pool import RankPool

ROOT = Path(__file__).parents[1]
TESTS = [str(ROOT / "tests" / name) for name in ("runtime", "parity", "launch")]
DAY_SECONDS = 86_400
REPLICATE = {"name": "replicate", "size": 2}


@contextlib.contextmanager
def job_pool(num_ranks: int) -> Iterator[RankPool]:
    """Warm ranks that find the jobs of the tests."""
    sys.path += [each for each in TESTS if each not in sys.path]
    with RankPool(num_ranks) as pool:
        yield pool


def _plan(*techniques: dict[str, Any], batch: int = 8, microbatch: int = 2) -> dict[str, Any]:
    return {"techniques": list(techniques), "batch": batch, "microbatch": microbatch, "version": 1}


def judge_stragglers(values: Values) -> tuple[str, list[str]]:
    rightly, wrongly, missed, late = (
        int(sum(values.get(name, []))) for name in ("rightly", "wrongly", "missed", "late")
    )
    precision, recall = rightly / max(1, rightly + wrongly), rightly / max(1, rightly + missed)
    figures = f"precision {precision:.0%}, recall {recall:.0%}, {late} later than 20 steps"
    return figures, ["too few"] if min(precision, recall) < 0.95 or late else []


@case_by_case(judge_stragglers)
def r8(numbers: range) -> Iterator[Case]:
    """Runs of two replicas of which one, the other or none computes 1.3 times as long from the 11th step on."""
    with job_pool(2) as pool:
        for number in numbers:
            dice = random.Random(f"8/{number}")
            slow, part = (dice.randrange(2) if number % 2 else -1), dice.choice(("forward", "backward"))
            arguments = {"plan": _plan(REPLICATE), "slow_rank": slow, "part": part, "ratio": 1.3, "steps": 36}
            told = pool.run("sanity_jobs:straggler_job", arguments, num_ranks=2, timeout_seconds=300)[0]
            named = [rank for _, rank, _, _ in told]
            values = {
                "rightly": slow in named,
                "wrongly": sum(rank != slow for rank in named),
                "missed": slow >= 0 and slow not in named,
                "late": sum(rank == slow and step > 11 + 20 for step, rank, _, _ in told),
            }
            # That some are not as they should be is allowed for: shares count.
            yield Case(
                what=f"rank {slow} slow in {part}, flagged {told}" if slow >= 0 else f"none slow, {told}", values=values
            )


# R9: hosts are network namespaces.


def r9(count: int) -> RowResult:
    """A cable pulled, a host killed (its connections are reset), and a slow link, in turn."""
    sys.path += [each for each in TESTS if each not in sys.path]
    namespaces = importlib.import_module("namespaces")
    if reason := namespaces.why_there_are_none():
        return RowResult(passed=False, count=0, figures=f"no network namespaces here: {reason}")
    failures: list[str] = []
    seconds: list[float] = []
    with tempfile.TemporaryDirectory(prefix="meshwright-r9-") as made:
        for number in range(count):
            folder = Path(made) / str(number)
            folder.mkdir()
            with namespaces.hosts_made(2, folder) as hosts:
                if number % 3 == 2:
                    failures += [f"case {number}, slow link: {text}" for text in _slow_link(hosts, folder)]
                else:
                    what, took = _parted(hosts, folder, is_silent=number % 3 == 0)
                    seconds.append(took)
                    failures += [f"case {number}, {'cable' if number % 3 == 0 else 'reset'}: {text}" for text in what]
    slowest = max(seconds, default=0.0)
    if slowest > 5.0:
        failures.append(f"the slowest end took {slowest:.1f} s")
    figures = f"ended at most {slowest:.1f} s after a reset, or after the 2 s that a silent host is given; one lineage"
    return RowResult(passed=not failures, count=count, figures=figures, failures=tuple(failures[:10]))


def _checkpointed(folder: Path, ranks: Sequence[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and not list((folder / "run" / "checkpoints").glob("step-*[0-9]")):
        if any(rank.poll() is not None for rank in ranks):
            raise RuntimeError("".join(rank.communicate()[0] for rank in ranks)[-1000:])
        time.sleep(0.05)


def _parted(hosts: Any, folder: Path, *, is_silent: bool) -> tuple[list[str], float]:
    """What went wrong, and the seconds until the last rank had ended, beyond those that a silent host is given."""
    words = train_words(toy_run(folder, steps=100_000, save_every=10))[3:]
    ranks = [hosts.start_rank(host, *words, MESHWRIGHT_SILENT_SECONDS="2") for host in range(2)]
    _checkpointed(folder, ranks)
    start = time.monotonic()
    if is_silent:
        hosts.pull_cable(1)
        left = ranks
    else:
        hosts.kill(0)
        left = ranks[1:]
    outcomes = [(rank.communicate(timeout=300)[0], rank.returncode) for rank in left]
    took = time.monotonic() - start - (2.0 if is_silent else 0.0)
    wrong = [f"exit {code}: {output[-300:]}" for output, code in outcomes if code != 1 or " is gone" not in output]
    before = set(committed_folders(folder / "run" / "checkpoints"))
    time.sleep(1.0)
    found = committed_folders(folder / "run" / "checkpoints")
    if set(found) != before:
        wrong.append("somebody went on writing checkpoints")
    wrong += [f"{path}: {problem}" for path in found.values() for problem in verify(path)]
    return wrong, took


def _slow_link(hosts: Any, folder: Path) -> Iterator[str]:
    """2 Mbit/s and packets lost where the queue is full: slow, and no false alarm; the same bits."""
    run_file = toy_run(folder, steps=8, save_every=4)
    slow = ("tbf", "rate", "2mbit", "burst", "32kbit", "latency", "400ms")
    subprocess.run(["tc", "qdisc", "add", "dev", hosts.cable(1), "root", *slow], check=True, capture_output=True)
    words = train_words(run_file)[3:]
    ranks = [hosts.start_rank(host, *words, MESHWRIGHT_SILENT_SECONDS="5") for host in range(2)]
    for rank in ranks:
        output = rank.communicate(timeout=600)[0]
        if rank.returncode:
            yield f"exit {rank.returncode}: {output[-300:]}"
            return
    there = toy_run(folder / "reference", steps=8, save_every=4)
    done = train(there)
    if done.returncode or final_state(folder / "run") != final_state(there.parent / "run"):
        yield f"not what one host trains: {done.stderr[-200:]}"


# R13


CLOCK = """
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long long shift(void) {  /* seconds, as the file says now */
    long long seconds = 0;
    FILE *file = fopen(getenv("SHIFTED_CLOCK"), "r");
    if (file) { if (fscanf(file, "%lld", &seconds) != 1) seconds = 0; fclose(file); }
    return seconds;
}
int clock_gettime(clockid_t id, struct timespec *now) {
    int code = syscall(SYS_clock_gettime, id, now);
    if (!code && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += shift();
    return code;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *out) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (out) *out = found.tv_sec;
    return found.tv_sec;
}
"""


def r13(count: int) -> RowResult:
    """The wall clock jumps by a day, forwards or backwards, in the middle of a run; and before it is resumed.

    A library put before libc shifts the wall clock (libfaketime breaks Python's sleep). The kernel's own waits until a
    time of day are not shifted: what waits so would wait a day, or not at all.
    """
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="meshwright-r13-") as made:
        library, source = Path(made) / "clock.so", Path(made) / "clock.c"
        source.write_text(CLOCK)
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
        reference = toy_run(Path(made) / "reference", steps=60, save_every=20)
        if (done := train(reference)).returncode:
            return RowResult(passed=False, count=0, figures="the reference failed", failures=(done.stderr[-300:],))
        wanted = final_state(reference.parent / "run")
        for number in range(count):
            folder = Path(made) / str(number)
            days = 1 if number % 2 else -1
            failures += [f"case {number}, {days:+d} day: {text}" for text in _jumped(folder, days, library, wanted)]
    figures = (
        f"{count} jumps of a day while training and before a resume: {len(failures)} false time-outs or other bits"
    )
    return RowResult(passed=not failures, count=count, figures=figures, failures=tuple(failures[:10]))


def _jumped(folder: Path, days: int, library: Path, wanted: dict[str, Any]) -> Iterator[str]:
    run_file = toy_run(folder, steps=60, save_every=20)
    clock = folder / "clock"
    clock.write_text("0")
    environment = clean_environment(LD_PRELOAD=str(library), SHIFTED_CLOCK=str(clock))
    metrics = folder / "run" / "metrics.jsonl"
    for code in (75, 0):  # stopped half way, and resumed
        words = train_words(run_file)
        with subprocess.Popen(
            words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            before = _lines(metrics)
            while process.poll() is None and _lines(metrics) < before + 5:
                time.sleep(0.02)
            clock.write_text(str(days * DAY_SECONDS * (1 if code else 2)))
            while code and process.poll() is None and _lines(metrics) < before + 15:
                time.sleep(0.02)
            if code:
                process.terminate()
            output = process.communicate(timeout=300)[0]
        if process.returncode != code:
            yield f"exit {process.returncode}: {output[-300:]}"
            return
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps_told = [row["step"] for row in rows if "loss" in row]
    if steps_told != list(range(1, 61)):
        yield "steps are not in order"
    if any(not 0 <= row["seconds"] < DAY_SECONDS / 2 for row in rows if "seconds" in row):
        yield "a step took a day"
    if final_state(folder / "run") != wanted:
        yield "other bits than without a jump"
    words = [sys.executable, "-m", "meshwright.cli.main", "runs", str(folder / "run")]
    told = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if told.returncode or "finished" not in told.stdout:
        yield f"mw runs: {told.stdout}{told.stderr}"[:300]


def _lines(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.read_bytes().count(b"\n")
    return 0


# R17, R18: jobs of tests/runtime/sanity_jobs.py.

SPIKE_STEP = 20


def _sane(pool: RankPool, techniques: Sequence[dict[str, Any]], **given: Any) -> list[dict[str, Any]]:
    settings = {"batch": 8, "optimizer": {"name": "adamw", "lr": 1e-2, "schedule": "constant"}, **given.pop("settings")}
    ranks = math.prod(each.get("size", 1) for each in techniques)
    arguments = {"plan": _plan(*techniques), "settings": settings, "folder": "", "jump": -1, "flip": None, **given}
    return pool.run("sanity_jobs:train_job", arguments, num_ranks=ranks, timeout_seconds=300)


SANE_PLANS: dict[str, list[dict[str, Any]]] = {
    "one device": [],
    "replicate": [REPLICATE],
    "shard": [{"name": "shard", "size": 2, "stage": 3}],
    "tensor": [{"name": "tensor", "size": 2}],
    "pipeline": [{"name": "pipeline", "size": 2}],
}
FAULTS = {"nan": "nan", "inf": "inf", "-inf": "-inf", "spike": "1e5"}


def r17(count: int) -> RowResult:
    """A batch that is not finite or spikes, under five plans, with every action; the oracle is a run without it."""
    failures = []
    caught = 0
    with job_pool(2) as pool, tempfile.TemporaryDirectory(prefix="meshwright-r17-") as made:
        for number in range(count):
            name = list(SANE_PLANS)[number % len(SANE_PLANS)]
            fault = list(FAULTS)[number // 2 % len(FAULTS)]
            action = ("skip", "roll_back", "stop")[number % 3]
            if fault == "spike" and action == "stop":
                action = "skip"  # a spike is warned of, skipped or rolled back past
            at = SPIKE_STEP if fault == "spike" else 4
            key = "on_spike" if fault == "spike" else "on_nan"
            settings = {"steps": at + 4, "save_every": 3, key: action}
            folder = str(Path(made) / str(number)) if action == "roll_back" else ""
            ranks = _sane(pool, SANE_PLANS[name], settings=settings, factors={str(at): FAULTS[fault]}, folder=folder)
            quiet = {"steps": at + 4 if action == "skip" else at, "save_every": 0}
            jump = at if action == "skip" else -1
            wanted = _sane(pool, SANE_PLANS[name], settings=quiet, factors={}, jump=jump)
            wrong = list(_not_as_wanted(action, at, ranks, wanted))
            caught += not wrong
            failures += [f"case {number}, {name}, {fault}, {action}: {text}" for text in wrong]
    figures = f"{caught} of {count} caught before the update on all ranks; state equal to a run without the batch"
    return RowResult(passed=not failures, count=count, figures=figures, failures=tuple(failures[:10]))


def _not_as_wanted(action: str, at: int, ranks: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> Iterator[str]:
    for number, (rank, other) in enumerate(zip(ranks, wanted, strict=True)):
        if action == "skip":
            if [step[0] for step in rank["steps"] if step[2]] != [at]:
                yield f"rank {number} skipped {[step[0] for step in rank['steps'] if step[2]]}"
            if rank["last"] != other["last"]:
                yield f"rank {number} holds other bits than a run without the step"
        else:
            if [(each[0], each[2]) for each in rank["raised"]] != [(at + 1, action)]:
                yield f"rank {number} raised {[each[:3] for each in rank['raised']]}"
            if action == "stop" and rank["last"] != other["last"]:
                yield f"rank {number} does not hold the state before the step"
            if action == "roll_back":
                rolled = next((step for step in rank["steps"] if step[3] == "rolled back"), None)
                saved = next((step for step in rank["steps"] if rolled and step[0] == rolled[0] - 1), None)
                if rolled is None or saved is None or rolled[5] != saved[5]:
                    yield f"rank {number} did not roll back to what was saved"


def r18(count: int) -> RowResult:
    """One flipped bit of a rank's parameters or optimizer state, on three and four replicas; and the check's cost."""
    failures, shares = [], []
    kinds = ("parameter", "exp_avg", "exp_avg_sq")
    with job_pool(4) as pool, tempfile.TemporaryDirectory(prefix="meshwright-r18-") as made:
        for number in range(count):
            dice = random.Random(f"18/{number}")
            size, step, kind = dice.choice((3, 4)), dice.randrange(1, 4), kinds[number % 3]
            rank = dice.randrange(size)
            plan = [{"name": "replicate", "size": size}]
            settings = {"batch": size * 2, "steps": 6, "save_every": 1, "on_mismatch": "roll_back"}
            folder, flip = str(Path(made) / str(number)), {"rank": rank, "step": step, "kind": kind}
            about = {"plan": _plan(*plan, batch=size * 2), "settings": settings, "factors": {}}
            told = _sane(pool, plan, **about, folder=folder, flip=flip)
            raised = [each for one in told for each in one["raised"]]
            words = f"rank {rank} holds other bits than the other {size - 1}"
            if len(raised) != size or not all(each[0] == step + 1 and words in each[3] for each in raised):
                failures.append(f"case {number}: {flip} of {size}: raised {raised}"[:300])
        for _ in range(3):
            shares.append(
                max(pool.run("benchmarks.reliability_runs:check_share", {"plan": _plan(REPLICATE)}, num_ranks=2))
            )
    share = statistics.median(shares)
    if share > 0.01:
        failures.append(f"comparing takes {share:.2%} of the time")
    figures = (
        f"{count - len(failures)} of {count} found at the next comparison (every 50 steps by default), rank named; "
    )
    figures += f"comparing takes {share:.2%} of the time"
    return RowResult(passed=not failures, count=count, figures=figures, failures=tuple(failures[:10]))


def check_share(*, plan: dict[str, Any], rank: int, num_ranks: int, rendezvous: str) -> float:
    """In a rank: the share of its time that comparing replicas takes, every 50 steps."""
    jobs, parity = importlib.import_module("sanity_jobs"), importlib.import_module("meshwright.verify.parity")
    parity.enter(rank, num_ranks, rendezvous)
    chosen = jobs.Plan.from_json(json.dumps(plan))
    trainer = jobs.opened(chosen, {"batch": chosen.batch, "steps": 24}, {})
    steps, checks = [], []
    start = time.perf_counter()
    for step in trainer.steps():
        steps.append(time.perf_counter() - start)
        if step.step >= 4:
            start = time.perf_counter()
            assert trainer.replicas.odd_one() == ""
            checks.append(time.perf_counter() - start)
        start = time.perf_counter()
    del trainer
    parity.leave()
    return statistics.median(checks) / (50 * statistics.median(steps[4:]) + statistics.median(checks))


# R21

HUNG_TOOL = """
import time
class Settings:
    def __init__(self, **given): pass
def login(**given): return {login}
def init(**given):
    {init}
    return Run()
class Run:
    def log(self, *given, **named): {log}
    def finish(self, *given, **named): {log}
    summary = {{}}
    def __getattr__(self, name): return self.log
def __getattr__(name): return Run()
"""
TOOLS = {
    "hangs at once": {"login": "True", "init": "time.sleep(10**6)", "log": "None"},
    "hangs in a call": {"login": "True", "init": "pass", "log": "time.sleep(10**6)"},
    "raises": {"login": "True", "init": "pass", "log": "1 / 0"},
}


def r21(count: int) -> RowResult:
    """A tracker (a stand-in for wandb's package) that hangs or raises: metrics are whole, a step waits for nothing."""
    from meshwright.run.trackers import About, Feed

    failures, costs, medians = [], [], []
    with tempfile.TemporaryDirectory(prefix="meshwright-r21-") as made:
        for number in range(count):
            name = list(TOOLS)[number % len(TOOLS)]
            folder = Path(made) / str(number)
            run_file = toy_run(folder, steps=60, save_every=30)
            (folder / "tools").mkdir()
            (folder / "tools" / "wandb.py").write_text(HUNG_TOOL.format(**TOOLS[name]))
            environment = clean_environment(PYTHONPATH=str(folder / "tools"))
            words = train_words(run_file, "--set", 'run.track=["wandb"]')
            done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=600, check=False)
            rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
            told = [row["step"] for row in rows if "loss" in row]
            if done.returncode or told != list(range(1, 61)):
                failures.append(f"{name}: exit {done.returncode}, {len(told)} of 60 steps told: {done.stderr[-300:]}")
            medians.append(statistics.median(row["seconds"] for row in rows if "loss" in row))
            costs.append(_cost_of_a_hung_tool(folder, About, Feed))
    share = max(costs, default=0.0) / max(statistics.median(medians), 1e-9) if medians else 0.0
    if share > 0.01:
        failures.append(f"a step gives {share:.2%} of its time to a tool that hangs")
    figures = (
        f"0 metrics lost; handing over to a hung tool takes {share:.3%} of a toy step"
        if not failures
        else "see failures"
    )
    return RowResult(passed=not failures, count=count, figures=figures, failures=tuple(failures[:10]))


def _cost_of_a_hung_tool(folder: Path, about: Any, feed: Any) -> float:
    """Seconds of a step for handing over, with a full queue."""

    class Hung:
        def open(self, about: Any) -> None:
            time.sleep(10**6)

        values = text = close = open

    made = feed("hung", Hung(), about(folder=folder, key="k", config={}, first_step=0), lambda text: None, 1000)
    for step in range(2000):
        made.put("values", step, {"loss": 1.0})
    start = time.perf_counter()
    for step in range(2000):
        made.put("values", step, {"loss": 1.0, "lr": 1e-3, "seconds": 0.1})
    return (time.perf_counter() - start) / 2000


# R22

SOAK = Path(os.environ.get("MESHWRIGHT_SOAK", Path(tempfile.gettempdir()) / "meshwright-soak"))
SOAK_KILL_SECONDS = 60.0
SOAK_STEPS = 5000
"""From so many steps on, growth and goodput are judged."""


def r22(count: int) -> RowResult:
    """Toy steps with a process killed every minute. An interrupted soak goes on where it was."""
    SOAK.mkdir(parents=True, exist_ok=True)
    run_file = toy_run(SOAK, steps=count, save_every=max(10, min(100, count // 10)))
    words = train_words(run_file, "--set", "train.keep=2", "--set", "run.standby=true")
    samples: list[tuple[float, int, int]] = []
    kills, starts, failures = 0, 0, []
    begin, dice = time.monotonic(), random.Random(22)
    while starts < 10 + count // 100:
        starts += 1
        errors = SOAK / "errors"  # a pipe that nobody reads would fill up and hold up the run
        with (
            errors.open("wb") as output,
            subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=output, env=clean_environment()) as run,
        ):
            kill_at = time.monotonic() + SOAK_KILL_SECONDS * dice.uniform(0.5, 1.5)
            while run.poll() is None:
                time.sleep(0.5)
                children = _ranks_of(run.pid)
                samples += [(time.monotonic() - begin, *_held(pid)) for pid in children[:1]]
                if time.monotonic() > kill_at and children:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(dice.choice(children), signal.SIGKILL)
                    kills += 1
                    kill_at = time.monotonic() + SOAK_KILL_SECONDS * dice.uniform(0.5, 1.5)
        told = errors.read_text(errors="replace")
        if run.returncode == 0:
            break
        if run.returncode not in (1, 75, -9):
            failures.append(f"start {starts}: exit {run.returncode}: {told[-300:]}")
            break
    rows = [json.loads(line) for line in (SOAK / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if "loss" in row]
    if steps != list(range(1, count + 1)):
        failures.append(f"{len(steps)} of {count} steps are told, the last is {max(steps, default=0)}")
    goodput = time_ledger(read_marks(SOAK / "run")).goodput
    growth, handles = _growth(samples)
    least = 0.90 if kills else 0.97
    if count >= SOAK_STEPS:  # before, most of it is start-up
        failures += [f"memory grew by {growth:.0%}"] if growth > 0.05 else []
        failures += [f"file handles grew by {handles}"] if handles > 2 else []
        failures += [f"goodput {goodput:.1%}"] if goodput < least else []
    if not failures:
        shutil.rmtree(SOAK)
    figures = f"{kills} kills in {time.monotonic() - begin:.0f} s, goodput {goodput:.1%}, memory {growth:+.1%}, "
    figures += f"file handles {handles:+d}"
    return RowResult(passed=not failures, count=count, figures=figures, failures=tuple(failures[:10]))


def _ranks_of(pid: int) -> list[int]:
    """The process ids of the ranks below a process: what carries RANK in its environment."""
    found = []
    waiting = [pid]
    while waiting:
        each = waiting.pop()
        for path in Path(f"/proc/{each}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                waiting += [int(word) for word in path.read_text().split()]
        with contextlib.suppress(OSError):
            if each != pid and b"\0RANK=" in b"\0" + Path(f"/proc/{each}/environ").read_bytes():
                found.append(each)
    return sorted(found)


def _held(pid: int) -> tuple[int, int]:
    """(resident bytes, open files) of a process; zeros where it has just gone."""
    with contextlib.suppress(OSError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE"), len(os.listdir(f"/proc/{pid}/fd"))
    return 0, 0


def _growth(samples: Sequence[tuple[float, int, int]]) -> tuple[float, int]:
    """Growth of the most memory held and of the most open files, from the second quarter of the time to the last."""
    if len(samples) < 8:
        return 0.0, 0
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    memory = [max(each[1] for each in part) for part in (early, late)]
    files = [max(each[2] for each in part) for part in (early, late)]
    return memory[1] / max(1, memory[0]) - 1, files[1] - files[0]
