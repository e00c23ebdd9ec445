"""What a plan needs to know of a model to run it: its layers, where it can be cut, how it starts.

Ours (`models/`) and everybody else's (`foreign/adapt.py`) are both such a `Model`, so that no technique asks what it is
handed. A profile (`core/profile.py`) says the same without torch; tests hold the two equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.core.technique import Spans

Inputs: TypeAlias = Tensor | tuple[Tensor, ...]
"""A microbatch: one tensor or several, samples along dim 0 of each."""


@dataclass(frozen=True, kw_only=True)
class ModelPart:
    """A layer as it stands in this stage's module."""

    name: str
    """`blocks.3`: the beginning of its parameters' names."""
    kind: str
    """The profile's layer it is an instance of."""
    module: nn.Module | None
    """None: parameters that do not hang together."""
    is_block: bool = False
    own: tuple[str, ...] = ()
    """Those parameters' names in the model."""


@dataclass(frozen=True, kw_only=True)
class ParameterUnit:
    """Parameters that are gathered and reduced together: those of one module, or of layers that share a weight."""

    module: nn.Module | None
    parameters: tuple[nn.Parameter, ...]
    is_block: bool
    chunk: int
    """The first of the stage's chunks of layers that has a part of it."""


@dataclass(frozen=True, kw_only=True)
class Inside:
    """A region that may be split: what enters `entries` is whole, pieces of it add up after the linear `row`."""

    entries: tuple[nn.Module, ...]
    """Modules whose first argument enters; once, where several are given the same tensor."""
    row: Any
    every: bool = False
    """Everything that entries are given and that carries a gradient enters, not their first argument only."""


def every_token(x: Tensor, dim: int) -> Tensor:
    """This rank has them all."""
    return x


class Model(nn.Module):
    """A list of layers, any of which may be absent, so that a stage is the same class with the same names."""

    kind: str = "decoder"
    compute_dtype: torch.dtype | None = None
    """Of activations; None: the weights' own."""
    statistics_groups: tuple[dist.ProcessGroup, ...] = ()
    span: tuple[int, int] | None = None
    """Of the blocks here those, first to last - 1, that the next forward runs; None: all."""
    block_order: tuple[int, ...] | None = None
    """Numbers of the blocks as a forward ran them; None: always all, one after the other."""
    own_tokens: Callable[[Tensor, int], Tensor] = staticmethod(every_token)
    """Those of whole sequences (along a dim) that this rank has."""
    fused: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    """Parameters (by public name) that hold several matrices along the dim that is cut, and the size of each there."""
    has_local_heads: bool = False
    """Blocks have losses before the end: every stage is given targets where it is trained."""
    cut_before: frozenset[int] = frozenset()
    """Blocks that hand no gradient back to those before them; a local head stands before each."""
    loss_scale: float = 1.0
    """What the loss is about to be multiplied by; losses that arise inside of layers need it. Set before each forward
    and backward."""

    def parts(self) -> Iterable[ModelPart]:
        """The layers here, in order."""
        raise NotImplementedError

    def keep(self, spans: Spans) -> None:
        """Become the stage of these blocks, with what comes before the first block and after the last at the ends."""
        raise NotImplementedError

    def runs(self, block: int) -> bool:
        """Whether the block of that number has its turn now."""
        return self.span is None or self.span[0] <= block < self.span[1]

    def regions(self) -> Iterable[Inside]:
        """Where the insides of layers may be split."""
        return ()

    def set_split(self, index: int, ways: int) -> None:
        """The insides are split, this is piece `index`."""

    def ends(self) -> tuple[Any, Any]:
        """The embedding and the head of a model over a vocabulary, where they are on this stage."""
        return None, None

    def heads(self) -> Iterable[tuple[str, Any]]:
        """The heads here that turn hidden states into a loss over the vocabulary, by the beginning of their names."""
        _, head = self.ends()
        return () if head is None else (("head", head),)

    def public_name(self, name: str) -> str:
        """What a parameter is called in checkpoints and by users."""
        return name

    def boundary(self, inputs: Inputs, block: int) -> tuple[int, ...]:
        """Shape of what enters block number `block` (of the whole model) for a microbatch of inputs."""
        raise NotImplementedError

    def init_value(self, name: str) -> float | tuple[float, float]:
        """How a parameter or buffer starts: a constant, or (mean, standard deviation) of a normal."""
        raise NotImplementedError

    def forward(
        self,
        inputs: Inputs,
        targets: Tensor | None = None,
        weights: Tensor | None = None,
        received: Tensor | None = None,
    ) -> Tensor:
        """What goes to the next stage, or at the end the sum of weight x loss (the output, without targets).

        A later stage gets the samples too, and `received` from the stage before it.
        """
        raise NotImplementedError

    def block_modules(self) -> list[nn.Module]:
        return [part.module for part in self.parts() if part.is_block and part.module is not None]

    def compile_trunk(self, compiled: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> None:
        """Let one function, as `compiled` makes it, run all layers of the whole model before the loss. Only for
        decoders and image models of ours."""
        raise NotImplementedError

    def numbered_blocks(self) -> Iterable[tuple[nn.Module, int]]:
        """The blocks here, with their numbers in the whole model."""
        return ()

    def set_compute_dtype(self, dtype: torch.dtype) -> None:
        self.compute_dtype = dtype

    def boundary_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of what stages send each other, given the parameters' dtype."""
        return self.compute_dtype or dtype

    def set_place(self, device: torch.device, dtype: torch.dtype) -> None:
        """Where and in what dtype the parameters are about to be filled."""

    def casting(self, device: torch.device) -> Any:
        """For models that leave lower precision to autocast."""
        if self.compute_dtype is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.compute_dtype)

    def share_statistics(self, group: dist.ProcessGroup, ways: int) -> None:
        """Batch statistics are to be summed over `group` too, `ways` ranks with equally many samples each."""

    def take_hits(self) -> Tensor | None:
        """Weighted samples whose first choice was right since last asked; None where nothing is classified."""
        return None


