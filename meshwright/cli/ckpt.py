"""`mw ckpt list|verify`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from rich.table import Table

from meshwright.checkpoint.inspect import describe, verify_all
from meshwright.cli.show import stdout
from meshwright.core.errors import MeshwrightError, Problem
from meshwright.core.units import pretty_bytes


def run(arguments: Namespace) -> int:
    folder = Path(arguments.folder)
    root = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    if not root.is_dir():
        raise MeshwrightError([Problem(where=str(folder), what="there is no such folder.")])
    console = stdout()
    if arguments.action == "list":
        table = Table("step", "size", "files", "tensors", "saved", "state", box=None, header_style="bold")
        for row in describe(root):
            sizes = (str(row.step), pretty_bytes(row.bytes), str(row.num_files), str(row.num_tensors))
            table.add_row(*sizes, row.when_utc, row.damage or "complete")
        console.print(table)
        return 0
    checked = verify_all(root)
    if not checked:
        raise MeshwrightError([Problem(where=str(root), what="has no checkpoints.")])
    for step, problems in checked.items():
        console.print(f"step {step}: {'whole' if not problems else 'DAMAGED'}")
        for problem in problems:
            console.print(f"  {problem}", markup=False)
    return 1 if any(checked.values()) else 0
