"""Another plan for a run: asked for, found because steps are slow, or needed because less is left. No torch.

`mw replan` leaves a request in the folder of a run that is under way. The run's process stops the ranks as SIGTERM
does, so that they save, and starts them with the new plan. Batch and data order stay; any plan reads the checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.core.cluster import Cluster
from meshwright.core.codec import decode, encode
from meshwright.core.errors import MeshwrightError, error_at
from meshwright.core.files import json_rows, last_lines, write_whole
from meshwright.core.plan import Plan
from meshwright.core.units import counted, pretty_seconds
from meshwright.launch.local_ranks import StopRequests
from meshwright.machine.probe import count_gpus
from meshwright.planner.scoreboard import ScoredPlan
from meshwright.run.learned_cluster import cluster_from_run
from meshwright.run.model import ModelDescription
from meshwright.run.prepare import PreparedRun, Report, prepare
from meshwright.run.run_file import RunConfig
from meshwright.simulator.forecast import Forecast, forecast

REQUEST = "replan.json"
"""In a run's folder, until the run has taken it."""
_MOST_BYTES = 1 << 22
LEAST_GAIN = 0.05
"""Of a step, by which another plan must be faster to be clearly better."""
_LEAST_SAVED_SECONDS = 60.0
"""Over the steps that are left: a change of plan itself takes about as long as a start."""
_LOOK_SECONDS, _SLOW_SECONDS = 0.2, 5.0
"""Between two looks for a request, and at the seconds of steps."""
_WINDOW_STEPS = 20
"""Both halves of so many steps must be slow, and as many come before them."""


@dataclass(frozen=True, kw_only=True)
class PlanChange:
    prepared: PreparedRun
    why: str


@dataclass(frozen=True, kw_only=True)
class Replanned:
    """What a search says now, beside the plan there is."""

    prepared: PreparedRun
    current: Plan
    current_forecast: Forecast
    """On the same cluster."""
    learned: tuple[str, ...]
    """What the run has taught about its cluster."""

    def is_worth(self, steps_left: int) -> bool:
        """By the seconds for what a step teaches that sums every gradient."""
        now, then = (
            ScoredPlan(plan, expected).seconds_to_target
            for plan, expected in (
                (self.current, self.current_forecast),
                (self.prepared.plan, self.prepared.forecast),
            )
        )
        return 1 - then / now >= LEAST_GAIN and (now - then) * steps_left >= _LEAST_SAVED_SECONDS


def search_again(
    config: RunConfig,
    description: ModelDescription,
    current: Plan,
    cluster: Cluster,
    *,
    given: str | Plan = "",
    pin: Sequence[str] = (),
    ban: Sequence[str] = (),
    num_ranks: int = 0,
    report: Report = lambda text: None,
) -> Replanned:
    """Plan anew, with what the run has measured. `given`: a plan in place of a search; `num_ranks`: so many of the
    cluster's devices."""
    learned: list[str] = []
    with contextlib.suppress(MeshwrightError):  # too few steps were measured, or on other devices
        cluster, learned = cluster_from_run(config.run.folder, cluster)
    about: dict[str, Any] = {"sequence": config.sequence, "optimizer": config.train.optimizer}
    before = forecast(description.profile, current, cluster, **about)
    cluster = cluster.resized(num_ranks) if num_ranks and num_ranks != cluster.num_devices else cluster
    wishes = replace(config.plan, file="", pin=(*config.plan.pin, *pin), ban=(*config.plan.ban, *ban))
    made = prepare(replace(config, plan=wishes), given, report, None, description, on=cluster)
    return Replanned(prepared=made, current=current, current_forecast=before, learned=tuple(learned))


def fewer_ranks(config: RunConfig, prepared: PreparedRun, report: Report) -> PlanChange | None:
    """A plan for one rank less, or for as many as any plan can use; None where there is none."""
    num_ranks, description = prepared.plan.num_ranks, prepared.description
    for left in range(num_ranks - 1, config.run.min_ranks - 1, -1):
        with contextlib.suppress(MeshwrightError):
            asked = replace(config, plan=replace(config.plan, file=""))
            made = prepare(asked, "", report, None, description, on=prepared.cluster.resized(left))
            return PlanChange(prepared=made, why=f"Going on with {counted(left, 'rank')} in place of {num_ranks}")
    return None


