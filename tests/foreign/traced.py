"""Our own models as the tracer's subjects, and totals of a profile to hold against what it finds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from meshwright.core.profile import Op, Poly
from meshwright.foreign.trace import Subject, TracedLayer
from meshwright.foreign.trace_fit import Summary
from meshwright.models.presets import Config, DecoderConfig, DLRMConfig
from meshwright.ops.model_interface import Inputs
from meshwright.zoo import module_of


def subject_of(config: Config) -> Subject:
    """With one block of each kind."""
    is_decoder = isinstance(config, DecoderConfig)
    if is_decoder:  # the rest would only be made to stand aside
        dense = min(1, config.num_dense_layers)
        config = replace(config, num_layers=1 + dense, num_dense_layers=dense)
    with torch.device("meta"):
        model = module_of(config)
    if not is_decoder:
        model.set_compute_dtype(torch.bfloat16)
    places: list[TracedLayer] = []
    aside: dict[str, str] = {}
    seen: dict[str, str] = {}
    for part in model.parts():
        if part.is_block and part.kind in seen:
            aside[part.name] = seen[part.kind]
            continue
        seen[part.kind] = part.name
        places.append(TracedLayer(path=part.name, is_block=part.is_block))

    def step(module: nn.Module, batch: Inputs, is_fake: bool) -> Tensor:
        *inputs, targets, weights = batch
        return module(inputs[0] if len(inputs) == 1 else tuple(inputs), targets, weights)

    return Subject(
        module=model,
        step=step,
        inputs=lambda samples, sequence: batch_of(config, samples, sequence),
        places=places,
        aside=aside,
        is_autocast=not is_decoder,
    )


def batch_of(config: Config, samples: int, sequence: int) -> tuple[Tensor, ...]:
    def whole(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64)

    if isinstance(config, DecoderConfig):
        return whole(samples, sequence), whole(samples, sequence), torch.zeros(samples, sequence)
    if isinstance(config, DLRMConfig):
        ids = whole(samples, len(config.tables))
        return torch.zeros(samples, config.num_dense), ids, whole(samples), torch.zeros(samples)
    images = torch.zeros(samples, config.channels, config.image_size, config.image_size)
    return images, whole(samples), torch.zeros(samples)


Totals = dict[str, dict[str, float]]
"""Op kind -> quantity -> amount; bytes where the model computes in 16 bits."""


def totals(ops: Iterable[Op], samples: int, sequence: int) -> Totals:
    found: Totals = defaultdict(lambda: defaultdict(float))
    for op in ops:
        width = 4 if op.dtype == "float32" else 2
        sums = found[op.kind]
        sums["flops"] += op.flops(samples, sequence)
        sums["backward_flops"] += op.backward_flops(samples, sequence)
        sums["moved"] += width * op.moved(samples, sequence)
        sums["backward_moved"] += width * op.backward_moved(samples, sequence)
        if op.moved(samples, sequence):
            sums["kernels"] += op.kernels
        if op.backward_moved(samples, sequence):
            sums["backward_kernels"] += op.backward_kernels
        found["all"]["saved"] += width * op.saved(samples, sequence)
        found["all"]["working"] += width * op.working(samples, sequence)
        left = op.fused or op
        found["all"]["fused_saved"] += width * left.saved(samples, sequence)
        if op.kind in ("matmul", "attention"):
            continue
        sums["fused_moved"] += width * left.moved(samples, sequence)
        sums["fused_backward_moved"] += width * left.backward_moved(samples, sequence)
        sums["fused_kernels"] += left.kernels if left.moved != Poly() else 0.0
        sums["fused_backward_kernels"] += left.backward_kernels if left.backward_moved != Poly() else 0.0
    return found


def traced_totals(summary: Summary, layer: int) -> Totals:
    found: Totals = defaultdict(lambda: defaultdict(float))
    for key, sums in summary.ops.items():
        if key.layer != layer:
            continue
        width = 4 if key.is_wide else 2
        for quantity, amount in sums.items():
            kind = "all" if quantity.endswith("saved") else key.kind
            found[kind][quantity] += amount * (width if quantity.endswith(("moved", "saved")) else 1)
    for (place, _, is_wide), elements in summary.working.items():
        if place == layer:
            found["all"]["working"] += elements * (4 if is_wide else 2)
    return found
