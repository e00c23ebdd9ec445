"""A model from its dimensions, as a module."""

from __future__ import annotations

from meshwright.models.config import Config, DLRMConfig, ResNetConfig, VGGConfig, ViTConfig
from meshwright.models.conv import VGG, ResNet
from meshwright.models.decoder import Decoder
from meshwright.models.dlrm import DLRM
from meshwright.models.vit import ViT
from meshwright.ops.model import Model


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
