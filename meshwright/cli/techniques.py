"""`mw techniques`: the list, or one card."""

from __future__ import annotations

import re
import sys
from argparse import Namespace

from meshwright.core.technique import technique_named, technique_names
from meshwright.report.terminal import FigureTable, stdout


def run(arguments: Namespace) -> int:
    console = stdout()
    if arguments.name:
        console.print(re.sub(r"\n(?!\n|What:|When|Cost:|Exactness:)(?<!\n\n)", " ", card(arguments.name)))
        return 0
    table = FigureTable("technique", "axis", "exactness", last="what")
    for name in technique_names():
        kind = technique_named(name)
        table.add_row(name, kind.axis, kind.exactness, card(name).splitlines()[0])
    console.print(table)
    console.print("\nnext: mw techniques NAME shows its card: what, when it helps, when it does not, cost")
    return 0


def card(name: str) -> str:
    return (sys.modules[technique_named(name).__module__].__doc__ or "").strip()
