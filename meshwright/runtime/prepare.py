"""From a run file to a plan with its forecast: everything decided before a process starts. No torch."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from meshwright.core.cluster import Cluster
from meshwright.core.codec import encode, load_artefact
from meshwright.core.errors import MeshwrightError, Problem
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.data.source import Data
from meshwright.data.source import open_data as open_files
from meshwright.probe.here import machine_name
from meshwright.runtime.config import RunConfig
from meshwright.runtime.model import describe, fitting
from meshwright.search.search import Found, search
from meshwright.simulate.forecast import Forecast, forecast
from meshwright.simulate.timeline import simulate

Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    profile: Profile
    cluster: Cluster
    plan: Plan
    forecast: Forecast
    found: Found | None
    """How the search went; None for a plan that was given."""


def prepare(config: RunConfig, plan_file: str, report: Report, geometry: tuple[int, int] | None = None) -> Prepared:
    """Find the machine, then the plan. What an earlier start of this run decided is kept while it still holds.

    `geometry`: (devices in a node, nodes) where somebody else has already started the ranks.
    """
    profile = describe(config.model, config.data.sequence).profile
    cluster = _cluster(config, report, geometry)
    found = None
    plan = load_plan(config, plan_file, cluster) or _earlier(config, profile, cluster)
    if plan is None:
        found = _search(config, profile, cluster)
        assert found.best is not None
        plan = found.best[0]
    problems = config.train.optimizer.problems_with(plan)
    if problems:
        raise MeshwrightError([replace(problem, where=f"train.{problem.where}") for problem in problems])
    predicted = forecast(profile, plan, cluster, sequence=config.sequence, optimizer=config.train.optimizer)
    return Prepared(profile=profile, cluster=cluster, plan=plan, forecast=predicted, found=found)


def load_plan(config: RunConfig, plan_file: str, cluster: Cluster | None = None) -> Plan | None:
    """The plan a user gave, if any, checked against the run (and the machines)."""
    plan_file = plan_file or config.plan.file
    if not plan_file:
        return None
    plan = load_artefact(Plan, plan_file)
    profile = describe(config.model, config.data.sequence).profile
    problems = list(plan.check(profile, cluster) or plan.check_sequence(config.sequence))
    if plan.batch != config.train.batch:
        what = f"the plan is for {plan.batch} samples, train.batch is {config.train.batch}."
        problems.append(Problem(where="batch", what=what, fix="Plan again, or change train.batch."))
    if problems:
        raise MeshwrightError([Problem(where=f"{plan_file}: {p.where}", what=p.what, fix=p.fix) for p in problems])
    return plan


def open_data(config: RunConfig, cache: Path | None = None) -> Data:
    """The run's data, made ready in its folder the first time and mapped from there afterwards."""
    data = open_files(config.data, cache=cache or Path(config.run.folder) / "data")
    fitting(describe(config.model, config.data.sequence), data)
    return data


def _cluster(config: RunConfig, report: Report, geometry: tuple[int, int] | None) -> Cluster:
    from meshwright.probe.machine import probe
    from meshwright.probe.names import cluster
    from meshwright.probe.plausible import warnings_of

    ranks = config.run.ranks
    if config.run.cluster:
        named = cluster(config.run.cluster)
        for line in warnings_of(named):
            report(f"warning: {config.run.cluster}: {line}")
        if geometry is not None:
            return named.resized(*geometry)
        return named.resized(ranks) if ranks and ranks != named.num_devices else named
    known = Path(config.run.folder) / "cluster.json"
    if known.exists():
        earlier = load_artefact(Cluster, known)
        is_same = earlier.sources.get("machine") == machine_name()
        if is_same and (not ranks or earlier.num_devices == ranks):
            return earlier
    report("measuring this machine")
    measured = probe(num_devices=ranks or None, report=report, quick=True)
    return replace(measured, sources={**measured.sources, "machine": machine_name()})


def wishes_of(config: RunConfig) -> dict[str, Any]:
    return {"allow": config.plan.allow, "pin": list(config.plan.pin), "ban": list(config.plan.ban)}


def _earlier(config: RunConfig, profile: Profile, cluster: Cluster) -> Plan | None:
    """The plan this run has used so far, if it still fits the batch, the machine and what the user asks for."""
    folder = Path(config.run.folder)
    if not (folder / "plan.json").exists() or not (folder / "wishes.json").exists():
        return None
    if json.loads((folder / "wishes.json").read_text(encoding="utf-8")) != wishes_of(config):
        return None
    plan = load_artefact(Plan, folder / "plan.json")
    is_same = plan.batch == config.train.batch and plan.num_ranks == cluster.num_devices
    problems = plan.check(profile, cluster) or plan.check_sequence(config.sequence)
    return plan if is_same and not problems else None


def write_prepared(config: RunConfig, prepared: Prepared) -> None:
    """Every artefact between two stages lies in the folder, to be read, edited and used again."""
    folder = Path(config.run.folder)
    timeline = simulate(
        prepared.profile,
        prepared.plan,
        prepared.cluster,
        sequence=config.sequence,
        optimizer=config.train.optimizer,
    )
    for name in ("result.json", "measured.timeline.json", "measured.trace.json", "timeline.svg"):
        (folder / name).unlink(missing_ok=True)  # of an earlier start
    texts = {
        "cluster.json": prepared.cluster.to_json(),
        "plan.json": prepared.plan.to_json(),
        "wishes.json": json.dumps(wishes_of(config)),
        "forecast.json": json.dumps(encode(prepared.forecast), indent=1),
        "predicted.timeline.json": timeline.to_json(),
        "predicted.trace.json": timeline.to_chrome(),
    }
    for name, text in texts.items():
        temporary = folder / f"{name}.tmp"
        temporary.write_text(text + "\n", encoding="utf-8")
        os.replace(temporary, folder / name)


def job_arguments(config: RunConfig, prepared: Prepared) -> dict[str, Any]:
    """What every rank is told."""
    return {
        "config": encode(config),
        "plan": encode(prepared.plan),
        "device": prepared.cluster.device.kind,
        "tokens_per_second": prepared.forecast.tokens_per_second,
    }


def _search(config: RunConfig, profile: Profile, cluster: Cluster) -> Found:
    found = search(
        profile,
        cluster,
        batch=config.train.batch,
        sequence=config.sequence,
        optimizer=config.train.optimizer,
        allow=config.plan.allow,
        pin=config.plan.pin,
        ban=config.plan.ban,
    )
    if found.best is None:
        from meshwright.search.explain import explain

        raise MeshwrightError("no plan fits.\n" + "\n".join(explain(found, cluster)), exit_code=1)
    return found


def open_folder(folder: Path) -> IO[str]:
    """Make the run folder and lock it for this process. The lock goes when the process does."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe_file = folder / ".write-test"
        probe_file.write_bytes(b"x" * 4096)
        probe_file.unlink()
        lock = open(folder / ".lock", "a+", encoding="utf-8")  # noqa: SIM115 (held as long as the run)
    except OSError as error:
        what = f"cannot write there: {error.strerror}."
        raise MeshwrightError([Problem(where=f"run.folder {folder}", what=what)]) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        owner = lock.read().strip() or "another process"
        what = f"is in use by {owner}."
        raise MeshwrightError(
            [Problem(where=f"run.folder {folder}", what=what, fix="Stop it, or choose another folder.")]
        ) from None
    lock.seek(0)
    lock.truncate()
    lock.write(f"process {os.getpid()}")
    lock.flush()
    return lock
