"""Rows of the scorecard about plans that change: exactly-once samples, out of memory, and goodput as simulated."""

from __future__ import annotations

import itertools
import json
import os
import random
import resource
import signal
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.scorecard import Case, RowResult, Values, case_by_case, clean_environment, toy_run, train_words
from meshwright.core.codec import decode, encode
from meshwright.core.plan import Plan
from meshwright.core.time_ledger import read_marks, time_ledger
from meshwright.launch.rank_pool import RankPool
from meshwright.simulator.failure_replay import replay_failures

ROOT = Path(__file__).parents[1]
BATCH, STEPS, SEQUENCE = 12, 10, 32
SIZES = (1, 2, 4, 3)
LIMIT_BYTES = 1_600_000 << 10
"""Of address space: a rank of the toy takes two thirds of it before its first step."""


def r15(count: int) -> RowResult:
    """Histories of starts with other numbers of replicas, each cut off after steps that no checkpoint has. Every sample
    of the corpus has its own number in its bytes, which is read back from what the model was given."""
    failures, starts = [], 0
    os.environ["PYTHONPATH"] = str(ROOT)
    with RankPool(max(SIZES), threads_per_rank=1) as pool:
        for seed in range(count):
            with tempfile.TemporaryDirectory() as folder:
                seen, made = _history(pool, Path(folder), random.Random(seed))
            starts += made
            twice = sum(number - 1 for number in seen.values() if number > 1)
            missing = BATCH * STEPS - len(seen)
            if twice or missing:
                failures.append(f"seed {seed}: {twice} duplicates, {missing} missing")
    figures = f"{count} histories of {starts} starts on 1 to 4 ranks, {BATCH * STEPS} samples each: {len(failures)} bad"
    return RowResult(passed=not failures, count=count, figures=figures, failures=tuple(failures[:5]))


def _history(pool: RankPool, folder: Path, dice: random.Random) -> tuple[Counter[int], int]:
    """How often each sample is part of the result, and how many starts that took."""
    rows = (f"{number:06d} ".ljust(SEQUENCE, "x") for number in range(BATCH * STEPS))
    path = toy_run(folder, steps=STEPS, save_every=0)
    text = path.read_text().replace("batch = 4", f"batch = {BATCH}").replace("fraction = 0.1", "fraction = 0")
    (folder / "corpus.txt").write_text("".join(rows) + "x", encoding="ascii")
    path.write_text(text)
    by_step: dict[int, list[int]] = {}
    saved, starts = 0, 0
    while saved < STEPS:
        size, starts = dice.choice(SIZES), starts + 1
        kept = min(STEPS - saved, dice.randint(0, 4))
        lost = 0 if saved + kept == STEPS else dice.randint(0, min(2, STEPS - saved - kept))
        techniques = [{"name": "replicate", "size": size}] if size > 1 else []
        plan = encode(decode(Plan, {"techniques": techniques, "batch": BATCH, "microbatch": 1}, "plan"))
        arguments = {"run_file": str(path), "plan": plan, "kept": kept, "lost": lost}
        for rank in pool.run("benchmarks.reliability_elastic:segment", arguments, num_ranks=size, timeout_seconds=300):
            for step, numbers in rank.items():
                if int(step) < saved + kept:
                    by_step.setdefault(int(step), []).extend(numbers)
        saved += kept
    return Counter(number for numbers in by_step.values() for number in numbers), starts


def segment(
    *, run_file: str, plan: Any, kept: int, lost: int, rank: int, num_ranks: int, rendezvous: str
) -> dict[int, list[int]]:
    """Train `kept` steps from the newest checkpoint, save, and train `lost` more: step (from 0) -> numbers of the
    samples that this rank's model was given."""
    import torch
    import torch.distributed as dist

    from meshwright.checkpoint.step_folders import newest_good
    from meshwright.ops.device_mesh import Mesh, join
    from meshwright.run.model import describe_run, open_model
    from meshwright.run.prepare import open_data
    from meshwright.run.run_file import read_run
    from meshwright.runtime.trainer import Trainer

    config, chosen = read_run(run_file), decode(Plan, plan, "plan")
    device = torch.device("cpu")
    if num_ranks > 1:
        join(rank, num_ranks, device, rendezvous=rendezvous)
    root = Path(config.run.folder) / "checkpoints"
    root.parent.mkdir(exist_ok=True)
    description = describe_run(config)
    opened, data = open_model(description, 0), open_data(config, description, cache=root.parent / f"data-{rank}")
    mesh = Mesh.make(chosen.mesh, device)
    newest = newest_good(root, report=lambda text: None)
    trainer = Trainer(chosen, opened, data, config.train, mesh, checkpoint=newest)
    told: dict[int, list[int]] = {}
    whole = trainer.build.model.forward

    def forward(inputs: Any, *rest: Any) -> Any:
        rows = [bytes(row.tolist()[:6]).decode("ascii") for row in inputs]
        told.setdefault(trainer.step + len(trainer.fed), []).extend(map(int, rows))
        return whole(inputs, *rest)

    trainer.build.model.forward = forward
    start = trainer.step
    trainer.rests = (start + kept, start + kept + lost)
    steps = trainer.steps()
    while trainer.step < start + kept:
        next(steps)
    if kept:
        assert trainer.save(root) == ""
    while trainer.step < start + kept + lost:
        next(steps)
    if num_ranks > 1:
        dist.destroy_process_group()
    return told


