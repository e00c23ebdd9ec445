"""What went wrong in a rank, and which of several failures is the cause.

When one rank dies, its peers fail a moment later because the connection is gone. Reporting those hides the
cause, so a failure is *secondary* when it is a lost connection or our own kill; the reported one is the
lowest-ranked failure that is not.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from meshwright.core.errors import MeshwrightError

TAIL_BYTES = 4096
# Lower-case pieces of what gloo, NCCL and the stores say when a peer is gone.
GONE = "gone: the process ended"
LOST_PEER = (
    GONE,
    *("connection closed by peer", "connection reset", "connection was closed", "connection refused", "broken pipe"),
    *("timed out", "wait timeout", "gloo", "nccl"),
)
SIGNAL_HINTS: dict[int, str] = {
    signal.SIGKILL: "often the out-of-memory killer",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGABRT: "native code gave up",
    signal.SIGBUS: "often a full /dev/shm or a truncated file",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """How one rank failed. `exit_code` is what the whole command exits with if this one is the cause."""

    rank: int
    kind: Literal["exception", "signal", "exit", "hang"]
    message: str
    details: str
    is_secondary: bool
    exit_code: int = 1
    log: Path | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Of the error it raised."""
    is_ours: bool = False
    """It was raised by this package, with what to do about it: trying again is no remedy."""

    def sentence(self, num_ranks: int) -> str:
        who = f"rank {self.rank} of {num_ranks}"
        if self.kind == "exception":
            return f"{who} failed: {self.message}"
        verb = {"signal": "was ", "exit": "ended with ", "hang": ""}[self.kind]
        return f"{who} {verb}{self.message}"


def cause(failures: Sequence[Failure]) -> Failure:
    """The one failure to report: the lowest-ranked primary one, or the lowest-ranked if all are secondary."""
    return min(failures, key=lambda failure: (failure.is_secondary, failure.rank))


def speaks_of_lost_peer(text: str) -> bool:
    lowered = text.lower()
    return any(piece in lowered for piece in LOST_PEER)


def error_as_json(error: BaseException) -> dict[str, Any]:
    """An exception as plain data, so that it can cross a process border without pickle."""
    ours = error if isinstance(error, MeshwrightError) else None
    return {
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "exit_code": ours.exit_code if ours else 1,
        "is_meshwright_error": ours is not None,
        "facts": dict(ours.facts) if ours else {},
    }


def failure_from_error(rank: int, error: Mapping[str, Any], log: Path | None) -> Failure:
    """A rank that said itself what went wrong. A problem the user can mend is told in its own words."""
    is_ours = bool(error.get("is_meshwright_error"))
    message = str(error["message"])
    name = str(error["type"])
    return Failure(
        rank=rank,
        kind="exception",
        message=message if is_ours else f"{name}: {message}" if message else name,
        details=str(error["traceback"]),
        is_secondary=not is_ours and speaks_of_lost_peer(message),
        exit_code=int(error.get("exit_code", 1)),
        log=log,
        facts=error.get("facts", {}),
        is_ours=is_ours,
    )


def failure_from_exit(rank: int, exit_code: int, why_ended: str, tail: str, log: Path | None) -> Failure:
    """A rank that ended without a word: all we have is its exit status, our own part in it, and its log."""
    if exit_code >= 0:
        message = f"exit code {exit_code}, without saying why"
        return Failure(rank=rank, kind="exit", message=message, details=tail, is_secondary=False, log=log)
    number = -exit_code
    ended_by_us = bool(why_ended) and number in (signal.SIGTERM, signal.SIGKILL)
    # NCCL's watchdog aborts the process when a peer is gone; its reason is only in the log.
    watchdog = number == signal.SIGABRT and speaks_of_lost_peer(tail)
    name = next((each.name for each in signal.Signals if each == number), f"signal {number}")
    hint = SIGNAL_HINTS.get(number)
    return Failure(
        rank=rank,
        kind="signal",
        message=f"killed by us: {why_ended}" if ended_by_us else f"killed by {name}{f' ({hint})' if hint else ''}",
        details=tail,
        is_secondary=ended_by_us or watchdog,
        log=log,
    )


def log_tail(log: Path | None, start: int = 0) -> str:
    """The last few kilobytes of a log, from byte `start` on; empty when there is none."""
    if log is None or not log.exists():
        return ""
    with log.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(max(start, size - TAIL_BYTES))
        return stream.read().decode(errors="replace")
