"""Any `nn.Module` as a `Model`: the module's own forward runs unchanged, on every stage.

A stage keeps its blocks. The others stay where they are, so that the forward around them may ask for whatever they
have, but do nothing: those before the stage pass on what they are given, the last of them handing out what came from
the stage before; the first one after it ends the forward. Parameters that only other stages need are hollow: zeros of
the right shape without memory. Whether a forward bears that is tried without values, stage by stage (`cut_problem`).
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.core.codec import encode
from meshwright.core.errors import error_at, first_line, last_line
from meshwright.core.profile import Profile
from meshwright.foreign import examine as examining
from meshwright.foreign.examine import Anatomy, InputTemplate, run_apart, run_module
from meshwright.foreign.factory import look
from meshwright.foreign.regions import Regions, SplitRegion, linear_dims, regions_of
from meshwright.foreign.trace import ENDS, Loss, end_names, hidden_shape, profile_of_module
from meshwright.foreign.trace_ops import FixedDraw
from meshwright.hf.weights_module import take_over_experts
from meshwright.ops.batch_norm import BatchNorm
from meshwright.ops.cross_entropy import token_loss
from meshwright.ops.model_interface import Inputs, Inside, Model, ModelPart, Spans, is_within


def scores(output: Any) -> Tensor:
    """The tensor of scores in an output: itself, `logits` in a dict or as an attribute, or the first of a tuple."""
    first = output[0] if isinstance(output, tuple | list) and output else output
    result = examining.logits_of(output, first)
    if isinstance(result, Tensor):
        return result
    what = f"the module returns a {type(output).__name__}: no tensor of scores in it."
    raise error_at("model.factory", what, "Return a loss from the factory, too.")


def default_loss(output: Any, targets: Tensor) -> Tensor:
    """Cross entropy over the last dim for whole-number targets, squared error for others."""
    logits = scores(output)
    if targets.is_floating_point():
        return F.mse_loss(logits.reshape(targets.shape).to(targets.dtype), targets, reduction="none")
    if logits.shape[:-1] != targets.shape:
        what = f"the module's scores are {tuple(logits.shape)} for targets of shape {tuple(targets.shape)}."
        raise error_at("model.factory", what, "Return scores of shape (*targets, classes), or a loss from the factory.")
    return token_loss(logits, targets)


class _StageEnd(Exception):
    """Ends a forward: the rest is another stage's."""

    def __init__(self, hidden: Tensor):
        self.hidden = hidden


