"""`mw simulate`: one plan's forecast and timeline, without running it."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from meshwright.cli.show import print_forecast, stdout, write_output
from meshwright.core.codec import encode, load_artefact
from meshwright.core.errors import MeshwrightError, Problem
from meshwright.core.plan import Plan
from meshwright.core.timeline import Timeline
from meshwright.core.units import pretty_seconds
from meshwright.models.config import preset
from meshwright.models.cost import decoder_profile
from meshwright.probe.names import cluster as named_cluster
from meshwright.simulate.forecast import forecast
from meshwright.simulate.timeline import simulate


def run(arguments: Namespace) -> int:
    plan = load_artefact(Plan, arguments.plan)
    problems = [
        Problem(where=f"--{name}", what="is missing.", fix=f"For example --{name} {example}.")
        for name, example in (("model", "llama3-8b"), ("cluster", "8xh100"))
        if not getattr(arguments, name)
    ]
    if problems:
        raise MeshwrightError(problems)
    config, cluster = preset(arguments.model), named_cluster(arguments.cluster)
    profile = decoder_profile(config, arguments.model)
    sequence = arguments.seq or min(4096, config.max_sequence)
    problems = list(plan.check(profile, cluster))
    for technique in plan.techniques:
        problems.extend(technique.check_sequence(sequence))
    if problems:
        raise MeshwrightError(problems)
    predicted = forecast(profile, plan, cluster, sequence=sequence)
    timeline = simulate(profile, plan, cluster, sequence=sequence)
    if arguments.output:
        write_output(arguments.output, timeline.to_json())
        trace = Path(arguments.output).with_suffix("").with_suffix(".trace.json")
        write_output(str(trace), timeline.to_chrome())
    if arguments.json:
        print(json.dumps(encode(predicted)))
        return 0 if predicted.fits else 1
    console = stdout()
    print_forecast(console, plan, predicted, "forecast")
    if not predicted.fits:
        console.print("[bold red]does not fit[/bold red]")
    console.print()
    for line in drawn(timeline):
        console.print(line, markup=False)
    if arguments.output:
        console.print(f"\nopen {trace} in ui.perfetto.dev")
    return 0 if predicted.fits else 1


def drawn(timeline: Timeline, width: int = 96) -> list[str]:
    """A row per stage: F forward, B backward, = exchange and update, . idle."""
    total = timeline.seconds or 1.0
    rows = []
    for device in sorted({span.device for span in timeline.spans}):
        row = ["."] * width
        for span in timeline.spans:
            if span.device != device or span.lane != "compute":
                continue
            letter = {"forward": "F", "backward": "B"}.get(span.name.split()[0], "=")
            first = int(span.start_seconds / total * width)
            last = int((span.start_seconds + span.seconds) / total * width)
            for place in range(first, max(first + 1, min(last, width))):
                if place < width:
                    row[place] = letter
        busy = timeline.busy_fraction(device)
        rows.append(f"rank {device:<5} {''.join(row)} busy {busy:.0%}")
    return [*rows, f"{'':10} 0{'':{width - 12}}{pretty_seconds(total):>10}"]
