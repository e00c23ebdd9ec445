"""What a command is asked about: model, machines and sequence, from flags, else a run file, else defaults."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from meshwright.core.cluster import Cluster, parse_cluster_name
from meshwright.core.errors import MeshwrightError, Problem, error_at, raise_problems
from meshwright.core.profile import Profile
from meshwright.machine.named_clusters import cluster as named_cluster
from meshwright.machine.named_clusters import warnings_of
from meshwright.report.terminal import progress
from meshwright.run.model import describe, describe_run, section_named
from meshwright.run.run_file import RunConfig

_DEFAULT_SEQUENCE = 4096
_COUNTS = ("seq", "batch", "top")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    profile: Profile
    cluster: Cluster
    cluster_name: str
    """What --cluster takes to mean the same machines."""
    sequence: int


def read_wanted(arguments: Namespace, run: RunConfig | None = None) -> PlanInputs:
    """Everything that is wrong with the flags is said at once."""
    problems = [
        Problem(where=f"--{name}", what=f"is {value}.", fix="Use at least 1.")
        for name in _COUNTS
        if (value := getattr(arguments, name, None)) is not None and value < 1
    ]
    profile = _tried(problems, lambda: _model(arguments, run))
    place = _tried(problems, lambda: _cluster(arguments, run))
    sequence = 0
    if profile is not None:
        default = run.sequence if run else min(_DEFAULT_SEQUENCE, profile.max_sequence)
        sequence = default if arguments.seq is None else arguments.seq
        if profile.counts == "samples":
            sequence = 1
        elif sequence > profile.max_sequence:
            what = f"is {sequence}; the model has positions for {profile.max_sequence}."
            problems.append(Problem(where="--seq", what=what))
    raise_problems(problems)
    assert profile is not None
    assert place is not None
    for line in warnings_of(place[0]):
        progress(f"warning: {place[1]}: {line}")
    return PlanInputs(profile=profile, cluster=place[0], cluster_name=place[1], sequence=sequence)


def _tried(problems: list[Problem], read: Callable[[], T]) -> T | None:
    try:
        return read()
    except MeshwrightError as error:
        problems.extend(error.problems)
        return None


def _model(arguments: Namespace, run: RunConfig | None) -> Profile:
    if arguments.model:
        return describe(section_named(arguments.model), arguments.seq or _DEFAULT_SEQUENCE).profile
    if run is not None:
        return describe_run(run).profile
    raise error_at("--model", "is missing.", "For example --model llama3-8b.")


def _cluster(arguments: Namespace, run: RunConfig | None) -> tuple[Cluster, str]:
    """The machines and their name; those of a run file have as many devices as it has ranks."""
    if arguments.cluster:
        return named_cluster(arguments.cluster), arguments.cluster
    if run is None or not run.run.cluster:
        if getattr(arguments, "from_run", ""):
            from meshwright.run.learned_cluster import cluster_of_run

            return cluster_of_run(arguments.from_run)
        raise error_at("--cluster", "is missing.", "For example --cluster 8xh100; or mw probe first.")
    name, ranks = run.run.cluster, run.run.ranks
    cluster = named_cluster(name)
    if not ranks or ranks == cluster.num_devices:
        return cluster, name
    parsed = parse_cluster_name(name.lower())
    return cluster.resized(ranks), f"{ranks}x{parsed[2]}" if parsed else name
