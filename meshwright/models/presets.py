"""Presets of every kind of model, by name, and the profile of any of them. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from meshwright.core.errors import Problem, error_at, nearest
from meshwright.core.profile import Profile
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.cost_samples import dlrm_profile, resnet_profile, vgg_profile, vit_profile
from meshwright.models.dimensions import Config, DecoderConfig, DLRMConfig, ResNetConfig, VGGConfig, ViTConfig


def _gpt2(layers: int, hidden: int, heads: int, **changes: Any) -> DecoderConfig:
    about = {"max_sequence": 1024, "tied": True} | changes
    return DecoderConfig.like_gpt2(layers, hidden, heads, 4 * hidden, 50257, **about)


def _llama(layers: int, hidden: int, heads: int, ffn: int, **changes: Any) -> DecoderConfig:
    base: dict[str, Any] = {"num_layers": layers, "hidden_size": hidden, "num_heads": heads, "num_kv_heads": 8}
    base |= {"ffn_size": ffn, "vocab_size": 128256, "max_sequence": 131072, "rope_theta": 500_000.0}
    return DecoderConfig(**(base | changes))


def _qwen3(layers: int, hidden: int, heads: int, ffn: int, tied: bool) -> DecoderConfig:
    changes = {"vocab_size": 151936, "max_sequence": 40960, "rope_theta": 1_000_000.0, "norm_epsilon": 1e-6}
    return _llama(layers, hidden, heads, ffn, head_size=128, qk_norm=True, tied=tied, **changes)


def _mixtral(layers: int, hidden: int, heads: int, ffn: int, **changes: Any) -> DecoderConfig:
    base = {"num_experts": 8, "experts_per_token": 2, "vocab_size": 32000, "rope_theta": 1_000_000.0}
    base |= {"max_sequence": 32768, "expert_ffn_size": ffn}
    return _llama(layers, hidden, heads, ffn, **(base | changes))


def _fine_experts(heads: int, experts: int, dense_layers: int, **changes: Any) -> DecoderConfig:
    """DeepSeek-V3 and its kin, with plain attention (heads of 128, each with its own key and value) in place of their
    latent one, and balanced by a loss rather than by biases."""
    base = {"head_size": 128, "norm_epsilon": 1e-6, "expert_ffn_size": 2048, "router": "sigmoid", "balance": 1e-4}
    base |= {"num_experts": experts, "experts_per_token": 8, "num_shared_experts": 1, "num_dense_layers": dense_layers}
    return _llama(61, 7168, heads, 18432, num_kv_heads=heads, **(base | changes))


def _vit(layers: int, hidden: int, heads: int, patch: int) -> ViTConfig:
    return ViTConfig(num_layers=layers, hidden_size=hidden, num_heads=heads, ffn_size=4 * hidden, patch_size=patch)


# Rows of the tables of Criteo's terabyte of clicks, ids beyond 40 million folded, as MLPerf trains it.
# fmt: off
_CRITEO = (
    39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10, 2208, 11938, 155, 4, 976, 14,
    39979771, 25641295, 39664984, 585935, 12972, 108, 36,
)
# fmt: on

_TINY: dict[str, Any] = {"num_kv_heads": 2, "vocab_size": 256, "max_sequence": 64, "rope_theta": 1e4}

# Dimensions as published by the models' authors (their config files and papers).
PRESETS: dict[str, Config] = {
    "gpt2-124m": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "gpt3-175b": _gpt2(96, 12288, 96, max_sequence=2048),
    "llama3.2-1b": _llama(16, 2048, 32, 8192, tied=True, rope_scaling="llama3", rope_factor=32.0),
    "llama3.2-3b": _llama(28, 3072, 24, 8192, tied=True, rope_scaling="llama3", rope_factor=32.0),
    "llama3-8b": _llama(32, 4096, 32, 14336, max_sequence=8192),
    "llama3-70b": _llama(80, 8192, 64, 28672, max_sequence=8192),
    "llama3-405b": _llama(126, 16384, 128, 53248, rope_scaling="llama3"),
    "llama3.1-8b": _llama(32, 4096, 32, 14336, rope_scaling="llama3"),
    "llama3.1-70b": _llama(80, 8192, 64, 28672, rope_scaling="llama3"),
    "llama3.1-405b": _llama(126, 16384, 128, 53248, rope_scaling="llama3"),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288, tied=False),
    "qwen3-14b": _qwen3(40, 5120, 40, 17408, tied=False),
    "qwen3-32b": _qwen3(64, 5120, 64, 25600, tied=False),
    "mistral-7b": _llama(32, 4096, 32, 14336, vocab_size=32768, max_sequence=32768, rope_theta=1_000_000.0),
    "mixtral-8x7b": _mixtral(32, 4096, 32, 14336),
    "mixtral-8x22b": _mixtral(56, 6144, 48, 16384, max_sequence=65536),
    # 17 billion parameters more than DeepSeek-V3 has; Kimi K2: a trillion parameters.
    "deepseek-v3-like": _fine_experts(128, 256, 3, vocab_size=129280, rope_theta=10_000.0, routed_scale=2.5),
    "kimi-k2-like": _fine_experts(64, 384, 1, vocab_size=163840, rope_theta=50_000.0, routed_scale=2.827),
    "vit-b16": _vit(12, 768, 12, 16),
    "vit-l16": _vit(24, 1024, 16, 16),
    "vit-h14": _vit(32, 1280, 16, 14),
    "vgg16": VGGConfig(),
    "resnet50": ResNetConfig(),
    "dlrm-small": DLRMConfig(tables=tuple(min(rows, 100_000) for rows in _CRITEO)),
    "dlrm-large": DLRMConfig(tables=_CRITEO),
    # Small ones for a laptop and for tests: byte-level, so the vocabulary is 256.
    "byte-3m": _llama(4, 256, 4, 688, num_kv_heads=2, vocab_size=256, max_sequence=1024, rope_theta=1e4),
    "byte-tiny": _llama(2, 32, 4, 64, **_TINY),
    "moe-tiny": _mixtral(2, 32, 4, 64, **_TINY, num_experts=4, expert_ffn_size=32, num_shared_experts=1, balance=0.01),
    "vit-digits": ViTConfig(
        num_layers=3, hidden_size=48, num_heads=4, ffn_size=96, patch_size=2, image_size=8, channels=1, num_classes=10
    ),
    "vgg-tiny": VGGConfig(stages=(1, 2), widths=(8, 16), fc_size=32, image_size=8, channels=1, num_classes=10),
    "resnet-tiny": ResNetConfig(stages=(1, 2), widths=(8, 16), stem_width=8, image_size=16, channels=1, num_classes=10),
    "dlrm-tiny": DLRMConfig(tables=(64, 32, 8, 3), embedding_size=8, num_dense=5, bottom=(16,), top=(32, 16)),
}
ALIASES = {"vit-b": "vit-b16", "vit-l": "vit-l16", "vit-h": "vit-h14"}


def sequence_problem(profile: Profile, sequence: float, where: str) -> Problem | None:
    """What is wrong with samples of so many tokens, and where there are positions for them."""
    most, config = profile.max_sequence, PRESETS.get(ALIASES.get(profile.name, profile.name))
    if 1 <= sequence <= most and sequence == int(sequence):
        return None
    fix = f"Use 1 to {most}"
    if isinstance(config, DecoderConfig) and sequence > most:
        same: dict[str, Any] = {"max_sequence": config.max_sequence, "rope_scaling": config.rope_scaling}
        longer = [
            name
            for name, each in PRESETS.items()
            if isinstance(each, DecoderConfig) and each.max_sequence >= sequence and replace(each, **same) == config
        ]
        stretched = (
            " --change rope_scaling=llama3" if (config.positions, config.rope_scaling) == ("rope", "none") else ""
        )
        fix += "".join(f", or --model {name}" for name in longer)
        fix += f", or give it more: --change max_sequence={math.ceil(sequence)}{stretched}"
    return Problem(where=where, what=f"{sequence:g} tokens; {profile.name} has positions for {most}.", fix=f"{fix}.")


def preset(name: str) -> Config:
    name = ALIASES.get(name, name)
    if name not in PRESETS:
        raise error_at("model", f'no model is called "{name}".', nearest(name, PRESETS))
    return PRESETS[name]


_KINDS: dict[type, tuple[str, Callable[[Any, str], Profile]]] = {
    DecoderConfig: ("decoder", decoder_profile),
    ViTConfig: ("vit", vit_profile),
    VGGConfig: ("conv", vgg_profile),
    ResNetConfig: ("conv", resnet_profile),
    DLRMConfig: ("dlrm", dlrm_profile),
}


def config_kind(config: Config) -> str:
    return _KINDS[type(config)][0]


def profile_of(config: Config, name: str) -> Profile:
    return _KINDS[type(config)][1](config, name)


def profile(model: str | Config) -> Profile:
    """`profile("llama3-8b")`, or the profile of a model of any dimensions."""
    return profile_of(preset(model), model) if isinstance(model, str) else profile_of(model, config_kind(model))
