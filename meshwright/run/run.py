"""A training run as a value: prepare it, start it, follow it, stop it, ask what came of it. No console, no torch.

    with Run("run.toml", changes=["train.steps=100"]) as run:
        run.prepare().forecast.step_seconds
        run.start()
        for event in run.follow():
            print(event)
        run.result().summary

The ranks are child processes, watched by a thread. Nothing is printed, no signal handler is set, and a process may
have several runs at once, each in its own folder.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from meshwright.checkpoint.memory_folder import CheckpointMemory, copies_in_memory
from meshwright.checkpoint.step_folders import list_steps, newest_good, read_manifest
from meshwright.core.codec import encode
from meshwright.core.errors import MeshwrightError, error_at, raise_problems
from meshwright.core.files import is_locked, json_rows
from meshwright.core.plan import Plan
from meshwright.core.time_ledger import note_time
from meshwright.data.open_data import Data
from meshwright.launch.environment import outside_launcher, restarts_so_far
from meshwright.launch.failure import cause
from meshwright.launch.guard import cause_of_restart, tell_guard
from meshwright.launch.local_ranks import LaunchOutcome, Standby, StopRequests, launch
from meshwright.launch.rank_job import PREEMPTED_EXIT_CODE
from meshwright.machine.probe import count_gpus
from meshwright.run import prepare as preparation
from meshwright.run.model import ModelDescription, describe_run
from meshwright.run.out_of_memory import PostMortem, examine, failure_of, smaller_microbatch
from meshwright.run.recovery import CRASH_LOOP_EXIT_CODE, Attempt, Remedy, remedy_for, without_progress
from meshwright.run.replanning import ChangeWatch, PlanChange, devices_left, fewer_ranks
from meshwright.run.result import RunResult, conclude, earlier_result
from meshwright.run.run_file import RunConfig, read_run
from meshwright.run.trackers import require_trackers

_POLL_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class StepEvent:
    """A training step was completed."""

    step: int
    """Counted from 1."""
    loss: float
    gradient_norm: float
    lr: float
    seconds: float
    per_second: float
    """Tokens per second, or samples if these have no sequence."""
    memory_bytes: int
    """Peak memory of rank 0 so far."""


@dataclass(frozen=True, kw_only=True)
class EvaluationEvent:
    """An evaluation on held-out data was completed."""

    step: int
    values: Mapping[str, float]
    """`held_out_loss`, and depending on the data `held_out_bits_per_byte` or `held_out_top1`."""


@dataclass(frozen=True, kw_only=True)
class SaveEvent:
    """A checkpoint was written."""

    step: int
    path: Path


@dataclass(frozen=True, kw_only=True)
class RestartEvent:
    """Ranks failed and were restarted; steps after this one are repeated."""

    step: int
    cause: str


@dataclass(frozen=True, kw_only=True)
class MessageEvent:
    """A message of rank 0 to the user."""

    step: int
    text: str


RunEvent = StepEvent | EvaluationEvent | SaveEvent | RestartEvent | MessageEvent


class Run:
    """A training run.

    Parameters
    ----------
    source
        A run file (TOML), or its content as a `RunConfig`.
    changes
        Keys of the file to change, as in `mw train --set`: `["train.steps=100"]`.
    plan
        A plan or its file. Default: the plan of an earlier start of this run, or the fastest plan that fits, found by a
        search.
    report
        Called with a line of text for each stage of the preparation. Default: no output.
    """

    def __init__(
        self,
        source: str | Path | RunConfig,
        *,
        changes: Sequence[str] = (),
        plan: str | Path | Plan = "",
        report: preparation.Report | None = None,
    ):
        self.config = read_run(source, changes)
        words = (word for change in changes for word in ("--set", change))
        self.command = ("mw", "train", self.config.origin.path or "RUN.toml", *words)
        """The command that starts this run."""
        self.plan = plan if isinstance(plan, Plan) else str(plan)
        self.folder = Path(self.config.run.folder)
        self.report: preparation.Report = report or (lambda text: None)
        self._stop = StopRequests()
        self._lock: IO[str] | None = None
        self._prepared: preparation.PreparedRun | None = None
        self._result: RunResult | None = None
        self._thread: threading.Thread | None = None
        self._was_finished = False
        """When it was started, so that there are no ranks to wait for."""
        self._outcome: LaunchOutcome | BaseException | None = None
        self.post_mortem: PostMortem | None = None
        """Of a step that ran out of memory."""
        self._left_out: list[int] = []
        """GPUs on which ranks have failed again and again."""

    @cached_property
    def description(self) -> ModelDescription:
        """The model, looked at once."""
        return describe_run(self.config)

    @cached_property
    def _given_plan(self) -> Plan | None:
        """The plan to use as it is. What keeps the run from starting here is raised before the folder is touched; first
        of all that somebody has it, as looking at the model may take long."""
        if self._lock is None and is_locked(self.folder):
            self.open()
        require_trackers(self.config.run.track)
        plan = preparation.plan_to_run(self.config, self.plan, self.description.profile)
        raise_problems(preparation.problems_here(self.config, plan))
        return plan

    def open(self, wait_seconds: float = 0.0) -> None:
        """Make the run's folder and lock it until the run is closed; a second owner is refused, after that long."""
        if self._lock is None:
            if restarts_so_far(os.environ) > 0:  # what was there before may still be saving
                wait_seconds = max(wait_seconds, preparation.REQUEUE_SECONDS)
            self._lock = preparation.open_folder(self.folder, wait_seconds, self.report)
            tell_guard(self.folder.absolute(), self.config.run.restarts)

    def note_start(self) -> None:
        """For the time ledger: from now on this run takes time."""
        if (died := cause_of_restart()) and self._thread is None:
            note_time(self.folder, "end", exit_code=1, cause=died)
        note_time(self.folder, "start", model=self.config.model.title, steps=self.config.train.steps)

    @property
    def is_finished(self) -> bool:
        """Whether its last step is in a checkpoint whose every byte is right, so that there is nothing left to do.

        Looked up each time: a run that is under way finishes.
        """
        _ = self._given_plan
        if self._thread is None and not self._was_finished:  # afterwards the folder may have been given back
            self.open()
        steps = list_steps(self.folder / "checkpoints")
        if not steps or steps[-1] < self.config.train.steps:
            return False
        newest = newest_good(self.folder / "checkpoints", report=lambda text: None)
        return newest is not None and read_manifest(newest).step >= self.config.train.steps

    def prepare(self, on_plan: Callable[[preparation.PreparedRun], object] | None = None) -> preparation.PreparedRun:
        """Determine the cluster and the plan, forecast it, and prepare the data. No ranks are started.

        `on_plan` is called with the plan before the data is prepared if it is known by then: preparing data may take
        hours.
        """
        if self._prepared is None:
            plan = self._given_plan
            self.open()
            self.note_start()
            # What is wrong with a plan is told before data is made ready; what is wrong with the data before a machine
            # is measured only to search.
            known = self.config.run.cluster or preparation.measured_before(self.config, self.config.run.ranks)
            if plan is None and not known:
                self._open_data()
            prepared = preparation.prepare(self.config, self.plan, self.report, None, self.description, self._open_data)
            if on_plan is not None:
                on_plan(prepared)
            self._open_data()
            self._prepared = prepared
        return self._prepared

    def _open_data(self) -> Data:
        data = preparation.open_data(self.config, self.description)
        self.config.train.require_tokenizer(data)
        return data

    def adopt(self, prepared: preparation.PreparedRun, *, is_start: bool = True) -> dict[str, Any]:
        """Write down what was decided, in the run's folder; what every rank is told."""
        self._prepared = prepared
        preparation.write_prepared(self.config, prepared, is_start=is_start)
        return {
            "config": encode(self.config),
            "description": encode(prepared.description),
            "plan": encode(prepared.plan),
            "device": prepared.cluster.device.kind,
            "tokens_per_second": prepared.forecast.tokens_per_second,
            "mfu": prepared.forecast.mfu,
            "promise": encode(preparation.promise_of(self.config, prepared)),
            "owner": preparation.owner_of(self.folder),
        }

    def start(self, *, stop: StopRequests | None = None, show: bool = False) -> Run:
        """Start the ranks and return. A finished run starts none.

        `show`: rank 0 writes its progress to stderr of this process instead of its log. `stop`: an object through which
        others request a stop (the signals of a command).
        """
        if self._thread is not None:
            raise MeshwrightError("this run was started before; make another Run of the same file to resume it.")
        if (place := outside_launcher(os.environ)) is not None:
            what = f"this process is rank {place.rank} of {place.num_ranks} of {place.kind}; a Run starts ranks itself."
            fix = f"Start `mw train` by {place.kind}, or this program without it."
            raise error_at("Run", what, fix)
        if self.config.run.hosts:
            raise error_at("run.hosts", "is for the command.", "Start `mw train` on each host, or leave it out.")
        self._stop = stop or self._stop
        self.open()
        self._was_finished = self.is_finished
        if not self._was_finished:
            arguments = self.adopt(self.prepare())
            self._thread = threading.Thread(
                target=self._launch, args=(arguments, show), name=f"run {self.folder}", daemon=True
            )
            self._thread.start()
        return self

    def _launch(self, arguments: Mapping[str, Any], show: bool) -> None:
        """By a thread that outlives the ranks: they die with the thread that started them."""
        try:
            with CheckpointMemory() as memory:
                with Standby() as standby:
                    outcome = self._launch_with(standby if self.config.run.standby else None, memory, arguments, show)
                saved, copies = list_steps(self.folder / "checkpoints"), copies_in_memory(memory.folders)
                for step, copy in copies.items() if outcome.exit_code and not self._stop.is_urgent else ():
                    if saved and step <= saved[-1]:
                        break
                    try:
                        preparation.require_owner(self.folder, str(arguments.get("owner", "")))
                        copy.write_to_disk(self.folder / "checkpoints")
                        self.report(f"The copy of step {step} in memory was written to disk.")
                        break
                    except MeshwrightError as error:
                        self.report(f"The copy of step {step} in memory was not written to disk: {error}")
            self._outcome = outcome
        except BaseException as error:  # told by `result`, where somebody listens
            self._outcome = error
            note_time(self.folder, "end", exit_code=1, cause=str(error))

    def _launch_with(
        self, standby: Standby | None, memory: CheckpointMemory, arguments: Mapping[str, Any], show: bool
    ) -> LaunchOutcome:
        """Launch all ranks, again after failures that this may cure."""
        settings, attempts = self.config.run, list[Attempt]()
        while True:
            assert self._prepared is not None
            stop, made, steps = StopRequests(self._stop), self._prepared, list_steps(self.folder / "checkpoints")
            if self.config.train.memory_save_seconds:
                arguments = {**arguments, "memory": memory.fit(made.plan.num_ranks)}
            with ChangeWatch(self.config, made, stop, self.report, steps[-1] if steps else 0) as watch:
                outcome = launch(
                    "meshwright.runtime.rank",
                    arguments,
                    made.plan.num_ranks,
                    log_folder=self.folder / "logs",
                    grace_seconds=settings.grace_seconds,
                    environment={"KINETO_LOG_LEVEL": "9", **devices_left(self._left_out)},  # the profiler's own chatter
                    show_rank_zero=show,
                    stop=stop,
                    patience_seconds=60 * settings.patience_minutes,
                    standby=standby,
                )
            self.post_mortem = None
            if outcome.exit_code == 1:
                self.examine_memory([failure.facts for failure in outcome.failures])
            saved = list_steps(self.folder / "checkpoints")
            copied_step = max(copies_in_memory(memory.folders), default=-1)
            attempts.append(Attempt(outcome=outcome, saved_step=saved[-1] if saved else -1, copied_step=copied_step))
            is_stopped = self._stop.first_seconds < math.inf
            remedy = remedy_for(attempts, restarts=settings.restarts, is_stopped=is_stopped)
            change = None if is_stopped else self._change_after(attempts, remedy, watch)
            if remedy.action == "give up" and change is None:
                outcome = replace(outcome, exit_code=remedy.exit_code, advice=remedy.why)
            about = {"exit_code": outcome.exit_code, "cause": outcome.message() if change is None else change.why}
            note_time(self.folder, "end", **about, noticed_monotonic=outcome.noticed_seconds)
            if change is not None:
                self.report(change.why)
                self.note_start()
                attempts.clear()
                told = self.adopt(change.prepared, is_start=False)
                since = outcome.noticed_seconds or stop.first_seconds
                arguments = {**told, "restart": change.why, "changed_since": since}
                continue
            if remedy.action == "give up":
                return outcome
            self.report(remedy.why)
            self._stop.wait(remedy.pause_seconds)
            self.note_start()
            arguments = {**arguments, "restart": remedy.why, "changed_since": 0.0}

    def _change_after(self, attempts: Sequence[Attempt], remedy: Remedy, watch: ChangeWatch) -> PlanChange | None:
        """The plan to go on with in place of this one: it was asked for, or ranks cannot go on with this one."""
        assert self._prepared is not None
        config, made, outcome = self.config, self._prepared, attempts[-1].outcome
        if watch.change is not None and (outcome.exit_code == PREEMPTED_EXIT_CODE or remedy.action == "restart"):
            return watch.change
        if self.post_mortem is not None and config.run.on_oom == "retry":
            usable = self.post_mortem.usable_bytes
            smaller = smaller_microbatch(config, made.profile, made.cluster, made.plan, usable)
            if smaller is not None:
                why = f"Going on in microbatches of {smaller.plan.microbatch} in place of {made.plan.microbatch}"
                prepared = replace(made, plan=smaller.plan, forecast=smaller.forecast, found=None)
                return PlanChange(prepared=prepared, why=why)
        recent = without_progress(attempts)
        failing = {cause(each.outcome.failures).rank for each in recent if each.outcome.failures}
        if config.run.elastic and remedy.exit_code == CRASH_LOOP_EXIT_CODE and len(failing) == 1:
            if made.cluster.device.kind == "cuda":
                here = [each for each in range(count_gpus()) if each not in self._left_out]
                self._left_out.append(here[failing.pop()])
            return fewer_ranks(config, made, self.report)
        return None

    def examine_memory(self, facts: Iterable[Mapping[str, Any]]) -> PostMortem | None:
        """Where a rank ran out of memory: why, and what would need less; `facts`: of the ranks' errors."""
        assert self._prepared is not None
        for failure in filter(None, map(failure_of, facts)):
            made, plan = self._prepared, self._prepared.plan
            self.post_mortem = examine(self.config, made.profile, made.cluster, plan, failure, self.command)
            for line in self.post_mortem.text().splitlines():
                self.report(line)
            return self.post_mortem
        return None

    @property
    def steps_made(self) -> int:
        """By the latest ranks, once they have ended."""
        return self._outcome.steps if isinstance(self._outcome, LaunchOutcome) else 0

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def follow(self) -> Iterator[RunEvent]:
        """Iterate over all events of this start, across restarts, until the ranks end."""
        events, metrics = _Tail(self.folder / "events.jsonl"), _Tail(self.folder / "metrics.jsonl")
        has_begun = False
        while self._thread is not None:
            is_over = not self._thread.is_alive()
            told = events.rows()  # first: a start is noted before its first step
            while told:
                count = next((i for i, row in enumerate(told) if row["event"] == "start"), len(told))
                before, start, told = told[:count], told[count : count + 1], told[count + 1 :]
                # Until a start is noted, metrics may still hold steps that will be made again.
                end = start[0]["metrics_bytes"] if start else None
                yield from _events([*before, *(metrics.rows(end) if has_begun else [])])
                if start:
                    metrics.position, has_begun = start[0]["metrics_bytes"], True
                    yield from _events(start)
            yield from _events(metrics.rows() if has_begun else [])
            if is_over:
                return
            self._thread.join(_POLL_SECONDS)

    def stop(self, *, now: bool = False) -> None:
        """Ask the ranks to finish their step, save and end, as SIGTERM does; `now`: kill them instead."""
        self._stop.request(is_urgent=now)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait at most `seconds` for the ranks to end; return whether they have."""
        if self._thread is not None:
            self._thread.join(seconds)
        return not self.is_running

    def result(self) -> RunResult:
        """Wait for the end and return the result. If a rank failed, raise an error with the cause."""
        if self._result is None:
            self.wait()
            outcome = self._outcome
            if isinstance(outcome, BaseException):
                self.close()
                raise outcome
            if self._thread is None:
                if not self._was_finished and not self.is_finished:
                    raise MeshwrightError("this run was not started.")
                self._result = earlier_result(self.folder, self.config.train.steps)
            else:
                assert isinstance(outcome, LaunchOutcome)
                if outcome.exit_code not in (0, PREEMPTED_EXIT_CODE):
                    self.close()
                    raise MeshwrightError(outcome.message(), outcome.exit_code)
                self._result = self.conclude(outcome.exit_code)
            self.close()
        return self._result

    def conclude(self, exit_code: int) -> RunResult:
        """Compare what the ranks have left with the forecast."""
        assert self._prepared is not None
        return conclude(self.config, self._prepared, exit_code)

    def close(self) -> None:
        """Stop the ranks if they are running, and unlock the folder."""
        if self.is_running:
            self.stop()
            self.wait()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Run({self.config.model.title!r}, folder={str(self.folder)!r})"


class _Tail:
    """The whole lines that were added to a file of JSON lines since the last look."""

    def __init__(self, path: Path):
        self.path, self.position = path, 0

    def rows(self, end: int | None = None) -> list[dict[str, Any]]:
        """Up to byte `end`, or to the last there is."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.position)
                data = file.read() if end is None else file.read(max(0, end - self.position))
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self.position += len(whole)
        return [row for row in json_rows(whole) if isinstance(row.get("step"), int)]


def _events(rows: Sequence[dict[str, Any]]) -> Iterator[RunEvent]:
    """Of lines of events.jsonl or metrics.jsonl; nothing of what nobody waits for."""
    for row in sorted(rows, key=lambda row: int(row["step"])):
        if row.get("event") == "message":
            yield MessageEvent(step=row["step"], text=row["text"])
        elif row.get("event") == "start" and row.get("cause"):
            yield RestartEvent(step=row["step"], cause=row["cause"])
        elif row.get("event") == "save":
            yield SaveEvent(step=row["step"], path=Path(row["path"]))
        elif "held_out_loss" in row:
            yield EvaluationEvent(step=row["step"], values={name: row[name] for name in row if name != "step"})
        elif "loss" in row:
            names = ("step", "loss", "gradient_norm", "lr", "seconds", "memory_bytes")
            rate = next(row[name] for name in ("tokens_per_second", "samples_per_second") if name in row)
            yield StepEvent(per_second=rate, **{name: row[name] for name in names})
