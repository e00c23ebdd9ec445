"""The process that the user started does nothing but start the one that works again, should it be killed. No torch.

    `mw train` (guard) ──fork──> supervisor: plans, starts ranks, restarts them ──> ranks
    killed: supervisor and ranks die with it        killed: the guard forks another one, which resumes
                                                    (and finds the open files that were left for it)

The guard has imported nothing when it forks, so a new supervisor begins as the first one did. Signals reach the guard
alone (the supervisor has a session of its own), which passes them on.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from meshwright.core.errors import MeshwrightError
from meshwright.core.process import die_with_process
from meshwright.launch.environment import how_to_go_on, outside_launcher
from meshwright.launch.rank_job import PREEMPTED_EXIT_CODE, STOP_SIGNALS

_PROCESS, _PIPE, _CAUSE = "MESHWRIGHT_GUARD", "MESHWRIGHT_GUARD_PIPE", "MESHWRIGHT_RESTARTED"
_TAKE, _LEAVE = "MESHWRIGHT_GUARD_TAKE", "MESHWRIGHT_GUARD_LEAVE"
_MOST_FILES = 253  # of one message; linux/net/scm.h
_MOST_RESTARTS = 3  # until the supervisor has read the run file


def guard() -> int | None:
    """None in the process that is to work; what to exit with, once that has ended, in the one that was started.

    Where torchrun or Slurm has started this process as one of many ranks, it starts it again by itself.
    """
    try:
        if outside_launcher(os.environ) is not None:
            return None
    except MeshwrightError:  # the command says so
        return None
    numbers = (signal.SIGINT, signal.SIGHUP, *STOP_SIGNALS)
    watched = _Forwarder(numbers)
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    # What a supervisor sends stays in the socket, and alive, until the next one receives it.
    kind = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK  # `recv_fds` does not pass its flags on
    take, leave = (str(end.detach()) for end in socket.socketpair(socket.AF_UNIX, kind))
    os.environ |= {_PROCESS: str(os.getpid()), _PIPE: str(writer), _TAKE: take, _LEAVE: leave}
    os.environ.pop(_CAUSE, None)
    told: dict[str, Any] = {}
    num_restarts, newest = 0, ""
    while True:
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        watched.child = 0 if watched.has_passed else os.fork()
        if not watched.child and not watched.has_passed:
            os.setsid()
            die_with_process(int(os.environ[_PROCESS]))
            watched.leave()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
            return None
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        code = watched.wait()
        if code >= 0:
            return code
        with contextlib.suppress(BlockingIOError, ValueError):
            told = json.loads(os.read(reader, 1 << 16).splitlines()[-1])
        saved = newest_name(told.get("folder", ""))
        num_restarts, newest = (num_restarts + 1, newest) if saved == newest else (1, saved)
        cause = f"the supervising process was killed by {signal.Signals(-code).name}"
        if watched.has_passed and -code in numbers:  # before it could take them
            print(f"mw train: stopped, nothing is lost; {how_to_go_on(os.environ)}", file=sys.stderr)
            return PREEMPTED_EXIT_CODE
        if watched.has_passed or num_restarts > told.get("restarts", _MOST_RESTARTS):
            print(f"mw train: {cause}; the same command resumes from the last checkpoint", file=sys.stderr)
            return 128 - code
        print(f"mw train: {cause}; it is started again", file=sys.stderr, flush=True)
        os.environ[_CAUSE] = cause


class _Forwarder:
    """Passes stop signals on to a child."""

    def __init__(self, numbers: Sequence[signal.Signals]):
        # `nohup` sets SIGHUP to ignored, and means it.
        self.before = {number: signal.getsignal(number) for number in numbers}
        self.before = {number: old for number, old in self.before.items() if old is not signal.SIG_IGN}
        self.child, self.has_passed = 0, False
        for number in self.before:
            signal.signal(number, self.on_signal)

    def leave(self) -> None:
        for number, old in self.before.items():
            signal.signal(number, old)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self.has_passed = True
        if self.child:
            os.kill(self.child, number)

    def wait(self) -> int:
        """How the child has ended, as `subprocess` says it; one that was not started has ended by a signal."""
        if not self.child:
            return -signal.SIGTERM
        os.waitid(os.P_PID, self.child, os.WEXITED | os.WNOWAIT)  # its process id stays its own until it is reaped
        child, self.child = self.child, 0
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def newest_name(folder: str) -> str:
    """Of the newest checkpoint, without importing what reads one."""
    with contextlib.suppress(OSError):
        return max((name for name in os.listdir(f"{folder}/checkpoints") if "." not in name), default="")
    return ""


def command_pid() -> int:
    """The process that the user has started: this one, or its guard."""
    return os.getppid() if _is_guarded() else os.getpid()


def _is_guarded() -> bool:
    return os.environ.get(_PROCESS) == str(os.getppid())


def tell_guard(folder: Path, restarts: int) -> None:
    """Which run this is, and how often it may be started again without a new checkpoint."""
    if _is_guarded():
        with contextlib.suppress(OSError):
            os.write(int(os.environ[_PIPE]), json.dumps({"folder": str(folder), "restarts": restarts}).encode() + b"\n")


def leave_files(about: str, files: Sequence[int]) -> None:
    """Have open files outlive this process, for the one that its guard would start after it."""
    if _is_guarded():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(os.environ[_LEAVE]))) as end:
            socket.send_fds(end, [about.encode()], files)


def left_files() -> tuple[str, list[int]]:
    """What the process before this one has left, the last time that it did."""
    about, files = "", list[int]()
    if cause_of_restart():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(os.environ[_TAKE]))) as end:
            while True:
                data, received, *_ = socket.recv_fds(end, 1 << 16, _MOST_FILES)
                for each in files:
                    os.close(each)
                for each in received:
                    os.set_inheritable(each, False)
                about, files = data.decode(), received
    return about, files


def cause_of_restart() -> str:
    """What ended the process before this one, under the same guard; empty where there was none."""
    return os.environ.get(_CAUSE, "") if _is_guarded() else ""
