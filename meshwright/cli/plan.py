"""`mw plan`: the ranked table, the best plan's forecast, and why the others lost."""

from __future__ import annotations

import json
from argparse import Namespace

from meshwright.cli.show import print_forecast, print_ranked, stdout, write_output
from meshwright.core.cluster import Cluster
from meshwright.core.errors import MeshwrightError, Problem
from meshwright.core.units import pretty_count
from meshwright.models.config import preset
from meshwright.models.cost import decoder_profile
from meshwright.probe.names import cluster as named_cluster
from meshwright.search.explain import explain
from meshwright.search.search import found_as_json, search

_DEFAULT_BATCH = 64
_DEFAULT_SEQUENCE = 4096


def run(arguments: Namespace) -> int:
    config, sequence, batch, state_bytes, name, cluster = _wanted(arguments)
    profile = decoder_profile(config, name)
    found = search(
        profile,
        cluster,
        batch=batch,
        sequence=sequence,
        state_bytes=state_bytes,
        allow=arguments.allow,
        pin=arguments.pin,
        ban=arguments.ban,
        top=arguments.top,
    )
    if arguments.output and found.best is not None:
        write_output(arguments.output, found.best[0].to_json())
    if arguments.json:
        print(json.dumps(found_as_json(found)))
        return 0 if found.best is not None else 1
    console = stdout()
    size = pretty_count(profile.num_params)
    console.print(
        f"{name} ({size} parameters) on {cluster.name}, sequence {sequence}, batch {batch}: "
        f"{found.evaluated:,} plans in {found.search_seconds:.2f} s\n"
    )
    if found.best is not None:
        print_ranked(console, found.ranked)
        console.print()
        best, forecast = found.best
        print_forecast(console, best, forecast, "the best plan")
        console.print()
    for line in explain(found, cluster):
        console.print(line)
    if found.best is not None:
        console.print(f"\nnext: {_next(arguments, name, cluster, sequence)}")
    return 0 if found.best is not None else 1


def _next(arguments: Namespace, name: str, cluster: Cluster, sequence: int) -> str:
    if arguments.output:
        return f"mw simulate {arguments.output} --model {name} --cluster {cluster.name} --seq {sequence}"
    return "add -o best.plan.json to keep it, then: mw train RUN.toml --plan best.plan.json"


def _wanted(arguments: Namespace):  # type: ignore[no-untyped-def]
    """Model, sequence, batch and machines: from flags, else from the run file, else defaults."""
    from meshwright.runtime.config import OptimizerConfig, read_run

    section = read_run(arguments.run) if arguments.run else None
    problems = []
    if not arguments.model and section is None:
        problems.append(Problem(where="--model", what="is missing.", fix="For example --model llama3-8b."))
    place = arguments.cluster or (section.run.cluster if section else "")
    if not place:
        problems.append(
            Problem(where="--cluster", what="is missing.", fix="For example --cluster 8xh100; or mw probe first.")
        )
    for flag, value in (("--seq", arguments.seq), ("--batch", arguments.batch), ("--top", arguments.top)):
        if value is not None and value < 1:
            problems.append(Problem(where=flag, what=f"is {value}.", fix="Use at least 1."))
    config, cluster = None, None
    try:
        if arguments.model or section:
            config = preset(arguments.model) if arguments.model else section.model.config()  # type: ignore[union-attr]
    except MeshwrightError as error:
        problems.extend(error.problems)
    try:
        cluster = named_cluster(place) if place else None
    except MeshwrightError as error:
        problems.extend(error.problems)
    if config is not None:
        sequence = arguments.seq or (section.data.sequence if section else min(_DEFAULT_SEQUENCE, config.max_sequence))
        if sequence > config.max_sequence:
            what = f"is {sequence}; the model has positions for {config.max_sequence}."
            problems.append(Problem(where="--seq", what=what))
    if problems:
        raise MeshwrightError(problems)
    batch = arguments.batch or (section.train.batch if section else _DEFAULT_BATCH)
    optimizer = section.train.optimizer if section else OptimizerConfig()
    name = arguments.model or section.model.name  # type: ignore[union-attr]
    return config, sequence, batch, optimizer.state_bytes, name, cluster
