"""A model from its dimensions, as a module."""

from __future__ import annotations

from meshwright.models.presets import Config, DLRMConfig, ResNetConfig, VGGConfig, ViTConfig
from meshwright.ops.model_interface import Model
from meshwright.zoo.convolutional import VGG, ResNet
from meshwright.zoo.decoder import Decoder
from meshwright.zoo.recommendation import DLRM
from meshwright.zoo.vision_transformer import ViT


def module_of(config: Config) -> Model:
    """Not yet filled: `init_value` says how each parameter starts."""
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
