"""The child's side of a launch: read the job, poll a flag to stop, say what went wrong.

    parent                                  rank
    job file, signals blocked  ───────────> read it, take the signals, main(job, stop)
    SIGTERM (once)             ───────────> stop.is_set: finish the step, save, return 75
    error file, exit status    <─────────── an exception, as JSON; the traceback in the rank's log

The signals are blocked from before the process exists until `run_rank` has its flag. By that the parent knows a rank
that still imports torch, and ends it at once: it has nothing to save. Importable without torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from meshwright.core.errors import MeshwrightError
from meshwright.core.files import open_to_append, write_whole
from meshwright.launch.failure import error_as_json

PREEMPTED_EXIT_CODE = 75
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What asks a rank to stop. Slurm sends the latter two (`--signal`), to every process of a step."""
GRACE_IS_OVER = "the grace (run.grace_seconds) was over; steps that no checkpoint has are made again"
GATE_NAME = "MESHWRIGHT_GATE"
"""The variable that names a pipe: a rank on standby has its job when the pipe is closed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What one rank is told: its arguments, its place, and where to meet, to log and to report."""

    arguments: Mapping[str, Any]
    rank: int
    num_ranks: int
    rendezvous: str
    error_file: str
    log_file: str
    sections: str = ""
    """The shared memory in which ranks stamp where they are."""
    is_shown: bool = False
    """It writes to the terminal of the command, instead of its log."""


def rank_environment(
    rank: int, num_ranks: int, threads_per_rank: int, changes: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Our environment, loopback for gloo and (unless it says other) NCCL, the caller's changes, torchrun's names."""
    return {
        "NCCL_SOCKET_IFNAME": "lo",
        **os.environ,
        "PYTHONUNBUFFERED": "1",  # a rank killed by a signal leaves its last lines in its log
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": str(threads_per_rank),
        **(changes or {}),
        **rank_names(rank, num_ranks),
    }


def rank_names(rank: int, num_ranks: int) -> dict[str, str]:
    """The part of torchrun's contract that tells a rank of one machine who it is."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
    }


class StopFlag:
    """Set by a signal, polled by the loop. While there is nothing to save, a signal ends the process instead; later
    its grace does."""

    def __init__(self) -> None:
        self.is_set = False
        self.grace_seconds = math.inf
        """From a signal until somebody kills this process."""
        self.say: Callable[[str], object] = lambda text: None
        """Is told what the end of this process means, from a thread, just before it."""
        self._leaves_at_once, self._asked_seconds, self._writer = False, math.inf, -1

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self.is_set = True

    def note(self) -> None:
        """Another rank has got a signal."""
        self.is_set = True
        if self._writer >= 0:
            os.write(self._writer, b"\0")

    @property
    def left_seconds(self) -> float:
        """Until this process leaves, with or without a save; infinite before a signal."""
        return self._asked_seconds + max(self.grace_seconds - 1, self.grace_seconds / 2) - time.monotonic()

    def take(self, numbers: Iterable[signal.Signals]) -> None:
        """Have these signals set the flag; those that are ignored (`nohup`) stay so."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        self._writer = writer
        taken = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]

        def watch() -> None:
            """Sees a signal even while the main thread is inside native code (a collective), where no handler runs."""
            while True:
                left = self.left_seconds
                if not select.select([reader], [], [], None if left == math.inf else max(left, 0.0))[0]:
                    self._leave(GRACE_IS_OVER)
                number = os.read(reader, 1)[0]
                if number and number not in taken:
                    continue
                self._asked_seconds = min(self._asked_seconds, time.monotonic())
                if number and self._leaves_at_once:
                    self._leave("there was nothing to save")

        threading.Thread(target=watch, name="stop signals", daemon=True).start()
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in taken:
            signal.signal(number, self.on_signal)

    def leave_at_once(self, is_allowed: bool) -> None:
        """From now on a signal may end this process where it stands: since the last checkpoint, no step was made."""
        self._leaves_at_once = is_allowed
        if is_allowed and self.is_set:
            self._leave("there was nothing to save")

    def _leave(self, why: str) -> NoReturn:
        with contextlib.suppress(Exception):
            self.say(why)
        os._exit(PREEMPTED_EXIT_CODE)


def show_stacks_on_crash(log_file: str = "") -> None:
    """Stacks of all threads to stderr on a crash in native code, and on SIGQUIT, to see where a rank hangs, to its log
    (or to stderr)."""
    faulthandler.enable(all_threads=True)
    if log_file:  # the descriptor stays open
        faulthandler.register(signal.SIGQUIT, file=open_to_append(Path(log_file)), all_threads=True)
    else:
        faulthandler.register(signal.SIGQUIT, all_threads=True)


def run_rank(main: Callable[[Job, StopFlag], int]) -> NoReturn:
    """Run `main(job, stop)` as this rank, and exit with what it returns or with the error it raises.

    Leaves by `os._exit`: gloo's threads may be stuck on a dead peer and would hold up an orderly exit.
    """
    if len(sys.argv) != 2:
        raise MeshwrightError(f"a rank takes one argument, the path of its job file, and got {len(sys.argv) - 1}.")
    gate = os.environ.pop(GATE_NAME, "")
    if gate:
        Path(gate).read_bytes()
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    if gate and not job.is_shown:
        log = open_to_append(Path(job.log_file))
        for number in (sys.stdout.fileno(), sys.stderr.fileno()):
            os.dup2(log, number)
    show_stacks_on_crash(job.log_file)
    stop = StopFlag()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop.take(STOP_SIGNALS)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    exit_code = 1
    try:
        exit_code = main(job, stop)
    except BaseException as error:
        exit_code = report_error(job, error)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(exit_code)


def report_error(job: Job, error: BaseException) -> int:
    """Write the error file and the traceback; the exit code. A plain `sys.exit(number)` is no error."""
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return error.code or 0
    report = error_as_json(error)
    try:
        write_whole(Path(job.error_file), json.dumps(report))
        with os.fdopen(open_to_append(Path(job.log_file)), "a", errors="backslashreplace") as log:
            log.write(report["traceback"])
    except OSError:  # a full disk must not hide the error
        sys.stderr.write(report["traceback"])
    return int(report["exit_code"])
