"""`mw plan`: the ranked table, the best plan's forecast, and why the others lost."""

from __future__ import annotations

import json
import shlex
from argparse import Namespace

from meshwright.cli.show import print_forecast, print_ranked, stdout, write_output
from meshwright.cli.wanted import Wanted, read_wanted
from meshwright.core.units import pretty_count
from meshwright.runtime.config import OptimizerConfig, PlanSection, read_run
from meshwright.search.explain import explain
from meshwright.search.search import found_as_json, search

_DEFAULT_BATCH = 64


def run(arguments: Namespace) -> int:
    file = read_run(arguments.run) if arguments.run else None
    wanted = read_wanted(arguments, file)
    wishes = file.plan if file else PlanSection()
    optimizer = file.train.optimizer if file else OptimizerConfig()
    batch = arguments.batch or (file.train.batch if file else _DEFAULT_BATCH)
    profile, cluster, sequence = wanted.profile, wanted.cluster, wanted.sequence
    found = search(
        profile,
        cluster,
        batch=batch,
        sequence=sequence,
        optimizer=optimizer,
        allow=arguments.allow or wishes.allow,
        pin=(*wishes.pin, *arguments.pin),
        ban=(*wishes.ban, *arguments.ban),
        top=arguments.top,
    )
    if arguments.output and found.best is not None:
        write_output(arguments.output, found.best[0].to_json())
    if arguments.json:
        print(json.dumps(found_as_json(found)))
        return 0 if found.best is not None else 1
    console = stdout()
    size = pretty_count(profile.num_params)
    length = f"sequence {sequence}, " if profile.counts == "tokens" else ""
    console.print(
        f"{profile.name} ({size} parameters) on {cluster.name}, {length}batch {batch}: "
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
    for what in profile.unpriced:
        console.print(f"not counted, or roughly: {what}")
    if found.best is not None:
        console.print(f"\nnext: {_next(arguments, wanted)}")
    return 0 if found.best is not None else 1


def _next(arguments: Namespace, wanted: Wanted) -> str:
    if not arguments.output:
        return "add -o best.plan.json to keep it, then: mw train RUN.toml --plan best.plan.json"
    if arguments.run:
        return shlex.join(["mw", "train", arguments.run, "--plan", arguments.output])
    words = ["--model", arguments.model, "--cluster", wanted.cluster_name, "--seq", str(wanted.sequence)]
    return shlex.join(["mw", "simulate", arguments.output, *words])
