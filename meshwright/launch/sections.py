"""Where each rank is: numbers in shared memory that the rank writes and its parent reads, to find hangs. No torch.

Each rank has one row that only it writes: how often it has stamped, the section it is in, how many steps it has made,
and its stamps within the step. A stamp is four stores. The parent sees when a row changes; no clock of a rank is used.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SECTIONS = (
    *("start", "data", "forward", "backward", "exchange", "update", "send", "receive"),
    *("evaluation", "save", "records", "end"),
)
_WAITS = ("exchange", "send", "receive")
"""Where a rank waits for others."""
_WIDE = ("start", "evaluation")
"""Where a rank may be for long: reading, compiling."""
_UNBOUNDED = (*_WIDE, "save", "end")
"""Earlier saves say nothing of the last one, which waits for its files to be written, and uploaded."""
_ROW = 4
FACTOR, SLACK_SECONDS = 3.0, 2.0
ELSEWHERE_SECONDS = 10.0
"""More for ranks that seem to wait: what they wait for is found, and ended, on its own machine first."""
_FIRST_STEPS = 3
"""Of an attempt, while kernels are compiled and memory is taken."""
_MOST_STEPS = 64
"""Of which the median is taken."""
_MOST_UNSEEN_SECONDS = 0.2
"""Between two looks: more is not counted, as this process was stopped or starved too."""
_STORAGE_FACTOR, _STORAGE_SECONDS = 10.0, 60.0


class SectionStamp:
    """A rank's own row."""

    def __init__(self, path: str = "", rank: int = 0):
        """Without a path, the row is nobody else's to see."""
        if path:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            memory = mmap.mmap(file, 0)
            os.close(file)
        else:
            memory = mmap.mmap(-1, (rank + 1) * _ROW * 8)
        self.row = memoryview(memory).cast("Q")[rank * _ROW : (rank + 1) * _ROW]
        self.is_held = False

    def begin(self, step: int) -> None:
        """Training goes on from a step."""
        self.row[2] = step
        self.row[0] += 1

    def look(self, kind: str) -> None:
        """An action begins."""
        if not self.is_held:
            self.row[1] = _CODES[kind]
        self.row[3] += 1
        self.row[0] += 1

    def end_step(self, steps_done: int) -> None:
        self.row[1], self.row[2], self.row[3] = _CODES["records"], steps_done, 0
        self.row[0] += 1

    @contextlib.contextmanager
    def within(self, section: str) -> Iterator[None]:
        """Actions inside belong to this section."""
        before, self.is_held = self.row[1], True
        self.row[1] = _CODES[section]
        self.row[0] += 1
        try:
            yield
        finally:
            self.row[1], self.is_held = before, False
            self.row[0] += 1


_CODES = {name: code for code, name in enumerate(SECTIONS)}
_CODES |= {kind: _CODES[kind.partition("_")[0]] for kind in ("backward_input", "backward_weight")}
_CODES |= {f"{way}_{kind}": _CODES[way] for way in ("send", "receive") for kind in ("forward", "backward")}
_CODES |= {"begin": _CODES["forward"]}


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A rank that shows no sign of life, and how it was found."""

    rank: int
    section: str
    step: int
    """That it was making; the first is 1."""
    seconds: float
    usual_seconds: float
    """Median of its steps; 0: not known yet."""
    is_stopped: bool = False

    def text(self) -> str:
        state = "was stopped by a signal (SIGSTOP) in" if self.is_stopped else "hangs in"
        usual = f" (a step takes {self.usual_seconds:.3g} s)" if self.usual_seconds else ""
        return f"{state} {self.section} of step {self.step}: no sign of life for {self.seconds:.1f} s{usual}"


@dataclass(kw_only=True)
class _RankRow:
    """A rank's row as it was at the last look."""

    count: int = 0
    section: str = "start"
    step: int = 0
    position: int = 0
    age: float = 0.0
    """Seconds without a stamp, as far as this process was awake."""
    since_step: float = 0.0
    first_step: int = -1


