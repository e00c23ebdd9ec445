"""What runs were promised and what they took: one JSON line for each, in the user's own state folder. No torch.

`mw train` appends, `mw probe --from-runs` learns. A line is written by one call on a file opened for appending, so runs
that end together do not mix theirs; a line that was cut short is skipped by readers and ended by the next writer.
Lines are sealed: one that was damaged is skipped too, and not learnt from.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from meshwright.core.cluster import Cluster
from meshwright.core.codec import decode, encode, seal, unseal
from meshwright.core.errors import MeshwrightError, error_at, raise_problems, wrong_numbers
from meshwright.core.files import append_line

NOT_KNOWN = "not known"
"""What a comparison says of memory while only one rank's has been seen, and that one is not the fullest."""
LEAST_STEPS = 10
"""Measured steps that a run must have to be told: the median of fewer is chance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    step_seconds: float
    step_seconds_low: float
    step_seconds_high: float
    peak_bytes: int
    """As it is measured."""
    seconds_by_origin: Mapping[str, float]
    seconds_by_cause: Mapping[str, float]
    """By whose error it is: compute, launch, inner, outer, idle (the fields of `Errors`)."""
    reserved_bytes: int = 0
    """What a GPU's allocator takes; 0 on a CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    step_seconds: float
    """The median, after warm-up."""
    step_seconds_p10: float
    step_seconds_p90: float
    num_steps: int
    peak_bytes: int
    """Of the fullest rank: what torch allocated on a GPU, what the process held on a CPU."""
    reserved_bytes: int = 0
    """What a GPU's allocator took; 0 on a CPU."""
    data_seconds: float = 0.0
    """Of a step, that rank 0 waited for its samples: no forecast has them, and no machine is slower for them."""
    seconds_by_part: Mapping[str, float] = field(default_factory=dict)
    """Compute and collectives (that nothing hides), as a profiled step shared out; where all ranks do the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One run."""

    VERSION: ClassVar[int] = 1

    unix_seconds: float
    """When it ended."""
    versions: Mapping[str, str]
    machine: str
    """As `mw train` knows it again: processor, cores, GPUs."""
    device_name: str
    model: str
    model_fingerprint: str
    plan: Mapping[str, Any]
    """As JSON: a technique that is gone must not make the line unreadable."""
    plan_fingerprint: str
    cluster: Cluster
    """That the forecast was made with."""
    sequence: int
    batch: int
    predicted: Predicted
    measured: Measured
    comparison: Mapping[str, Any] = field(default_factory=dict)
    """Verdicts, reasons and the numbers they rest on, as they were told."""
    version: int = 1

    def __post_init__(self) -> None:
        positive: dict[str, float] = {"measured.num_steps": self.measured.num_steps, "batch": self.batch}
        both: dict[str, Predicted | Measured] = {"predicted": self.predicted, "measured": self.measured}
        positive |= {f"{name}.step_seconds": each.step_seconds for name, each in both.items()}
        problems = [*wrong_numbers(positive, "above zero")]
        parts = {f"predicted.seconds_by_cause.{k}": v for k, v in self.predicted.seconds_by_cause.items()}
        problems += wrong_numbers(parts, "zero or more")
        waits, most = {"measured.data_seconds": self.measured.data_seconds}, self.measured.step_seconds
        problems += wrong_numbers(waits, "zero or more and less than a step", lambda value: 0 <= value < most)
        raise_problems(problems)


def ledger_path() -> Path:
    """$XDG_STATE_HOME/meshwright/ledger.jsonl; a relative folder does not count (XDG Base Directory)."""
    state = os.environ.get("XDG_STATE_HOME", "")
    try:
        folder = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    except RuntimeError:
        raise FileNotFoundError(errno.ENOENT, "this user has no home folder", "~") from None
    return folder / "meshwright" / "ledger.jsonl"


def append(entry: Entry, path: Path | None = None) -> str:
    """Why it could not be written, or nothing: a full disk or a home that is read-only must not hurt a run."""
    try:
        path = path or ledger_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        line = seal(json.dumps(encode(entry), allow_nan=False)) + b"\n"
        append_line(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), line)
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:  # a number that is none
        return str(error)
    return ""


def read(path: Path) -> tuple[list[Entry], int]:
    """The entries, and how many lines are none."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        what = f"cannot be read: {error.strerror}."
        fix = "`mw train` makes it; give another file if it lies elsewhere."
        raise error_at(path, what, fix) from None
    entries, num_bad = [], 0
    for line in lines:
        if not line.strip():
            continue
        try:
            text = unseal(line) if line.startswith(b'{"digest"') else line  # those of earlier versions have no seal
            entries.append(decode(Entry, json.loads(text), "ledger"))
        except (MeshwrightError, ValueError, RecursionError):
            num_bad += 1
    return entries, num_bad
