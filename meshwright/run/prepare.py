"""From a run file to a plan with its forecast: everything decided before a process starts. No torch."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median_high
from typing import IO, Any, TypeVar

import numpy as np

from meshwright.ask.explain import explain, headroom_warning
from meshwright.ask.question import HEADROOM, with_headroom
from meshwright.core.cluster import Cluster, Device
from meshwright.core.codec import encode, load_artefact
from meshwright.core.errors import MeshwrightError, Problem, error_at, raise_problems
from meshwright.core.files import link_problems, open_to_append, write_whole
from meshwright.core.ledger import Predicted
from meshwright.core.placement import placed
from meshwright.core.plan import Plan
from meshwright.core.profile import Layer, Profile
from meshwright.core.technique import PHASES, is_within, technique_named, technique_names
from meshwright.core.units import counted, pretty_bytes, pretty_seconds
from meshwright.core.work import Work
from meshwright.data.open_data import Data
from meshwright.data.open_data import open_data as open_files
from meshwright.launch.failure import cause
from meshwright.launch.guard import command_pid
from meshwright.launch.rank_pool import RankError, RankPool
from meshwright.machine.probe import machine_name
from meshwright.planner.scoreboard import TIE
from meshwright.planner.search import SearchResult, search
from meshwright.planner.wishes import read_wishes
from meshwright.run.comparison import Promise
from meshwright.run.model import ModelDescription, describe_run, fitting
from meshwright.run.run_file import PlanSection, RunConfig
from meshwright.simulator.forecast import Forecast, forecast
from meshwright.simulator.pricing import price
from meshwright.simulator.simulate import simulate
from meshwright.simulator.stage_seconds import compute_seconds, op_class

Report = Callable[[str], None]
OF_ONE_START = (
    *("result.json", "comparison.json", "measured.timeline.json", "measured.trace.json", "timeline.svg"),
    *("events.jsonl", "search.json"),
)
"""Files of a run folder that speak of the latest start alone, and go when another begins."""
RUN_FILE = "run.json"
"""In a run's folder: the content of its run file, as of the latest start."""
MOST_TIMINGS = 2
"""Of a model, each in another form: once its rates are known, another precision or microbatch may be the best."""
REQUEUE_SECONDS = 60.0
"""That a job which was started again waits for its earlier self to save and end."""
_BYTES_PER_TOKEN = 20
"""Of a batch in host memory: input and target as int64, the weight as float32."""
_SAME = ("step_seconds", "step_seconds_low", "step_seconds_high", "seconds_by_origin", "seconds_by_cause")
"""Fields of a forecast that a promise has too."""
_SECONDS, _DEADLINE_SECONDS = 1.0, 60.0
"""Of steps that are timed; of all of it, where something hangs."""
_MOST_STEP_SECONDS, _MOST_MEMORY = 0.5, 0.5
"""By the forecast: of longer steps, or of those that need a larger share of the memory, only the first blocks."""
_COMPILING = PHASES[4]  # whose kernels are others than those that are timed, and take too long to make
_MOST_OFF = 16.0
"""Times that a kind of ops may be off; beyond, kernels are not of the profile's kinds, and one factor serves all."""
_TIMED_ERROR = 0.1
"""What is left open: a machine is not as fast in the next minute as in this one."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    description: ModelDescription
    cluster: Cluster
    plan: Plan
    forecast: Forecast
    found: SearchResult | None
    """How the search went; None for a plan that was given."""

    @property
    def profile(self) -> Profile:
        return self.description.profile


def prepare(
    config: RunConfig,
    given: str | Plan,
    report: Report,
    geometry: tuple[int, int] | None = None,
    description: ModelDescription | None = None,
    ready: Callable[[], Data] | None = None,
    *,
    on: Cluster | None = None,
) -> PreparedRun:
    """Find the machine, then the plan. What an earlier start of this run decided is kept while it still holds.

    `given`: a plan to use as it is, or the file of one. `geometry`: (devices in a node, nodes) where somebody else has
    already started the ranks. `description`: of the model, where it has been looked at before. `ready` makes the data
    ready; with it, the model is timed on a machine that was measured, and documents are as long as they are. `on`: plan
    anew for this cluster, whatever an earlier start has decided.
    """
    description = description or describe_run(config)
    profile = description.profile
    cluster = on or _cluster(config, report, geometry, plan_to_run(config, given, profile))
    if config.data.packing == "documents" and cluster.device.kind == "cuda" and ready is not None:
        profile = profile.with_documents(document_length(ready()))
    known = plan_to_run(config, given, profile, cluster)
    known = known or (None if on is not None else _earlier(config, profile, cluster, report))
    result, wishes = None, {name: getattr(config.plan, name) for name in ("allow", "pin", "ban")}
    if config.train.memory_cap:
        kinds = map(technique_named, technique_names())
        opaque = {kind.name for kind in kinds if kind.phase == _COMPILING or kind.uses_tiers}
        wishes["ban"] = (*config.plan.ban, *sorted(opaque.difference(config.plan.ban, config.plan.pin)))
    if "skip" in (config.train.on_nan, config.train.on_spike):
        early = (name for name in technique_names() if technique_named(name).updates_in_backward)
        wishes["ban"] = (*wishes["ban"], *(name for name in early if name not in (*wishes["ban"], *config.plan.pin)))
    headroom = HEADROOM if config.plan.headroom is None else config.plan.headroom
    about: dict[str, Any] = {"sequence": config.sequence, "optimizer": config.train.optimizer}
    for turn in range(MOST_TIMINGS + 1):
        if known is None:
            usable = with_headroom(cluster, headroom)
            result = search(profile, usable, batch=config.train.batch, tie=TIE, **about, **wishes)
            if result.best is None:
                raise MeshwrightError("no plan fits.\n" + "\n".join(explain(result, usable)), exit_code=1)
        plan = known or result.best[0]  # type: ignore[union-attr, index]
        (timed, this), before = timings(cluster, profile, plan, config.sequence), cluster
        is_wanted = turn < MOST_TIMINGS and "measured" in cluster.sources and this not in timed
        if is_wanted and ready is not None and not any(each.phase == _COMPILING for each in plan.techniques):
            ready()
            cluster = with_timing(config, description, plan, cluster, report)
        if cluster is before:
            break
    raise_problems(_against_training(config, plan))
    predicted = forecast(profile, plan, cluster, **about)
    raise_problems(space_problems(config, plan, predicted, cluster.devices_per_node))
    if line := headroom_warning(predicted, headroom):
        report(line)
    return PreparedRun(description=description, cluster=cluster, plan=plan, forecast=predicted, found=result)


def space_problems(config: RunConfig, plan: Plan, predicted: Forecast, per_node: int) -> list[Problem]:
    """What this host has too little of at the moment, whatever its owner has said that it has."""
    from meshwright.machine.probe import available_host_bytes

    folder, problems = Path(config.run.disk or config.run.folder), []
    if config.run.disk and not folder.is_dir():
        problems.append(Problem(where="run.disk", what=f"{folder} is no folder.", fix="Make it, or name another."))
    while not folder.exists():
        folder = folder.parent
    here: dict[str, tuple[Callable[[], int], str]] = {
        "host": (available_host_bytes, "memory of this host"),
        "disk": (lambda: shutil.disk_usage(folder).free, f"space in {folder}"),
    }
    for tier, size in predicted.peak_bytes_by_tier.items():
        measure, words = here[tier]
        if (needed := size * min(plan.num_ranks, per_node)) > (left := measure()):
            what = f"the plan needs {pretty_bytes(needed)} of the {words}, of which {pretty_bytes(left)} are available "
            what += f"now: {pretty_bytes(needed - left)} too little."
            fix = "Free it (other runs may have it), or plan again for less (--set run.cluster to a file that says so)."
            problems.append(Problem(where=f"the {tier}", what=what, fix=fix))
    return problems


def timed_part(plan: Plan) -> Plan:
    """What one rank of the plan does with a microbatch, as far as it is timed."""
    own = tuple(each for each in plan.techniques if each.phase == PHASES[0])
    return Plan(techniques=own, batch=plan.microbatch, microbatch=plan.microbatch)


def timings(cluster: Cluster, profile: Profile, plan: Plan, sequence: int) -> tuple[list[str], str]:
    """The models and forms whose rates the cluster has, and what this one is called there."""
    key = f"{profile.name} ({profile.fingerprint[:12]}), sequence {sequence}, {timed_part(plan)}"
    return [each for each in cluster.sources.get("timed", "").split("; ") if each], key


def with_timing(
    config: RunConfig, description: ModelDescription, plan: Plan, cluster: Cluster, report: Report
) -> Cluster:
    """The cluster as this model's ops find it; the very same where they cannot be timed, which is reported."""
    local, profile, device = timed_part(plan), description.profile, replace(cluster.device, op_slowdowns={})
    about: dict[str, Any] = {"sequence": config.sequence, "optimizer": config.train.optimizer}

    def expected(profile: Profile) -> tuple[float, int]:
        """Seconds; and bytes, without those of the process and of the optimizer, which is left out."""
        told = forecast(profile, local, replace(cluster.resized(1), device=device), **about)
        return told.step_seconds, told.peak_allocated_bytes - told.peak_bytes_by_category.get("optimizer", 0)

    report(f"timing {profile.name} itself: {local}")
    room, blocks = _MOST_MEMORY * device.memory_bytes - device.reserved_bytes, profile.num_blocks
    seconds, held = expected(profile)
    if "stages" not in profile.uncut and (share := min(_MOST_STEP_SECONDS / seconds, room / held)) < 1:
        blocks, layers = max(1, int(share * blocks)), list[Layer]()  # and what comes before the blocks
        for layer in profile.layers:
            if layer.is_block or not any(each.is_block for each in layers):
                count = min(layer.repeat, blocks - sum(each.repeat for each in layers if each.is_block))
                layers += [replace(layer, repeat=count)] if count else []
        profile = replace(profile, layers=tuple(layers))
        seconds, held = expected(profile)
    if held > room or seconds > 4 * _MOST_STEP_SECONDS:
        report(f"{profile.name} is not timed: a microbatch takes {pretty_seconds(seconds)}, or too much memory")
        return cluster
    arguments = {"run": encode(config), "model": encode(description), "plan": encode(local)}
    arguments |= {"kind": device.kind, "blocks": blocks, "budget": _SECONDS}
    threads = max(1, len(os.sched_getaffinity(0)) // plan.num_ranks)
    try:
        with RankPool(plan.num_ranks, threads_per_rank=threads) as pool:
            told = pool.run("meshwright.runtime.rank:time_model", arguments, plan.num_ranks, _DEADLINE_SECONDS)
    except RankError as error:
        report(f"{profile.name} is not timed: {cause(error.failures).message}")
        return cluster
    before, key = timings(cluster, description.profile, plan, config.sequence)
    timed = {"timed": "; ".join([*before, key]), "errors.compute": "the model's own ops were timed"}
    slowdowns = _slowdowns(told, price(profile, local, **about), cluster.device)
    device, inner = replace(device, op_slowdowns=slowdowns), cluster.inner
    if device.kind == "cpu":
        if not before:  # a rank waits wherever the others come later, which collectives back to back do not show
            waits = min(rank["wait_seconds"] for rank in told)
            inner = replace(inner, latency_seconds=max(inner.latency_seconds, waits))
        if 0 < (own := max(rank["peak_bytes"] for rank in told) - held) < device.memory_bytes:
            device = replace(device, reserved_bytes=own)
            timed["reserved_bytes"] = "measured in a rank that ran the model"
    errors = replace(cluster.errors, compute=_TIMED_ERROR)
    return replace(cluster, device=device, inner=inner, errors=errors, sources={**cluster.sources, **timed})


def _slowdowns(told: Sequence[Mapping[str, Any]], work: Work, device: Device) -> dict[str, float]:
    """What the ranks have timed over what the device's other figures say of it, and what was known before."""
    result, plain = dict(device.op_slowdowns), replace(device, op_slowdowns={})
    for way in ("forward", "backward"):
        wanted, names = dict[str, float](), set[str]()
        for task in work.computes:
            kind, direction, _ = op_class(task).split()
            if direction == way:
                names.add(op_class(task))
                wanted[kind] = wanted.get(kind, 0.0) + float(task.repeat * compute_seconds(task, plain))
        spent = {kind: median_high([rank["by_kind"].get(f"{kind} {way}", 0.0) for rank in told]) for kind in wanted}
        # The profiler slows what it watches; on a GPU the host only, whose time is not the device's.
        whole, total = median_high([rank[way] for rank in told]), max(sum(spent.values()), 1e-9)
        scale = whole / total if device.kind == "cpu" else 1.0
        times = {kind: scale * spent[kind] / seconds for kind, seconds in wanted.items() if seconds > 0}
        if not all(1 / _MOST_OFF < each < _MOST_OFF for each in times.values()):
            times = dict.fromkeys(times, scale * total / sum(wanted.values()))
        for name in names:
            kind, _, dtype = name.split()
            # Of ops in another dtype than the plan's own, a plan in that dtype knows better.
            if times.get(kind, 0) > 0 and (dtype == work.facts.compute_dtype or name not in result):
                result[name] = round(times[kind], 4)
    return result


def plan_to_run(config: RunConfig, given: str | Plan, profile: Profile, cluster: Cluster | None = None) -> Plan | None:
    """The plan a user gave; without one, what a search would refuse of their wishes is raised."""
    plan = load_plan(config, given, profile, cluster, is_trained=True)
    if plan is None:
        read_wishes(config.plan.pin, config.plan.ban, allow=config.plan.allow)
    return plan


def load_plan(
    config: RunConfig, given: str | Plan, profile: Profile, cluster: Cluster | None = None, *, is_trained: bool = False
) -> Plan | None:
    """The plan a user gave, if any, checked against the model and the samples; if it `is_trained`, against the training
    too: its optimizer, and how far its numbers may depart."""
    name = "plan" if isinstance(given, Plan) else given or config.plan.file
    if not name:
        return None
    plan = given if isinstance(given, Plan) else load_artefact(Plan, name)
    problems = list(plan.check(profile, cluster) or plan.check_sequence(config.sequence))
    if plan.batch != config.train.batch:
        what = f"the plan is for {plan.batch} samples, train.batch is {config.train.batch}."
        problems.append(Problem(where="batch", what=what, fix="Plan again, or change train.batch."))
    for technique in plan.techniques:
        if is_trained and not is_within(technique.exactness, config.plan.allow):
            what = f'{technique} is {technique.exactness}, and plan.allow is "{config.plan.allow}".'
            fix = f'Set plan.allow = "{technique.exactness}", or plan again without it.'
            problems.append(Problem(where=technique.name, what=what, fix=fix))
    problems = [replace(problem, where=f"{name}: {problem.where}") for problem in problems]
    raise_problems(problems + (_against_training(config, plan) if is_trained else []))
    return plan


def _against_training(config: RunConfig, plan: Plan) -> list[Problem]:
    problems = config.train.optimizer.problems_with(plan)
    placed = [replace(problem, where=f"train.{problem.where}") for problem in problems]
    return placed + config.train.problems_with(plan)


def problems_here(config: RunConfig, plan: Plan | None) -> list[Problem]:
    """What keeps this machine from running it, found before data is prepared or a process is started."""
    from meshwright.machine.named_clusters import cluster
    from meshwright.machine.probe import available_host_bytes, count_gpus

    problems = []
    named = cluster(config.run.cluster) if config.run.cluster else None
    if named is not None and named.device.kind == "cuda":
        needed = plan.num_ranks if plan is not None else config.run.ranks or named.num_devices
        least = config.run.min_ranks if config.run.elastic and plan is None else needed
        if (here := count_gpus()) < least:
            what = f"{config.run.cluster} means {counted(needed, 'GPU')}; this machine has {here or 'none'}."
            fix = "Leave run.cluster out to use this machine, or start the command on every node (docs/hosts.md)."
            problems.append(Problem(where="run.cluster", what=what, fix=fix))
    rows = config.train.batch // (plan.num_replicas if plan is not None else 1)
    if (needed := rows * config.sequence * _BYTES_PER_TOKEN) > (available := available_host_bytes()):
        devices = 1 if plan is not None else config.run.ranks or (named.num_devices if named else 1)
        if needed // devices > available:
            what = f"a rank's part of the batch takes {pretty_bytes(needed // devices)} of host memory; "
            what += f"{pretty_bytes(available)} are available."
            problems.append(Problem(where="train.batch", what=what, fix="Use a smaller batch, or more ranks."))
    return problems


def open_data(config: RunConfig, description: ModelDescription, cache: Path | None = None) -> Data:
    """The run's data, made ready in its folder the first time and mapped from there afterwards."""
    data = open_files(config.data, cache=cache or Path(config.run.folder) / "data")
    fitting(description, data)
    return data


def document_length(data: Data, rows: int = 64) -> float:
    """Of packed documents, as attention's cost sees them: the mean of squares over the mean, of the first rows."""
    inputs = data.batch(0, min(rows, data.num_train)).inputs
    assert isinstance(inputs, tuple)
    lengths = np.concatenate([np.bincount(row) for row in np.asarray(inputs[1])])
    return float((lengths**2).sum() / lengths.sum())


def _cluster(config: RunConfig, report: Report, geometry: tuple[int, int] | None, given: Plan | None) -> Cluster:
    from meshwright.machine.named_clusters import cluster, warnings_of
    from meshwright.machine.probe import count_gpus, probe

    ranks = config.run.ranks
    if config.run.cluster:
        named = cluster(config.run.cluster)
        for line in warnings_of(named):
            report(f"warning: {config.run.cluster}: {line}")
        if geometry is not None:
            return named.resized(*geometry)
        if config.run.elastic and named.device.kind == "cuda" and (here := count_gpus()) < (ranks or named.num_devices):
            ranks = here
            report(f"{config.run.cluster} has {counted(here, 'GPU')} here now: planning for these")
        return named.resized(ranks) if ranks and ranks != named.num_devices else named
    most = ranks or len(os.sched_getaffinity(0))
    if given is not None and given.num_ranks <= most:
        ranks = given.num_ranks  # ranks share the cores and the memory: it is measured with as many as will run
    known = measured_before(config, ranks, report)
    if known is not None:
        return known
    report("measuring this machine")
    measured = probe(num_devices=ranks or None, report=report, quick=True)
    return replace(measured, sources={**measured.sources, "machine": machine_name()})


def measured_before(config: RunConfig, ranks: int, report: Report = lambda text: None) -> Cluster | None:
    """This machine, as an earlier start of this run has measured it with so many ranks."""
    earlier = _derived(Cluster, Path(config.run.folder) / "cluster.json", "this machine is measured again", report)
    if earlier is None:
        return None
    is_same = earlier.sources.get("machine") == machine_name()
    return earlier if is_same and (not ranks or earlier.num_devices == ranks) else None


def _derived(kind: type[T], path: Path, consequence: str, report: Report) -> T | None:
    """What an earlier start has written; None where it is missing, or damaged, which is said: it can be made again."""
    if not path.exists():
        return None
    try:
        return load_artefact(kind, path)
    except MeshwrightError as error:
        report(f"{path} is damaged, so {consequence}: {str(error.problems[0]).removeprefix(f'{path}: ')}")
        return None


def _earlier(config: RunConfig, profile: Profile, cluster: Cluster, report: Report) -> Plan | None:
    """The plan this run has used so far, if it still fits the batch, the machine and what the user asks for."""
    folder, again = Path(config.run.folder), "a plan is searched for again"
    if _derived(PlanSection, folder / "wishes.json", again, report) != replace(config.plan, file=""):
        return None
    plan = _derived(Plan, folder / "plan.json", again, report)
    if plan is None or plan.check(profile, cluster) or plan.check_sequence(config.sequence):
        return None
    if config.train.problems_with(plan):
        return None
    is_same = plan.batch == config.train.batch and plan.num_ranks == placed(plan, cluster).num_devices
    return plan if is_same else None


def write_prepared(config: RunConfig, prepared: PreparedRun, *, is_start: bool = True) -> None:
    """Every artefact between two stages lies in the folder, to be read, edited and used again. `is_start`: no run is
    under way, whose events go on."""
    folder = Path(config.run.folder)
    timeline = simulate(
        prepared.profile, prepared.plan, prepared.cluster, sequence=config.sequence, optimizer=config.train.optimizer
    )
    for name in OF_ONE_START:
        if is_start or name != "events.jsonl":
            (folder / name).unlink(missing_ok=True)
    texts = {
        RUN_FILE: json.dumps(encode(config), indent=1),
        "profile.json": prepared.profile.to_json(),
        "cluster.json": prepared.cluster.to_json(),
        "plan.json": prepared.plan.to_json(),
        "wishes.json": json.dumps(encode(replace(config.plan, file=""))),
        "forecast.json": json.dumps(encode(prepared.forecast), indent=1),
        **({} if prepared.found is None else {"search.json": json.dumps(encode(prepared.found))}),
        "predicted.timeline.json": timeline.to_json(),
        "predicted.trace.json": timeline.to_chrome(),
    }
    for name, text in texts.items():
        write_whole(folder / name, text + "\n")


def promise_of(config: RunConfig, prepared: PreparedRun) -> Promise:
    """For the comparison, while it runs and at its end."""
    forecast, plan, profile = prepared.forecast, prepared.plan, prepared.profile
    is_cpu = prepared.cluster.device.kind == "cpu"
    return Promise(
        machine=machine_name(),
        model=config.model.title,
        model_fingerprint=profile.fingerprint,
        plan=encode(plan),
        plan_fingerprint=plan.fingerprint,
        cluster=prepared.cluster,
        sequence=config.sequence,
        batch=config.train.batch,
        predicted=Predicted(
            # As it is measured: what torch allocates on a GPU, all that a process holds on a CPU.
            peak_bytes=forecast.peak_bytes if is_cpu else forecast.peak_allocated_bytes,
            reserved_bytes=0 if is_cpu else forecast.peak_reserved_bytes,
            **{name: getattr(forecast, name) for name in _SAME},
        ),
        bytes_by_category=forecast.peak_bytes_by_category,
        has_one_stage=len(plan.blocks_of_stages(profile)) == 1,
        is_first_fullest=forecast.worst_stage == 0,
    )


def open_folder(folder: Path, wait_seconds: float = 0.0, report: Report = lambda text: None) -> IO[str]:
    """Make the run folder and lock it for this process. The lock goes when the process does.

    `wait_seconds`: that its owner may take to end.
    """
    place, checkpoints = folder, folder / "checkpoints"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        raise_problems(link_problems(folder))
        for place in (checkpoints, folder) if checkpoints.exists() else (folder,):  # they may be on two disks
            write_whole(place / ".write-test", "x" * 4096, is_durable=True)
            (place / ".write-test").unlink()
        lock = os.fdopen(open_to_append(folder / ".lock", os.O_RDWR), "r+", encoding="utf-8", errors="replace")
    except OSError as error:
        fix = "Free space there, make it writable, or choose another run.folder."
        raise error_at(f"run.folder {place}", f"cannot write there: {error.strerror}.", fix) from None
    start, is_said = time.monotonic(), False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            waited = time.monotonic() - start
        lock.seek(0)
        owner = lock.read().partition(_TOKEN)[0].strip() or "another process"
        if waited > max(wait_seconds, 0.1):  # `mw runs` looks for a moment
            fix = "Stop it, or choose another folder."
            raise error_at(f"run.folder {folder}", f"is in use by {owner}.", fix)
        if waited > 1.0 and not is_said:
            report(f"{folder} is in use by {owner}; waiting {pretty_seconds(wait_seconds)} at most for it to end")
            is_said = True
        time.sleep(0.05)
    lock.seek(0)
    lock.truncate()
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    lock.write(f"process {command_pid()} on {socket.gethostname()} since {since}{_TOKEN}{uuid.uuid4().hex}")
    lock.flush()
    return lock


_TOKEN = ", token "


def owner_of(folder: Path) -> str:
    """Who has taken a run folder last, and a token that nobody had before; empty where nobody has."""
    try:
        return (folder / ".lock").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def require_owner(folder: Path, owner: str) -> None:
    """Raise where somebody else has taken the run folder since: where locks are lost (a network file system, a host
    that was cut off), an owner that comes back must not commit what belongs to another history."""
    if owner and (now := owner_of(folder)) and now != owner:
        what = f"now belongs to {now.partition(_TOKEN)[0]}."
        raise error_at(f"run.folder {folder}", what, "This process must end; the other one goes on.", exit_code=1)
