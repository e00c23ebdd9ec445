"""`mw profile`: what each layer of a named model costs."""

from __future__ import annotations

from argparse import Namespace

from rich.table import Table

from meshwright.cli.show import stdout, write_output
from meshwright.core.units import pretty_count
from meshwright.models.config import PRESETS, preset
from meshwright.models.cost import decoder_profile


def run(arguments: Namespace) -> int:
    console = stdout()
    if not arguments.model:
        table = Table("model", "parameters", "blocks", "hidden", "vocabulary", box=None, header_style="bold")
        for name, config in PRESETS.items():
            size = pretty_count(decoder_profile(config, name).num_params)
            sizes = map(str, (config.num_layers, config.hidden_size, config.vocab_size))
            table.add_row(name, size, *sizes)
        console.print(table)
        return 0
    profile = decoder_profile(preset(arguments.model), arguments.model)
    if arguments.output:
        write_output(arguments.output, profile.to_json())
        return 0
    console.print(f"{profile.name}: {pretty_count(profile.num_params)} parameters")
    table = Table("layer", "x", "parameters", "flops/token", "kept/token", box=None, header_style="bold")
    for layer in profile.layers:
        # Per token of a sequence of 1: attention's share grows with the sequence and is left out.
        flops = sum(op.flops.bs + op.backward_flops.bs for op in layer.ops)
        kept = sum(op.saved.bs for op in layer.ops)
        table.add_row(
            layer.name,
            str(layer.repeat),
            pretty_count(layer.num_params()),
            pretty_count(flops),
            f"{pretty_count(kept)} elements",
        )
    console.print(table)
    return 0
