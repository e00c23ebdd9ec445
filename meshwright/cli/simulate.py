"""`mw simulate`: one plan's forecast and timeline, without running it."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from meshwright.cli.show import print_forecast, stdout, write_output
from meshwright.cli.wanted import read_wanted
from meshwright.core.codec import encode, load_artefact
from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.core.timeline import Span, Timeline
from meshwright.core.units import pretty_seconds
from meshwright.simulate.forecast import forecast
from meshwright.simulate.timeline import simulate


def run(arguments: Namespace) -> int:
    plan = load_artefact(Plan, arguments.plan)
    wanted = read_wanted(arguments)
    profile, cluster, sequence = wanted.profile, wanted.cluster, wanted.sequence
    if problems := plan.check(profile, cluster) or plan.check_sequence(sequence):
        raise MeshwrightError(problems)
    predicted = forecast(profile, plan, cluster, sequence=sequence)
    timeline = simulate(profile, plan, cluster, sequence=sequence)
    if arguments.output:
        write_output(arguments.output, timeline.to_json())
        trace = trace_beside(arguments.output)
        write_output(trace, timeline.to_chrome())
    if arguments.json:
        print(json.dumps(encode(predicted), allow_nan=False))
        return 0 if predicted.fits else 1
    console = stdout()
    print_forecast(console, plan, predicted, "forecast")
    if not predicted.fits:
        console.print("[bold red]does not fit[/bold red]")
    shown = timeline.environment["microbatches"]
    console.print("" if shown == f"{plan.num_microbatches} of {plan.num_microbatches}" else f"\nmicrobatches: {shown}")
    for line in drawn(timeline):
        console.print(line, markup=False)
    if arguments.output:
        console.print(f"\nopen {trace} in ui.perfetto.dev")
    return 0 if predicted.fits else 1


def trace_beside(output: str) -> str:
    """`T.trace.json` for `T.timeline.json`; never the same file."""
    path = Path(output)
    stem = path.name.removesuffix(".json").removesuffix(".timeline")
    return str(path.with_name(f"{stem}.trace.json"))


def drawn(timeline: Timeline, width: int = 96) -> list[str]:
    """A row per stage: F forward, B backward, = exchange and update, . idle."""
    total = timeline.seconds or 1.0
    computes: dict[int, list[Span]] = {span.device: [] for span in timeline.spans}
    for span in timeline.spans:
        if span.lane == "compute":
            computes[span.device].append(span)
    rows = []
    for device, spans in sorted(computes.items()):
        row = ["."] * width
        for span in spans:
            letter = {"forward": "F", "backward": "B"}.get(span.name.split()[0], "=")
            first = int(span.start_seconds / total * width)
            last = int((span.start_seconds + span.seconds) / total * width)
            for place in range(first, max(first + 1, min(last, width))):
                if place < width:
                    row[place] = letter
        busy = sum(span.seconds for span in spans) / total
        rows.append(f"rank {device:<5} {''.join(row)} busy {busy:.0%}")
    return [*rows, f"{'':10} 0{'':{width - 12}}{pretty_seconds(total):>10}"]
