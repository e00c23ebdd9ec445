"""Run one module as N ranks on this machine, watch them, and give one exit code and one message.

    every rank ends with 0                 -> 0
    SIGINT, SIGTERM, SIGHUP or SIGUSR1/2   -> SIGTERM to the ranks, who save and end with 75     -> 75
    a second one, or no end within grace   -> SIGKILL
    a rank fails                           -> 1 s for the others to say why, SIGKILL               -> 1 or 2
    a rank hangs                           -> stacks of all ranks into their logs, SIGKILL         -> 1

No rank outlives `launch`: each has its own process group, killed in a `finally`, and by the kernel if we die.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from meshwright.core.errors import MeshwrightError
from meshwright.core.files import memory_file, open_to_append
from meshwright.core.process import Child, start_child
from meshwright.launch.failure import Failure, cause, failure_from_error, failure_from_exit, log_tail
from meshwright.launch.rank_job import GATE_NAME, PREEMPTED_EXIT_CODE, Job, rank_environment
from meshwright.launch.rank_job import STOP_SIGNALS as RANK_SIGNALS
from meshwright.launch.sections import Hang, HangWatch

GRACE_SECONDS = 30.0  # what Slurm and Kubernetes allow between their SIGTERM and their SIGKILL
POLL_SECONDS = 0.02
LAST_WORDS_SECONDS = 1.0  # after one rank failed, for the others to fail by themselves: together they cannot save
STACKS_SECONDS = 1.0  # for hung ranks to write where they are
ECHO_SECONDS = 0.5  # wrappers forward a signal that the terminal also sent; that is one request, not two
STOP_SIGNALS = (signal.SIGINT, signal.SIGHUP, *RANK_SIGNALS)
STANDBY_STEPS = 3  # made before processes on standby are started beside them
KEPT_ATTEMPTS = 5  # whose logs stay in `attempt-N` folders


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOutcome:
    """How a launch ended: what to exit with, and every failure by rank."""

    exit_code: int
    failures: tuple[Failure, ...]
    num_ranks: int
    steps: int = 0
    """That were made, by the rank that was ahead."""
    noticed_seconds: float = 0.0
    """When the first failure was seen, on the monotonic clock."""
    advice: str = ""
    """What was done about the failures of this launch and of those before, if anything was."""

    def message(self) -> str:
        """One message, about the failure that caused the others."""
        if self.exit_code == PREEMPTED_EXIT_CODE:
            return "stopped as asked. The same command resumes."
        if not self.failures:
            return f"all {self.num_ranks} ranks finished."
        failure = cause(self.failures)
        text = failure.sentence(self.num_ranks)
        text = f"{text}\nSee {failure.log}" if failure.log is not None and failure.log.exists() else text
        return f"{text}\n{self.advice}" if self.advice else text


class Stopped(KeyboardInterrupt):
    """A signal asked us to stop, before there was anything to save or time to; its argument says what that means."""


class StopRequests:
    """Notes that somebody asks us to stop, and when; `watch` acts."""

    def __init__(self, outer: StopRequests | None = None) -> None:
        """`outer`: whose requests are also these."""
        self.outer = outer
        self._first_seconds, self._is_urgent = math.inf, False

    @property
    def first_seconds(self) -> float:
        return self._first_seconds if self.outer is None else min(self._first_seconds, self.outer.first_seconds)

    @property
    def is_urgent(self) -> bool:
        return self._is_urgent or (self.outer is not None and self.outer.is_urgent)

    def request(self, *, is_urgent: bool = False) -> None:
        """Have the ranks save and end; `is_urgent`: kill them."""
        self._is_urgent = self._is_urgent or is_urgent
        self._first_seconds = min(self._first_seconds, time.monotonic())

    def wait(self, seconds: float) -> None:
        """That long, or until somebody asks."""
        end = time.monotonic() + seconds
        while self.first_seconds == math.inf and time.monotonic() < end:
            time.sleep(POLL_SECONDS)


def launch(
    module: str,
    arguments: Mapping[str, Any],
    num_ranks: int,
    *,
    log_folder: Path,
    threads_per_rank: int | None = None,
    grace_seconds: float = GRACE_SECONDS,
    environment: Mapping[str, str] | None = None,
    show_rank_zero: bool = True,
    stop: StopRequests | None = None,
    patience_seconds: float = 0.0,
    standby: Standby | None = None,
    first_rank: int = 0,
    num_in_all: int = 0,
) -> LaunchOutcome:
    """Run `module` as `num_ranks` ranks (the module ends in `run_rank(main)`) and wait for the end.

    Rank 0 writes to our own terminal unless `show_rank_zero` is off; the others write to `log_folder/rank-K.log`. Logs
    of the launch before move to `log_folder/attempt-N`. `arguments` must be JSON. `stop`: from `stop_signals`, where
    the caller has taken the signals already. `patience_seconds`: see `HangWatch`; 0: hangs are not looked for.
    `standby`: processes to use, and to be started for the next launch once this one trains. `first_rank`: of those
    here, where there are `num_in_all` ranks on several machines.
    """
    if num_ranks < 1:
        raise MeshwrightError(f"launch: {num_ranks} ranks cannot run anything. Use 1 or more.")
    log_folder = log_folder.absolute()
    log_folder.mkdir(parents=True, exist_ok=True)
    set_logs_aside(log_folder)
    threads = threads_per_rank or max(1, len(os.sched_getaffinity(0)) // num_ranks)
    jobs: list[Job] = []
    children: list[Child] = []
    with contextlib.ExitStack() as held:
        stop = stop or held.enter_context(stop_signals())
        if stop.first_seconds < math.inf:  # nothing has begun, so there is nothing to save
            return LaunchOutcome(exit_code=PREEMPTED_EXIT_CODE, failures=(), num_ranks=num_ranks)
        rendezvous, sections = held.enter_context(memory_file()), held.enter_context(memory_file())
        hangs = HangWatch(sections, num_ranks, patience_seconds, first_rank, has_others=num_in_all > num_ranks)
        try:
            variables = [rank_environment(rank, num_ranks, threads, environment) for rank in range(num_ranks)]
            for local, names in enumerate(variables) if num_in_all else ():
                names |= {"RANK": str(first_rank + local), "WORLD_SIZE": str(num_in_all)}
                for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # not the loopback
                    names.pop(name)
                    names |= {name: os.environ[name]} if name in os.environ else {}
            waiting = standby.take(variables) if standby is not None else []
            for local in range(num_ranks):
                rank = first_rank + local
                job = Job(
                    arguments=dict(arguments),
                    rank=rank,
                    num_ranks=num_in_all or num_ranks,
                    rendezvous=rendezvous,
                    error_file=str(log_folder / f"rank-{rank}.error.json"),
                    log_file=str(log_folder / f"rank-{rank}.log"),
                    sections=sections,
                    is_shown=show_rank_zero and rank == 0,
                )
                jobs.append(job)
                if waiting:
                    children.append(waiting[local].begin(job))
                else:
                    job_file = held.enter_context(memory_file(json.dumps(asdict(job))))
                    log = None if job.is_shown else Path(job.log_file)
                    children.append(start_rank(module, rank, job_file, variables[local], log))
            refill = partial(standby.fill, module, variables, jobs) if standby is not None else None
            found = watch(children, stop, grace_seconds, hangs, [Path(job.log_file) for job in jobs], refill)
        finally:
            for child in children:
                child.end()
    outcome = judge(children, jobs, is_stopped=stop.first_seconds < math.inf, hang=found.hang)
    return replace(outcome, steps=hangs.steps_done, noticed_seconds=found.noticed_seconds)


def set_logs_aside(log_folder: Path) -> None:
    """Move the logs of the launch before into a numbered folder, where they say anything, and drop the oldest."""
    files = [path for path in log_folder.iterdir() if re.fullmatch(r"rank-\d+\.(log|error\.json)", path.name)]
    numbers = (re.fullmatch(r"attempt-(\d+)", path.name) for path in log_folder.iterdir())
    attempts = sorted(int(number[1]) for number in numbers if number)
    if any(path.lstat().st_size for path in files):
        aside = log_folder / f"attempt-{attempts[-1] + 1 if attempts else 1}"
        aside.mkdir()
        for path in files:
            path.rename(aside / path.name)
        for number in attempts[: max(0, len(attempts) + 1 - KEPT_ATTEMPTS)]:
            shutil.rmtree(log_folder / f"attempt-{number}", ignore_errors=True)
    else:
        for path in files:
            path.unlink()


def start_rank(module: str, rank: int, job_file: str, environment: Mapping[str, str], log: Path | None) -> Child:
    """Start one rank with its stop signals blocked; `run_rank` unblocks them once there is a flag to set.

    `log`: where its output goes, if not to our own terminal.
    """
    with contextlib.ExitStack() as stack:
        # Append mode: the rank also opens the file, to add the traceback of what ended it.
        output = None if log is None else stack.enter_context(os.fdopen(open_to_append(log), "ab"))
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, RANK_SIGNALS)
        stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
        return start_child(rank, (module, job_file), environment=environment, stdout=output, stderr=output)


@dataclass(frozen=True, kw_only=True)
class StandbyRank:
    """A process that has imported everything and waits for its job."""

    child: Child
    job_file: str
    writer: int
    """The end of a pipe that the process reads; when it is closed, the job is there."""

    def begin(self, job: Job) -> Child:
        with open(self.job_file, "r+b") as file:  # in memory
            file.write(json.dumps(asdict(job)).encode())
        os.close(self.writer)
        return self.child


class Standby(contextlib.ExitStack):
    """Processes on standby, one for each rank, so that a launch after a failure need not import anything."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks: list[StandbyRank] = []
        self.variables: list[dict[str, str]] = []

    def fill(self, module: str, variables: list[dict[str, str]], jobs: Sequence[Job]) -> None:
        """Start them, unless they are there. By the thread that launches, which they do not outlive."""
        if self.ranks:
            return
        self.variables = variables
        for job, environment in zip(jobs, variables, strict=True):
            job_file = self.enter_context(memory_file())
            reader, writer = os.pipe()
            self.callback(os.close, reader)
            gate = {GATE_NAME: f"/proc/{os.getpid()}/fd/{reader}"}
            log = None if job.is_shown else Path(os.devnull)
            child = start_rank(module, job.rank, job_file, environment | gate, log)
            self.callback(child.end)
            self.ranks.append(StandbyRank(child=child, job_file=job_file, writer=writer))

    def take(self, variables: list[dict[str, str]]) -> list[StandbyRank]:
        """All of them; none where they are not for these ranks, or where one has ended."""
        ranks, self.ranks = self.ranks, []
        if variables == self.variables and all(each.child.exit_code is None for each in ranks):
            return ranks
        for each in ranks:
            os.close(each.writer)
            each.child.end()
        return []


