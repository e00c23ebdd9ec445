"""Vision transformer: an image as a sequence of patches, read both ways."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from meshwright.models.presets import ViTConfig
from meshwright.ops.model_interface import Inside
from meshwright.zoo.image_models import ImageModel
from meshwright.zoo.layers import GELU, Norm, TransformerBlock


class PatchStem(nn.Module):
    def __init__(self, config: ViTConfig):
        super().__init__()
        d, patch = config.hidden_size, config.patch_size
        self.patches = nn.Conv2d(config.channels, d, kernel_size=patch, stride=patch)
        self.token = nn.Parameter(torch.empty(d))
        self.positions = nn.Parameter(torch.empty(config.num_tokens, d))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        token = self.token.to(x.dtype).expand(x.shape[0], 1, -1)
        # The stream is of the images' dtype, whatever the patches were computed in.
        return torch.cat((token, x), dim=1).to(images.dtype) + self.positions.to(images.dtype)


class ImageHead(nn.Module):
    def __init__(self, config: ViTConfig):
        super().__init__()
        self.norm = Norm(config.hidden_size, "layer", config.norm_epsilon)
        self.output = nn.Linear(config.hidden_size, config.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        # A copy of the class token, so that the patches need not be kept.
        return self.output(self.norm(x[:, 0].contiguous()))


class ViT(ImageModel):
    kind = "vit"

    def __init__(self, config: ViTConfig):
        encoder = config.encoder
        blocks = [TransformerBlock(encoder, GELU(encoder, "none"), is_causal=False) for _ in range(config.num_layers)]
        super().__init__(PatchStem(config), blocks, ImageHead(config), config.init_std)
        self.config = config

    def kind_of(self, block: int) -> str:
        return "blocks"

    def entry(self, block: int) -> tuple[int, ...]:
        return self.config.num_tokens, self.config.hidden_size

    def regions(self) -> Iterable[Inside]:
        for block in self.blocks.values():
            assert isinstance(block, TransformerBlock)
            yield from block.regions()
