"""`mw runs`: every run below a folder, in a line."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from meshwright.core.codec import encode
from meshwright.core.units import pretty_seconds
from meshwright.report.terminal import FigureTable, stdout
from meshwright.run.run_list import list_runs


def run(arguments: Namespace) -> int:
    rows = list_runs(Path(arguments.folder))
    if arguments.json:
        print(json.dumps({"runs": [encode(row) for row in rows]}))
        return 0
    console = stdout()
    if not rows:
        console.print(f"no runs below {arguments.folder}")
        return 0
    table = FigureTable("run", "state", "model", "step", "loss", "left", "goodput", last="last failure")
    for row in rows:
        table.add_row(
            row.folder,
            row.state,
            row.model or "-",
            f"{row.step}/{row.steps or '?'}",
            "-" if row.loss is None else f"{row.loss:.4f}",
            "-" if row.seconds_left is None else pretty_seconds(row.seconds_left),
            "-" if row.goodput is None else f"{row.goodput:.1%}",
            row.failure,
            style="bold" if row.state in ("failed", "crashed", "damaged") else "",
        )
    console.print(table)
    return 0
