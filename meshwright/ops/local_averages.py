"""Islands that train parameters of their own and meet every few steps.

    island i:   x_i -> optimizer -> x_i -> ... every-th update -> d_i = c - x_i          c: the shared model
    all:        d = mean of d_i over the islands            (one message for each layer)
    average:    c <- c - d                                  x_i <- x_i + blend (c - x_i)
    nesterov:   m <- momentum m + d,  c <- c - rate (d + momentum m)       (DiLoCo: Douillard et al. 2023)
    elastic:    x_i <- x_i + pull d_i,  c <- c - push (sum of d_i)         (EASGD: Zhang et al. 2015)

The shared model is what is evaluated and written to checkpoints. Layers are dealt out to fragments in turn, which meet
one after the other within a period; with `overlap` a sum is under way for some updates before it is used (streaming
DiLoCo: Douillard et al. 2025). After the last step of a run all layers have met.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.core.build import Build, Exchange, OptimizerState
from meshwright.ops.fsdp import local
from meshwright.ops.gradient_codecs import CodedSum
from meshwright.ops.host_memory import flat_views

if TYPE_CHECKING:
    from meshwright.techniques.compress_gradients import CompressGradients
    from meshwright.techniques.local_steps import LocalSteps


def trained_layers(build: Build) -> Iterator[list[tuple[str, Tensor, Tensor]]]:
    """Of each layer that has trained parameters: (name, what is trained, what the model computes with) each."""
    names = {id(parameter): name for name, parameter in build.named_parameters()}
    for unit in build.units():
        trained = [(names[id(p)], local(p.detach())) for p in unit.parameters if p.requires_grad]
        if trained:
            yield [(name, build.wide.get(name, value), value) for name, value in trained]


class IslandLayer:
    """A layer's parameters as this rank trains them, and as all islands share them."""

    def __init__(self, named: list[tuple[str, Tensor, Tensor]], settings: LocalSteps):
        """`named`: of `trained_layers`."""
        self.names = [name for name, _, _ in named]
        self.values, self.copies = [value for _, value, _ in named], [copy for _, _, copy in named]
        self.shared = [value.clone() for value in self.values]
        self.momenta = [torch.zeros_like(v) for v in self.values] if settings.outer == "nesterov" else []
        size = sum(value.numel() for value in self.values) if settings.overlap else 0
        self.flat = self.values[0].new_zeros(size)
        """The mean of the islands that is not used yet, where that is not at once."""
        self.means = flat_views(self.flat, self.values) if settings.overlap else ()
        self.work: dist.Work | None = None
        self.is_pending: bool | None = False
        """None: the numbers tell, which come from a checkpoint."""

    def write_copies(self) -> None:
        for copy, value in zip(self.copies, self.values, strict=True):
            if copy is not value:
                copy.copy_(value)

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None


class LocalAverages(Exchange):
    def __init__(self, build: Build, settings: LocalSteps, coding: CompressGradients | None):
        self.build, self.settings = build, settings
        self.group = build.mesh.group(settings.axis)
        self.layers = [IslandLayer(named, settings) for named in trained_layers(build)]
        self.sums: list[CodedSum] = []
        if coding is not None:
            self.sums = [CodedSum(build, coding, settings.axis, each.names, each.values) for each in self.layers]
        self.has_ended = False
        """All have met after the run's last step."""
        for layer in self.layers:
            build.evaluated.update(zip(layer.names, layer.shared, strict=True))

    @torch.no_grad()
    def after_update(self, count: int) -> None:
        is_last, settings = self.build.is_last_step, self.settings
        self.has_ended = is_last
        for at, layer in enumerate(self.layers):
            ahead = at % settings.fragments * settings.every // settings.fragments
            since = (count + ahead) % settings.every
            meets = since == 0 or is_last
            if layer.is_pending is None:
                layer.is_pending = bool(layer.flat.any())
            if layer.is_pending and (since == settings.overlap or meets):
                layer.wait()
                self._use(layer, layer.means)
                layer.is_pending = False
                layer.flat.zero_()
            if meets:
                coded = self.sums[at] if self.sums else None
                self._meet(layer, coded, waits=is_last or not settings.overlap)

    def _meet(self, layer: IslandLayer, coded: CodedSum | None, *, waits: bool) -> None:
        differences = torch._foreach_sub(layer.shared, layer.values)
        if coded is not None:
            coded(differences)
            coded.commit()
        # Means, so that as many or other islands can use them.
        flat = torch.cat([each.flatten() for each in differences]).div_(self.settings.size)
        if waits:
            if coded is None:
                dist.all_reduce(flat, group=self.group)
            self._use(layer, flat_views(flat, layer.values))
            return
        layer.flat.copy_(flat)
        layer.is_pending = True
        if coded is None:
            layer.work = dist.all_reduce(layer.flat, group=self.group, async_op=True)

    def _use(self, layer: IslandLayer, means: Sequence[Tensor]) -> None:
        """Take the islands' mean difference into the shared model, and the shared model into this island's."""
        settings, shared = self.settings, layer.shared
        if settings.outer == "elastic":
            torch._foreach_lerp_(layer.values, shared, settings.pull)
            torch._foreach_sub_(shared, means, alpha=settings.push * settings.size)
        else:
            step, rate = means, 1.0
            if layer.momenta:
                torch._foreach_mul_(layer.momenta, settings.outer_momentum)
                torch._foreach_add_(layer.momenta, means)
                step = torch._foreach_add(means, layer.momenta, alpha=settings.outer_momentum)
                rate = settings.outer_lr
            torch._foreach_sub_(shared, step, alpha=rate)
            if settings.blend == 1:
                torch._foreach_copy_(layer.values, shared)
            else:
                torch._foreach_lerp_(layer.values, shared, settings.blend)
        layer.write_copies()

    def before_saving(self) -> None:
        if self.build.is_last_step and not self.has_ended:  # that step was refused
            self.after_update(0)

    def before_evaluation(self) -> None:
        """The shared model changes places with this island's."""
        self.before_saving()
        self._swap()

    def after_evaluation(self) -> None:
        self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for layer in self.layers:
            for value, shared in zip(layer.values, layer.shared, strict=True):
                kept = value.clone()
                value.copy_(shared)
                shared.copy_(kept)
            layer.write_copies()

    def kept(self) -> Iterator[OptimizerState]:
        island, boxes = self.build.mesh.index(self.settings.axis), self.build.boxes
        for layer in self.layers:
            layer.wait()
            layer.is_pending = None if layer.means else False
            of_all = {"meeting.momentum": layer.momenta, "meeting.mean": layer.means}
            for at, (name, value) in enumerate(zip(layer.names, layer.values, strict=True)):
                is_mine = self.build.owns(name)
                yield OptimizerState(f"meeting.local@{island}", name, value, boxes[name], is_mine)
                for kind, values in of_all.items():
                    if values:
                        yield OptimizerState(kind, name, values[at], boxes[name], is_mine and island == 0)
        for coded in self.sums:
            yield from coded.kept()
