"""Rows of the reliability scorecard about processes of `mw train` that are killed, stopped, hang, crash or meet."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faulty_toy import CRASHES, HANGS
from benchmarks.scorecard import (
    Case,
    Values,
    case_by_case,
    clean_environment,
    final_state,
    percentile,
    toy_run,
    train_words,
)
from meshwright.checkpoint.step_folders import committed_folders, list_steps, verify
from meshwright.core.time_ledger import TimeMark, read_marks

ROOT = Path(__file__).parents[1]
STEPS, SAVE_EVERY, GRACE_SECONDS = 100, 10, 30.0
CHANGES = ("train.evaluate_every=20", f"run.grace_seconds={GRACE_SECONDS:g}")
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Instant:
    """Of a run: so many seconds after its start, or after a step was made."""

    seconds: float
    step: int = 0

    def __str__(self) -> str:
        return f"{self.seconds:.2f} s after " + (f"step {self.step}" if self.step else "the start")


class Command:
    """`mw train` as a shell starts it, and all processes that come of it."""

    def __init__(self, run_file: Path, *changes: str, **environment: str):
        self.folder, self.mark = run_file.parent, uuid.uuid4().hex
        self.temporary, self.errors = self.folder / "tmp", self.folder / f"errors-{self.mark}"
        self.temporary.mkdir(exist_ok=True)
        about = {"TOY_MARK": self.mark, "TMPDIR": str(self.temporary), "PYTHONPATH": str(ROOT), **environment}
        words = train_words(run_file, *(word for change in (*CHANGES, *changes) for word in ("--set", change)))
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=clean_environment(**about),
                start_new_session=True,
                preexec_fn=_as_from_a_shell,
            )
        self.started = time.monotonic()

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def family(self) -> dict[int, dict[str, str]]:
        """Process id -> environment of every living process of this command."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                data = path.read_bytes()
                if self.mark.encode() in data:
                    words = (word.partition("=") for word in data.decode(errors="replace").split("\0"))
                    found[int(path.parent.name)] = {name: value for name, _, value in words}
        return found

    def role(self, pid: int, environment: dict[str, str]) -> str:
        if pid == self.process.pid:
            return "command"
        if "RANK" not in environment:
            return "supervisor"
        return ("standby " if "MESHWRIGHT_GATE" in environment else "rank ") + environment["RANK"]

    def rank_pid(self, rank: int) -> int:
        return next(pid for pid, each in self.family().items() if self.role(pid, each) == f"rank {rank}")

    def steps_made(self) -> int:
        with contextlib.suppress(OSError):
            for line in reversed((self.folder / "run" / "metrics.jsonl").read_bytes().split(b"\n")[:-1]):
                with contextlib.suppress(ValueError):
                    if "loss" in (row := json.loads(line)):
                        return int(row["step"])
        return 0

    def wait_for(self, is_so: Callable[[], bool], seconds: float = 300) -> bool:
        """Whether it came to be so while the command lived."""
        until = time.monotonic() + seconds
        while not is_so():
            if self.process.poll() is not None or time.monotonic() > until:
                return False
            time.sleep(0.01)
        return True

    def wait_until(self, instant: Instant) -> bool:
        """Whether the command lives then."""
        self.wait_for(lambda: self.steps_made() >= instant.step)
        since = time.monotonic() if instant.step else self.started
        return not self.wait_for(lambda: self.process.poll() is not None, since + instant.seconds - time.monotonic())

    def wait_for_handler(self, number: signal.Signals) -> None:
        """Until Python has let the command take this signal, it dies of it, as any program does."""

        def is_caught() -> bool:
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{self.process.pid}/status").read_text()
                return bool(int(text.partition("SigCgt:\t")[2].split()[0], 16) >> (number - 1) & 1)
            return False

        self.wait_for(is_caught)

    def end(self, seconds: float = 600) -> int:
        return self.process.wait(timeout=seconds)

    def said(self) -> str:
        return " ".join(self.errors.read_text(errors="replace").split())

    def marks(self, event: str) -> list[TimeMark]:
        """Of this start."""
        marks = read_marks(self.folder / "run")
        return [mark for mark in marks if mark.event == event and mark.monotonic_seconds > self.started]


