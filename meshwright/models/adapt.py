"""Any `nn.Module` as a `Model`: the module's own forward runs unchanged, on every stage.

A stage keeps its blocks. Those before it are stand-ins that pass on what they are given, the last of them handing out
what came from the stage before; the first one after it ends the forward and takes what it is given to the next stage.
Parameters that only other stages need are hollow: zeros of the right shape without memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.core.errors import MeshwrightError, Problem
from meshwright.core.profile import Profile
from meshwright.models.borders import Regions, regions_of
from meshwright.models.examine import Anatomy, Template, examine
from meshwright.models.factory import last_line, look
from meshwright.models.measure import ENDS, end_names, hidden_shape, profile_of_module
from meshwright.models.regions import Found, linear_dims
from meshwright.ops.batch_norm import BatchNorm
from meshwright.ops.loss import token_loss
from meshwright.ops.model import Inputs, Inside, Model, Part, Spans, is_within

Loss = Callable[[Any, Tensor], Tensor]
"""(the module's output, targets) -> one value for each target."""


def scores(output: Any) -> Tensor:
    """The tensor of scores in an output: itself, transformers' `logits`, or the first of a tuple."""
    if isinstance(output, Tensor):
        return output
    if isinstance(getattr(output, "logits", None), Tensor):
        return output.logits
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        return output[0]
    what = f"the module returns a {type(output).__name__}: no tensor of scores in it."
    raise MeshwrightError([Problem(where="model.factory", what=what, fix="Return a loss from the factory, too.")])


def default_loss(output: Any, targets: Tensor) -> Tensor:
    """Cross entropy over the last dim for whole-number targets, squared error for others."""
    found = scores(output)
    if targets.is_floating_point():
        return F.mse_loss(found.reshape(targets.shape).to(targets.dtype), targets, reduction="none")
    if found.shape[:-1] != targets.shape:
        what = f"the module's scores are {tuple(found.shape)} for targets of shape {tuple(targets.shape)}."
        fix = "Return scores of shape (*targets, classes), or a loss from the factory."
        raise MeshwrightError([Problem(where="model.factory", what=what, fix=fix)])
    return token_loss(found, targets)


def run_module(module: nn.Module, inputs: Inputs) -> Any:
    return module(*inputs) if isinstance(inputs, tuple) else module(inputs)


class _Handed(Exception):
    """Ends a forward: the rest is another stage's."""

    def __init__(self, hidden: Tensor):
        self.hidden = hidden


class _StandIn(nn.Module):
    """In place of a block that is on another stage. The forward around it may still ask for its plain attributes."""

    def __init__(self, block: nn.Module, act: Callable[[Tensor], Any]):
        super().__init__()
        plain = {k: v for k, v in vars(block).items() if not k.startswith("_") and not isinstance(v, Tensor)}
        for name, value in plain.items():
            if name not in ("training", "forward"):
                setattr(self, name, value)
        self.act = act

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.act(args[0] if args else next(iter(kwargs.values())))


class Adapted(Model):
    kind = "module"

    def __init__(self, module: nn.Module, anatomy: Anatomy, regions: Regions, template: Template, loss: Loss):
        super().__init__()
        self.module = module
        self.anatomy, self.found, self.template, self.loss = anatomy, regions, template, loss
        self.fused = {
            f"{path}.{cut.name}": cut.groups
            for path, found in regions.items()
            for region in found
            for cut in region.cuts
            if cut.groups
        }
        self.received: Tensor | None = None
        self.spans: Spans = ((0, anatomy.num_blocks),)
        self.aside: dict[int, _StandIn] = {}
        """For blocks that are here, while others have their turn."""
        self.ends_here = tuple(tuple(names) for names in end_names(module, anatomy))
        self.right: Tensor | None = None
        self.hollow: list[tuple[nn.Module, str, torch.Size]] = []
        """Parameters of other stages, which the forward around the blocks may still read."""
        self.vocab_size = self.num_scores = 0  # not known
        self.idle: tuple[str, ...] = ()
        """Parameters that the scores do not depend on, as far as that is known."""

    def forward(
        self,
        inputs: Inputs,
        targets: Tensor | None = None,
        weights: Tensor | None = None,
        received: Tensor | None = None,
    ) -> Tensor:
        self.received = received
        device = (inputs[0] if isinstance(inputs, tuple) else inputs).device
        try:
            with self.casting(device), self._turn():
                output = run_module(self.module, inputs)
        except _Handed as stop:
            return stop.hidden.to(self.parameter_dtype())
        finally:
            self.received = None
        if targets is None or weights is None:
            return scores(output)
        losses = self.loss(output, targets)
        if not isinstance(losses, Tensor) or losses.shape != weights.shape:
            shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            what = f"the loss gives {shape} for targets of shape {tuple(targets.shape)}."
            fix = "Return one value for each target (reduction='none'): they are weighed and summed over all ranks."
            raise MeshwrightError([Problem(where="model.factory", what=what, fix=fix)])
        if not self.training:
            self._count(output, targets, weights)
        return (losses * weights).sum()

    def _count(self, output: Any, targets: Tensor, weights: Tensor) -> None:
        if targets.is_floating_point() or targets.ndim != 1:
            return
        hits = ((scores(output).argmax(-1) == targets) * weights).sum().double()
        self.right = hits if self.right is None else self.right + hits

    def take_hits(self) -> Tensor | None:
        hits, self.right = self.right, None
        return hits

    def parameter_dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.parameters())

    def boundary_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def empty(self) -> None:
        """Let go of the module's own weights."""
        hollow: dict[nn.Parameter, nn.Parameter] = {}
        for module in self.module.modules():
            for name, value in module._parameters.items():
                if value is not None:
                    meta = nn.Parameter(value.detach().to("meta"), requires_grad=value.requires_grad)
                    module._parameters[name] = hollow.setdefault(value, meta)

    def public_name(self, name: str) -> str:
        return name.removeprefix("module.")

    def _list(self) -> nn.Module:
        return self.module.get_submodule(self.anatomy.path)

    def parts(self) -> Iterable[Part]:
        prefix = f"module.{self.anatomy.path}.".replace("..", ".")
        before, after = (tuple(f"module.{name}" for name in names) for names in self.ends_here)
        if before:
            yield Part(name=ENDS[0], kind=ENDS[0], module=None, own=before)
        if self.anatomy.num_blocks:
            children = list(self._list().named_children())
            for name, block in (children[at] for span in self.spans for at in range(*span)):
                yield Part(name=f"{prefix}{name}", kind="", module=block, is_block=True)
        if after:
            yield Part(name=ENDS[1], kind=ENDS[1], module=None, own=after)

    def keep(self, spans: Spans) -> None:
        children = list(self._list().named_children())
        before, after = self.ends_here
        for index, (name, block) in enumerate(children):
            stand_in = _StandIn(block, functools.partial(self._stand_in, index))
            if not is_within(spans, index):
                setattr(self._list(), name, stand_in)
            elif len(spans) > 1:
                self.aside[index] = stand_in
        self.spans = spans
        self.ends_here = (
            before if is_within(spans, 0) else (),
            after if is_within(spans, len(children) - 1) else (),
        )
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        shared = {id(parameters[name]) for names in self.ends_here for name in names}
        gone = {id(parameters[name]) for name in (*before, *after)} - shared
        self.hollow += [_hollow(self.module, name) for name, value in parameters.items() if id(value) in gone]

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Blocks whose turn it is not stand aside, so that nobody who watches them thinks they ran."""
        if not self.aside:
            yield
            return
        modules = self._list()._modules
        names = list(modules)
        resting = {names[at]: modules[names[at]] for at in self.aside if not self.runs(at)}
        modules.update({names[at]: stand_in for at, stand_in in self.aside.items() if not self.runs(at)})
        try:
            yield
        finally:
            modules.update(resting)

    def _stand_in(self, index: int, hidden: Tensor) -> Any:
        first, last = self.span or self.spans[0]
        if index >= last:
            raise _Handed(hidden)
        if index < first - 1:  # whatever this is, the last one before the span hands in what was received
            return self._structured(hidden)
        assert self.received is not None, "a later stage is given what the stage before it made"
        return self._structured(self.received)

    def _structured(self, hidden: Tensor) -> Any:
        length = self.anatomy.returns_tuple
        return (hidden, *(None,) * (length - 1)) if length else hidden

    def _regions_here(self) -> Iterator[tuple[nn.Module, Found]]:
        """Those whose weights are on this stage."""
        here = {name for name, _ in self.module.named_parameters()}
        for path, regions in self.found.items():
            for found in regions:
                if f"{path}.{found.cuts[0].name}" in here:
                    yield self.module.get_submodule(path), found

    def regions(self) -> Iterable[Inside]:
        for block, found in self._regions_here():
            columns = tuple(block.get_submodule(name) for name in found.columns)
            row = block.get_submodule(found.row)
            yield Inside(entries=columns, row=row, every=linear_dims(row) is None)

    def set_split(self, index: int, ways: int) -> None:
        for block, found in self._regions_here():
            found.split(block, index, ways)

    def set_place(self, device: torch.device, dtype: torch.dtype) -> None:
        for holder, attribute, shape in self.hollow:
            # Not a parameter, and all its elements are one.
            setattr(holder, attribute, torch.zeros((), device=device, dtype=dtype).expand(shape))

    def boundary(self, inputs: Inputs, block: int) -> tuple[int, ...]:
        first = inputs[0] if isinstance(inputs, tuple) else inputs
        sequence = first.shape[1] if self.template.has_sequence else 1
        return hidden_shape(self.anatomy, block, first.shape[0], sequence)

    def share_statistics(self, group: Any, ways: int) -> None:
        for module in self.module.modules():
            if isinstance(module, BatchNorm):
                module.groups = (*module.groups, group)


def _hollow(module: nn.Module, name: str) -> tuple[nn.Module, str, torch.Size]:
    path, _, attribute = name.rpartition(".")
    holder = module.get_submodule(path)
    old = holder._parameters.pop(attribute)
    assert old is not None
    return holder, attribute, old.shape


def adopt_batch_norms(module: nn.Module) -> bool:
    """Put our batch norm, which can see other ranks' samples, in the place of torch's. Whether there was any."""
    is_any = False
    for path, each in list(module.named_modules()):
        if isinstance(each, BatchNorm):
            is_any = True
        if not isinstance(each, nn.modules.batchnorm._BatchNorm):
            continue
        if not each.affine or not each.track_running_stats or each.momentum is None:
            what = f"{path} is a batch norm without weights, running statistics or momentum."
            fix = "Give it affine=True, track_running_stats=True and a momentum."
            raise MeshwrightError([Problem(where="model.factory", what=what, fix=fix)])
        ours = BatchNorm(each.num_features, each.eps, each.momentum)
        ours.weight, ours.bias = each.weight, each.bias
        ours.running_mean, ours.running_var = each.running_mean, each.running_var
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, ours)
        is_any = True
    return is_any


def adapt(module: nn.Module, example: Inputs, *, name: str, loss: Loss | None = None) -> tuple[Adapted, Profile]:
    """A module as a `Model` with its profile. Its tensors stay where they are."""
    for each in module.modules():
        if hasattr(getattr(each, "config", None), "use_cache"):
            each.config.use_cache = False
    has_statistics = adopt_batch_norms(module)
    template = Template.like(example)
    seen = look(module, run_module, example)
    if seen.failure is not None:
        what = f"its forward fails on its sample inputs: {last_line(seen.failure)}"
        fix = "A module is called with what its data gives; return sample inputs like that from the factory."
        raise MeshwrightError([Problem(where=f"model {name}", what=what, fix=fix)])
    anatomy = examine(module, run_module, template)
    regions, no_inside = regions_of(module, run_module, template, anatomy)
    uncut = {
        "loss": "only our decoder's vocabulary can be gone through in pieces.",
        "sequence": "the code between its regions expects whole sequences.",
    }
    if anatomy.no_stages:
        uncut["stages"] = anatomy.no_stages
    if no_inside:
        uncut["inside" if not any(regions.values()) else "parts of the inside"] = no_inside
    if has_statistics:
        uncut["samples"] = "its batch norms see the whole batch at once."
    aim = loss or default_loss
    profile = profile_of_module(module, run_module, template, anatomy, regions, name=name, uncut=uncut, loss=aim)
    made = Adapted(module, anatomy, regions, template, aim)
    made.vocab_size = seen.vocab_size
    if loss is None and seen.output is not None:
        made.num_scores, made.idle = scores(seen.output).shape[-1], seen.idle
    return made, profile
