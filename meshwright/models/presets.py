"""Presets of every kind of model, by name, and the profile of any of them. No torch.

`presets.json` has dimensions as published by the models' authors (their config files and papers). The models like
DeepSeek-V3 and Kimi K2 have plain attention in place of their latent one, and a balancing loss in place of biases.
DLRM's tables are those of Criteo's terabyte of clicks, ids beyond 40 million folded, as MLPerf trains it. The last
entries are small ones for a laptop and for tests.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.core.codec import decode
from meshwright.core.errors import Problem, error_at, nearest
from meshwright.core.profile import Profile
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.cost_samples import dlrm_profile, resnet_profile, vgg_profile, vit_profile
from meshwright.models.dimensions import Config, DecoderConfig, DLRMConfig, ResNetConfig, VGGConfig, ViTConfig

_CONFIGS: dict[str, type[Config]] = {
    "decoder": DecoderConfig,
    "vit": ViTConfig,
    "vgg": VGGConfig,
    "resnet": ResNetConfig,
    "dlrm": DLRMConfig,
}


PRESETS: dict[str, Config] = {
    name: decode(_CONFIGS[each.pop("kind")], each, f"presets.json: {name}")
    for name, each in json.loads(Path(__file__).with_name("presets.json").read_text(encoding="utf-8")).items()
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
    what = f"{min(sequence, 1e18):g} tokens; {profile.name} has positions for {most}."
    return Problem(where=where, what=what, fix=f"{fix}.")


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
