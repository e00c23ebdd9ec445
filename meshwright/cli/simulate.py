"""`mw simulate`: one plan's forecast and timeline, without running it."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from meshwright.ask.explain import headroom_warning
from meshwright.ask.question import HEADROOM
from meshwright.cli.arguments import read_wanted
from meshwright.core.codec import encode, load_artefact
from meshwright.core.errors import error_at, raise_problems
from meshwright.core.plan import Plan
from meshwright.core.timeline import Timeline, last_step
from meshwright.report.terminal import print_forecast, stdout, unwritable, write_output
from meshwright.report.timeline_lanes import compared
from meshwright.report.timeline_svg import picture
from meshwright.report.timeline_text import draw
from meshwright.simulator.forecast import forecast
from meshwright.simulator.simulate import simulate

_PIPED_WIDTH = 100


def run(arguments: Namespace) -> int:
    plan = load_artefact(Plan, arguments.plan)
    measured = last_step(load_artefact(Timeline, arguments.measured)) if arguments.measured else None
    if measured is not None and not measured.spans:
        raise error_at(arguments.measured, "has no spans.", "Record at least one step.")
    wanted = read_wanted(arguments)
    profile, cluster, sequence = wanted.profile, wanted.cluster, wanted.sequence
    outputs = {"-o": arguments.output, "--svg": arguments.svg, "--perfetto": arguments.perfetto}
    problems = [*plan.check(profile, cluster), *unwritable(outputs), *wanted.optimizer.problems_with(plan)]
    raise_problems(problems or plan.check_sequence(sequence))
    predicted = forecast(profile, plan, cluster, sequence=sequence, optimizer=wanted.optimizer)
    timeline = simulate(profile, plan, cluster, sequence=sequence, optimizer=wanted.optimizer)
    traces = [arguments.perfetto] if arguments.perfetto else []
    if arguments.output:
        write_output(arguments.output, timeline.to_json())
        # `T.trace.json` for `T.timeline.json`; never the same file.
        path = Path(arguments.output)
        stem = path.name.removesuffix(".json").removesuffix(".timeline")
        traces.append(str(path.with_name(f"{stem}.trace.json")))
    for trace in traces:
        write_output(trace, timeline.to_chrome())
    if arguments.svg:
        title = f"{profile.name} on {cluster.name}: {plan}"
        both = [timeline, *([measured] if measured else [])]
        write_output(arguments.svg, picture(both, title=title, notes=[f"bound by {predicted.bottleneck}"]))
    if arguments.json:
        print(json.dumps(encode(predicted), allow_nan=False))
        return 0 if predicted.fits else 1
    console = stdout()
    print_forecast(console, plan, predicted, "forecast")
    if not predicted.fits:
        console.print("does not fit", style="bold red")
    if line := headroom_warning(predicted, HEADROOM):
        console.print(line)
    console.print()
    print_timeline(console, timeline)
    if measured:
        console.print("\nmeasured", style="bold")
        if measured.plan_fingerprint != plan.fingerprint:
            console.print("of another plan than the one predicted")
        print_timeline(console, measured)
        console.print(compared(timeline, measured))
    if traces:
        console.print(f"\nopen {' or '.join(traces)} in ui.perfetto.dev")
    return 0 if predicted.fits else 1


def print_timeline(console: Console, timeline: Timeline) -> None:
    width = console.width if console.is_terminal else min(console.width, _PIPED_WIDTH)
    plain = "utf" not in console.encoding.lower()
    for line in draw(timeline, width=width, plain=plain):
        console.print(Text.assemble(*line))
