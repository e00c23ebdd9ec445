"""ViT, VGG and ResNet: a stem, blocks, a head that classifies, and a loss for each image.

As they were published, but for VGG's dropout, which is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.cost_samples import resnet_kinds, vgg_kinds
from meshwright.models.dimensions import BottleneckShape, ConvShape
from meshwright.models.presets import ResNetConfig, VGGConfig, ViTConfig
from meshwright.ops.batch_norm import BatchNorm
from meshwright.ops.cross_entropy import token_loss
from meshwright.ops.model_interface import BlockModel, Inputs, Inside
from meshwright.zoo.layers import GELU, Norm, TransformerBlock


class ImageModel(BlockModel):
    """Images come in the dtype of the parameters; lower precision is left to autocast, inside of a stage."""

    first = "stem"

    def __init__(
        self,
        stem: nn.Module,
        blocks: Sequence[nn.Module],
        head: nn.Module,
        entries: Sequence[tuple[int, ...]],
        kinds: Sequence[str],
        init_std: float | None = None,
    ):
        """`entries`: shapes of one image where it enters each block; `kinds`: the profile's layer of each."""
        super().__init__()
        self.entries, self.kinds = entries, kinds
        self.stem: nn.Module | None = stem
        self.blocks = nn.ModuleDict({str(i): block for i, block in enumerate(blocks)})
        self.head = head
        self.num_blocks = len(blocks)
        self.hits: Tensor | None = None
        self.starts: dict[str, float | tuple[float, float]]
        self.starts = {name: _start(name, value, init_std) for name, value in self.named_parameters()}
        self.starts |= {name: float(name.endswith("running_var")) for name, _ in self.named_buffers()}

    def forward(
        self,
        inputs: Inputs,
        targets: Tensor | None = None,
        weights: Tensor | None = None,
        received: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(inputs, Tensor)
        logits = self.layers(inputs, received)
        if self.head is None or not self.runs(self.num_blocks - 1) or targets is None or weights is None:
            return logits
        if not self.training:
            hits = (logits.argmax(-1) == targets).to(torch.float64) @ weights.to(torch.float64)
            self.hits = hits if self.hits is None else self.hits + hits
        return (token_loss(logits, targets) * weights).sum()

    def layers(self, inputs: Tensor, received: Tensor | None = None) -> Tensor:
        """Logits, or on an earlier stage what the next one is given."""
        with self.casting(inputs.device):
            x = received
            if x is None:
                assert self.stem is not None, "a later stage is given what the stage before it made"
                x = self.stem(_laid_out(inputs))
            x = _laid_out(x)
            for name, block in self.blocks.items():
                if self.runs(int(name)):
                    x = block(x)
            if self.head is None or not self.runs(self.num_blocks - 1):
                return x.to(inputs.dtype)
            return self.head(x)

    def compile_trunk(self, compiled: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> None:
        self.layers = compiled(self.layers)  # type: ignore[method-assign]

    def take_hits(self) -> Tensor | None:
        """Zero on a stage without the head: it has seen no answers."""
        hits, self.hits = self.hits, None
        device = next(self.parameters()).device
        return torch.zeros((), dtype=torch.float64, device=device) if hits is None else hits

    def boundary(self, inputs: Inputs, block: int) -> tuple[int, ...]:
        assert isinstance(inputs, Tensor)
        return inputs.shape[0], *self.entries[block]

    def kind_of(self, block: int) -> str:
        return self.kinds[block]

    def regions(self) -> Iterable[Inside]:
        return (each for block in self.blocks.values() if hasattr(block, "regions") for each in block.regions())

    def boundary_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def share_statistics(self, group: dist.ProcessGroup, ways: int) -> None:
        self.statistics_groups = (*self.statistics_groups, group)
        for module in self.modules():
            if isinstance(module, BatchNorm):
                module.groups = self.statistics_groups

    def init_value(self, name: str) -> float | tuple[float, float]:
        return self.starts[name]


def _laid_out(x: Tensor) -> Tensor:
    """Channels last on a GPU: VGG-16 is half as fast again on an H200."""
    return x.contiguous(memory_format=torch.channels_last) if x.is_cuda and x.dim() == 4 else x


def _start(name: str, parameter: Tensor, std: float | None) -> float | tuple[float, float]:
    """From its whole shape, before anything is cut; He et al. 2015 for convolutions."""
    if parameter.dim() == 1:
        return float(name.endswith("weight"))  # of a norm
    if std is None and parameter.dim() == 4:
        std = (2.0 / (parameter.shape[0] * parameter.shape[2] * parameter.shape[3])) ** 0.5
    return 0.0, std or parameter.shape[1] ** -0.5


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
        encoder, count = config.encoder, config.num_layers
        blocks = [TransformerBlock(encoder, GELU(encoder, "none"), is_causal=False) for _ in range(count)]
        entries = [(config.num_tokens, config.hidden_size)] * count
        super().__init__(PatchStem(config), blocks, ImageHead(config), entries, ["blocks"] * count, config.init_std)
        self.config = config


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

    def regions(self) -> tuple[Inside, ...]:
        return (Inside(entries=(self.pair,), row=self.pair.down),)


class VGG(ImageModel):
    kind = "conv"

    def __init__(self, config: VGGConfig):
        first, *rest = config.convs
        head = nn.Linear(config.fc_size, config.num_classes)
        sizes = [(each.width, each.size // 2 if each.pools else each.size) for each in config.convs]
        entries = [(width, size, size) for width, size in sizes]
        super().__init__(ConvLayer(first), [*map(ConvLayer, rest), Dense(config)], head, entries, vgg_kinds(config))
        self.config = config


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
        entries = [(each.channels, each.size, each.size) for each in config.bottlenecks]
        blocks = [*map(BottleneckBlock, config.bottlenecks)]
        super().__init__(ConvStem(config), blocks, ConvHead(config), entries, resnet_kinds(config))
        self.config = config
