"""Rows of the scorecard about checkpoints: commits that are interrupted, disks and object stores that fail, cost."""

from __future__ import annotations

import contextlib
import errno
import itertools
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
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.scorecard import (
    Case,
    RowResult,
    Values,
    case_by_case,
    clean_environment,
    final_state,
    toy_run,
    train_words,
)

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS / folder) for folder in ("checkpoint", "parity", "runtime", "released")]

from checkpoint_ranks import holds, same_bits, save, toy  # noqa: E402

from meshwright.checkpoint.load import Reader  # noqa: E402
from meshwright.checkpoint.step_folders import (  # noqa: E402
    committed_folders,
    newest_good,
    step_folder,
    usable_folders,
    verify,
)
from meshwright.core.box import Box  # noqa: E402
from meshwright.core.errors import MeshwrightError  # noqa: E402
from meshwright.core.plan import Plan  # noqa: E402
from meshwright.launch.rank_pool import RankPool  # noqa: E402
from meshwright.optimizers.optimizer_config import OptimizerConfig  # noqa: E402


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="meshwright-row-") as folder:
        yield Path(folder)


def quiet(_: str) -> None:
    pass


def r2(count: int) -> RowResult:
    """A process that saves is killed (SIGKILL) in place of every disk call of the save, also with half a write done."""
    from test_save_crash import Watch, number_of_calls

    class Kill(Watch):
        is_half = False

        def strike(self) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

    def killed(root: Path, step: int, ranks: int, at: int) -> bool:
        if (child := os.fork()) == 0:
            with contextlib.suppress(BaseException):
                Kill(pytest.MonkeyPatch(), at=at)
                save(root, step, toy(7), keep=1, num_ranks=ranks)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL

    failures, cases, before = [], 0, 0
    with scratch() as folder:
        for ranks, step in itertools.product((2, 3, 4, 6, 8), (1, 2)):
            save(folder / "start", 1, toy(1), keep=1)
            shutil.copytree(folder / "start", folder / "count")
            calls = number_of_calls(folder / "count", step) + 3 * 8
            for at in range(calls):
                if cases == count:
                    break
                root = folder / "run"
                shutil.copytree(folder / "start", root)
                if not killed(root, step, ranks, at):
                    shutil.rmtree(root)
                    break  # the save has fewer calls
                cases += 1
                found = newest_good(root, report=quiet)
                good = found is not None and (holds(found, toy(7)) or holds(found, toy(1)))
                before += bool(found and holds(found, toy(1)))
                good = good and all(verify(each) == () for each in usable_folders(root).values())
                save(root, 3, toy(3), keep=1)
                if not good or os.listdir(root) != ["step-00000003"]:
                    failures.append(f"{ranks} ranks, step {step}, killed in place of disk call {at}")
                shutil.rmtree(root)
            shutil.rmtree(folder / "start")
            shutil.rmtree(folder / "count")
    figures = f"{cases} processes killed: {before} left the checkpoint before, {cases - before} the new one; 0 others"
    if failures:
        figures = f"{len(failures)} of {cases} bad"
    return RowResult(passed=not failures, count=cases, figures=figures, failures=tuple(failures[:5]))