def _as_from_a_shell() -> None:
    for number in (signal.SIGINT, signal.SIGHUP, *SIGNALS):
        signal.signal(number, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@dataclass(frozen=True)
class Reference:
    """Toy runs in a folder of their own, and what one of them comes to that nobody disturbs."""

    folder: Path
    state: dict[str, Any]
    start_seconds: float
    """Until the first step was made."""
    is_faulty: bool
    is_compiled: bool

    def run_file(self, number: int | str) -> Path:
        path = toy_run(self.folder / str(number), steps=STEPS, save_every=SAVE_EVERY)
        if self.is_faulty:
            text = path.read_text().replace('name = "byte-tiny"', 'factory = "benchmarks.faulty_toy:model"')
            path.write_text(text)
        if self.is_compiled:
            plan = json.loads((path.parent / "toy.plan.json").read_text())
            plan["techniques"].append({"name": "compile"})
            (path.parent / "toy.plan.json").write_text(json.dumps(plan))
        return path

    def some_instant(self, dice: random.Random) -> Instant:
        if dice.random() < 0.35:
            return Instant(dice.uniform(0, self.start_seconds))
        return Instant(dice.uniform(0, 0.1), dice.randrange(1, STEPS + 1))

    def difference(self, command: Command, code: int) -> str:
        """What is wrong with a run that should have come to its end as this one did."""
        if code:
            return f"exit code {code}: {command.said()[-400:]}"
        run = command.folder / "run"
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        if [row["step"] for row in rows if "loss" in row] != list(range(1, STEPS + 1)):
            return "metrics do not have every step once"
        bad = [problem for path in committed_folders(run / "checkpoints").values() for problem in verify(path)]
        if bad:
            return f"a checkpoint is damaged: {bad[0]}"
        return "" if final_state(run) == self.state else "other bits than a run that nobody disturbed"


@contextlib.contextmanager
def reference(*, is_faulty: bool = False, is_compiled: bool = False) -> Iterator[Reference]:
    with tempfile.TemporaryDirectory(prefix="meshwright-row-", ignore_cleanup_errors=True) as folder:
        made = Reference(Path(folder), {}, 0.0, is_faulty, is_compiled)
        with Command(made.run_file("whole")) as command:
            command.wait_for(lambda: command.steps_made() > 0)
            seconds = time.monotonic() - command.started
            if command.end():
                raise RuntimeError(command.said()[-400:])
        state = final_state(command.folder / "run")
        yield Reference(made.folder, state, seconds, is_faulty, is_compiled)


# R1


def judge_kills(values: Values) -> tuple[str, list[str]]:
    waited, behind = (int(max(values.get(name, [0]), default=0)) for name in ("lost", "lost behind"))
    figures = f"at most {waited} steps made again, {behind} where checkpoints are written behind training "
    figures += f"(saved every {SAVE_EVERY})"
    # One is written at a time: while that of step 20 is, the one of step 10 is there.
    is_right = waited <= SAVE_EVERY and behind <= 2 * SAVE_EVERY
    return figures, [] if is_right else ["more than an interval was lost"]


@case_by_case(judge_kills)
def r1(numbers: range) -> Iterator[Case]:
    """Any process but the one that was started (R11 has that): ranks, their supervisor, processes on standby.
    Checkpoints are written behind training (by a thread of each rank) or waited for."""
    with reference() as whole:
        for number in numbers:
            dice = random.Random(f"1/{number}")
            instant, is_behind, has_standby = whole.some_instant(dice), number % 2 == 1, number % 3 == 2
            changes = [f"train.save_async={str(is_behind).lower()}", f"run.standby={str(has_standby).lower()}"]
            with Command(whole.run_file(number), *changes) as command:
                command.wait_until(instant)
                command.wait_for(lambda command=command: len(command.family()) > 1)
                family, made, killed = command.family(), command.steps_made(), time.monotonic()
                victim = dice.choice(sorted(family.keys() - {command.process.pid}) or [command.process.pid])
                if victim != command.process.pid:  # otherwise the run is over
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(victim, signal.SIGKILL)
                code, values = command.end(), dict[str, float]()
                resumed = [mark for mark in command.marks("resume") if mark.monotonic_seconds > killed]
                if resumed and made:
                    values["lost behind" if is_behind else "lost"] = max(0, made - resumed[0].step)
                what = f"{command.role(victim, family.get(victim, {}))} killed {instant}"
            yield Case(what=what, problem=whole.difference(command, code), values=values)


# R6, R7: the toy of benchmarks/faulty_toy.py.


def set_fault(path: Path, rank: int, part: str, kind: str, *, call: int = 0, again: bool = False) -> None:
    path.with_suffix(".tmp").write_text(
        json.dumps({"rank": rank, "part": part, "kind": kind, "call": call, "again": again})
    )
    path.with_suffix(".tmp").rename(path)


def judge_hangs(values: Values) -> tuple[str, list[str]]:
    late, named = values.get("beyond the limit", []), values.get("named", [])
    short = []
    if percentile(late, 0.99) > 0:
        short.append(f"found {percentile(late, 0.99):.2f} s beyond 3 x the median step + 3 s (p99)")
    if named and statistics.mean(named) < 0.95:
        short.append(f"rank and phase right in {statistics.mean(named):.0%}")
    steps, alarms = int(sum(values.get("steps under load", []))), int(sum(values.get("false alarms", [])))
    if alarms:
        short.append(f"{alarms} false alarms")
    figures = f"found after {percentile(values.get('seconds', []), 0.99):.2f} s (p99), at a median step of "
    figures += f"{statistics.median(values.get('median step', [0])):.3f} s; {alarms} false alarms in {steps:,} steps "
    return figures + "beside 8 busy processes", short


@case_by_case(judge_hangs)
def r6(numbers: range) -> Iterator[Case]:
    """A rank stops itself, loops without end or waits in a collective that nobody else enters, in forward or backward;
    or is stopped from outside anywhere. Every sixth case is 1,000 steps beside eight busy processes."""
    with reference(is_faulty=True) as whole:
        for number in numbers:
            if number % 6 == 5:
                yield _under_load(whole.folder / str(number))
                continue
            dice = random.Random(f"6/{number}")
            kind, rank = (*HANGS, "SIGSTOP")[number % 4], dice.randrange(2)
            part, step = dice.choice(("forward", "backward")), dice.randrange(10, 60)
            run_file = whole.run_file(number)
            fault = run_file.parent / "fault"
            with Command(run_file, TOY_FAULT=str(fault)) as command:
                command.wait_until(Instant(0.0, step))
                if kind == "SIGSTOP":
                    time.sleep(dice.uniform(0, 0.1))
                    began = time.monotonic()
                    os.kill(command.rank_pid(rank), signal.SIGSTOP)
                    fault.with_suffix(".began").touch()
                    part = r"\w+"
                else:
                    set_fault(fault, rank, part, kind)
                steps = _rows(command)
                code = command.end()
                if kind != "SIGSTOP":
                    began = float(fault.with_suffix(".began").read_text())
                problem, values = whole.difference(command, code), dict[str, float]()
                ends = [mark for mark in command.marks("end") if mark.about.get("exit_code")]
                if not ends:
                    problem = problem or "nobody has noticed"
                else:
                    median = statistics.median(row["seconds"] for row in steps[3:])
                    seconds = float(ends[0].about["noticed_monotonic"]) - began
                    told = str(ends[0].about["cause"])
                    how = "was stopped by a signal .*" if kind in ("stop", "SIGSTOP") else "hangs"
                    named = re.match(rf"rank {rank} of 2 {how} in {part} of step", told) is not None
                    values = {"seconds": seconds, "median step": median, "named": named}
                    values["beyond the limit"] = seconds - (3 * median + 3)
                    problem = problem or ("" if len(ends) == 1 else f"{len(ends)} ends, the first: {told[:200]}")
                where = "" if kind == "SIGSTOP" else f" in {part}"
                yield Case(what=f"{kind} of rank {rank}{where} after step {step}", problem=problem, values=values)


def _rows(command: Command) -> list[dict[str, Any]]:
    lines = (command.folder / "run" / "metrics.jsonl").read_text().split("\n")[:-1]
    return [row for row in map(json.loads, lines) if "loss" in row]


def _under_load(folder: Path) -> Case:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(8)]
    try:
        with Command(toy_run(folder, steps=1000, save_every=250)) as command:
            code = command.end(3600)
            alarms = sum(bool(mark.about.get("exit_code")) for mark in command.marks("end"))
            problem = "" if not code else f"exit code {code}: {command.said()[-400:]}"
    finally:
        for each in busy:
            each.kill()
            each.wait()
    values = {"steps under load": 1000, "false alarms": alarms}
    return Case(what="1,000 steps beside 8 busy processes", problem=problem, values=values)