@dataclass(kw_only=True)
class FailureSeen:
    """What was seen of ranks that failed."""

    noticed_seconds: float = 0.0
    hang: Hang | None = None


def watch(
    children: Sequence[Child],
    stop: StopRequests,
    grace_seconds: float,
    hangs: HangWatch,
    logs: Sequence[Path],
    when_training: Callable[[], None] | None = None,
) -> FailureSeen:
    """Wait until every rank has ended, and see to it that they do: asked first, made to later, as the earliest end
    says."""
    terminate_at, kill_at, why, is_asked, result = math.inf, math.inf, "", False, FailureSeen()
    while alive := [child for child in children if child.exit_code is None]:
        now, asked_at = time.monotonic(), stop.first_seconds
        ends = [(asked_at, asked_at + grace_seconds, f"it did not stop within {grace_seconds:g} s of the stop signal")]
        if stop.is_urgent:
            ends.append((now, now, "a second stop signal came before it had stopped"))
        failed = [child.rank for child in children if child.exit_code not in (None, 0, PREEMPTED_EXIT_CODE)]
        if failed:
            result.noticed_seconds = result.noticed_seconds or now
            ends.append((math.inf, now + LAST_WORDS_SECONDS, f"rank {failed[0]} had failed"))
        elif len(alive) == len(children) and (hang := hangs.look([child.process.pid for child in children])):
            result.noticed_seconds, result.hang = now, hang
            show_stacks(children, logs)
            ends.append((now, now, f"rank {hang.rank} {hang.text()}"))
        elif when_training is not None and hangs.steps_done >= STANDBY_STEPS:
            when_training()
            when_training = None
        for asked_at, killed_at, reason in ends:
            terminate_at = min(terminate_at, asked_at)
            if killed_at < kill_at:
                kill_at, why = killed_at, reason
        for child in alive:
            if now >= kill_at:
                child.kill(why)
            elif now >= terminate_at and not is_asked:
                child.terminate(why)
        is_asked = is_asked or now >= terminate_at
        time.sleep(POLL_SECONDS)
    return result


