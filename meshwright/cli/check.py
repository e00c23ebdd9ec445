"""`mw check`: parity of a plan with one device, on the user's own model and data."""

from __future__ import annotations

import json
from argparse import Namespace

from meshwright.cli.show import progress, stdout
from meshwright.core.codec import encode
from meshwright.core.errors import MeshwrightError
from meshwright.core.units import pretty_seconds
from meshwright.runtime.check import Checked, check
from meshwright.runtime.config import read_run
from meshwright.runtime.prepare import prepare


def run(arguments: Namespace) -> int:
    if arguments.steps < 1:
        raise MeshwrightError("--steps must be at least 1.")
    config = read_run(arguments.run, arguments.changes)
    prepared = prepare(config, arguments.plan, progress)
    checked = check(config, prepared.plan, steps=arguments.steps, report=progress)
    if arguments.json:
        print(json.dumps(encode(checked) | {"passed": checked.passed}))
    else:
        _print(checked)
    return 0 if checked.passed else 1


def _print(checked: Checked) -> None:
    console = stdout()
    console.print(f"plan: {checked.plan}")
    kind = f"{checked.steps} steps in {checked.dtype} took {pretty_seconds(checked.seconds)}"
    if checked.departures:
        first = checked.departures[0]
        console.print(
            f"[bold red]departs from one device[/bold red] first at step {first['step']}, {first['quantity']} of "
            f"{first['layer']}, rank {first['rank']}: {first['error']:.2e} of its norm "
            f"(tolerance {checked.tolerance:.0e}); {len(checked.departures)} departures in all; {kind}"
        )
    else:
        console.print(
            f"[bold green]trains as one device[/bold green]: losses, gradients and parameters agree to "
            f"{checked.worst_error:.1e} of their norms (tolerance {checked.tolerance:.0e}, {checked.exactness}); {kind}"
        )
    if checked.traffic:
        console.print("[bold red]bytes differ from the price:[/bold red]")
        for line in checked.traffic[:10]:
            console.print(f"  {line}")
    else:
        console.print(f"bytes as priced: {checked.num_messages:,} messages of one step, every rank, every axis")
