"""`mw check`: parity of a plan with one device, on the user's own model and data."""

from __future__ import annotations

import json
from argparse import Namespace

import meshwright as mw
from meshwright.core.codec import encode
from meshwright.core.errors import MeshwrightError
from meshwright.core.units import pretty_seconds
from meshwright.launch.failure import cause
from meshwright.launch.rank_pool import RankError
from meshwright.report.terminal import progress, stdout


def run(arguments: Namespace) -> int:
    if arguments.steps < 1:
        raise MeshwrightError("--steps must be at least 1.")
    try:
        checked = mw.check(
            arguments.run, arguments.plan, changes=arguments.changes, steps=arguments.steps, report=progress
        )
    except RankError as error:  # whose text has a traceback, for tests
        raise MeshwrightError(cause(error.failures).sentence(error.num_ranks), error.exit_code) from None
    if arguments.json:
        print(json.dumps(encode(checked) | {"passed": checked.passed}))
        return 0 if checked.passed else 1
    console = stdout()
    console.print(f"plan: {checked.plan}")
    for part in checked.parts:
        if part.departures:
            first = part.departures[0]
            console.print(
                f"[bold red]departs from one device[/bold red] ({part.what}) first at step {first['step']}, "
                f"{first['quantity']} of {first['layer']}, rank {first['rank']}: {first['error']:.2e} "
                f"(tolerance {first['tolerance']:.1e}); {len(part.departures)} departures in all",
                markup=True,
            )
            console.print(f"tolerance from: {part.tolerance_from}")
        else:
            console.print(
                f"[bold green]trains as one device[/bold green] ({part.what}): agrees to {part.worst_error:.1e} of the "
                f"norm (tolerance {part.tolerance:.1e}, from {part.tolerance_from})",
                markup=True,
            )
        for line in part.traffic[:10]:
            console.print(f"bytes differ from the price: {line}", style="red")
        if not part.traffic:
            console.print(f"bytes as priced: {part.num_messages:,} messages of one step, every rank, every axis")
    what = "losses, gradients, parameters and buffers"
    console.print(f"{checked.steps} steps of {what} in {pretty_seconds(checked.seconds)}")
    return 0 if checked.passed else 1