def r3(count: int) -> RowResult:
    """States that a power cut can leave of a save, of a disk harsher than a journaling file system."""
    from test_power_cut import bad_states

    looked, bad = 0, []
    for seed, step in itertools.product((1, 2), (1, 2)):
        with scratch() as folder:
            states, found = bad_states(folder, step, -(-count // 4), seed)
        looked, bad = looked + states, bad + found
    return RowResult(
        passed=not bad, count=looked, figures=f"{len(bad)} bad of {looked:,} states", failures=tuple(bad[:5])
    )


def r4(count: int) -> RowResult:
    """Damage drawn from a seed; the checkpoint before is used, and nothing of the damaged one is read."""
    from test_step_folders_damage import WAYS, flip

    missed, kinds = [], Counter[str]()
    tensors = [{"w": torch.arange(4096.0) + step, "b": torch.arange(9) + step} for step in (1, 2)]
    with scratch() as folder:
        for step in (1, 2):
            save(folder / "whole", step, tensors[step - 1])
        for number in range(count):
            dice, root = random.Random(number), folder / "run"
            shutil.copytree(folder / "whole", root, symlinks=True)
            newest = step_folder(root, 2)
            kind = dice.choice(["flip", "flip", "flip", "cut", "zeros", *(way.__name__ for way, _ in WAYS)])
            path = dice.choice(sorted(newest.iterdir()))
            data = path.read_bytes()
            if kind == "flip":
                flip(path, dice.randrange(len(data)), dice.randrange(8))
            elif kind == "cut":
                os.truncate(path, dice.randrange(len(data)))
            elif kind == "zeros":
                at = dice.randrange(len(data))
                changed = data[:at] + bytes(min(4096, len(data) - at)) + data[at + 4096 :]
                path.write_bytes(changed)
                if changed == data:
                    flip(path, at, 0)
            else:
                next(way for way, _ in WAYS if way.__name__ == kind)(newest)
            kinds[kind] += 1
            lines: list[str] = []
            found = newest_good(root, report=lines.append)
            if not verify(newest) or found != step_folder(root, 1) or not holds(found, tensors[0]) or len(lines) != 1:
                missed.append(f"case {number}: {kind} of {path.name}")
            shutil.rmtree(root)
            (folder / "elsewhere").unlink(missing_ok=True)
    figures = f"{count - len(missed):,} of {count:,} found ({len(kinds)} kinds of damage)"
    return RowResult(passed=not missed, count=count, figures=figures, failures=tuple(missed[:5]))


def r5(count: int) -> RowResult:
    """Full, faulty and read-only disks at a random call of a save behind training; every fourth case is `mw train` on a
    small disk of its own that is full for a while (where this user may mount one)."""
    from test_checkpointing import hashes, run_behind
    from test_save_crash import Watch
    from test_trainer import MadeData, run, state_of, trainer_of

    failures, real = [], 0
    steps = 12
    twin = trainer_of(MadeData(), steps=steps)
    run(twin)
    for number in range(count):
        if number % 4 == 3 and (told := _full_disk()) is not None:
            real += 1
            failures += [f"case {number}: {told}"] if told else []
            continue
        dice = random.Random(number)
        code = (errno.ENOSPC, errno.EIO, errno.EROFS)[number % 3]
        with scratch() as folder, pytest.MonkeyPatch.context() as patch:
            trainer = trainer_of(MadeData(), steps=steps)
            root = folder / "checkpoints"
            root.mkdir()

            class Refuse(Watch):
                def strike(self, code: int = code) -> None:
                    raise OSError(code, os.strerror(code))

            Refuse(patch, at=dice.randrange(10, 30))
            outcomes = run_behind(trainer, root)
            patch.undo()
            kept = hashes(root)  # which verifies them
            same = all(torch.equal(a, b) for a, b in zip(state_of(trainer), state_of(twin), strict=True))
            told = [each for each in outcomes if each]
            is_said = all(os.strerror(code) in each and "Earlier checkpoints are untouched" in each for each in told)
            if not same or len(outcomes) != 4 or len(told) > 1 or not is_said or max(kept) < 9:
                failures.append(f"case {number}: {errno.errorcode[code]}, {outcomes}, kept {sorted(kept)}")
    figures = f"{count} cases ({real} of them a full disk under mw train): the run went on, earlier checkpoints stayed"
    if failures:
        figures = f"{len(failures)} of {count} failed"
    return RowResult(passed=not failures, count=count, figures=figures, failures=tuple(failures[:5]))


_ON_A_SMALL_DISK = """
mount -t tmpfs -o size={size}k tmpfs {folder} || exit 77
cp -r {toy}/. {folder} && cd {folder} || exit 78
( while [ ! -e run/checkpoints/step-00000010 ]; do sleep 0.02; done
  head -c 99999999 /dev/zero > filler; touch {toy}/was-full
  while ! grep -q 'not written' {toy}/err; do sleep 0.02; done; rm filler ) 2>/dev/null &
{words} 2> {toy}/err > {toy}/out; code=$?
kill $! 2>/dev/null; rm -f filler; cp -r run {toy}/left; exit $code
"""


def _full_disk() -> str | None:
    """What went wrong, "" for nothing; None where no disk can be mounted here."""
    with scratch() as folder:
        path, mounted = toy_run(folder / "disk", steps=60, save_every=10, ranks=1), folder / "disk"
        (folder / "toy").mkdir()
        for name in os.listdir(mounted):
            shutil.copy(mounted / name, folder / "toy" / name)
        words = " ".join(train_words(path, "--set", "train.save_async=true"))
        (folder / "toy" / "err").touch()
        script = _ON_A_SMALL_DISK.format(size=6000, folder=mounted, toy=folder / "toy", words=words)
        made = ["unshare", "-m", "sh", "-c", script]
        done = subprocess.run(made, capture_output=True, timeout=600, env=clean_environment(), check=False)
        if done.returncode == 77 or not shutil.which("unshare"):
            return None
        told = " ".join((folder / "toy" / "err").read_text().split())  # lines end at words
        if done.returncode != 0:
            return f"exit code {done.returncode}: {told[-300:]}"
        if "No space left" not in told or not (folder / "toy" / "was-full").exists():
            return f"the disk was never full: {told[-300:]}"
        if "Free space" not in told:
            return "the message does not say what to do"
        rows = (folder / "toy" / "left" / "metrics.jsonl").read_text().splitlines()
        numbers = [row["step"] for row in map(json.loads, rows) if "loss" in row]
        if numbers != list(range(1, 61)):
            return f"metrics of {len(numbers)} steps"
        return "" if final_state(folder / "toy" / "left")["step"] == 60 else "no last checkpoint"


def recut_job(
    *, plan: dict[str, Any], source: str, folder: str, steps: int, rank: int, num_ranks: int, rendezvous: str
) -> str:
    """Load a checkpoint (or begin anew), train so many steps and save as step 1."""
    from rank_jobs import CPU, open_tiny
    from tiny import LLAMA, SEQUENCE

    from meshwright.runtime.checkpointing import restore_optimizer, source_of
    from meshwright.runtime.checkpointing import save as save_together
    from meshwright.verify import parity

    parity.enter(rank, num_ranks, rendezvous)
    chosen, rates = Plan.from_json(json.dumps(plan)), OptimizerConfig(lr=1e-2)
    opened, samples = open_tiny(LLAMA, chosen.batch, SEQUENCE, "float32")
    reader = Reader(Path(source)) if source else None
    if reader is not None:
        opened.source = source_of(reader, opened.source, ())
    session = parity.open_session(chosen, opened, rates, dtype="float32", device=CPU)
    if reader is not None:
        restore_optimizer(reader, session.build, session.loop.optimizer)
    for step in range(steps):
        session.loop.step(parity.own_samples(session, samples, step), rates.lr)
    reason = save_together(Path(folder), 1, session.build, session.loop.optimizer, {}, 1)
    parity.leave()
    return reason


def whole_tensors(folder: Path) -> dict[str, torch.Tensor]:
    reader, tensors = Reader(folder), {}
    for name, entry in reader.manifest.tensors.items():
        tensors[name] = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        reader.read_into(name, Box.whole(entry.shape), tensors[name])
    return tensors


def r16(count: int) -> RowResult:
    """Trained and saved under one plan, loaded and saved under another: every tensor the same, bit for bit."""
    import tiny

    sets: Mapping[str, tuple[Any, ...]] = {
        "one device": (),
        "replicate": (tiny.REPLICATE,),
        "shard 1": (tiny.SHARD1,),
        "shard 3": (tiny.SHARD3,),
        "tensor": (tiny.TENSOR,),
        "sequence": (tiny.SEQUENCED,),
        "uneven pipeline": (tiny.UNEVEN,),
        "interleaved": (tiny.INTERLEAVED,),
        "shard 3 x tensor": (tiny.SHARD3, tiny.TENSOR),
        "replicate x pipeline": (tiny.REPLICATE, tiny.PIPELINE),
        "tensor x pipeline": (tiny.SEQUENCED, tiny.PIPELINE),
    }
    failures, cases = [], 0
    plans = {
        name: json.loads(Plan(techniques=each, batch=8, microbatch=2).to_json())  # type: ignore[arg-type]
        for name, each in sets.items()
    }
    pairs = [pair for pair in itertools.product(plans, plans) if pair[0] != pair[1]]
    random.Random(0).shuffle(pairs)
    with scratch() as folder, RankPool(4) as pool:
        function, saved = "benchmarks.reliability_checkpoints:recut_job", dict[str, Path]()

        def job(name: str, source: str, root: Path, steps: int) -> Path:
            plan, arguments = Plan.from_json(json.dumps(plans[name])), {"plan": plans[name], "source": source}
            answers = pool.run(function, {**arguments, "folder": str(root), "steps": steps}, plan.num_ranks, 300)
            assert answers == [""] * plan.num_ranks, answers
            return step_folder(root, 1)

        for number, (first, second) in enumerate(pairs[:count]):
            if first not in saved:
                saved[first] = job(first, "", folder / f"saved-{len(saved)}", 2)
            cases += 1
            try:
                wanted, got = (
                    whole_tensors(saved[first]),
                    whole_tensors(job(second, str(saved[first]), folder / f"again-{number}", 0)),
                )
                if wanted.keys() != got.keys() or not all(same_bits(wanted[name], got[name]) for name in wanted):
                    failures.append(f"{first} -> {second}: tensors differ")
            except MeshwrightError as error:
                failures.append(f"{first} -> {second}: {error}")
    figures = f"{cases} pairs of {len(plans)} plans, {len(failures)} differ"
    return RowResult(passed=not failures, count=cases, figures=figures, failures=tuple(failures[:5]))


def r23(count: int) -> RowResult:
    """Blocks of steps with checkpoints at the interval chosen, with copies in memory besides, ten times as often, and
    without either, in turn, on one rank. Failures are taken to come every ten minutes, so that the interval is short
    enough to be measured."""
    from test_trainer import MadeData

    from meshwright.checkpoint.memory_folder import CheckpointMemory, MemoryFolder
    from meshwright.models.presets import DecoderConfig
    from meshwright.ops.device_mesh import Mesh
    from meshwright.run.model import open_config
    from meshwright.run.run_file import TrainSection
    from meshwright.runtime.trainer import Trainer

    class Tokens(MadeData):
        def batch(self, cursor: int, batch: int, *place: Any) -> Any:
            made = super().batch(cursor % 64, batch)
            return made

    config = DecoderConfig(
        num_layers=4, hidden_size=256, num_heads=4, num_kv_heads=4, ffn_size=704, vocab_size=256, max_sequence=64
    )
    settings = TrainSection(batch=8, steps=10**9, optimizer=OptimizerConfig(lr=1e-4))
    plan, made = Plan(batch=8, microbatch=8, techniques=()), Tokens()
    data: Any = made
    trainer = Trainer(plan, open_config(config, "toy", 0), data, settings, Mesh.make({}, torch.device("cpu")))
    interval = trainer.interval
    interval.mtbf_seconds, interval.saved_seconds = 600.0, time.monotonic()
    seconds: dict[str, list[float]] = {"disk": [], "": [], "disk and memory": []}
    num_saves, waited, num_copies = 0, 0.0, 0
    with scratch() as folder, CheckpointMemory() as memory:
        steps = trainer.steps()
        trainer.saving.use_memory(tuple(map(MemoryFolder, memory.fit(1))))

        def step(*, saves: str) -> None:
            nonlocal num_saves, waited, num_copies
            if not saves:
                interval.saved_seconds = time.monotonic()
            if "memory" not in saves:
                trainer.memory_interval.saved_seconds = time.monotonic()
            made = next(steps)
            if trainer.saving.is_under_way and not made.is_busy:
                trainer.saving.advance()
            if made.must_save and not trainer.saving.is_under_way:
                before = time.monotonic()
                assert trainer.save(folder, behind=True, may_be_in_memory=True) == ""
                if trainer.saving.is_in_memory:
                    num_copies += 1
                else:
                    waited, num_saves = waited + time.monotonic() - before, num_saves + 1

        for _ in range(20):
            step(saves="")
        for _ in range(3):  # what one costs
            interval.saved_seconds = -math.inf
            before = num_saves
            while num_saves == before or trainer.saving.is_under_way:
                step(saves="disk")
        num_saves, waited = 0, 0.0
        trainer.memory_interval.minutes = interval.seconds / 600
        for _ in range(count):
            for saves in seconds:
                interval.saved_seconds, start, done = time.monotonic(), time.monotonic(), 0
                block = 2.2 * interval.seconds
                while time.monotonic() - start < block or trainer.saving.is_under_way:
                    step(saves=saves)
                    done += 1
                seconds[saves].append((time.monotonic() - start) / done)
    slower, slower_in_memory = (
        statistics.median(saved / bare - 1 for saved, bare in zip(seconds[name], seconds[""], strict=True))
        for name in ("disk", "disk and memory")
    )
    figures = (
        f"steps {slower:+.1%} with a checkpoint every {interval.seconds:.2f} s (median of {count} pairs of blocks; "
        f"{num_saves} checkpoints, each waited for {waited / max(1, num_saves) * 1e3:.1f} ms); {slower_in_memory:+.1%} "
        f"with a copy in memory every {60 * trainer.memory_interval.minutes:.2f} s besides ({num_copies} copies)"
    )
    return RowResult(passed=slower <= 0.035 and num_saves >= count, count=count, figures=figures)


def r30(count: int) -> RowResult:
    """Everything in tests/released."""
    from test_released import checkpoints, load_checkpoint, load_plan, plans

    failures = []
    for load, paths in ((load_checkpoint, checkpoints()), (load_plan, plans())):
        for path in paths:
            try:
                load(path)
            except (AssertionError, MeshwrightError) as error:
                failures.append(f"{path.name}: {error}")
    number = len(checkpoints()) + len(plans())
    figures = f"{len(checkpoints())} checkpoints and {len(plans())} plans, {len(failures)} do not load"
    return RowResult(passed=not failures, count=number, figures=figures, failures=tuple(failures[:5]))


def judge_uploads(values: Values) -> tuple[str, list[str]]:
    requests, faults, told = (int(sum(values[name])) for name in ("requests", "faults", "said to be there"))
    return f"{faults:,} faults in {requests:,} requests, {told} uploads said to be complete", []


@case_by_case(judge_uploads)
def r31(numbers: range) -> Iterator[Case]:
    """Uploads through a proxy that answers late, twice, never or not at all; some are given up half-way. Whatever is
    committed in the store is whole, and what was said to be there is there."""
    from s3_server import BUCKET, FaultyProxy, environment, s3_server

    from meshwright.checkpoint import remote
    from meshwright.checkpoint.remote import ObjectFolder, Uploader, fetch_newest

    with scratch() as folder, s3_server() as address, pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "RETRY_SECONDS", (0.05,) * 12)
        for step in (1, 2, 3):
            save(folder / "here", step, toy(step), keep=3)
        for number in numbers:
            share, gives_up, problems = (0.1, 0.3, 0.5)[number % 3], number % 5 == 4, list[str]()
            proxy = FaultyProxy(address, share=share, seed=number)
            for name, value in environment(proxy.address).items():
                patch.setenv(name, value)
            url = f"s3://{BUCKET}/case-{number}"
            uploader = Uploader(ObjectFolder(url, request_seconds=0.5), lambda steps: set(steps[-2:]), quiet)
            for step, path in committed_folders(folder / "here").items():
                uploader.put(path)
                if step < 3 and number % 2:
                    uploader.close(0.3)
            is_there = uploader.close(random.Random(number).uniform(0.0, 0.5) if gives_up else 60.0)
            proxy.is_dead = True  # what is under way reaches nobody any more
            for name, value in environment(address).items():
                patch.setenv(name, value)
            direct, root = ObjectFolder(url), folder / f"there-{number}"
            try:
                found = fetch_newest(direct, root, report=problems.append)
                problems = [line for line in problems if "is not used" in line]
                steps = direct.steps()
                good = found is None or any(holds(found, toy(step)) for step in steps)
                good = good and (3 in steps or not is_there)
                for step in steps:
                    shutil.rmtree(root, ignore_errors=True)
                    good = good and holds(direct.download(step, root), toy(step))
                if not good:
                    problems.append(f"{steps} there, said to be there: {is_there}")
            except MeshwrightError as error:
                problems.append(str(error))
            proxy.shutdown()
            requests = sum(proxy.seen.values())
            told = {"requests": requests, "faults": requests - proxy.seen[""], "said to be there": is_there}
            what = f"{share:.0%} faults, " + ("given up" if gives_up else "to the end")
            yield Case(what=what, problem="; ".join(problems), values=told)