def r19(count: int) -> RowResult:
    """Runs whose address space is limited below what their microbatch needs: the report, and the retry."""
    failures, texts = [], []
    for case in range(count):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            microbatch = (128, 96, 112)[case % 3]
            path = toy_run(folder, steps=3, save_every=1)
            text = path.read_text().replace("byte-tiny", "byte-3m").replace("sequence = 32", "sequence = 64")
            path.write_text(text.replace("batch = 4", f"batch = {2 * microbatch}"))
            (folder / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog; " * 3000)
            plan = {"techniques": [{"name": "replicate", "size": 2}], "batch": 2 * microbatch, "microbatch": microbatch}
            (folder / "toy.plan.json").write_text(json.dumps(plan | {"version": 1}))
            done = subprocess.run(
                train_words(path, "--set", "run.on_oom=retry"),
                capture_output=True,
                text=True,
                timeout=900,
                env=clean_environment(),
                check=False,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES)),
            )
            report = folder / "run" / "out_of_memory" / "report.json"
            if done.returncode or not report.exists():
                failures.append(f"case {case}: exit {done.returncode}, {done.stderr[-300:]}")
                continue
            found = json.loads(report.read_text())
            used = json.loads((folder / "run" / "plan.json").read_text())
            held, wanted = found["failure"]["held_bytes"], found["predicted_bytes"]
            texts.append(f"{used['microbatch']} of {microbatch}")
            if len(found["fixes"]) != 3 or used["batch"] != 2 * microbatch or used["microbatch"] >= microbatch:
                failures.append(f"case {case}: {len(found['fixes'])} fixes, {used}")
            for kind in ("parameters", "optimizer"):
                if abs(held[kind] / wanted[kind] - 1) > 0.01:
                    failures.append(f"case {case}: {kind} {held[kind]}, forecast {wanted[kind]}")
    figures = f"{count} runs limited by RLIMIT_AS: three fixes each, finished in microbatches {', '.join(texts)}"
    return RowResult(passed=not failures, count=count, figures=figures, failures=tuple(failures[:5]))


def judge_traces(values: Values) -> tuple[str, list[str]]:
    pairs = list(zip(values.get("real", []), values.get("simulated", []), strict=True))
    worst = max((100 * abs(real - simulated) for real, simulated in pairs), default=0.0)
    told = ", ".join(f"{real:.1%} ({simulated:.1%})" for real, simulated in pairs[:5])
    return f"at most {worst:.1f} points off; goodput (simulated) {told}", []


@case_by_case(judge_traces)
def r24(numbers: range) -> Iterator[Case]:
    """Toy runs whose ranks are killed at random, and the same failures replayed."""
    for seed in numbers:
        with tempfile.TemporaryDirectory() as name:
            real, simulated = _trace(Path(name), random.Random(seed))
        told = f"goodput {real:.1%}, simulated {simulated:.1%}"
        problem = told if abs(real - simulated) > 0.03 else ""
        yield Case(what=f"seed {seed}", problem=problem, values={"real": real, "simulated": simulated})


def _trace(folder: Path, dice: random.Random) -> tuple[float, float]:
    """Goodput of productive, lost, checkpoint and restart time alone, as it was and as it is replayed."""
    path = toy_run(folder, steps=4000, save_every=200)
    words = train_words(path, "--set", "run.restarts=1000", "--set", "train.save_async=false")
    run = subprocess.Popen(words, env=clean_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    is_over = threading.Event()

    def kill_ranks() -> None:
        while not is_over.wait(15 + dice.expovariate(1 / 15)):
            found = subprocess.run(
                ["pgrep", "-f", "meshwright.runtime.rank"], capture_output=True, text=True, check=False
            )
            ours = [int(pid) for pid in found.stdout.split() if _has_ancestor(int(pid), run.pid)]
            if ours:
                os.kill(dice.choice(ours), signal.SIGKILL)

    killer = threading.Thread(target=kill_ranks)
    killer.start()
    try:
        assert run.wait(timeout=900) == 0
    finally:
        run.kill()
        is_over.set()
        killer.join()
    marks = read_marks(folder / "run")
    found = time_ledger(marks).seconds
    pairs = itertools.pairwise(marks)
    starts = [b.seconds_since(a) for a, b in pairs if (a.event, b.event) == ("start", "resume")]
    ends = [mark for mark in marks if mark.event == "end" and mark.about.get("exit_code") not in (0, 75)]
    gaps = []
    for end in ends:
        begin = [mark for mark in marks[: marks.index(end)] if mark.event == "start"][-1]
        gaps.append(end.seconds_since(begin))
    saves = max(1, 4000 // 200)
    common = {name: found[name] for name in ("productive", "lost", "checkpoint", "restart")}
    replayed = replay_failures(
        gaps,
        interval=found["productive"] / saves,
        checkpoint=found["checkpoint"] / (saves + len(ends)),
        restart=mean(starts[1:] or [0.0]),
        first_start=starts[0],
        work=found["productive"],
    )
    return found["productive"] / sum(common.values()), replayed.goodput


def _has_ancestor(pid: int, ancestor: int) -> bool:
    while pid > 1:
        if pid == ancestor:
            return True
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            return False
    return False
