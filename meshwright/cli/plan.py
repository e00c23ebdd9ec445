"""`mw plan`: the fastest plan that fits, why it won, and what anything else would give."""

from __future__ import annotations

import json
import shlex
from argparse import Namespace
from dataclasses import replace
from typing import Any

from meshwright.ask.answer import AUTO, DEFAULT_BATCH, Answer, PlanRequest, answers, read_batch, read_request
from meshwright.ask.failures import answer_failures, read_failures
from meshwright.ask.stragglers import forecast_stragglers, read_stragglers, straggler_lines
from meshwright.cli.arguments import PlanInputs, read_wanted
from meshwright.core.codec import encode
from meshwright.core.errors import MeshwrightError
from meshwright.core.wrapping import wrapped
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.report.answer_json import answer_as_json
from meshwright.report.terminal import Waiting, progress, stdout, unwritable, write_output
from meshwright.run.run_file import PlanSection, read_run

STOPPED = 130
_AS_GIVEN = (
    *("max_memory", "top", "time_limit", "why", "what_if", "front", "devices"),
    *("critical_batch", "target_steps", "target_tokens"),
)
"""Flags that a request takes under the same name."""
_SCALARS = ("host_memory", "optimizer", "documents", "adapter", "imbalance")
"""Flags that say what is planned for, besides those that may be given several times."""


def run(arguments: Namespace) -> int:
    inputs, request = _read(arguments)
    console = None if arguments.json else stdout()
    answer: Answer | None = None
    with Waiting("searching") as waiting:
        for grown in answers(request, waiting.tell, inputs.adapted):
            if arguments.output and grown.best is not None and (answer is None or answer.best is None):
                write_output(arguments.output, grown.best.plan.to_json())
            if console is not None:
                from meshwright.report.answer_text import print_answer

                print_answer(console, grown, answer)
            answer = grown
    assert answer is not None, "the search always says something"
    more, lines = dict[str, Any](), list[str]()
    question = answer.question
    if arguments.failures and answer.best is not None:
        found = answer_failures(read_failures(arguments.failures, []), answer.best, question.cluster)
        more["failures"], lines = found
    if arguments.stragglers and answer.best is not None:
        slow = forecast_stragglers(read_stragglers(arguments.stragglers, []), answer.best.plan, question)
        more["stragglers"], lines = slow, [*lines, *straggler_lines(slow, answer.best.plan.num_ranks)]
    if console is None:
        print(json.dumps(answer_as_json(answer) | encode(more)))
    if answer.is_interrupted:
        return STOPPED
    if answer.best is None:
        return 1
    if console is not None:
        for line in lines:
            console.print(line)
        following = ["mw", "simulate", arguments.output, "--model", arguments.model, "--cluster", inputs.cluster_name]
        if not arguments.output:
            next_step = "add -o best.plan.json to keep it, then: mw train RUN.toml --plan best.plan.json"
        elif arguments.run:
            next_step = shlex.join(["mw", "train", arguments.run, "--plan", arguments.output])
        else:
            flags = [(name, each) for name in ("change", "freeze", "train") for each in getattr(arguments, name)]
            given = [(name, getattr(arguments, name)) for name in _SCALARS]
            flags += [(name.replace("_", "-"), str(each)) for name, each in given if each]
            following += [
                "--seq",
                str(inputs.sequence),
                *(word for name, each in flags for word in (f"--{name}", each)),
            ]
            next_step = shlex.join(following)
        goes_on = " \\" if arguments.output else ""
        console.print(wrapped(f"next: {next_step}", console.width, " " * 6, goes_on))
    return 0


def _read(arguments: Namespace) -> tuple[PlanInputs, PlanRequest]:
    """Flags, else the run file, else defaults; everything that is wrong is said at once."""
    problems = unwritable({"-o": arguments.output})
    if arguments.failures:
        read_failures(arguments.failures, problems)
    if arguments.stragglers:
        read_stragglers(arguments.stragglers, problems)
    file = read_run(arguments.run) if arguments.run else None
    wishes = file.plan if file else PlanSection()
    default_batch = file.train.batch if file else DEFAULT_BATCH
    is_auto = arguments.batch == AUTO
    arguments.batch = None if is_auto or arguments.batch is None else read_batch(arguments.batch, problems)
    inputs, cluster = None, None
    try:
        inputs = read_wanted(arguments, file)
        cluster = inputs.cluster
        if arguments.from_run:  # the cluster as a run has shown it to be
            from meshwright.run.learned_cluster import cluster_from_run

            cluster, lines = cluster_from_run(arguments.from_run, cluster)
            for line in lines:
                progress(line)
    except MeshwrightError as error:
        problems.extend(error.problems)
    request = read_request(
        inputs.profile if inputs else None,
        cluster,
        batch=AUTO if is_auto else arguments.batch or default_batch,
        sequence=inputs.sequence if inputs else 1,
        optimizer=inputs.optimizer if inputs else OptimizerConfig(),
        allow=arguments.allow or wishes.allow,
        pin=(*wishes.pin, *arguments.pin),
        ban=(*wishes.ban, *arguments.ban),
        headroom=wishes.headroom if arguments.headroom is None else arguments.headroom,
        **{name: getattr(arguments, name) for name in _AS_GIVEN},
        suggests=not arguments.json,
        default_batch=default_batch,
        problems=problems,
    )
    assert inputs is not None
    return inputs, replace(request, command=("mw", *arguments.words))