def devices_left(left_out: Sequence[int]) -> dict[str, str]:
    """The environment of ranks that do not see some of the GPUs."""
    if not left_out:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else list(map(str, range(count_gpus())))
    return {"CUDA_VISIBLE_DEVICES": ",".join(name for i, name in enumerate(names) if i not in left_out)}


def leave_request(folder: Path, change: PlanChange) -> None:
    told = {"plan": encode(change.prepared.plan), "cluster": encode(change.prepared.cluster), "why": change.why}
    write_whole(folder / REQUEST, json.dumps(told))


def take_request(config: RunConfig, description: ModelDescription, report: Report) -> PlanChange | None:
    """What somebody has asked for, if it can be: a plain file of this user's, and a plan that the run may use."""
    path = Path(config.run.folder) / REQUEST
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        path.unlink(missing_ok=True)
        report(f"{path} is not followed: {error.strerror}")
        return None
    with os.fdopen(file, "rb") as stream:
        about = os.fstat(file)
        is_ours = stat.S_ISREG(about.st_mode) and about.st_uid in (0, os.geteuid()) and about.st_size <= _MOST_BYTES
        data = stream.read() if is_ours else b""
    path.unlink(missing_ok=True)
    try:
        if not is_ours:
            raise error_at(path, "is not a plain file of this user's.")
        told = json.loads(data)
        plan, cluster = decode(Plan, told["plan"], "plan"), decode(Cluster, told["cluster"], "cluster")
        made = prepare(config, plan, report, None, description, on=cluster)
        return PlanChange(prepared=made, why=str(told["why"]))
    except (MeshwrightError, ValueError, TypeError, KeyError, RecursionError) as error:
        report(f"the plan that was asked for is not used: {error}")
        return None


_TAIL_BYTES = 1 << 16
"""Of the metrics: more than the steps that are looked at."""


def is_slow(folder: Path, prepared: PreparedRun, first_step: int) -> bool:
    """Whether steps since `first_step` take steadily longer than the interval of their forecast."""
    seconds = []
    with contextlib.suppress(OSError):
        for row in json_rows(last_lines(folder / "metrics.jsonl", _TAIL_BYTES)):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                seconds += [float(row["seconds"])] if row["step"] > first_step else []
    half, most = _WINDOW_STEPS // 2, prepared.forecast.step_seconds_high
    if len(seconds) < 2 * _WINDOW_STEPS:
        return False
    recent = seconds[-_WINDOW_STEPS:]
    return statistics.median(recent[:half]) > most and statistics.median(recent[half:]) > most


def reason(found: Replanned) -> str:
    now, then = found.current_forecast.step_seconds, found.prepared.forecast.step_seconds
    return f"Changing to {found.prepared.plan}: {pretty_seconds(then)} a step in place of {pretty_seconds(now)}"


class ChangeWatch:
    """While ranks run, a thread that looks for another plan, asked for or found, and stops the ranks for it."""

    def __init__(self, config: RunConfig, prepared: PreparedRun, stop: StopRequests, report: Report, first_step: int):
        self.config, self.prepared, self.stop, self.report = config, prepared, stop, report
        self.first_step = first_step
        self.change: PlanChange | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="plan changes", daemon=True)

    def __enter__(self) -> ChangeWatch:
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        next_seconds, searches = 0.0, self.config.run.replan == "when_slow"
        while self.change is None and not self._is_over.wait(_LOOK_SECONDS):
            self.change = take_request(self.config, self.prepared.description, self.report)
            if self.change is None and searches and time.monotonic() >= next_seconds:
                next_seconds = time.monotonic() + _SLOW_SECONDS
                if is_slow(Path(self.config.run.folder), self.prepared, self.first_step):
                    searches = False  # what was found once is not searched for again
                    self.change = self._faster()
        if self.change is not None:
            self.stop.request()

    def _faster(self) -> PlanChange | None:
        made, config = self.prepared, self.config
        try:
            found = search_again(config, made.description, made.plan, made.cluster)
            steps_left = config.train.steps - self.first_step
            if found.prepared.plan != made.plan and found.is_worth(steps_left):
                return PlanChange(prepared=found.prepared, why=reason(found))
            self.report("steps take longer than forecast; by what was measured no other plan is clearly faster")
        except MeshwrightError as error:
            self.report(f"steps take longer than forecast, and no other plan was found: {error}")
        return None
