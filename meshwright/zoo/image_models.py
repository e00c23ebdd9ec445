"""What ViT, VGG and ResNet have in common: a stem, blocks, a head that classifies, and a loss for each image."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.ops.batch_norm import BatchNorm
from meshwright.ops.cross_entropy import token_loss
from meshwright.ops.model_interface import Inputs, Model, ModelPart, Spans, is_within


class ImageModel(Model):
    """Images come in the dtype of the parameters; lower precision is left to autocast, inside of a stage."""

    def __init__(self, stem: nn.Module, blocks: Sequence[nn.Module], head: nn.Module, init_std: float | None = None):
        super().__init__()
        self.stem: nn.Module | None = stem
        self.blocks = nn.ModuleDict({str(i): block for i, block in enumerate(blocks)})
        self.head: nn.Module | None = head
        self.num_blocks = len(blocks)
        self.hits: Tensor | None = None
        self.starts: dict[str, float | tuple[float, float]]
        self.starts = {name: _start(name, value, init_std) for name, value in self.named_parameters()}
        self.starts |= {name: float(name.endswith("running_var")) for name, _ in self.named_buffers()}

    def kind_of(self, block: int) -> str:
        """The profile's layer that a block is."""
        raise NotImplementedError

    def entry(self, block: int) -> tuple[int, ...]:
        """Shape of one image where it enters a block."""
        raise NotImplementedError

    def forward(
        self,
        inputs: Inputs,
        targets: Tensor | None = None,
        weights: Tensor | None = None,
        received: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(inputs, Tensor)
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
            logits = self.head(x)
        if targets is None or weights is None:
            return logits
        if not self.training:
            self._count_hits(logits, targets, weights)
        return (token_loss(logits, targets) * weights).sum()

    def _count_hits(self, logits: Tensor, targets: Tensor, weights: Tensor) -> None:
        right = (logits.argmax(-1) == targets).to(torch.float64) @ weights.to(torch.float64)
        self.hits = right if self.hits is None else self.hits + right

    def take_hits(self) -> Tensor | None:
        """Zero on a stage without the head: it has seen no answers."""
        hits, self.hits = self.hits, None
        device = next(self.parameters()).device
        return torch.zeros((), dtype=torch.float64, device=device) if hits is None else hits

    def keep(self, spans: Spans) -> None:
        for name in list(self.blocks):
            if not is_within(spans, int(name)):
                del self.blocks[name]
        if not is_within(spans, 0):
            self.stem = None
        if not is_within(spans, self.num_blocks - 1):
            self.head = None

    def parts(self) -> Iterable[ModelPart]:
        if self.stem is not None:
            yield ModelPart(name="stem", kind="stem", module=self.stem)
        for name, block in self.blocks.items():
            yield ModelPart(name=f"blocks.{name}", kind=self.kind_of(int(name)), module=block, is_block=True)
        if self.head is not None:
            yield ModelPart(name="head", kind="head", module=self.head)

    def boundary(self, inputs: Inputs, block: int) -> tuple[int, ...]:
        assert isinstance(inputs, Tensor)
        return inputs.shape[0], *self.entry(block)

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