def judge_crashes(values: Values) -> tuple[str, list[str]]:
    noticed = percentile(values.get("noticed", []), 0.99)
    warm, cold = (percentile(values.get(name, []), 0.95) for name in ("next with standby", "next"))
    figures = f"noticed in {noticed:.2f} s (p99); next step made after {warm:.2f} s with run.standby, {cold:.2f} s "
    figures += "without (p95)"
    short = [f"noticed in {noticed:.2f} s"] if noticed > 0.5 else []
    return figures, short + ([f"next step after {warm:.2f} s"] if warm > 3.0 else [])


@case_by_case(judge_crashes)
def r7(numbers: range) -> Iterator[Case]:
    """A rank reads at address 0, aborts, leaves with 1 or is killed as by the out-of-memory killer, in forward or
    backward; with processes on standby (which are given the time to import) and without, in turn."""
    with reference(is_faulty=True) as whole:
        for number in numbers:
            dice = random.Random(f"7/{number}")
            kind, rank, has_standby = CRASHES[number // 2 % 4], dice.randrange(2), number % 2 == 0
            part, step = dice.choice(("forward", "backward")), dice.randrange(5, 30)
            run_file = whole.run_file(number)
            fault = run_file.parent / "fault"
            with Command(run_file, f"run.standby={str(has_standby).lower()}", TOY_FAULT=str(fault)) as command:
                command.wait_until(Instant(0.0, step))
                if has_standby:
                    command.wait_for(lambda command=command: _is_standby_ready(command))
                set_fault(fault, rank, part, kind)
                code = command.end()
                problem, values = whole.difference(command, code), dict[str, float]()
                ends = [mark for mark in command.marks("end") if mark.about.get("exit_code")]
                if ends:
                    began, resumed = float(fault.with_suffix(".began").read_text()), command.marks("resume")[-1]
                    first = next(row for row in _rows(command) if row["step"] == resumed.step + 1)
                    values["noticed"] = float(ends[0].about["noticed_monotonic"]) - began
                    name = "next with standby" if has_standby else "next"
                    values[name] = resumed.monotonic_seconds + first["seconds"] - began
                    told = str(ends[0].about["cause"])
                    if not told.startswith(f"rank {rank} of 2 "):
                        problem = problem or f"the rank is not named: {told[:200]}"
                elif not problem:
                    problem = "nobody has noticed"
            yield Case(what=f"{kind} of rank {rank} in {part} after step {step}", problem=problem, values=values)


def _is_standby_ready(command: Command) -> bool:
    """Whether both processes on standby have imported everything: they use no processor any more."""

    def used() -> list[list[str]]:
        pids = [pid for pid, each in command.family().items() if command.role(pid, each).startswith("standby")]
        with contextlib.suppress(OSError):
            return [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13] for pid in pids]
        return []

    before = used()
    time.sleep(1.0)
    return len(before) == 2 and used() == before