def _idle(block: nn.Module, act: Callable[[Tensor], Any]) -> nn.Module:
    """`block`, which from now on does nothing but `act`, whoever watches it."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return act(args[0] if args else next(iter(kwargs.values())))

    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        object.__setattr__(block, name, OrderedDict())
    block.__dict__["forward"] = forward
    return block


class Adapted(Model):
    kind = "module"

    def __init__(self, module: nn.Module, anatomy: Anatomy, regions: Regions, template: InputTemplate, loss: Loss):
        super().__init__()
        self.module = module
        self.anatomy, self.split_regions, self.template, self.loss = anatomy, regions, template, loss
        self.fused = {
            f"{path}.{cut.name}": cut.groups
            for path, own in regions.items()
            for region in own
            for cut in region.cuts
            if cut.groups
        }
        self.received: Tensor | None = None
        self.spans: Spans = ((0, anatomy.num_blocks),)
        self.aside: dict[int, nn.Module] = {}
        """For blocks that are here, while others have their turn."""
        self.ends_here = tuple(tuple(names) for names in end_names(module, anatomy))
        self.hits: Tensor | None = None
        self.left: Tensor | None = None
        """What the last block of a span handed on, where the forward does something to it before the next."""
        self.hollow: list[tuple[nn.Module, str, Tensor]] = []
        """Parameters and buffers of other stages, which the forward around the blocks may still read."""
        self.dtype: torch.dtype | None = None
        """Dtype in which parameters are stored and stages exchange activations; gathered parameters may be narrower."""
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
        except _StageEnd as stop:
            return stop.hidden.to(self.dtype or self.parameter_dtype(stop.hidden.dtype))
        finally:
            self.received = self.left = None
        if targets is None or weights is None:
            return scores(output)
        losses = self.loss(output, targets)
        if not isinstance(losses, Tensor) or losses.shape != weights.shape:
            shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            what = f"the loss gives {shape} for targets of shape {tuple(targets.shape)}."
            fix = "Return one value for each target (reduction='none'): they are weighed and summed over all ranks."
            raise error_at("model.factory", what, fix)
        if not self.training and targets.ndim == 1 and not targets.is_floating_point():
            hits = ((scores(output).argmax(-1) == targets) * weights).sum().double()
            self.hits = hits if self.hits is None else self.hits + hits
        return (losses * weights).sum()

    def take_hits(self) -> Tensor | None:
        hits, self.hits = self.hits, None
        return hits

    def parameter_dtype(self, other: torch.dtype = torch.float32) -> torch.dtype:
        """`other`: of a stage without parameters."""
        return next((p.dtype for p in self.parameters()), other)

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

    def _blocks(self) -> list[nn.Module]:
        return [self.module.get_submodule(name) for name in self.anatomy.names]

    def parts(self) -> Iterable[ModelPart]:
        before, after = (tuple(f"module.{name}" for name in names) for names in self.ends_here)
        if before:
            yield ModelPart(name=ENDS[0], kind=ENDS[0], module=None, own=before)
        for at in (at for span in self.spans for at in range(*span)):
            name = f"module.{self.anatomy.names[at]}"
            yield ModelPart(name=name, kind="", module=self.get_submodule(name), is_block=True)
        if after:
            yield ModelPart(name=ENDS[1], kind=ENDS[1], module=None, own=after)

    def numbered_blocks(self) -> Iterable[tuple[nn.Module, int]]:
        return ((block, number) for number, block in enumerate(self._blocks()) if is_within(self.spans, number))

    def keep(self, spans: Spans) -> None:
        def note_left(module: nn.Module, args: Any, output: Any) -> None:
            self.left = output[0] if isinstance(output, tuple) else output

        before, after = self.ends_here
        blocks = self._blocks()
        for index, block in enumerate(blocks):
            act = functools.partial(self._stand_in, index)
            if not is_within(spans, index):
                self.hollow += [each for inner in block.modules() for each in _hollow(inner, list(_own_tensors(inner)))]
                _idle(block, act)
            elif len(spans) > 1:
                twin = object.__new__(type(block))  # with everything the block has, now and later
                twin.__dict__.update(block.__dict__)
                self.aside[index] = _idle(twin, act)
            if any(index + 1 == last for _, last in spans) and index + 1 in self.anatomy.between:
                block.register_forward_hook(note_left)
        self.spans = spans
        self.ends_here = (before if is_within(spans, 0) else (), after if is_within(spans, len(blocks) - 1) else ())
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        shared = {id(parameters[name]) for names in self.ends_here for name in names}
        gone = {id(parameters[name]) for name in (*before, *after)} - shared
        for each in self.module.modules():
            names = [name for name, value in each._parameters.items() if id(value) in gone]
            if names and isinstance(each, BatchNorm):  # its statistics are another stage's, too
                _idle(each, lambda x: x)
                names = list(_own_tensors(each))
            self.hollow += _hollow(each, names)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Blocks whose turn it is not stand aside, so that nobody who watches them thinks they ran."""
        resting: list[tuple[nn.Module, str, nn.Module]] = []
        for at, stand_in in self.aside.items():
            if not self.runs(at):
                path, _, name = self.anatomy.names[at].rpartition(".")
                holder = self.module.get_submodule(path)
                resting.append((holder, name, holder._modules[name]))
                holder._modules[name] = stand_in
        try:
            yield
        finally:
            for holder, name, block in resting:
                holder._modules[name] = block

    def _stand_in(self, index: int, hidden: Tensor) -> Any:
        first, last = self.span or self.spans[0]
        if index >= last:
            raise _StageEnd(self.left if index in self.anatomy.between and self.left is not None else hidden)
        if index < first - 1:  # whatever this is, the last one before the span hands in what was received
            return self.anatomy.returned[self.anatomy.names[index]].made(hidden)
        assert self.received is not None, "a later stage is given what the stage before it made"
        return self.anatomy.returned[self.anatomy.names[index]].made(self.received)

    def _regions_here(self) -> Iterator[tuple[nn.Module, SplitRegion]]:
        """Those whose weights are on this stage."""
        here = {name for name, _ in self.module.named_parameters()}
        for path, regions in self.split_regions.items():
            for region in regions:
                if f"{path}.{region.cuts[0].name}" in here:
                    yield self.module.get_submodule(path), region

    def regions(self) -> Iterable[Inside]:
        for block, region in self._regions_here():
            columns = tuple(block.get_submodule(name) for name in region.columns)
            row = block.get_submodule(region.row)
            yield Inside(entries=columns, row=row, every=linear_dims(row) is None)

    def set_split(self, index: int, ways: int) -> None:
        for block, region in self._regions_here():
            region.split(block, index, ways)

    def set_place(self, device: torch.device, dtype: torch.dtype) -> None:
        self.dtype = dtype
        for holder, attribute, old in self.hollow:
            # Not a parameter, and all its elements are one.
            wide = dtype if isinstance(old, nn.Parameter) else old.dtype
            setattr(holder, attribute, torch.zeros((), device=device, dtype=wide).expand(old.shape))

    def boundary(self, inputs: Inputs, block: int) -> tuple[int, ...]:
        first = inputs[0] if isinstance(inputs, tuple) else inputs
        sequence = first.shape[1] if self.template.has_sequence else 1
        return hidden_shape(self.anatomy, block, first.shape[0], sequence)

    def share_statistics(self, group: Any, ways: int) -> None:
        for module in self.module.modules():
            if isinstance(module, BatchNorm):
                module.groups = (*module.groups, group)