def show_stacks(children: Sequence[Child], logs: Sequence[Path]) -> None:
    """Have all ranks write the stacks of their threads into their logs; one that is stopped is woken for it."""
    sizes = [0] * len(logs)
    for child in children:
        # Before it has its handlers (its stop signals are blocked until then) a rank would die of it.
        if child.exit_code is None and not child.blocks(signal.SIGTERM):
            os.kill(child.process.pid, signal.SIGQUIT)
            os.kill(child.process.pid, signal.SIGCONT)
    deadline = time.monotonic() + STACKS_SECONDS
    while time.monotonic() < deadline:
        time.sleep(5 * POLL_SECONDS)
        before, sizes = sizes, [log.stat().st_size if log.exists() else 0 for log in logs]
        if sizes == before and all("(most recent call first)" in log_tail(log) for log in logs):
            return


def judge(children: Sequence[Child], jobs: Sequence[Job], is_stopped: bool, hang: Hang | None = None) -> LaunchOutcome:
    """One exit code from all the ranks' codes and error files."""
    result: list[Failure] = []
    for child, job in zip(children, jobs, strict=True):
        code, log = child.exit_code, Path(job.log_file)
        if hang is not None and hang.rank == child.rank:
            about = {"message": hang.text(), "details": log_tail(log), "is_secondary": False}
            result.append(Failure(rank=child.rank, kind="hang", log=log, **about))  # type: ignore[arg-type]
            continue
        if code is None or code in (0, PREEMPTED_EXIT_CODE):
            continue
        try:
            error = json.loads(Path(job.error_file).read_text())
            result.append(failure_from_error(child.rank, error, log))
        except (OSError, ValueError):
            result.append(failure_from_exit(child.rank, code, child.why_ended, log_tail(log), log))
    failures = tuple(result)
    some_saved = any(child.exit_code == PREEMPTED_EXIT_CODE for child in children)
    some_saved = some_saved or (is_stopped and all(child.never_began for child in children))  # nothing to save
    # A rank that stopped as asked closes its connections; a peer that noticed has not failed by itself.
    all_followed = all(failure.is_secondary for failure in failures)
    if some_saved and (not failures or (is_stopped and all_followed)):
        exit_code = PREEMPTED_EXIT_CODE
    else:
        exit_code = cause(failures).exit_code if failures else 0
    return LaunchOutcome(exit_code=exit_code, failures=failures, num_ranks=jobs[0].num_ranks)


@contextlib.contextmanager
def stop_signals(
    numbers: Sequence[signal.Signals] = STOP_SIGNALS, *, raises: bool = False, requests: StopRequests | None = None
) -> Iterator[StopRequests]:
    """Note the stop signals instead of dying of them (and raise `Stopped`); the old handlers come back afterwards."""
    requests = requests or StopRequests()
    if threading.current_thread() is not threading.main_thread():
        yield requests  # only the main thread may set handlers
        return
    before = {number: signal.getsignal(number) for number in numbers}

    def on_signal(number: int, frame: FrameType | None) -> None:
        is_first, is_echo = (
            requests.first_seconds == math.inf,
            time.monotonic() <= requests.first_seconds + ECHO_SECONDS,
        )
        requests.request(is_urgent=not is_echo)
        if raises and (is_first or not is_echo):
            raise Stopped

    # `nohup` sets SIGHUP to ignored, and means it.
    taken = {number: old for number, old in before.items() if old is not signal.SIG_IGN}
    for number in taken:
        signal.signal(number, on_signal)
    try:
        yield requests
    finally:
        for number, old in taken.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)
