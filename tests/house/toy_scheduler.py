"""A scheduler outside the package that shares one machine between runs, through `meshwright`'s public names alone.

Runs are started in the order of their priority, `most_at_once` at a time. One that is needed no longer, or has had its
turn, is asked to stop: it saves, and goes on from there when it is started again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import meshwright as mw


@dataclass
class ScheduledRun:
    """A run file in the queue, and what is known of it."""

    file: Path
    changes: list[str] = field(default_factory=list)
    steps_in_a_turn: int | None = None
    """Steps after which it makes room for others; None: it runs to its end."""
    losses: dict[int, float] = field(default_factory=dict)
    results: list[mw.RunResult] = field(default_factory=list)
    errors: list[mw.MeshwrightError] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return bool(self.errors) or (bool(self.results) and not self.results[-1].is_stopped)


class Scheduler:
    """Takes turns with several runs until all are done."""

    def __init__(self, queue: Sequence[ScheduledRun], most_at_once: int = 2):
        self.queue, self.most_at_once = list(queue), most_at_once
        self.most_running = 0

    def turn(self) -> None:
        """Start the first few that are not done, and wait until each has ended or was stopped."""
        chosen = [scheduled for scheduled in self.queue if not scheduled.is_done][: self.most_at_once]
        runs = [(scheduled, mw.Run(scheduled.file, changes=scheduled.changes)) for scheduled in chosen]
        for _, run in runs:
            run.start()
        self.most_running = max(self.most_running, sum(run.is_running for _, run in runs))
        threads = [threading.Thread(target=self._follow, args=each) for each in runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _follow(self, scheduled: ScheduledRun, run: mw.Run) -> None:
        with run:
            made = 0
            for event in run.follow():
                if isinstance(event, mw.StepEvent):
                    scheduled.losses[event.step] = event.loss
                    made += 1
                if scheduled.steps_in_a_turn is not None and made == scheduled.steps_in_a_turn:
                    run.stop()
            try:
                scheduled.results.append(run.result())
            except mw.MeshwrightError as error:
                scheduled.errors.append(error)

    def run(self) -> None:
        while not all(scheduled.is_done for scheduled in self.queue):
            self.turn()
