"""`mw replan`: another plan for a run, now or at its next start."""

from __future__ import annotations

import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from meshwright.checkpoint.step_folders import list_steps
from meshwright.core.cluster import Cluster
from meshwright.core.codec import load_artefact
from meshwright.core.errors import error_at
from meshwright.core.files import is_locked
from meshwright.core.plan import Plan
from meshwright.core.units import pretty_seconds
from meshwright.report.terminal import print_forecast, progress, stdout
from meshwright.run.model import describe_run
from meshwright.run.prepare import open_folder, write_prepared
from meshwright.run.replanning import REQUEST, PlanChange, leave_request, reason, search_again
from meshwright.run.replay import config_of_run

_WAIT_SECONDS = 30.0
"""For the run to take the request."""


def run(arguments: Namespace) -> int:
    if arguments.ranks < 0:
        raise error_at("--ranks", f"is {arguments.ranks}.", "Use at least 1.")
    console, config = stdout(), config_of_run(arguments.run)
    folder = Path(config.run.folder)
    plan, cluster = load_artefact(Plan, folder / "plan.json"), load_artefact(Cluster, folder / "cluster.json")
    found = search_again(
        config,
        describe_run(config),
        plan,
        cluster,
        given=arguments.plan,
        pin=arguments.pin,
        ban=arguments.ban,
        num_ranks=arguments.ranks or plan.num_ranks,
        report=progress,
    )
    for line in found.learned:
        console.print(line, markup=False)
    print_forecast(console, found.prepared.plan, found.prepared.forecast, "the plan")
    now = pretty_seconds(found.current_forecast.step_seconds)
    console.print(f"the plan there is, {plan}: {now} a step by the same figures", markup=False)
    is_wanted = bool(arguments.plan or arguments.pin or arguments.ban or arguments.ranks)
    steps_left = config.train.steps - max(list_steps(folder / "checkpoints"), default=0)
    if found.prepared.plan == plan or not (is_wanted or found.is_worth(steps_left)):
        console.print("no plan is clearly better: nothing is changed")
        return 0
    if is_locked(folder):
        leave_request(folder, PlanChange(prepared=found.prepared, why=reason(found)))
        end = time.monotonic() + _WAIT_SECONDS
        while (folder / REQUEST).exists() and time.monotonic() < end:
            time.sleep(0.1)
        is_taken = not (folder / REQUEST).exists()
        told = "the run saves and goes on with it" if is_taken else "the run has not taken it yet"
        console.print(f"{told} ({folder / 'events.jsonl'} says what becomes of it)", markup=False)
        return 0
    with open_folder(folder):
        write_prepared(replace(config, plan=replace(config.plan, file="")), found.prepared, is_start=False)
    console.print("the next start of the run uses it, unless it is given another (--plan, plan.file)", markup=False)
    return 0
