"""Our models as `nn.Module`s. Their dimensions, presets and costs, without torch, are in `models`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshwright.models.presets import Config, DecoderConfig, DLRMConfig, ResNetConfig, VGGConfig, ViTConfig
from meshwright.ops.model_interface import Model
from meshwright.zoo.decoder import Decoder
from meshwright.zoo.image_models import VGG, ResNet, ViT
from meshwright.zoo.recommendation import DLRM

_MODULES: dict[type[Config], Callable[[Any], Model]] = {
    DecoderConfig: Decoder,
    ViTConfig: ViT,
    VGGConfig: VGG,
    ResNetConfig: ResNet,
    DLRMConfig: DLRM,
}


def module_of(config: Config) -> Model:
    """A model from its dimensions; its parameters are not filled yet: `init_value` says how each one starts."""
    return _MODULES[type(config)](config)