class BlockModel(Model):
    """A first layer, numbered blocks and a head; each may be on another stage, and is then None or not among them."""

    first: str
    """Attribute that holds the first layer, and the name of its profile's layer."""
    num_blocks: int
    """Of the whole model."""
    blocks: nn.ModuleDict
    head: nn.Module | None

    def kind_of(self, block: int) -> str:
        """The profile's layer that a block is."""
        return "blocks"

    def keep(self, spans: Spans) -> None:
        for name in list(self.blocks):
            if not is_within(spans, int(name)):
                del self.blocks[name]
        if not is_within(spans, 0):
            setattr(self, self.first, None)
        if not is_within(spans, self.num_blocks - 1):
            self.head = None

    def parts(self) -> Iterable[ModelPart]:
        if getattr(self, self.first) is not None:
            yield ModelPart(name=self.first, kind=self.first, module=getattr(self, self.first))
        for name, block in self.blocks.items():
            yield ModelPart(name=f"blocks.{name}", kind=self.kind_of(int(name)), module=block, is_block=True)
        if self.head is not None:
            yield ModelPart(name="head", kind="head", module=self.head)


def is_within(spans: Spans, block: int) -> bool:
    return any(first <= block < last for first, last in spans)


def map_inputs(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    return tuple(map(change, inputs)) if isinstance(inputs, tuple) else change(inputs)


def split_inputs(inputs: Inputs, size: int) -> list[Inputs]:
    """Microbatches of `size` samples."""
    if isinstance(inputs, tuple):
        return list(zip(*(each.split(size) for each in inputs), strict=True))
    return list(inputs.split(size))


def num_samples(inputs: Inputs) -> int:
    return (inputs[0] if isinstance(inputs, tuple) else inputs).shape[0]


def replace_parameter(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Wherever it hangs: in more than one place where it is tied."""
    for module in model.modules():
        for name, value in list(module._parameters.items()):
            if value is old:
                module._parameters[name] = new
