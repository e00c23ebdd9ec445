"""A model by its name, or by its dimensions, as a profile. No torch."""

from __future__ import annotations

from meshwright.core.profile import Profile
from meshwright.models.cost_conv import resnet_profile, vgg_profile
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.cost_dlrm import dlrm_profile
from meshwright.models.cost_vit import vit_profile
from meshwright.models.presets import Config, DLRMConfig, ResNetConfig, VGGConfig, ViTConfig, config_kind, preset


def profile_of(config: Config, name: str) -> Profile:
    match config:
        case ViTConfig():
            return vit_profile(config, name)
        case VGGConfig():
            return vgg_profile(config, name)
        case ResNetConfig():
            return resnet_profile(config, name)
        case DLRMConfig():
            return dlrm_profile(config, name)
        case _:
            return decoder_profile(config, name)


def profile(model: str | Config) -> Profile:
    """`profile("llama3-8b")`, or the profile of a model of any dimensions."""
    return profile_of(preset(model), model) if isinstance(model, str) else profile_of(model, config_kind(model))
