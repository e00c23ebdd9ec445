"""`mw profile`: what each layer of a named model costs."""

from __future__ import annotations

import time
from argparse import Namespace

from meshwright.cli.arguments import section_named
from meshwright.core.errors import raise_problems
from meshwright.core.profile import Poly
from meshwright.core.units import pretty_bytes, pretty_count, pretty_seconds
from meshwright.models.presets import PRESETS, config_kind, profile_of
from meshwright.report.terminal import FigureTable, stdout, unwritable, write_output
from meshwright.run.model import describe

_TRACED_SEQUENCE = 1024
"""For modules that are looked at by running them."""


def run(arguments: Namespace) -> int:
    console = stdout()
    if not arguments.model:
        table = FigureTable("model", "kind", "parameters", "blocks", last="hidden")
        for name, config in PRESETS.items():
            result = profile_of(config, name)
            sizes = map(str, (result.num_blocks, result.hidden_size))
            table.add_row(name, config_kind(config), pretty_count(result.num_params), *sizes)
        console.print(table)
        return 0
    raise_problems(unwritable({"-o": arguments.output}))
    started = time.perf_counter()
    profile = describe(section_named(arguments.model), _TRACED_SEQUENCE).profile
    took_seconds = time.perf_counter() - started
    if arguments.output:
        write_output(arguments.output, profile.to_json())
        return 0
    console.print(f"{profile.name}: {pretty_count(profile.num_params)} parameters, in {pretty_seconds(took_seconds)}")
    sequence = min(_TRACED_SEQUENCE, profile.max_sequence)
    counted = profile.counts.removesuffix("s")
    heads = ("layer", "x", "parameters", f"forward/{counted}", f"backward/{counted}", f"kept/{counted}")
    table = FigureTable(*heads, last="kernels")
    for layer in profile.layers:
        forward = sum(op.flops(1, sequence) for op in layer.ops) / sequence
        backward = sum(op.backward_flops(1, sequence) for op in layer.ops) / sequence
        kept_bytes = sum((4 if op.dtype == "float32" else 2) * op.saved(1, sequence) for op in layer.ops) / sequence
        launched = [op for op in layer.ops if op.moved != Poly() or op.backward_moved != Poly()]
        table.add_row(
            layer.name,
            str(layer.repeat),
            pretty_count(layer.num_params()),
            f"{pretty_count(forward)} flops",
            f"{pretty_count(backward)} flops",
            pretty_bytes(int(kept_bytes)),
            f"{sum(op.kernels for op in launched):.0f} + {sum(op.backward_kernels for op in launched):.0f}",
        )
    console.print(table)
    if profile.counts == "tokens":
        console.print(f"of a sequence of {sequence}; computed in 16 bits")
    for what, why in profile.uncut.items():
        console.print(f"{what} cannot be divided: {why}")
    for what in profile.unpriced:
        console.print(f"not counted, or roughly: {what}")
    return 0
