"""What a command is asked about: model, machines and sequence, from flags, else a run file, else defaults."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from meshwright.core.cluster import Cluster, parse_cluster_name
from meshwright.core.errors import MeshwrightError, Problem
from meshwright.core.profile import Profile
from meshwright.models.config import DecoderConfig, preset
from meshwright.models.cost import decoder_profile
from meshwright.probe.names import cluster as named_cluster

if TYPE_CHECKING:
    from meshwright.runtime.config import RunConfig

_DEFAULT_SEQUENCE = 4096
_COUNTS = ("seq", "batch", "top")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    profile: Profile
    cluster: Cluster
    cluster_name: str
    """What --cluster takes to mean the same machines."""
    sequence: int


def read_wanted(arguments: Namespace, run: RunConfig | None = None) -> Wanted:
    """Everything that is wrong with the flags is said at once."""
    problems = [
        Problem(where=f"--{name}", what=f"is {value}.", fix="Use at least 1.")
        for name in _COUNTS
        if (value := getattr(arguments, name, None)) is not None and value < 1
    ]
    config = _tried(problems, lambda: _model(arguments, run))
    place = _tried(problems, lambda: _cluster(arguments, run))
    sequence = 0
    if config is not None:
        default = run.data.sequence if run else min(_DEFAULT_SEQUENCE, config.max_sequence)
        sequence = default if arguments.seq is None else arguments.seq
        if sequence > config.max_sequence:
            what = f"is {sequence}; the model has positions for {config.max_sequence}."
            problems.append(Problem(where="--seq", what=what))
    if problems:
        raise MeshwrightError(problems)
    assert config is not None
    assert place is not None
    name = arguments.model or (run.model.name if run else "")
    profile = decoder_profile(config, name)
    return Wanted(profile=profile, cluster=place[0], cluster_name=place[1], sequence=sequence)


def _tried(problems: list[Problem], read: Callable[[], T]) -> T | None:
    try:
        return read()
    except MeshwrightError as error:
        problems.extend(error.problems)
        return None


def _model(arguments: Namespace, run: RunConfig | None) -> DecoderConfig:
    if arguments.model:
        return preset(arguments.model)
    if run is not None:
        return run.model.config()
    raise MeshwrightError([Problem(where="--model", what="is missing.", fix="For example --model llama3-8b.")])


def _cluster(arguments: Namespace, run: RunConfig | None) -> tuple[Cluster, str]:
    """The machines and their name; those of a run file have as many devices as it has ranks."""
    if arguments.cluster:
        return named_cluster(arguments.cluster), arguments.cluster
    if run is None or not run.run.cluster:
        fix = "For example --cluster 8xh100; or mw probe first."
        raise MeshwrightError([Problem(where="--cluster", what="is missing.", fix=fix)])
    name, ranks = run.run.cluster, run.run.ranks
    cluster = named_cluster(name)
    if not ranks or ranks == cluster.num_devices:
        return cluster, name
    parsed = parse_cluster_name(name.lower())
    return cluster.resized(ranks), f"{ranks}x{parsed[2]}" if parsed else name
