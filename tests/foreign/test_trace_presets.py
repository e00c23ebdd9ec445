"""The torch-free costs of our own models are what the tracer finds: every named model is traced again, at full width.

Held per layer and op kind: flops and kernels exactly, bytes kept within 1 %, bytes moved within 3 % (or a kilobyte).

Tests of `models/cost_samples.py`.
"""

from __future__ import annotations

import pytest
from traced import subject_of, totals, traced_totals

from meshwright.foreign.trace import trace_at
from meshwright.models.presets import PRESETS, DecoderConfig, config_kind, profile

SAMPLES = 3
EXACT = ("flops", "backward_flops", "kernels", "backward_kernels")
MOVED = ("moved", "backward_moved")
FUSED = ("fused_kernels", "fused_backward_kernels")
FUSED_MOVED = ("fused_moved", "fused_backward_moved")


@pytest.mark.parametrize("name", PRESETS)
def test_named_models_cost_what_the_tracer_finds(name: str) -> None:
    config, layers = PRESETS[name], profile(name).layers
    # Not a size that anything of these models has.
    sequence = min(config.max_sequence, 1022) if isinstance(config, DecoderConfig) else 1
    summary = trace_at(subject_of(config), SAMPLES, sequence)
    kept_traced = kept = 0.0
    compared = 0
    for place, layer in enumerate(layers):
        found, said = traced_totals(summary, place), totals(layer.ops, SAMPLES, sequence)
        kinds = (found.keys() | said.keys()) - {"all"}
        for kind in kinds:
            for quantity in EXACT:
                assert said[kind][quantity] == pytest.approx(found[kind][quantity], rel=1e-6), (
                    layer.name,
                    kind,
                    quantity,
                )
            if layer.name == "embed" and kind in ("memory", "gather"):
                continue  # tables of positions have the sequence's length once, whatever the samples
            for quantity in MOVED:
                assert said[kind][quantity] == pytest.approx(found[kind][quantity], rel=0.03, abs=1024), (
                    layer.name,
                    kind,
                )
                compared += 1
        if layer.name == "embed":
            continue
        kept_traced += found["all"]["saved"]
        kept += said["all"]["saved"]
        if config_kind(config) != "conv":  # there a pooled image is told by whoever made it, not by whoever reads it
            assert said["all"]["saved"] == pytest.approx(found["all"]["saved"], rel=0.01, abs=64), layer.name
    assert compared > 8
    assert kept == pytest.approx(kept_traced, rel=0.01)


DENSE = [name for name, config in PRESETS.items() if isinstance(config, DecoderConfig) and not config.num_experts]


@pytest.mark.parametrize("name", ["llama3-8b", "qwen3-8b", "gpt2-xl"])
def test_compiled_blocks_cost_what_fusing_the_trace_gives(name: str) -> None:
    assert name in DENSE
    summary = trace_at(subject_of(PRESETS[name]), SAMPLES, 1022)
    found, said = traced_totals(summary, 1), totals(profile(name).layers[1].ops, SAMPLES, 1022)
    assert found["memory"]["fused_moved"] < found["memory"]["moved"]
    for quantity in FUSED:
        assert said["memory"][quantity] == found["memory"][quantity], quantity
    for quantity in FUSED_MOVED:
        assert said["memory"][quantity] == pytest.approx(found["memory"][quantity], rel=0.03), quantity
    assert said["all"]["fused_saved"] == pytest.approx(found["all"]["fused_saved"], rel=0.01)
