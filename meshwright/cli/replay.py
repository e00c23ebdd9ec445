"""`mw replay`: a recorded step again, looked at layer by layer."""

from __future__ import annotations

import json
from argparse import Namespace

from rich.console import Console

from meshwright.core.codec import encode
from meshwright.report.terminal import FigureTable, stdout
from meshwright.run.replay import ReplayedStep, replay


def run(arguments: Namespace) -> int:
    steps = [] if arguments.step is None else [arguments.step]
    found = replay(arguments.run, steps, on_one_rank=arguments.one_rank)
    if arguments.json:
        print(json.dumps({"steps": [encode(each) for each in found]}))
        return 0
    for each in found:
        show(stdout(), each)
    return 0


def show(console: Console, found: ReplayedStep) -> None:
    start = f"the checkpoint of step {found.from_step}" if found.from_step else "the beginning"
    lines = [f"step {found.step}, samples from {found.cursor} on, replayed from {start} ({found.plan})"]
    for name, value, recorded in (
        ("loss", found.loss, found.recorded_loss),
        ("gradient norm", found.gradient_norm, found.recorded_gradient_norm),
    ):
        is_same = recorded is not None and str(value) == str(recorded)
        beside = "not recorded" if recorded is None else "as recorded" if is_same else f"recorded {recorded:.9g}"
        lines.append(f"{name} {value:.9g} ({beside})")
    lines += [f"not finite first: {text}" for text in found.first_bad] or ["everything is finite"]
    if found.bad_samples:
        lines.append(f"in the rows of samples {', '.join(map(str, found.bad_samples))}")
    for line in lines:
        console.print(line, markup=False)
    table = FigureTable("layer", "largest output", "weights", last="gradient norm")
    for layer in found.layers:
        output = "-" if layer.output is None else f"{layer.output:.4g}"
        table.add_row(layer.name, output, f"{layer.weights:.4g}", f"{layer.gradients:.4g}")
    console.print(table)