def _own_tensors(module: nn.Module) -> Iterator[str]:
    """Parameters and lasting buffers of a module itself."""
    yield from (name for name, value in module._parameters.items() if value is not None)
    lasting = (name for name, value in module._buffers.items() if value is not None)
    yield from (name for name in lasting if name not in module._non_persistent_buffers_set)


def _hollow(module: nn.Module, names: list[str]) -> list[tuple[nn.Module, str, Tensor]]:
    held: list[tuple[nn.Module, str, Tensor]] = []
    for name in names:
        old = (module._parameters if name in module._parameters else module._buffers).pop(name)
        assert old is not None
        held.append((module, name, old.detach().to("meta") if not isinstance(old, nn.Parameter) else old))
    return held


@contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Whatever is done to the module and those inside of it is undone."""
    held = []
    for each in module.modules():
        kept = ("_parameters", "_buffers", "_modules", "_forward_hooks")
        held.append((each, dict(vars(each)), {k: dict(vars(each)[k]) for k in vars(each) if k in kept}))
    try:
        yield
    finally:
        for each, own, inner in held:
            each.__dict__.clear()
            each.__dict__.update(own)
            for name, values in inner.items():
                own[name].clear()
                own[name].update(values)


def cut_problem(module: nn.Module, anatomy: Anatomy, template: InputTemplate) -> str:
    """Why the forward fails where only one block is there; empty if it never does."""
    sizes = 2, max(1, min(4, template.sequence))
    with examining.tracing(module, template), FixedDraw(0.5):
        inputs = template.shaped(*sizes)
        for index in range(anatomy.num_blocks):
            why = ""
            with _restored(module):
                stage = Adapted(module, anatomy, {}, template, lambda output, targets: targets)
                stage.keep(((index, index + 1),))
                dtype = stage.parameter_dtype()
                stage.set_place(torch.device("cpu"), dtype)
                given = torch.zeros(1), torch.zeros(1), torch.zeros(hidden_shape(anatomy, index, *sizes), dtype=dtype)

                def call(stage: nn.Module, inputs: Inputs, given: Any = given) -> Any:
                    return stage(inputs, *given)

                try:
                    output, _ = run_apart(stage, inputs, call)
                    is_last = index + 1 == anatomy.num_blocks
                    if not is_last and output.shape != hidden_shape(anatomy, index + 1, *sizes):
                        why = "does not stop after it"
                except Exception as error:
                    why = f"fails ({type(error).__name__}: {first_line(error)})"
            if why:
                return f"where only block {index} is there, its forward {why}."
    return ""


@dataclass(frozen=True, kw_only=True)
class ModuleFindings:
    """What `adapt` learned by running a module, as data: another process adapts its own copy without running it."""

    anatomy: Anatomy
    regions: Mapping[str, tuple[SplitRegion, ...]]
    block_order: tuple[int, ...]
    vocab_size: int
    num_scores: int
    idle: tuple[str, ...]

    @classmethod
    def of(cls, made: Adapted) -> ModuleFindings | None:
        """None where a block returns what cannot be written down: such a module is run again wherever it is opened."""
        try:
            encode(made.anatomy.returned)
        except NotImplementedError:
            return None
        learned = {name: getattr(made, name) for name in LEARNED}
        return cls(anatomy=made.anatomy, regions=made.split_regions, **learned)

    def adapted(self, module: nn.Module, example: Inputs, loss: Loss | None) -> Adapted:
        """An equal module as the same `Model`."""
        _ready(module)
        made = Adapted(module, self.anatomy, self.regions, InputTemplate.like(example), loss or default_loss)
        for name in LEARNED:
            setattr(made, name, getattr(self, name))
        return made


LEARNED = ("block_order", "vocab_size", "num_scores", "idle")


def _ready(module: nn.Module) -> bool:
    """Change what of a module would not bear being cut or shared; whether it has batch norms. Ours, which can see other
    ranks' samples, take the place of torch's."""
    take_over_experts(module)
    for path, each in list(module.named_modules()):
        if hasattr(getattr(each, "config", None), "use_cache"):
            each.config.use_cache = False
        if isinstance(each, nn.RNNBase):  # would move its weights while others hold on to where they were
            each.__dict__["flatten_parameters"] = lambda: None
        if isinstance(each, nn.modules.batchnorm._BatchNorm):
            if not each.affine or not each.track_running_stats or each.momentum is None:
                what = f"{path} is a batch norm without weights, running statistics or momentum."
                raise error_at("model.factory", what, "Give it affine=True, track_running_stats=True and a momentum.")
            ours = BatchNorm(each.num_features, each.eps, each.momentum)
            ours.weight, ours.bias = each.weight, each.bias
            ours.running_mean, ours.running_var = each.running_mean, each.running_var
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, ours)
    return any(isinstance(each, BatchNorm) for each in module.modules())


def adapt(module: nn.Module, example: Inputs, *, name: str, loss: Loss | None = None) -> tuple[Adapted, Profile]:
    """A module as a `Model` with its profile. Its tensors stay where they are."""
    has_statistics = _ready(module)
    template = InputTemplate.like(example)
    seen = look(module, example)
    if seen.failure is not None:
        what = f"its forward fails on its sample inputs: {last_line(seen.failure)}"
        fix = "A module is called with what its data gives; return sample inputs like that from the factory."
        raise error_at(f"model {name}", what, fix)
    anatomy = examining.examine(module, template)
    if anatomy.num_blocks and not anatomy.no_stages:
        anatomy.no_stages = cut_problem(module, anatomy, template)
    regions, no_inside = regions_of(module, template, anatomy)
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
    profile = profile_of_module(module, template, anatomy, regions, name=name, uncut=uncut, loss=aim)
    made = Adapted(module, anatomy, regions, template, aim)
    made.vocab_size = seen.vocab_size
    order = tuple(anatomy.names.index(path) for path in seen.ran if path in anatomy.names)
    everything = tuple(range(anatomy.num_blocks))
    # Other values may run blocks that these left out.
    made.block_order = everything if seen.needs_values and order == tuple(sorted(set(order))) else order
    if loss is None and seen.output is not None:
        made.num_scores, made.idle = scores(seen.output).shape[-1], seen.idle
    return made, profile
