"""What the profile says of a model with adapters is what the model is; and which adapters there cannot be.

Tests of `models/cost_decoder.py`, `models/dimensions.py`, `models/frozen_parameters.py`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from model_families import GPT, LLAMA, MIXTRAL, QWEN, microbatch
from test_cost import described, kept_by_kind

from meshwright.core.box import Box
from meshwright.core.codec import decode, encode
from meshwright.core.errors import MeshwrightError
from meshwright.core.profile import Profile, packed_shape
from meshwright.models.dimensions import Adapter, DecoderConfig
from meshwright.models.frozen_parameters import freeze
from meshwright.models.presets import preset, profile_of
from meshwright.run.model import describe, open_config
from meshwright.run.run_file import ModelSection
from meshwright.zoo import module_of

SAMPLES, SEQUENCE = 2, 32
WIDE = replace(LLAMA, ffn_size=192)
ADAPTED = {
    "nf4": replace(WIDE, adapter=Adapter(rank=4, base="nf4")),
    "int8, with biases": replace(QWEN, ffn_size=128, adapter=Adapter(rank=3, base="int8")),
    "bf16": replace(GPT, adapter=Adapter(rank=4)),
    "some layers": replace(WIDE, adapter=Adapter(rank=2, targets=("attention.key", "mlp.down"), base="nf4")),
    "outputs": replace(GPT, adapter=Adapter(rank=2, targets=("attention.output",), base="nf4")),
}


def filled(config: DecoderConfig) -> Any:
    opened = open_config(replace(config, init_std=0.2), "tiny", 3)
    model = opened.model.to_empty(device="cpu")
    with torch.no_grad():
        for name, each in model.named_parameters():
            dtype = torch.float32 if each.is_floating_point() else each.dtype
            each.copy_(opened.source(name, Box.whole(tuple(each.shape)), dtype))
    return model


@pytest.mark.parametrize("name", ADAPTED)
def test_names_shapes_and_what_is_trained_are_the_modules(name: str) -> None:
    config = ADAPTED[name]
    with torch.device("meta"):
        model = module_of(config)
    profile = profile_of(config, name)
    real = {n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False)}
    stored = [replace(x, params=tuple(replace(p, shape=p.stored_shape) for p in x.params)) for x in profile.layers]
    assert described(replace(profile, layers=tuple(stored))) == real
    assert profile.num_trained_params == sum(p.numel() for p in model.parameters() if p.requires_grad) > 0
    plain = profile_of(replace(config, adapter=None), name)
    assert profile.num_params == plain.num_params + profile.num_trained_params
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {n for n in real if ".lora_" in n}
    assert Profile.from_json(profile.to_json()) == profile
    assert profile.fingerprint != plain.fingerprint
    assert freeze(profile, lambda name: ".lora_" not in name) == profile, "frozen twice"
    assert decode(DecoderConfig, json.loads(json.dumps(encode(config))), "model") == config


@pytest.mark.parametrize("name", ADAPTED)
def test_saved_bytes_are_what_autograd_keeps(name: str) -> None:
    model, profile = filled(ADAPTED[name]), profile_of(ADAPTED[name], name)
    inputs, targets, weights = microbatch(ADAPTED[name], SAMPLES, SEQUENCE, torch.float32)
    measured, total = kept_by_kind(model, (inputs, targets.clone(), weights))
    promised = {x.name: sum(4 * op.saved(SAMPLES, SEQUENCE) for op in x.ops) for x in profile.layers}
    if ADAPTED[name].adapter.targets == ("*",):  # otherwise the first block keeps less, and each is an average one
        assert 0.92 * measured["blocks"] <= promised["blocks"] <= 1.01 * measured["blocks"]
    assert sum(promised[x.name] * x.repeat for x in profile.layers) == pytest.approx(total, rel=0.06)


def test_costs_of_an_8b_model_are_those_counted_by_hand() -> None:
    profile = profile_of(replace(preset("llama3-8b"), adapter=Adapter(rank=16, base="nf4")), "llama3-8b")
    sizes = {"q": (4096, 4096), "kv": (1024, 4096), "ffn": (14336, 4096)}
    linear = sum(n * k * times for (n, k), times in zip(sizes.values(), (2, 2, 3), strict=True))
    assert profile.num_trained_params == 32 * 16 * (4 * 4096 + 2 * 5120 + 3 * 18432)
    block = profile.block_layers[0]
    packed = sum(torch.Size(p.stored_shape).numel() for p in block.params if p.packed)
    assert packed == linear * 36 // 64
    assert packed_shape((1024, 4096), "int8") == (1024, 64, 68)
    flops = {op.name: op for op in block.ops if op.role == "linear"}
    assert sum(op.flops.bs for op in flops.values()) == 2 * linear
    # One product back, into the input; where it is the first block's, of some layers none.
    assert sum(op.backward_flops.bs for op in flops.values()) == pytest.approx(2 * linear, rel=0.01)
    decoded = [op for op in block.ops if op.name.endswith(".decode")]
    assert sum(op.moved.one for op in decoded) == pytest.approx(linear * (2 + 36 / 64) / 2)
    assert max(op.working.one for op in decoded) == 14336 * 4096


@pytest.mark.parametrize(
    ("config", "adapter", "said"),
    [
        (LLAMA, {"rank": 0}, "rank: is 0. Use at least 1."),
        (LLAMA, {"rank": 33}, "adapter.rank: is 33, and attention.key has no more than 32. Use 1 to 32."),
        (LLAMA, {"rank": 4, "alpha": -1.0}, "alpha: is -1.0."),
        (LLAMA, {"rank": 4, "base": "int4"}, "base: 'int4' is not one of its values."),
        (LLAMA, {"rank": 4, "base": "nf4"}, "stores rows in blocks of 64, and mlp.down has 160 inputs."),
        (LLAMA, {"rank": 4, "targets": ["attention.qurey"]}, '"attention.qurey" matches no linear layer'),
        (LLAMA, {"rank": 4, "targets": ["embed.*"]}, '"embed.*" matches no linear layer of a block'),
        (LLAMA, {"rank": 4, "dropout": 0.1}, "dropout: unknown key."),
        (LLAMA, {}, "rank: missing."),
        (MIXTRAL, {"rank": 4}, "experts are stacked weights, which adapters do not reach."),
    ],
)
def test_adapters_that_cannot_be(config: DecoderConfig, adapter: dict[str, Any], said: str) -> None:
    with pytest.raises(MeshwrightError) as caught:
        decode(DecoderConfig, {**encode(config), "adapter": adapter}, "model")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"name": "vit-b16"}, "model.adapter: is for linear layers of our own decoders, and vit-b16 is none."),
        ({"factory": "somebody:model"}, "and somebody:model is none."),
        ({"name": "byte-3m", "train": ("head.*",)}, "adapter: alone is trained"),
        ({"name": "moe-tiny"}, "model.adapter: experts are stacked weights"),
    ],
)
def test_models_that_have_no_adapters(section: dict[str, Any], said: str) -> None:
    with pytest.raises(MeshwrightError) as caught:
        describe(ModelSection(adapter=Adapter(rank=2), **section), 16)
    assert said in str(caught.value)
