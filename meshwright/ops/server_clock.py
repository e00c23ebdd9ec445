"""Which gradients a parameter server uses, and when a worker may go on: decisions without a tensor or a socket.

Workers count their gradients: the c-th one of each belongs to clock c.

    sync, ssp:  the update of clock c is made of the gradients of clock c, once n - backups of them have come, and after
                that of clock c - 1; a gradient that comes later is dropped. A worker begins clock c + 1 as soon as
                c - staleness clocks are complete (SSP: Ho et al. 2013): nobody is ever more than `staleness` clocks
                ahead of the slowest one that counts. sync is a staleness of 0.
    async:      each gradient is an update of its own, in the order of arrival, and nobody waits.

What all workers must do together (stop, save) is due at one clock, which nobody has left when it is chosen: the latest
that a worker has begun.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

SAVE, STOP, NOT_FINITE = 1, 2, 4


class Update(NamedTuple):
    """The gradients of these workers, of one clock, are one update."""

    clock: int
    workers: tuple[int, ...]
    """In rising order, so that sums do not depend on who came first."""
    staleness: tuple[int, ...]
    """Of each, the updates made since it pulled the weights that its gradient is of."""


class Drop(NamedTuple):
    """A gradient is not used."""

    worker: int
    clock: int


class Release(NamedTuple):
    """A worker may begin the next clock."""

    worker: int
    clock: int
    """That it has ended."""
    asked: int
    """What is due at this clock: STOP, SAVE or NOT_FINITE, or several of them."""
    is_busy: bool
    has_weights: bool
    """The newest weights go with it; not to a worker that is late, and leaves its next steps out."""
    complete: int
    """Clocks whose update was made."""


Decision = Update | Drop | Release


@dataclass(kw_only=True)
class ServerClock:
    workers: int
    staleness: int | None = 0
    """None: nobody waits."""
    backups: int = 0
    pushed: list[int] = field(init=False)
    """The last clock that each worker has ended."""
    released: list[int] = field(init=False)
    pulled: list[int] = field(init=False)
    """The version of the weights that each has."""
    bases: dict[tuple[int, int], int] = field(default_factory=dict)
    """(worker, clock) -> the version that its gradient is of, until it is used."""
    complete: int = 0
    version: int = 0
    """Updates made."""
    arrived: dict[int, list[int]] = field(default_factory=dict)
    """Clock -> workers whose gradients wait for its update."""
    absent: Counter[int] = field(default_factory=Counter)
    """Clock -> gradients that came and cannot be used."""
    asked: dict[int, int] = field(default_factory=dict)
    busy: list[bool] = field(init=False)
    is_free: set[int] = field(default_factory=set)
    """Clocks that were chosen as nobody was busy."""
    gaps: Counter[int] = field(default_factory=Counter)
    """Clocks that a worker was ahead of the slowest one as it began one."""
    ages: Counter[int] = field(default_factory=Counter)
    """Updates between a gradient's weights and its use."""
    dropped: int = 0
    """Gradients that came too late or were not finite, and steps that were left out."""

    def __post_init__(self) -> None:
        self.pushed, self.released, self.pulled = ([0] * self.workers for _ in range(3))
        self.busy = [False] * self.workers

    def push(self, worker: int, *, is_idle: bool = False, asked: int = 0, is_busy: bool = False) -> Iterator[Decision]:
        """A worker has ended its next clock. `is_idle`: it is late, and has no gradient; `asked`: as in `Release`."""
        clock = self.pushed[worker] = self.pushed[worker] + 1
        assert clock == self.released[worker] + 1, "a worker goes on only when it is released"
        latest = max(self.released) + 1
        is_usable = not asked & NOT_FINITE
        for due, flags in self.asked.items():
            asked &= ~flags if due >= clock else -1  # it asks until it is told
        if asked:
            self.asked[latest] = self.asked.get(latest, 0) | asked
        self.busy[worker] = is_busy
        if not any(self.busy):
            self.is_free.add(latest)
        is_late = self.staleness is not None and clock <= self.complete
        self.bases[worker, clock] = self.pulled[worker]
        if is_late or not is_usable:
            del self.bases[worker, clock]
            self.dropped += 1
            self.absent.update([] if is_late else [clock])
            if not is_idle:
                yield Drop(worker, clock)
        elif self.staleness is None:
            yield self._update(clock, (worker,))
        else:
            self.arrived.setdefault(clock, []).append(worker)
        while self.staleness is not None:
            due = self.complete + 1
            chosen = self.arrived.get(due, [])
            if len(chosen) + self.absent[due] < self.workers - self.backups:
                break
            self.complete = due
            self.arrived.pop(due, None)
            del self.absent[due]
            if chosen:
                yield self._update(due, tuple(sorted(chosen)))
        yield from self.release()

    def _update(self, clock: int, workers: tuple[int, ...]) -> Update:
        ages = tuple(self.version - self.bases.pop((worker, clock)) for worker in workers)
        self.ages.update(ages)
        self.version += 1
        return Update(clock, workers, ages)

    def release(self) -> Iterator[Release]:
        """Those that need not wait any more."""
        for worker, clock in enumerate(self.pushed):
            is_waiting = clock > self.released[worker]
            if not is_waiting or (self.staleness is not None and clock - self.complete > self.staleness):
                continue
            self.released[worker] = clock
            ahead = clock - (min(self.pushed) if self.staleness is None else self.complete)
            self.gaps[max(ahead, 0)] += 1
            has_weights = self.staleness is None or clock >= self.complete
            if has_weights:
                self.pulled[worker] = self.version
            asked, is_busy = self.asked.get(clock, 0), clock not in self.is_free
            yield Release(worker, clock, asked, is_busy, has_weights, self.complete)
        oldest = min(self.released)
        self.asked = {clock: asked for clock, asked in self.asked.items() if clock > oldest}
        self.is_free = {clock for clock in self.is_free if clock > oldest}

    def note_pull(self, worker: int) -> None:
        """A worker has been sent the weights beside its steps."""
        self.pulled[worker] = self.version

    @property
    def waiting(self) -> list[int]:
        """Workers that wait for others."""
        return [worker for worker, clock in enumerate(self.pushed) if clock > self.released[worker]]

    def figures(self) -> dict[str, float]:
        """What is recorded: histograms of gaps and ages so far, the largest in their last entry."""
        result: dict[str, float] = {"dropped_gradients": float(self.dropped)}
        for name, counts in (("clock_gap", self.gaps), ("staleness", self.ages)):
            total = sum(counts.values())
            result[f"{name}_mean"] = sum(value * count for value, count in counts.items()) / max(total, 1)
            result |= {f"{name}_{value}": float(counts[value]) for value in sorted(counts)}
        return result