class HangWatch:
    """Watches the rows of all ranks of a launch."""

    def __init__(
        self, path: str, num_ranks: int, patience_seconds: float, first_rank: int = 0, *, has_others: bool = False
    ):
        """`patience_seconds`: without a sign of life, where no usual time is known; 0: no hang is ever found.
        `has_others`: there are ranks on other machines, which are watched there."""
        self.first_rank, self.elsewhere_seconds = first_rank, ELSEWHERE_SECONDS if has_others else 0.0
        os.truncate(path, num_ranks * _ROW * 8)
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.memory = mmap.mmap(file, 0)
        os.close(file)
        self.rows = memoryview(self.memory).cast("Q")
        self.seen = [_RankRow() for _ in range(num_ranks)]
        self.patience_seconds = patience_seconds
        self.steps: deque[float] = deque(maxlen=_MOST_STEPS)
        self.longest: dict[str, float] = {}
        """Seconds without a stamp, by section."""
        self.before = time.monotonic()

    @property
    def steps_done(self) -> int:
        """By the rank that is ahead."""
        return max((each.step - each.first_step for each in self.seen if each.first_step >= 0), default=0)

    def look(self, pids: Sequence[int]) -> Hang | None:
        """To be called often; `pids` by rank. The rank that hangs, if one does."""
        now = time.monotonic()
        passed, self.before = min(now - self.before, _MOST_UNSEEN_SECONDS), now
        for rank, seen in enumerate(self.seen):
            self._read(rank, seen, passed)
        if not self.patience_seconds:
            return None
        late = [rank for rank, seen in enumerate(self.seen) if seen.age > self._usual_limit()]
        if not late:
            return None
        states = {rank: process_state(pids[rank]) for rank in range(len(self.seen))}
        for rank in late:
            if self.seen[rank].age > self._limit(self.seen[rank], states[rank]):
                found = self._culprit(states)  # those that wait for it are late as well
                local = found.rank - self.first_rank
                if self.seen[local].age > self._limit(self.seen[local], states[local]):
                    return found
        return None

    def _read(self, rank: int, seen: _RankRow, passed: float) -> None:
        count, code, step, position = self.rows[rank * _ROW : (rank + 1) * _ROW]
        seen.since_step += passed
        if count == seen.count:
            seen.age += passed
            return
        if seen.step >= seen.first_step + _FIRST_STEPS or seen.section in _WIDE:
            self.longest[seen.section] = max(self.longest.get(seen.section, 0.0), seen.age)
        if step != seen.step:
            if seen.first_step >= 0 and step > seen.step >= seen.first_step + _FIRST_STEPS:
                self.steps.append(seen.since_step / (step - seen.step))
            seen.since_step = 0.0
        if seen.first_step < 0:
            seen.first_step = step
        seen.count, seen.section, seen.step, seen.position, seen.age = count, SECTIONS[code], step, position, 0.0

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.steps) if self.steps else 0.0

    def _usual_limit(self) -> float:
        return FACTOR * self.median_seconds + SLACK_SECONDS

    def _limit(self, seen: _RankRow, state: str) -> float:
        """How long a rank may be silent where it is."""
        usual = self._usual_limit()
        if state == "T":
            return usual
        if seen.section in _WAITS or state == "S":
            usual += self.elsewhere_seconds
        longest = self.longest.get(seen.section, 0.0)
        if seen.section in _WIDE and longest and seen.step > max(seen.first_step, 0):
            return max(usual, _STORAGE_SECONDS, _STORAGE_FACTOR * longest)
        # A process that waits for a disk (D) is not to blame.
        if not self.steps or seen.section in _UNBOUNDED or state == "D":
            return max(usual, self.patience_seconds)
        return max(usual, 1.5 * longest)

    def _culprit(self, states: dict[int, str]) -> Hang:
        """A stopped rank; else the one that is furthest behind of those that do not wait for others."""

        def blame(rank: int) -> tuple[bool, bool, bool, int, int]:
            seen, state = self.seen[rank], states[rank]
            return state != "T", seen.section in _WAITS, state != "R", seen.step, seen.position

        rank = min(range(len(self.seen)), key=blame)
        seen = self.seen[rank]
        return Hang(
            rank=self.first_rank + rank,
            section=seen.section,
            step=seen.step + 1,
            seconds=seen.age,
            usual_seconds=self.median_seconds,
            is_stopped=states[rank] == "T",
        )


def process_state(pid: int) -> str:
    """Of its main thread: R runs, S sleeps, D waits for a disk, T is stopped; empty where there is none."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
    return ""