# R10


def judge_stops(values: Values) -> tuple[str, list[str]]:
    slowest, stopped = max(values.get("seconds", [0])), len(values.get("seconds", []))
    figures = f"{stopped} stopped in at most {slowest:.1f} s of {GRACE_SECONDS:g} with exit code 75 and no step lost, "
    return figures + f"{int(sum(values.get('finished', [])))} had come to their end", []


@case_by_case(judge_stops)
def r10(numbers: range) -> Iterator[Case]:
    """SIGTERM, SIGUSR1 or SIGUSR2 to the command, or to all its processes as Slurm does; every eighth plan is
    compiled."""
    with reference() as plain, contextlib.ExitStack() as held:
        compiled: Reference | None = None
        for number in numbers:
            dice = random.Random(f"10/{number}")
            whole = plain
            if number % 8 == 7:
                whole = compiled = compiled or held.enter_context(reference(is_compiled=True))
            instant, signum, to_all = whole.some_instant(dice), dice.choice(SIGNALS), number % 4 == 1
            run_file = whole.run_file(number)
            what = f"{signum.name} to {'all processes' if to_all else 'the command'} {instant}"
            what += ", compiled" if whole is compiled else ""
            with Command(run_file) as command:
                command.wait_until(instant)
                command.wait_for_handler(signum)
                sent = time.monotonic()
                for pid in command.family() if to_all else [command.process.pid]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signum)
                code, seconds = command.end(), time.monotonic() - sent
                made, steps = command.steps_made(), list_steps(command.folder / "run" / "checkpoints")
                saved = steps[-1] if steps else 0
                if code == 0:
                    problem, values = whole.difference(command, code), {"finished": 1.0}
                else:
                    problem, values = "", {"seconds": seconds}
                    if code != 75:
                        problem = f"exit code {code}: {command.said()[-400:]}"
                    elif saved != made:
                        problem = f"{made} steps were made, the checkpoint is of step {saved}"
                    elif seconds > GRACE_SECONDS:
                        problem = f"took {seconds:.1f} s"
            if code:
                with Command(run_file) as again:
                    problem = problem or whole.difference(again, again.end())
            yield Case(what=what, problem=problem, values=values)


