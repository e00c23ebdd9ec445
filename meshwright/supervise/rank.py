"""The child's side of a launch: read the job, die with the parent, poll a flag to stop, say what went wrong.

    parent                                  rank
    job file, SIGTERM blocked  ───────────> read_job, die_with_parent, take the signals, main(job, stop)
    SIGTERM (once)             ───────────> stop.is_set: finish the step, save, return 75
    error file, exit status    <─────────── an exception, as JSON; the traceback in the rank's log

SIGTERM is blocked from before the process exists until `run_rank` has its flag, so a stop that arrives while
torch is being imported is kept and not lost. Importable without torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from meshwright.core.errors import MeshwrightError
from meshwright.supervise.failure import error_as_json

PREEMPTED_EXIT_CODE = 75
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What one rank is told: its arguments, its place, and where to meet, to log and to report."""

    arguments: Mapping[str, Any]
    rank: int
    num_ranks: int
    rendezvous: str
    error_file: str
    log_file: str
    parent_pid: int


class StopFlag:
    """Set by SIGTERM, polled by the loop: a signal never does more than this."""

    def __init__(self) -> None:
        self._is_set = False

    @property
    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self._is_set = True


def read_job(argv: Sequence[str]) -> Job:
    """The job in the file named by the only argument."""
    if len(argv) != 2:
        raise MeshwrightError(f"a rank takes one argument, the path of its job file, and got {len(argv) - 1}.")
    return Job(**json.loads(Path(argv[1]).read_text()))


def die_with_parent(job: Job) -> None:
    """Have the kernel kill this rank when the process that launched it dies."""
    die_with_process(job.parent_pid)


def die_with_process(parent_pid: int) -> None:
    """Tie our life to our parent's (to be exact: to the thread of it that started us)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it died before the line above, so no signal will ever come
        os._exit(1)


def show_stacks_on_crash() -> None:
    """Stacks of all threads to stderr on a crash in native code, and on SIGUSR1 to see where a rank hangs."""
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def run_rank(main: Callable[[Job, StopFlag], int]) -> NoReturn:
    """Run `main(job, stop)` as this rank, and exit with what it returns or with the error it raises.

    Leaves by `os._exit`: gloo's threads may be stuck on a dead peer and would hold up an orderly exit.
    """
    job = read_job(sys.argv)
    die_with_parent(job)
    show_stacks_on_crash()
    stop = StopFlag()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, stop.on_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
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
        write_atomically(Path(job.error_file), json.dumps(report))
        with Path(job.log_file).open("a", errors="backslashreplace") as log:
            log.write(report["traceback"])
    except OSError:  # a full disk must not hide the error
        sys.stderr.write(report["traceback"])
    return int(report["exit_code"])


def write_atomically(path: Path, text: str) -> None:
    """The whole text or nothing, for a reader that may look at any time."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.write_text(text)
    draft.replace(path)
