"""`mw profile`: what each layer of a named model costs."""

from __future__ import annotations

from argparse import Namespace

from rich.table import Table

from meshwright.cli.show import stdout, write_output
from meshwright.cli.wanted import section_named
from meshwright.core.units import pretty_count
from meshwright.models.config import PRESETS, config_kind
from meshwright.models.names import profile_of
from meshwright.runtime.model import describe

_TRACED_SEQUENCE = 1024
"""For modules that are looked at by running them."""


def run(arguments: Namespace) -> int:
    console = stdout()
    if not arguments.model:
        table = Table("model", "kind", "parameters", "blocks", "hidden", box=None, header_style="bold")
        for name, config in PRESETS.items():
            found = profile_of(config, name)
            sizes = map(str, (found.num_blocks, found.hidden_size))
            table.add_row(name, config_kind(config), pretty_count(found.num_params), *sizes)
        console.print(table)
        return 0
    profile = describe(section_named(arguments.model), _TRACED_SEQUENCE).profile
    if arguments.output:
        write_output(arguments.output, profile.to_json())
        return 0
    console.print(f"{profile.name}: {pretty_count(profile.num_params)} parameters")
    counted = profile.counts.removesuffix("s")
    table = Table("layer", "x", "parameters", f"flops/{counted}", f"kept/{counted}", box=None, header_style="bold")
    for layer in profile.layers:
        # Per token of a sequence of 1: attention's share grows with the sequence and is left out.
        flops = sum(each.b + each.bs for op in layer.ops for each in (op.flops, op.backward_flops))
        kept = sum(op.saved.b + op.saved.bs for op in layer.ops)
        table.add_row(
            layer.name,
            str(layer.repeat),
            pretty_count(layer.num_params()),
            pretty_count(flops),
            f"{pretty_count(kept)} elements",
        )
    console.print(table)
    for what, why in profile.uncut.items():
        console.print(f"{what} cannot be divided: {why}")
    return 0
