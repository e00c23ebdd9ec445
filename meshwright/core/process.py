"""Child processes: started without a shell, ended together with all their descendants, and never outliving us.

`python -m` looks for modules in the working folder before the standard library, so a `random.py` there would run.
A child is started with `-P` instead, through this file (which therefore imports nothing of the package at the top): it
asks the kernel for the death signal before anything large is imported, takes `meshwright` from where the parent has it,
and appends the rest of the parent's `sys.path` behind the standard library and the installed packages.

An ended child is left a zombie until `Child.end`, so its process id (which is also its group's id) cannot be taken by a
stranger before we kill what the child may have left behind. No torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

_PATH_NAME, _PARENT_NAME = "MESHWRIGHT_PATH", "MESHWRIGHT_PARENT"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def child_command(module: str, *arguments: str) -> list[str]:
    """The words that run `module`; to be started with `child_environment`, by the thread that outlives the child."""
    return [sys.executable, "-P", __file__, module, *arguments]


def child_environment() -> dict[str, str]:
    """What the child needs to know, beside the caller's own variables."""
    entries = dict.fromkeys(os.path.abspath(entry) for entry in sys.path)
    return {_PATH_NAME: os.pathsep.join(entries), _PARENT_NAME: str(os.getpid())}


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
            self.never_began = self.blocks(signal.SIGTERM)
            os.kill(self.process.pid, signal.SIGKILL if self.never_began else signal.SIGTERM)

    def blocks(self, number: signal.Signals) -> bool:
        """Whether the child's main thread blocks a signal."""
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


def die_with_process(parent_pid: int) -> None:
    """Tie our life to our parent's (to be exact: to the thread of it that started us)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it died before the line above, so no signal will ever come
        os._exit(1)


def _main() -> None:
    die_with_process(int(os.environ.pop(_PARENT_NAME)))
    import importlib.util
    import runpy

    sys.path += [entry for entry in os.environ.pop(_PATH_NAME).split(os.pathsep) if entry not in sys.path]
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    # By its place, not by `sys.path`: the parent may run from a checkout while another version is installed.
    spec = importlib.util.spec_from_file_location("meshwright", os.path.join(root, "__init__.py"))
    assert spec is not None
    assert spec.loader is not None
    sys.modules["meshwright"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
