"""One child process in its own session: started without a shell, ended together with all its descendants.

An ended child is left a zombie until `end`, so its process id (which is also its group's id) cannot be taken
by a stranger before we kill what the child may have left behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from meshwright.core.process import child_command, child_environment

Stream = int | IO[bytes] | None


@dataclass(kw_only=True)
class Child:
    """A running or ended process. `why_ended` is our own reason for signalling it, empty if we never did."""

    rank: int
    process: subprocess.Popen[bytes]
    why_ended: str = ""
    never_began: bool = False
    """It was ended while it still imported: it had nothing to save."""
    seen_exit_code: int | None = None

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal's number if a signal ended it."""
        if self.seen_exit_code is None:
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            state = os.waitid(os.P_PID, self.process.pid, options)
            if state is not None:
                has_exited = state.si_code == os.CLD_EXITED
                self.seen_exit_code = state.si_status if has_exited else -state.si_status
        return self.seen_exit_code

    def terminate(self, why: str) -> None:
        """Ask the child alone: its own children (data workers) must live until it has saved.

        One that blocks the signal has not begun yet, and may import for long: it is killed.
        """
        if self.exit_code is None:
            self.why_ended = why
            self.never_began = self._blocks(signal.SIGTERM)
            os.kill(self.process.pid, signal.SIGKILL if self.never_began else signal.SIGTERM)

    def _blocks(self, number: signal.Signals) -> bool:
        with contextlib.suppress(OSError):  # an ended one has no such file
            with open(f"/proc/{self.process.pid}/status", encoding="ascii", errors="replace") as status:
                blocked = next((line.split()[1] for line in status if line.startswith("SigBlk:")), "0")
            return bool(int(blocked, 16) >> (number - 1) & 1)
        return False

    def kill(self, why: str) -> None:
        """Kill the child and everything it started that stayed in its group."""
        if self.exit_code is None:
            self.why_ended = why
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self, why: str = "the launch is over") -> None:
        """Kill what is left, note how it ended, only then give the process id back. Safe to call twice."""
        if self.process.returncode is not None:
            return
        self.kill(why)
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        _ = self.exit_code
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def start_child(
    rank: int,
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    stdin: Stream = subprocess.DEVNULL,
    stdout: Stream = None,
    stderr: Stream = None,
) -> Child:
    """Start a module in its own session, so that the terminal's Ctrl-C does not reach it."""
    process = subprocess.Popen(
        child_command(*arguments),
        env={**environment, **child_environment()},
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )
    return Child(rank=rank, process=process)


def rank_environment(
    rank: int, num_ranks: int, threads_per_rank: int, changes: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Our environment, loopback for gloo, the caller's changes, then torchrun's names."""
    return {
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
