"""Our models as `nn.Module`s. Their dimensions, presets and costs, without torch, are in `models`."""

from __future__ import annotations

from meshwright.models.presets import Config, DLRMConfig, ResNetConfig, VGGConfig, ViTConfig
from meshwright.ops.model_interface import Model
from meshwright.zoo.decoder import Decoder
from meshwright.zoo.image_models import VGG, ResNet, ViT
from meshwright.zoo.recommendation import DLRM


def module_of(config: Config) -> Model:
    """A model from its dimensions; its parameters are not filled yet: `init_value` says how each one starts."""
    match config:
        case ViTConfig():
            return ViT(config)
        case VGGConfig():
            return VGG(config)
        case ResNetConfig():
            return ResNet(config)
        case DLRMConfig():
            return DLRM(config)
        case _:
            return Decoder(config)
