"""From a run file to a plan with its forecast: everything decided before a process starts. No torch."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from meshwright.core.cluster import Cluster
from meshwright.core.codec import load_artefact
from meshwright.core.errors import MeshwrightError, Problem
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.data.source import TextData, open_text
from meshwright.models.cost import decoder_profile
from meshwright.runtime.config import RunConfig
from meshwright.search.search import Found, search
from meshwright.simulate.forecast import Forecast, forecast

Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    profile: Profile
    cluster: Cluster
    plan: Plan
    forecast: Forecast
    found: Found | None
    """How the search went; None for a plan that was given."""


def prepare(config: RunConfig, plan_file: str, report: Report, num_devices: int = 0) -> Prepared:
    """Find the machine, then the plan. What an earlier start of this run decided is kept while it still holds."""
    folder = Path(config.run.folder)
    profile = decoder_profile(config.model.config(), config.model.name)
    cluster = _cluster(config, folder, report, num_devices or config.run.ranks)
    found = None
    plan_file = plan_file or config.plan.file
    if plan_file:
        plan = load_artefact(Plan, plan_file)
    elif earlier := _earlier(config, folder, profile, cluster):
        plan = earlier
    else:
        found = _search(config, profile, cluster)
        assert found.best is not None
        plan = found.best[0]
    _check(config, plan, profile, cluster, plan_file)
    predicted = forecast(
        profile,
        plan,
        cluster,
        sequence=config.data.sequence,
        state_bytes=config.train.optimizer.state_bytes,
    )
    return Prepared(profile=profile, cluster=cluster, plan=plan, forecast=predicted, found=found)


def open_data(config: RunConfig) -> TextData:
    """The run's data, tokenized into its folder the first time and mapped from there afterwards."""
    data = config.data
    text = open_text(
        data.train,
        sequence=data.sequence,
        held_out_fraction=data.held_out_fraction,
        seed=data.seed,
        cache=Path(config.run.folder) / "tokens",
    )
    words, known = text.tokenizer.vocab_size, config.model.config().vocab_size
    if words > known:
        what = f"{config.model.name} has {known} words, the {text.tokenizer.name} tokenizer {words}."
        fix = f"Set model.change.vocab_size to at least {words}."
        raise MeshwrightError([Problem(where="model", what=what, fix=fix)])
    return text


def _cluster(config: RunConfig, folder: Path, report: Report, num_devices: int) -> Cluster:
    from meshwright.probe.machine import probe
    from meshwright.probe.names import cluster

    if config.run.cluster:
        named = cluster(config.run.cluster)
        return named.resized(num_devices) if num_devices and num_devices != named.num_devices else named
    known = folder / "cluster.json"
    if known.exists():
        earlier = load_artefact(Cluster, known)
        if not num_devices or earlier.num_devices == num_devices:
            return earlier
    report("measuring this machine")
    return probe(num_devices=num_devices or None, report=report, quick=True)


def _earlier(config: RunConfig, folder: Path, profile: Profile, cluster: Cluster) -> Plan | None:
    """The plan this run has used so far, if it still fits the batch and the machine."""
    path = folder / "plan.json"
    if not path.exists() or config.plan.pin or config.plan.ban:
        return None
    plan = load_artefact(Plan, path)
    same = plan.batch == config.train.batch and plan.num_ranks == cluster.num_devices
    return plan if same and not plan.check(profile, cluster) else None


def _search(config: RunConfig, profile: Profile, cluster: Cluster) -> Found:
    found = search(
        profile,
        cluster,
        batch=config.train.batch,
        sequence=config.data.sequence,
        state_bytes=config.train.optimizer.state_bytes,
        allow=config.plan.allow,
        pin=config.plan.pin,
        ban=config.plan.ban,
    )
    if found.best is None:
        from meshwright.search.explain import explain

        raise MeshwrightError("no plan fits.\n" + "\n".join(explain(found, cluster)), exit_code=1)
    return found


def _check(config: RunConfig, plan: Plan, profile: Profile, cluster: Cluster, source: str) -> None:
    problems = list(plan.check(profile, cluster))
    if plan.batch != config.train.batch:
        what = f"the plan is for {plan.batch} samples, train.batch is {config.train.batch}."
        problems.append(Problem(where="batch", what=what, fix="Plan again, or change train.batch."))
    for technique in plan.techniques:
        problems.extend(technique.check_sequence(config.data.sequence))
    if problems:
        place = f"{source}: " if source else ""
        raise MeshwrightError([Problem(where=place + p.where, what=p.what, fix=p.fix) for p in problems])


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