# R11


def judge_ends(values: Values) -> tuple[str, list[str]]:
    seconds = max(values.get("seconds", [0]))
    return f"the last process was gone {seconds:.2f} s after the command, at most; no port or shared memory left", []


ENDS = ("Ctrl-C", "Ctrl-C twice", "SIGHUP", "kill -9", "kill -9 of the supervisor too")


@case_by_case(judge_ends)
def r11(numbers: range) -> Iterator[Case]:
    """Ctrl-C, SIGHUP, and kill -9 of the process that was started, at any instant; every other run has processes on
    standby. Then the same command comes to the end."""
    with reference() as whole:
        for number in numbers:
            dice, how = random.Random(f"11/{number}"), ENDS[number % len(ENDS)]
            instant, run_file = whole.some_instant(dice), whole.run_file(number)
            with Command(run_file, f"run.standby={str(number % 2 == 1).lower()}") as command:
                command.wait_until(instant)
                command.wait_for_handler(signal.SIGHUP)
                family, held = command.family(), _held(command)
                with contextlib.suppress(ProcessLookupError):
                    if how.startswith("Ctrl-C"):
                        os.killpg(command.process.pid, signal.SIGINT)
                        if how.endswith("twice"):
                            time.sleep(0.7)
                            os.killpg(command.process.pid, signal.SIGINT)
                    elif how == "SIGHUP":
                        os.killpg(command.process.pid, signal.SIGHUP)
                    else:
                        roles = {command.role(pid, each): pid for pid, each in family.items()}
                        if how.endswith("too") and "supervisor" in roles:
                            os.kill(roles["supervisor"], signal.SIGKILL)
                        command.process.kill()
                code, ended = command.end(), time.monotonic()
                # A process that is ending has no environment any more, but still its ports.
                while (problem := _left_of(command, held)) and time.monotonic() < ended + 5.0:
                    time.sleep(0.02)
                values = {"seconds": time.monotonic() - ended}
                allowed = {"Ctrl-C": (0, 75, 130), "SIGHUP": (0, 75)}.get(how)
                if allowed is not None and code not in allowed:
                    problem = problem or f"exit code {code}: {command.said()[-400:]}"
            with Command(run_file) as again:
                problem = problem or whole.difference(again, again.end())
            yield Case(what=f"{how} {instant}, exit code {code}", problem=problem, values=values)


def _held(command: Command) -> tuple[set[str], set[str]]:
    """(inodes of sockets, files in shared memory) of all processes."""
    sockets, shared = set[str](), set[str]()
    for pid in command.family():
        with contextlib.suppress(OSError):
            for path in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(path)):
                        sockets.add(match[1])
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if "/dev/shm/" in line:
                    shared.add(line.partition("/dev/shm/")[2].removesuffix(" (deleted)"))
    return sockets, shared


def _left_of(command: Command, held: tuple[set[str], set[str]]) -> str:
    if left := command.family():
        return f"{len(left)} processes are left: {[command.role(*each) for each in left.items()]}"
    sockets, shared = held
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    if ports := [words[1] for words in lines if words[3] == "0A" and words[9] in sockets]:
        return f"ports are open: {ports}"
    if names := sorted(name for name in shared if (Path("/dev/shm") / name).exists()):
        return f"shared memory is left: {names}"
    names = sorted(path.name for path in command.temporary.iterdir() if not path.name.startswith("torchinductor"))
    return f"temporary files are left: {names}" if names else ""


# R12


def judge_meetings(values: Values) -> tuple[str, list[str]]:
    seconds = max(values.get("refused seconds", [0]))
    figures = f"a second job is refused in at most {seconds:.2f} s and told whose the folder is; stale locks are no "
    figures += "hindrance; an owner whose lock was lost commits nothing more"
    return figures, [f"refused only after {seconds:.2f} s"] if seconds > 2.0 else []


