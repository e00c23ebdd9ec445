"""VGG and ResNet: convolutions, as they were published but for VGG's dropout, which is left out."""

from __future__ import annotations

from collections.abc import Iterable

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.cost_conv import resnet_kinds, vgg_kinds
from meshwright.models.dimensions import BottleneckShape, ConvShape
from meshwright.models.presets import ResNetConfig, VGGConfig
from meshwright.ops.batch_norm import BatchNorm
from meshwright.ops.model_interface import Inside
from meshwright.zoo.image_models import ImageModel


class ConvLayer(nn.Conv2d):
    """3x3, then relu, then perhaps half the size."""

    def __init__(self, size: ConvShape):
        super().__init__(size.channels, size.width, kernel_size=3, padding=1)
        self.pools = size.pools

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu_(super().forward(x))
        return F.max_pool2d(x, 2) if self.pools else x


class Pair(nn.Module):
    """Two linears with a relu between: what can be split."""

    def __init__(self, num_in: int, size: int):
        super().__init__()
        self.up = nn.Linear(num_in, size)
        self.down = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu_(self.up(x)))


class Dense(nn.Module):
    def __init__(self, config: VGGConfig):
        super().__init__()
        self.pair = Pair(config.flat_size, config.fc_size)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.pair(x.flatten(1)))


class VGG(ImageModel):
    kind = "conv"

    def __init__(self, config: VGGConfig):
        first, *rest = config.convs
        blocks = [*map(ConvLayer, rest), Dense(config)]
        super().__init__(ConvLayer(first), blocks, nn.Linear(config.fc_size, config.num_classes))
        self.config = config
        self.kinds = vgg_kinds(config)

    def kind_of(self, block: int) -> str:
        return self.kinds[block]

    def entry(self, block: int) -> tuple[int, ...]:
        before = self.config.convs[block]  # the stem is the first of them
        size = before.size // 2 if before.pools else before.size
        return before.width, size, size

    def regions(self) -> Iterable[Inside]:
        for block in self.blocks.values():
            if isinstance(block, Dense):
                yield Inside(entries=(block.pair,), row=block.pair.down)


def _conv(num_in: int, num_out: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(num_in, num_out, size, stride, padding=size // 2, bias=False)


class BottleneckBlock(nn.Module):
    def __init__(self, size: BottleneckShape):
        super().__init__()
        self.narrow = _conv(size.channels, size.width, 1)
        self.narrow_norm = BatchNorm(size.width)
        self.middle = _conv(size.width, size.width, 3, size.stride)
        self.middle_norm = BatchNorm(size.width)
        self.wide = _conv(size.width, size.out, 1)
        self.wide_norm = BatchNorm(size.out)
        self.shortcut = _conv(size.channels, size.out, 1, size.stride) if size.enters else None
        self.shortcut_norm = BatchNorm(size.out) if size.enters else None

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu_(self.narrow_norm(self.narrow(x)))
        out = F.relu_(self.middle_norm(self.middle(out)))
        out = self.wide_norm(self.wide(out))
        if self.shortcut is not None and self.shortcut_norm is not None:
            x = self.shortcut_norm(self.shortcut(x))
        return F.relu_(out + x)


class ConvStem(nn.Module):
    def __init__(self, config: ResNetConfig):
        super().__init__()
        self.conv = _conv(config.channels, config.stem_width, 7, 2)
        self.norm = BatchNorm(config.stem_width)

    def forward(self, images: Tensor) -> Tensor:
        return F.max_pool2d(F.relu_(self.norm(self.conv(images))), 3, 2, padding=1)


class ConvHead(nn.Module):
    def __init__(self, config: ResNetConfig):
        super().__init__()
        self.output = nn.Linear(config.bottlenecks[-1].out, config.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(x.mean((2, 3)))


class ResNet(ImageModel):
    kind = "conv"

    def __init__(self, config: ResNetConfig):
        super().__init__(ConvStem(config), [*map(BottleneckBlock, config.bottlenecks)], ConvHead(config))
        self.config = config
        self.kinds = resnet_kinds(config)

    def kind_of(self, block: int) -> str:
        return self.kinds[block]

    def entry(self, block: int) -> tuple[int, ...]:
        size = self.config.bottlenecks[block]
        return size.channels, size.size, size.size
