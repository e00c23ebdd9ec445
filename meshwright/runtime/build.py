"""A plan made real: the phases of `apply`, folded over one rank's share of a model.

The model stays on the meta device until the phases have cut it; only then does a rank allocate and fill its own pieces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.core.box import Box
from meshwright.core.build import Build, Exchange
from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.core.profile import Layer, Param, Profile
from meshwright.core.technique import PHASES, Technique
from meshwright.ops.device_mesh import Mesh
from meshwright.ops.fsdp import local
from meshwright.ops.gradient_exchange import LateSums
from meshwright.ops.host_memory import HostUnit
from meshwright.ops.initial_weights import Source, join_in_order
from meshwright.ops.model_interface import Inputs, Model, ModelPart, ParameterUnit, Spans, replace_parameter
from meshwright.ops.split_backward import Later
from meshwright.ops.stage_transport import Wire
from meshwright.optimizers.loss_scaling import LossScaling
from meshwright.optimizers.rule import RuleMaker
from meshwright.schedules import Actions, Call, Places, Timetable

if TYPE_CHECKING:
    from meshwright.techniques.compress_gradients import CompressGradients


@dataclass(kw_only=True)
class RankBuild:
    """The `Build` of one rank (`core/build.py` explains its fields), and what only the runtime asks of it."""

    plan: Plan
    profile: Profile
    model: Model
    mesh: Mesh
    source: Source
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype = torch.float32
    frozen_dtype: torch.dtype | None = None
    compute_dtype: torch.dtype = torch.float32
    timetable: Timetable = field(default_factory=Timetable)
    stage: int = 0
    num_stages: int = 1
    spans: Spans = ()
    wire: Wire | None = None
    later: Later | None = None
    sequence_ways: int = 1
    loss_scale: float = 1.0
    loss_scaling: LossScaling | None = None
    exchanges: list[Exchange] = field(default_factory=list)
    """Late sums are the last."""
    exchange_owners: dict[str, str] = field(default_factory=dict)
    rule_wraps: list[Callable[[RuleMaker], RuleMaker]] = field(default_factory=list)
    late_sums: LateSums = field(init=False)
    on_action: list[Callable[[str], Any]] = field(default_factory=list)
    """Called with the kind of every action before it: for whoever watches."""
    boxes: dict[str, Box] = field(default_factory=dict)
    cut_axes: dict[str, frozenset[str]] = field(default_factory=dict)
    canonical: dict[str, str] = field(default_factory=dict)
    zero_filled: set[int] = field(default_factory=set)
    copies: set[str] = field(default_factory=set)
    """Parameters that another stage holds too and answers for."""
    tied: tuple[str, ...] = ()
    replayed_blocks: set[int] = field(default_factory=set)
    wide: dict[str, Tensor] = field(default_factory=dict)
    evaluated: dict[str, Tensor] = field(default_factory=dict)
    coding: CompressGradients | None = None
    trained_from: int = -1
    is_last_step: bool = False
    masters: dict[str, Tensor] = field(default_factory=dict)
    host_units: list[HostUnit] = field(default_factory=list)
    disk: Path | None = None
    streams_blocks: bool = False
    _phases: dict[str, list[Callable[[Build], None]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.spans = self.spans or ((0, self.profile.num_blocks),)
        self.late_sums = LateSums(self)
        first: dict[int, str] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            self.canonical[name] = first.setdefault(id(parameter), self.model.public_name(name))
            self.boxes[self.canonical[name]] = Box.whole(tuple(parameter.shape))
            self.cut_axes[self.canonical[name]] = frozenset()
        holders = Counter(
            name for part in self.model.parts() for name in {self.canonical[n] for n in self._names(part)}
        )
        self.tied = tuple(name for name, count in holders.items() if count > 1)

    def at(self, phase: str, change: Callable[[Build], None]) -> None:
        assert phase in PHASES, phase
        self._phases.setdefault(phase, []).append(change)

    def run(self) -> None:
        for technique in self.plan.in_phase_order():
            technique.apply(self)
        for phase in PHASES:
            if phase == "wrap":
                self.model.set_place(self.mesh.device, self.dtype)
                for name, buffer in list(self.model.named_buffers()):
                    value = buffer
                    if buffer.device.type == "meta":
                        value = self.source(name, Box.whole(tuple(buffer.shape)), buffer.dtype)
                    holder = self.model.get_submodule(name.rpartition(".")[0])
                    holder._buffers[name.rpartition(".")[2]] = value.to(self.mesh.device)
            if phase == "optimizer":
                self.materialise(self.model.parameters())  # whatever no wrapper has filled yet
            for change in self._phases.get(phase, ()):
                change(self)
        if self.late_sums.groups:
            self.exchanges.append(self.late_sums)

    def named_params(self) -> Iterable[tuple[str, Param]]:
        seen = set()
        for part, layer in self._layers():
            entries = {param.name: param for param in layer.params}
            for name in self._names(part):
                canonical = self.canonical[name]
                if canonical not in seen:
                    seen.add(canonical)
                    own = self.model.public_name(name) if part.module is None else name.removeprefix(f"{part.name}.")
                    yield canonical, entries[own]

    def _layers(self) -> list[tuple[ModelPart, Layer]]:
        """The layers here, each with its profile."""
        ends = {layer.name: layer for layer in self.profile.layers if not layer.is_block}
        blocks = [layer for layer in self.profile.block_layers for _ in range(layer.repeat)]
        numbers = iter([number for span in self.spans for number in range(*span)])
        return [(part, blocks[next(numbers)] if part.is_block else ends[part.kind]) for part in self.model.parts()]

    def _names(self, part: ModelPart) -> tuple[str, ...]:
        if part.module is None:
            return part.own
        return tuple(f"{part.name}.{name}" for name, _ in part.module.named_parameters(remove_duplicate=False))

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        for name, parameter in self.model.named_parameters():
            yield self.canonical[name], parameter

    def units(self) -> list[ParameterUnit]:
        """Layers gathered and reduced together: one each, but those that share a weight or a unit as one."""
        grouped: dict[str, list[ModelPart]] = {}
        for part, layer in self._layers():
            is_shared = any(self.canonical[name] in self.tied for name in self._names(part))
            grouped.setdefault("shared" if is_shared else layer.unit or part.name, []).append(part)
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        units, chunks = [], dict[str, int]()
        of_blocks = [chunk for chunk, (first, last) in enumerate(self.spans) for _ in range(first, last)]
        at = -1
        for part in self.model.parts():
            at += part.is_block
            # What comes before the blocks is in the first chunk, what comes after one in that one's.
            chunks[part.name] = of_blocks[at] if at >= 0 else 0
        for parts in grouped.values():
            own = {id(parameters[name]): parameters[name] for part in parts for name in self._names(part)}
            module = parts[0].module if len(parts) == 1 else None
            chunk = min(chunks[part.name] for part in parts)
            is_block = parts[0].is_block
            units.append(ParameterUnit(module=module, parameters=tuple(own.values()), is_block=is_block, chunk=chunk))
        return sorted(units, key=lambda unit: unit.module is not None)

    @property
    def places(self) -> Places:
        return self.timetable.places(self.num_stages)

    @property
    def first_block(self) -> int:
        return self.spans[0][0]

    def actions(self, num_microbatches: int, call: Call = "first") -> Actions:
        """What this stage does in a call of the loop."""
        return self.timetable.actions(self.stage, self.num_stages, num_microbatches, call)

    def forward_actions(self, num_microbatches: int) -> Actions:
        return self.timetable.forward_actions(self.stage, self.num_stages, num_microbatches)

    def keep_spans(self, spans: Spans) -> None:
        self.model.keep(spans)
        self.spans = spans
        here = {self.canonical[name] for name, _ in self.model.named_parameters(remove_duplicate=False)}
        self.boxes = {name: box for name, box in self.boxes.items() if name in here}

    def cut(self, name: str, dim: int, index: int, count: int, axis: str) -> None:
        """Keep the index-th of `count` pieces of a parameter, of each matrix where several are fused in it."""
        groups = self.model.fused.get(name)
        whole = self.boxes[name] if groups is None else self.boxes[name].grouped(dim, groups, count)
        self.boxes[name] = whole.chunk(dim, index, count)
        self.cut_axes[name] |= {axis}
        old = dict(self.named_parameters())[name]
        shape = self.boxes[name].size
        new = nn.Parameter(torch.empty(shape, dtype=old.dtype, device="meta"), requires_grad=old.requires_grad)
        replace_parameter(self.model, old, new)

    def cut_everything(self, axis: str) -> None:
        for name in self.cut_axes:
            self.cut_axes[name] |= {axis}

    def add_exchange(self, technique: Technique, exchange: Exchange, *more_axes: str) -> None:
        for axis in (technique.axis, *more_axes):
            self._claim(axis, technique)
        self.exchanges.append(exchange)

    def _claim(self, axis: str, technique: Technique) -> None:
        owner = self.exchange_owners.setdefault(axis, technique.name)
        if owner != technique.name:
            what = f"{owner} already exchanges gradients over the axis {axis}: they would be summed twice."
            raise MeshwrightError([technique.problem(what, f"Leave out {technique.name} or {owner}.")])

    def sum_late(
        self, technique: Technique, name: str, group: dist.ProcessGroup | None, *, is_copy: bool = False
    ) -> None:
        self._claim(technique.axis, technique)
        if group is not None:
            self.late_sums.add(name, group)
        if is_copy:
            self.copies.add(name)

    def sum_rest_late(self, technique: Technique) -> None:
        for name, _ in self.named_parameters():
            if technique.axis not in self.cut_axes[name]:
                self.sum_late(technique, name, self.mesh.group(technique.axis))

    def materialise(self, parameters: Iterable[nn.Parameter], device: torch.device | None = None) -> None:
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        for parameter in list(parameters):
            if parameter.device.type != "meta":
                continue
            name = names[id(parameter)]
            dtype = self.weight_dtype if parameter.requires_grad else self.frozen_dtype or self.weight_dtype
            dtype = dtype if parameter.is_floating_point() else parameter.dtype
            parts = [self.source(name, box, dtype) for box in self.boxes[name].in_order()]
            value = join_in_order(self.boxes[name], parts).to(device or self.mesh.device)
            new = nn.Parameter(value.contiguous(), requires_grad=parameter.requires_grad)
            replace_parameter(self.model, parameter, new)

    def lasting_buffers(self) -> Iterable[tuple[str, Tensor]]:
        """Buffers that are part of what was learnt, such as running statistics: the same on every replica."""
        kept = self.model.state_dict(keep_vars=True)
        named = self.model.named_buffers()
        return ((self.model.public_name(name), buffer) for name, buffer in named if name in kept)

    def answers_for_buffers(self) -> bool:
        """Whether this rank writes its stage's buffers: the first of those that hold the same."""
        axis = "" if self.wire is None else self.wire.axis
        return all(self.mesh.index(each) == 0 for each in self.mesh.sizes if each != axis)

    def owns(self, name: str, *axes: str) -> bool:
        if name in self.copies:
            return False
        each = {*axes, *self.plan.island_axes, *self.cut_axes[name]}
        return all(self.mesh.index(axis) == 0 for axis in self.mesh.sizes if axis not in each)

    @property
    def island(self) -> int:
        return self.mesh.part(self.plan.island_axes)[0]

    def boundaries(self, inputs: Inputs) -> dict[tuple[str, int], tuple[int, ...]]:
        """Shapes of what comes from the stages before and after into each chunk, for a microbatch of inputs."""
        shapes = {}
        for chunk, (first, last) in enumerate(self.spans):
            for way, block in (("forward", first), ("backward", last)):
                if block in (0, self.profile.num_blocks):  # nothing comes from beyond the ends
                    continue
                samples, *rest = self.model.boundary(inputs, block)
                rest = [rest[0] // self.sequence_ways, *rest[1:]] if rest else rest
                shapes[way, chunk] = (samples, *rest)
        return shapes

    def local_parameters(self) -> Iterable[tuple[str, Tensor]]:
        for name, parameter in self.named_parameters():
            stored = self.masters.get(name, self.wide.get(name))
            yield name, local(parameter.detach()) if stored is None else stored

    def local_gradients(self) -> Iterable[tuple[str, Tensor]]:
        for name, parameter in self.named_parameters():
            if parameter.grad is not None:
                gradient = local(parameter.grad)
                yield name, gradient.to_dense() if gradient.is_sparse else gradient


def build(
    plan: Plan,
    model: Model,
    profile: Profile,
    mesh: Mesh,
    source: Source,
    dtype: torch.dtype = torch.float32,
    disk: Path | None = None,
) -> RankBuild:
    """Apply a plan to a model that lies on the meta device."""
    problems = plan.check(profile)
    if problems:
        raise MeshwrightError(problems)
    settings: dict[str, Any] = {"mesh": mesh, "source": source, "dtype": dtype, "disk": disk}
    settings |= {"weight_dtype": dtype, "compute_dtype": dtype}
    rank = RankBuild(plan=plan, profile=profile, model=model, **settings)
    rank.run()
    rank.source = _spent  # it may hold a whole model
    return rank


def _spent(name: str, box: Box, dtype: torch.dtype) -> Tensor:
    raise AssertionError(f"{name} is asked for after the model was filled")
