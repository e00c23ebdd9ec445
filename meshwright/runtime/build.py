"""A plan made real: the phases of `apply`, folded over one rank's share of a model.

The model stays on the meta device until the phases have cut it; only then does a rank allocate and fill its own pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.core.box import Box
from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.core.profile import Param, Profile
from meshwright.core.technique import PHASES
from meshwright.ops.mesh import Mesh
from meshwright.ops.pipeline import Wire
from meshwright.ops.shard import local
from meshwright.ops.surgery import replace_parameter
from meshwright.runtime.init import Source
from meshwright.schedules import SCHEDULES, Actions


@dataclass(kw_only=True)
class Build:
    """What techniques change. Each adds functions to phases; they run in the order of `PHASES`."""

    plan: Plan
    profile: Profile
    model: nn.Module
    mesh: Mesh
    source: Source
    dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype = torch.float32
    schedule: Callable[[int], Actions] = lambda count: SCHEDULES["1f1b"].actions(0, 1, count)
    forward_schedule: Callable[[int], Actions] = lambda count: SCHEDULES["forward"].actions(0, 1, count)
    wire: Wire | None = None
    has_loss: bool = True
    sequence_ways: int = 1
    loss_scale: float = 1.0
    reduction_owner: str = ""
    """The one technique that sums gradients over the replicas."""
    on_step: list[Callable[[], Any]] = field(default_factory=list)
    on_backward: list[Callable[[bool], Any]] = field(default_factory=list)
    on_finish: list[Callable[[], Any]] = field(default_factory=list)
    on_action: list[Callable[[], Any]] = field(default_factory=list)
    """Called before every action: for whoever watches."""
    on_evaluated: list[Callable[[], Any]] = field(default_factory=list)
    boxes: dict[str, Box] = field(default_factory=dict)
    cut_axes: dict[str, frozenset[str]] = field(default_factory=dict)
    """Axes that cut a parameter; along all others it is a replica."""
    canonical: dict[str, str] = field(default_factory=dict)
    """Name here -> the one name a parameter has in every plan (tied weights have two names)."""
    owed: dict[str, list[dist.ProcessGroup]] = field(default_factory=dict)
    """Gradients still to be summed over a group when the backward passes are over."""
    copies: set[str] = field(default_factory=set)
    """Parameters that another stage holds too and answers for."""
    tied_across_stages: tuple[str, ...] = ()
    _phases: dict[str, list[Callable[[Build], None]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tied = {}
        for layer in self.profile.layers:
            for param in layer.params:
                if param.tied:
                    tied[f"{layer.name}.{param.name}"] = param.tied
        self.tied_across_stages = tuple(tied.values())
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            self.canonical[name] = tied.get(name, name)
            self.boxes[self.canonical[name]] = Box.whole(tuple(parameter.shape))
            self.cut_axes[self.canonical[name]] = frozenset()

    def at(self, phase: str, change: Callable[[Build], None]) -> None:
        assert phase in PHASES, phase
        self._phases.setdefault(phase, []).append(change)

    def run(self) -> None:
        for technique in self.plan.in_phase_order():
            technique.apply(self)
        for phase in PHASES:
            if phase == "optimizer":
                self.materialise(self.model)  # whatever no wrapper has filled yet
            for change in self._phases.get(phase, ()):
                change(self)

    def named_params(self) -> Iterable[tuple[str, Param]]:
        """Canonical name and profile entry of every parameter of this stage, tied ones once."""
        entries = {(layer.name, param.name): param for layer in self.profile.layers for param in layer.params}
        blocks = {layer.name for layer in self.profile.layers if layer.is_block}
        for name, _ in list(self.model.named_parameters()):  # a list: callers replace parameters as they go
            layer, rest = name.split(".", 1)
            yield self.canonical[name], entries[layer, rest.split(".", 1)[1] if layer in blocks else rest]

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        for name, parameter in self.model.named_parameters():
            yield self.canonical[name], parameter

    def units(self) -> list[list[nn.Module]]:
        """Layers gathered and reduced together: one each, but those that share a weight as one."""
        shared = {name.split(".")[0] for name, to in self.canonical.items() if name != to}
        shared |= {to.split(".")[0] for name, to in self.canonical.items() if name != to}
        layers = list(self.model.layers())
        together = [module for name, module in layers if name in shared]
        if len(together) < 2:  # the others are on another stage
            return [[module] for _, module in layers]
        return [together, *([module] for name, module in layers if name not in shared)]

    def keep_layers(self, first: int, last: int) -> None:
        """Become the stage of blocks first..last-1."""
        self.model.keep(first, last)
        here = {self.canonical[name] for name, _ in self.model.named_parameters(remove_duplicate=False)}
        self.boxes = {name: box for name, box in self.boxes.items() if name in here}

    def cut(self, name: str, dim: int, index: int, count: int, axis: str) -> None:
        """Keep the index-th of `count` pieces of a parameter."""
        self.boxes[name] = self.boxes[name].chunk(dim, index, count)
        self.cut_axes[name] |= {axis}
        old = dict(self.named_parameters())[name]
        shape = self.boxes[name].size
        new = nn.Parameter(torch.empty(shape, dtype=old.dtype, device="meta"), requires_grad=old.requires_grad)
        replace_parameter(self.model, old, new)

    def cut_everything(self, axis: str) -> None:
        """A parameter lives at one place along `axis`."""
        for name in self.cut_axes:
            self.cut_axes[name] |= {axis}

    def owe(self, name: str, group: dist.ProcessGroup | None, is_copy: bool = False) -> None:
        """The gradient is still to be summed over `group`; `is_copy`: another stage answers for the parameter."""
        if group is not None:
            self.owed.setdefault(name, []).append(group)
        if is_copy:
            self.copies.add(name)

    def materialise(self, module: nn.Module) -> None:
        """Allocate and fill the parameters that are still on the meta device."""
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        for parameter in list(module.parameters()):
            if parameter.device.type != "meta":
                continue
            name = names[id(parameter)]
            value = self.source(name, self.boxes[name], self.dtype).to(self.mesh.device)
            new = nn.Parameter(value.contiguous(), requires_grad=parameter.requires_grad)
            replace_parameter(self.model, parameter, new)

    def owns(self, name: str) -> bool:
        """Whether this rank answers for its piece: exactly one of the replicas does."""
        if name in self.copies:
            return False
        return all(self.mesh.index(axis) == 0 for axis in self.mesh.sizes if axis not in self.cut_axes[name])

    def boundary_shape(self, inputs: Tensor) -> tuple[int, ...]:
        """What passes between stages for a microbatch of inputs."""
        samples, sequence = inputs.shape
        return samples, sequence // self.sequence_ways, self.profile.hidden_size

    def local_parameters(self) -> Iterable[tuple[str, Tensor]]:
        for name, parameter in self.named_parameters():
            yield name, local(parameter.detach())

    def local_gradients(self) -> Iterable[tuple[str, Tensor]]:
        for name, parameter in self.named_parameters():
            if parameter.grad is not None:
                yield name, local(parameter.grad)

    def sum_owed(self) -> None:
        """Pay the sums owed, one message for each group."""
        by_group: dict[int, tuple[dist.ProcessGroup, list[Tensor]]] = {}
        gradients = dict(self.local_gradients())
        for name, groups in self.owed.items():
            for group in groups:
                by_group.setdefault(id(group), (group, []))[1].append(gradients[name])
        for group, tensors in by_group.values():
            flat = torch.cat([tensor.flatten() for tensor in tensors])
            dist.all_reduce(flat, group=group)
            for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                tensor.copy_(part.view_as(tensor))


def build(
    plan: Plan,
    model: nn.Module,
    profile: Profile,
    mesh: Mesh,
    source: Source,
    dtype: torch.dtype = torch.float32,
) -> Build:
    """Apply a plan to a model that lies on the meta device."""
    problems = plan.check(profile)
    if problems:
        raise MeshwrightError(problems)
    made = Build(plan=plan, profile=profile, model=model, mesh=mesh, source=source, dtype=dtype, compute_dtype=dtype)
    made.run()
    return made
