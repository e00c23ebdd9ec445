"""The inputs of a command: model, cluster and sequence, from flags, else a run file, else defaults."""

from __future__ import annotations

import contextlib
import re
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from meshwright.ask.ways_out import ADAPTER_WORDS
from meshwright.ask.what_if import read_memory
from meshwright.core.cluster import Cluster, parse_cluster_name
from meshwright.core.codec import decode_into
from meshwright.core.errors import MeshwrightError, Problem, error_at, raise_problems, read_or_note
from meshwright.core.profile import Profile
from meshwright.machine.named_clusters import cluster as named_cluster
from meshwright.machine.named_clusters import warnings_of, with_host_memory
from meshwright.models.dimensions import Adapter
from meshwright.models.presets import sequence_problem
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.report.terminal import progress
from meshwright.run.model import describe, describe_run, section_named
from meshwright.run.run_file import RunConfig, apply_change

_DEFAULT_SEQUENCE = 4096
_COUNTS = ("seq", "batch", "top", "documents")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    profile: Profile
    cluster: Cluster
    cluster_name: str
    """The value of --cluster for the same machines."""
    sequence: int
    optimizer: OptimizerConfig
    adapted: Callable[[], Profile | None] = lambda: None
    """The model with low-rank adapters on packed weights; None if it does not support them or is partly frozen."""


def read_wanted(arguments: Namespace, run: RunConfig | None = None) -> PlanInputs:
    """Read the flags, and report all problems at once."""
    problems = [
        Problem(where=f"--{name}", what=f"is {value}.", fix="Use at least 1.")
        for name in _COUNTS
        if (value := getattr(arguments, name, None)) is not None and value < 1
    ]
    profile = read_or_note(problems, lambda: _model(arguments, run))
    place = read_or_note(problems, lambda: _cluster(arguments, run))
    if (size := arguments.host_memory) is not None and (given := read_memory(size, "--host-memory", problems)):
        place = place and (with_host_memory(place[0], given), place[1])
    optimizer = read_or_note(problems, lambda: _optimizer(arguments, run))
    sequence = 0
    if profile is not None:
        default = run.sequence if run else min(_DEFAULT_SEQUENCE, profile.max_sequence)
        sequence = default if arguments.seq is None else arguments.seq
        if profile.counts == "samples":
            sequence = 1
        elif sequence >= 1 and (problem := sequence_problem(profile, sequence, "--seq")):
            problems.append(problem)
        if (length := arguments.documents) is not None and length >= 1:
            if not any(op.kind == "attention" and op.flops.bss for layer in profile.layers for op in layer.ops):
                what = f"is {length}, and {profile.name} has no attention over a sequence."
                problems.append(Problem(where="--documents", what=what, fix="Leave it out."))
            profile = profile.with_documents(min(length, sequence))
    raise_problems(problems)
    assert profile is not None
    assert place is not None
    assert optimizer is not None
    for line in warnings_of(place[0]):
        progress(f"warning: {place[1]}: {line}")
    made: dict[str, Any] = {"cluster": place[0], "cluster_name": place[1], "optimizer": optimizer}
    return PlanInputs(profile=profile, sequence=sequence, adapted=lambda: _adapted(arguments, run), **made)


def _adapted(arguments: Namespace, run: RunConfig | None) -> Profile | None:
    if run is not None or any((arguments.adapter, arguments.train, arguments.freeze, arguments.documents)):
        return None
    with contextlib.suppress(MeshwrightError):  # no decoder of ours, experts, or sizes that cannot be packed
        return _model(Namespace(**(vars(arguments) | {"adapter": ADAPTER_WORDS})), run)
    return None


def _model(arguments: Namespace, run: RunConfig | None) -> Profile:
    changes: dict[str, Any] = {}
    problems: list[Problem] = []
    for change in arguments.change:
        apply_change(changes, change, problems, "--change")
    raise_problems(problems)
    given: dict[str, Any] = {"change": changes, "freeze": tuple(arguments.freeze), "train": tuple(arguments.train)}
    given = {key: value for key, value in given.items() if value}
    if arguments.adapter:
        given["adapter"] = _settings(Adapter, "--adapter", re.split(r",(?=\s*\w+\s*=)", arguments.adapter), {})
    if arguments.imbalance is not None:
        given["imbalance"] = arguments.imbalance
    try:
        if arguments.model:
            return describe(section_named(arguments.model, **given), arguments.seq or _DEFAULT_SEQUENCE).profile
        if run is not None:
            return describe_run(replace(run, model=replace(run.model, **given)) if given else run).profile
    except MeshwrightError as error:  # what a flag sets is named by the flag
        places = [re.sub(rf"^(model\.)?({'|'.join(given) or '-'})\b\.?", r"--\2 ", p.where) for p in error.problems]
        raise MeshwrightError(
            [replace(p, where=where.strip()) for p, where in zip(error.problems, places, strict=True)]
        ) from None
    raise error_at("--model", "is missing.", "For example --model llama3-8b.")


def _optimizer(arguments: Namespace, run: RunConfig | None) -> OptimizerConfig:
    """`--optimizer sgd`, or with settings: `sgd,momentum=0`."""
    if arguments.optimizer is None:
        return run.train.optimizer if run is not None else OptimizerConfig()
    name, *settings = arguments.optimizer.split(",")
    return _settings(OptimizerConfig, "--optimizer", settings, {"name": name.strip()})


def _settings(kind: type[T], flag: str, settings: list[str], table: dict[str, Any]) -> T:
    """A value of a class from `table` and settings in the form of a flag, `a=1`."""
    problems: list[Problem] = []
    for each in settings:
        apply_change(table, each, problems, flag)
    result = decode_into(kind, table, flag, problems)
    raise_problems([replace(problem, where=problem.where.replace("r.", "r ")) for problem in problems])
    return cast(T, result)


def _cluster(arguments: Namespace, run: RunConfig | None) -> tuple[Cluster, str]:
    """The cluster and its name; that of a run file has as many devices as the file has ranks."""
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
