"""Small models that use every switch between them, and something to feed them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from meshwright.core.box import Box
from meshwright.models.presets import PRESETS, Config, DecoderConfig, DLRMConfig, config_kind
from meshwright.ops.initial_weights import seeded
from meshwright.ops.model_interface import Inputs
from meshwright.zoo import module_of

LLAMA = DecoderConfig(
    num_layers=3, hidden_size=64, num_heads=4, num_kv_heads=2, ffn_size=160, vocab_size=96, max_sequence=64
)
QWEN = replace(LLAMA, qk_norm=True, tied=True, qkv_bias=True)
GPT = replace(
    LLAMA,
    positions="learned",
    norm="layer",
    mlp="gelu",
    bias=True,
    qkv_bias=True,
    tied=True,
    num_kv_heads=4,
    ffn_size=256,
)
MIXTRAL = replace(LLAMA, num_experts=4, experts_per_token=2, expert_ffn_size=48)
DEEPSEEK = replace(
    LLAMA,
    num_experts=8,
    experts_per_token=3,
    expert_ffn_size=32,
    num_shared_experts=2,
    num_dense_layers=1,
    router="sigmoid",
    routed_scale=2.5,
    balance=0.01,
)
FAMILIES = {"llama": LLAMA, "qwen": QWEN, "gpt": GPT, "mixtral": MIXTRAL, "deepseek": DEEPSEEK}
OTHERS: dict[str, Config] = {
    name: replace(PRESETS[name], num_classes=100)  # type: ignore[call-arg]
    for name in ("vit-digits", "vgg-tiny", "resnet-tiny")
}
MODELS: dict[str, Config] = {**FAMILIES, **OTHERS, "dlrm-tiny": PRESETS["dlrm-tiny"]}


def filled(config: Config, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """The model with seeded weights, of a decoder large enough that everything matters."""
    if isinstance(config, DecoderConfig):
        changes = {"init_std": 0.2, **changes}
    model = module_of(replace(config, **changes)).to(dtype)
    source = seeded(model.init_value, 3)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.copy_(source(name, Box.whole(tuple(tensor.shape)), dtype))
    return model


def microbatch(
    config: Config, samples: int = 2, sequence: int = 12, dtype: torch.dtype = torch.float64
) -> tuple[Inputs, torch.Tensor, torch.Tensor]:
    """Inputs, targets and weights."""
    draw = torch.Generator().manual_seed(0)
    if isinstance(config, DecoderConfig):
        tokens = torch.randint(config.vocab_size, (samples, sequence + 1), generator=draw)
        return tokens[:, :-1], tokens[:, 1:], torch.ones(samples, sequence, dtype=dtype)
    weights = torch.ones(samples, dtype=dtype)
    if isinstance(config, DLRMConfig):
        dense = torch.randn(samples, config.num_dense, generator=draw, dtype=dtype)
        ids = torch.stack([torch.randint(rows, (samples,), generator=draw) for rows in config.tables], dim=1)
        return (dense, ids), torch.randint(2, (samples,), generator=draw), weights
    assert config_kind(config) in ("vit", "conv")
    images = torch.randn(samples, config.channels, config.image_size, config.image_size, generator=draw, dtype=dtype)
    return images, torch.randint(config.num_classes, (samples,), generator=draw), weights