@case_by_case(judge_meetings)
def r12(numbers: range) -> Iterator[Case]:
    """A second command in the folder of one that runs; after all processes of the first were killed at once; and where
    the file system has lost the lock of one that runs."""
    with reference(is_faulty=True) as whole:
        for number in numbers:
            dice, run_file = random.Random(f"12/{number}"), whole.run_file(number)
            lock, what = run_file.parent / "run" / ".lock", ("two at once", "stale lock", "lost lock")[number % 3]
            slow = {"TOY_FAULT": str(run_file.parent / "none")}  # so that it has not come to its end meanwhile
            with Command(run_file, **slow) as first, contextlib.ExitStack() as held:
                first.wait_for(lambda lock=lock: lock.exists() and lock.stat().st_size > 0)
                problem, values = "", dict[str, float]()
                if what == "two at once":
                    first.wait_until(Instant(time.monotonic() - first.started + dice.uniform(0, 2)))
                    with Command(run_file) as second:
                        code = second.end()
                        values["refused seconds"] = time.monotonic() - second.started
                        said = second.said()
                        if code != 2 or f"process {first.process.pid} on" not in said:
                            problem = f"exit code {code}, the owner is {first.process.pid}: {said[-400:]}"
                    last = first
                elif what == "stale lock":
                    first.wait_until(Instant(0.0, dice.randrange(1, STEPS - 10)))
                    first.__exit__()
                    while first.family():
                        time.sleep(0.01)
                    last = held.enter_context(Command(run_file))
                else:  # as of a host that was cut off and comes back when the other run is over
                    first.wait_until(Instant(0.0, dice.randrange(SAVE_EVERY + 1, 30)))
                    stopped = first.family()
                    for pid in stopped:
                        os.kill(pid, signal.SIGSTOP)
                    lock.unlink()
                    last = held.enter_context(Command(run_file))
                problem = problem or whole.difference(last, last.end())
                if what == "lost lock":
                    for pid in stopped:
                        os.kill(pid, signal.SIGCONT)
                    code = first.end()
                    if code != 1 or f"now belongs to process {last.process.pid}" not in first.said():
                        problem = problem or f"the first ended with {code}: {first.said()[-400:]}"
                    problem = problem or whole.difference(last, 0)
            yield Case(what=what, problem=problem, values=values)


# R20


def judge_loops(values: Values) -> tuple[str, list[str]]:
    stopped, went_on = int(sum(values.get("stopped", []))), int(sum(values.get("went on", [])))
    figures = (
        f"{stopped} crash loops ended with exit code 70 after their restarts and named rank and cause; {went_on} runs "
    )
    return figures + "that failed more often, but with a new checkpoint between failures, came to their end", []


SAID = {"kill": "killed by SIGKILL", "segv": "killed by SIGSEGV", "exit": "exit", "raise": "made to fail"}


@case_by_case(judge_loops)
def r20(numbers: range) -> Iterator[Case]:
    """A rank fails in the third step of every attempt; or in its 14th, so that there is a checkpoint between
    failures."""
    with reference(is_faulty=True) as whole:
        for number in numbers:
            kind, rank, restarts = list(SAID)[number // 2 % 4], number // 2 % 2, 1 + number // 8 % 3
            is_loop, run_file = number % 2 == 0, whole.run_file(number)
            fault = run_file.parent / "fault"
            set_fault(fault, rank, "forward", kind, call=5 if is_loop else 27, again=True)
            changes = [f"run.restarts={restarts}"]
            with Command(run_file, *changes, TOY_FAULT=str(fault)) as command:
                code = command.end(1200)
                ends = [mark for mark in command.marks("end") if mark.about.get("exit_code")]
                said = command.said()
                if is_loop:
                    wanted = ("This is a crash loop", f"rank {rank} of 2", SAID[kind])
                    missing = [words for words in wanted if words not in said]
                    problem = f"exit code {code}, not said: {missing}: {said[-300:]}" if code != 70 or missing else ""
                    if len(ends) != restarts + 1:
                        problem = problem or f"{len(ends)} attempts with {restarts} restarts allowed"
                else:
                    problem = whole.difference(command, code)
                    if len(ends) <= restarts + 1:
                        problem = problem or f"it failed {len(ends)} times only"
            if is_loop:
                fault.unlink()
                with Command(run_file) as again:
                    problem = problem or whole.difference(again, again.end())
            name = "stopped" if is_loop else "went on"
            what = f"{kind} of rank {rank} in every {'third' if is_loop else '14th'} step, {restarts} restarts"
            yield Case(what=what, problem=problem, values={name: not problem})
