"""What somebody else's module is made of: found by running it without values (on fake tensors).

    first ──> block 0 ──> block 1 ──> ... ──> last

The repeated blocks are the ModuleList or Sequential with the most parameters, or several of them side by side. Stages
may be cut between them if each needs nothing of the others but the one tensor it is handed: each block is given a fresh
copy of that tensor, and autograd then tells which parameters everything after it depends on.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten, treespec_dumps, treespec_loads

from meshwright.core.errors import Problem, first_line
from meshwright.foreign.trace_ops import FixedDraw
from meshwright.ops.model_interface import Inputs, map_inputs

VALUES_WANTED = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""What a forward raises on fake tensors if it cannot do without values."""
Dim = tuple[int, int, int]
"""A size as constant + per sample + per token of the sequence."""


@dataclass(frozen=True, kw_only=True)
class InputTemplate:
    """Inputs of any number of samples and any sequence, like an example of them."""

    example: Inputs
    has_sequence: bool

    @classmethod
    def like(cls, example: Inputs) -> InputTemplate:
        first = example[0] if isinstance(example, tuple) else example
        return cls(example=example, has_sequence=first.ndim >= 2 and not first.is_floating_point())

    @property
    def sequence(self) -> int:
        first = self.example[0] if isinstance(self.example, tuple) else self.example
        return int(first.shape[1]) if self.has_sequence else 1

    @property
    def third(self) -> int:
        """A length of which three times as much is still no longer than a sample."""
        return max(1, min(8, self.sequence // 3))

    def shaped(self, samples: int, sequence: int) -> Inputs:
        """Zeros of so many samples and such a sequence."""

        def make(tensor: Tensor) -> Tensor:
            shape = [samples, *tensor.shape[1:]]
            if self.has_sequence and tensor.ndim >= 2 and tensor.shape[1] == self.sequence:
                shape[1] = sequence
            return torch.zeros(shape, dtype=tensor.dtype, device="cpu")

        return map_inputs(self.example, make)


def run_module(module: nn.Module, inputs: Inputs) -> Any:
    return module(*inputs) if isinstance(inputs, tuple) else module(inputs)


class _Absent:
    """In place of a tensor that only a block of another stage has. Whatever is done with it fails."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError("the second output of a block on another stage is used")

    def __bool__(self) -> bool:
        raise AttributeError("the second output of a block on another stage is used")


ABSENT = _Absent()


@dataclass(frozen=True)
class Returned:
    """How a block hands on its tensor: alone, or first in a tuple with other things."""

    kind: type | None = None
    rest: tuple[Any, ...] = ()

    @classmethod
    def like(cls, output: Any) -> Returned:
        """The structure of `output`, without its tensors."""
        plain = (bool, int, float, str, type(None), torch.dtype)
        if not isinstance(output, tuple):
            return cls()
        return cls(type(output), tree_map(lambda each: each if isinstance(each, plain) else ABSENT, tuple(output[1:])))

    def made(self, hidden: Tensor, rest: Sequence[Any] | None = None) -> Any:
        if self.kind is None:
            return hidden
        values = (hidden, *(self.rest if rest is None else rest))
        return self.kind._make(values) if hasattr(self.kind, "_make") else values

    def encode_self(self) -> Any:
        """As JSON has it; NotImplementedError where it is not made of tuples, lists and dicts."""
        leaves, spec = tree_flatten(self.rest)
        if self.kind not in (None, tuple):
            raise NotImplementedError(self.kind)
        values = [
            {"absent": True} if each is ABSENT else {"dtype": str(each)} if isinstance(each, torch.dtype) else each
            for each in leaves
        ]
        return [] if self.kind is None else [treespec_dumps(spec), values]

    @classmethod
    def decode_any(cls, data: Any, where: str, problems: list[Problem]) -> Returned:
        leaves = [
            each if not isinstance(each, dict) else getattr(torch, each["dtype"][6:]) if "dtype" in each else ABSENT
            for each in (data[1] if data else ())
        ]
        return cls(tuple, tree_unflatten(leaves, treespec_loads(data[0]))) if data else cls()


@dataclass(kw_only=True)
class Anatomy:
    """The blocks of a module, and whether stages may be cut between them."""

    names: tuple[str, ...] = ()
    """Names of the blocks in the order they run; empty if the module has no repeated blocks."""
    before: tuple[str, ...] = ()
    """Parameters used before the first block."""
    after: tuple[str, ...] = ()
    """Parameters used after the last one; tied ones may be in both."""
    no_stages: str = ""
    """Why stages cannot be cut; empty if they can."""
    returned: dict[str, Returned] = field(default_factory=dict)
    """What a block returns, by its name."""
    between: tuple[int, ...] = ()
    """Blocks that are not given the very tensor that the one before returned: the forward does something to it."""
    shapes: tuple[tuple[Dim, ...], ...] = ()
    """Shapes of the input of the first block and of the output of each block."""

    @property
    def num_blocks(self) -> int:
        return len(self.names)

    def holds(self, name: str) -> bool:
        """Whether a parameter is of a block."""
        return name.startswith(tuple(f"{block}." for block in self.names))


@contextlib.contextmanager
def pass_through(module: nn.Module, aside: Mapping[str, str]) -> Iterator[None]:
    """Blocks that equal one before them (block -> that one) hand on what they are given."""
    rests: dict[str, tuple[Any, ...] | None] = {}
    """What the block before them returned behind its first tensor; None: that tensor alone."""

    def note(path: str, args: Any, output: Any) -> None:
        rests[path] = tuple(output[1:]) if isinstance(output, tuple) else None

    def pass_on(other: str, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else next(iter(kwargs.values()))
        rest = rests.get(other)
        return hidden if rest is None else (hidden, *rest)

    blocks = {path: module.get_submodule(path) for path in aside}
    own = {path: vars(block)["forward"] for path, block in blocks.items() if "forward" in vars(block)}
    try:
        for path, block in blocks.items():
            block.forward = functools.partial(pass_on, aside[path])
        with hooked({path: module.get_submodule(path) for path in aside.values()}, after=note):
            yield
    finally:
        for path, block in blocks.items():
            del block.forward
            vars(block).update({"forward": own[path]} if path in own else {})


_NUMBERED = re.compile(r"idx|index|layer_id|number|depth")


def equal_runs(blocks: Sequence[nn.Module], shapes: Sequence[Any]) -> list[int]:
    """For each block, the first of the equal ones right before it that hand on what they are given; else itself."""

    def signature_of(block: nn.Module) -> Any:
        """All that may make a block compute something else than its neighbour; its number is no such thing."""
        signature = []
        for path, each in block.named_modules():
            plain = [
                (name, value)
                for name, value in sorted(vars(each).items())
                if isinstance(value, int | float | str | bool | None | tuple) and not _NUMBERED.search(name)
            ]
            tensors = [
                (name, None if value is None else (tuple(value.shape), value.dtype, value.requires_grad))
                for name, value in (*each._parameters.items(), *each._buffers.items())
            ]
            signature.append((path, type(each), repr(plain), tensors))
        return signature

    firsts: list[int] = []
    signatures = [signature_of(block) for block in blocks]
    for index, signature in enumerate(signatures):
        same = index > 0 and signature == signatures[index - 1]
        same = same and len(shapes) > index + 1 and shapes[index - 1] == shapes[index] == shapes[index + 1]
        firsts.append(firsts[-1] if same else index)
    return firsts


@contextlib.contextmanager
def tracing(module: nn.Module, template: InputTemplate) -> Iterator[None]:
    """Fake tensors inside, if the module runs on them; a forward that looks at values is run with values."""
    with quiet():
        try:
            with FakeTensorMode(allow_non_fake_inputs=True), FixedDraw(0.5):
                run_apart(module, template.shaped(1, min(2, template.sequence)))
            mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
        except Exception:
            if any(value.device.type == "meta" for value in module.parameters()):
                raise
            mode = contextlib.nullcontext()
        with mode:
            yield


def quiet() -> contextlib.AbstractContextManager[Any]:
    """Torch logs nothing of what fails on fake tensors: we report it, in a line."""
    return mock.patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)


def run_apart(
    module: nn.Module, inputs: Inputs, call: Callable[[nn.Module, Inputs], Any] = run_module
) -> tuple[Any, dict[str, Tensor]]:
    """Run a module on other tensors than its own (fake ones, where that is on): (its output, those tensors)."""
    fake_mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    is_fake = FakeTensorMode.is_infra_mode() and fake_mode is not None

    def make(value: Tensor) -> Tensor:
        made = torch.empty(value.shape, dtype=value.dtype, device="cpu") if is_fake else value.detach().clone()
        return made.requires_grad_(isinstance(value, nn.Parameter) and value.is_floating_point())

    tensors = other_tensors(module, make)
    return call_with(module, tensors, lambda: call(module, inputs)), tensors


def other_tensors(module: nn.Module, make: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """By name, a tensor for each of a module's parameters and buffers; tied ones stay one."""
    tensors: dict[str, Tensor] = {}
    same: dict[int, Tensor] = {}
    for path, each in module.named_modules():  # one that stands in two places comes once: else it is not put back
        for name, value in (*each._parameters.items(), *each._buffers.items()):
            if value is not None:
                if id(value) not in same:
                    same[id(value)] = make(value)
                tensors[f"{path}.{name}".lstrip(".")] = same[id(value)]
    return tensors


def call_with(module: nn.Module, tensors: Mapping[str, Tensor], run: Callable[[], Any]) -> Any:
    """`run()` while the module has `tensors` in place of its own."""

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self) -> Any:
            return run()

    inner = {f"inner.{name}": value for name, value in tensors.items()}
    return functional_call(Caller(), inner, (), tie_weights=False)


def block_names(module: nn.Module) -> list[tuple[str, ...]]:
    """Lists of blocks to try, the best first: what the module says itself; else those with the most parameters.

    Lists of equal blocks that hang side by side, as a ResNet's layer1 to layer4, may be one after the other.
    """
    hints = []  # where transformers' own pipeline plan has the repeated layers
    for path in getattr(module, "_pp_plan", None) or {}:
        with contextlib.suppress(AttributeError):
            if isinstance(each := module.get_submodule(path), nn.ModuleList) and len(each) > 1:
                hints.append(_children(module, path))
    lists: dict[str, nn.Module] = {}
    beside: dict[tuple[str, type], list[str]] = {}
    for path, each in module.named_modules():
        if isinstance(each, nn.ModuleList | nn.Sequential) and len(each):
            kinds = {type(child) for child in each}
            if len(each) >= 2 and (isinstance(each, nn.Sequential) or len(kinds) == 1):
                lists[path] = each
            if path and len(kinds) == 1:
                beside.setdefault((path.rpartition(".")[0], kinds.pop()), []).append(path)
    candidates = [_children(module, path) for path in lists]
    candidates += [sum((_children(module, path) for path in paths), ()) for paths in beside.values() if len(paths) > 1]
    sizes = {
        names: sum(value.numel() for name in names for value in module.get_submodule(name).parameters())
        for names in candidates
    }
    total = sum(value.numel() for value in module.parameters())
    best = sorted((names for names in candidates if 2 * sizes[names] >= total > 0), key=lambda names: -sizes[names])
    return hints[:1] + best[:2]


def _children(module: nn.Module, path: str) -> tuple[str, ...]:
    return tuple(f"{path}.{name}".lstrip(".") for name, _ in module.get_submodule(path).named_children())


def examine(module: nn.Module, template: InputTemplate) -> Anatomy:
    """Examine the candidate lists of blocks: the first one that can be cut into stages, else the last one tried."""
    anatomy = Anatomy(no_stages="it has no list of blocks that holds most of its parameters.")
    for names in block_names(module):
        anatomy = _examine(module, names, template)
        if not anatomy.no_stages:
            break
    return anatomy


def _examine(module: nn.Module, names: tuple[str, ...], template: InputTemplate) -> Anatomy:
    blocks = [module.get_submodule(name) for name in names]
    inside = {id(each) for block in blocks for each in block.modules()}
    places = [(value, i) for i, block in enumerate(blocks) for value in block.parameters()]
    places += [(value, -1) for each in module.modules() if id(each) not in inside for value in each.parameters(False)]
    first: dict[int, int] = {}
    for value, place in places:
        if first.setdefault(id(value), place) != place:
            name = next(name for name, each in module.named_parameters() if each is value)
            return Anatomy(
                no_stages=f"{name} is in more than one place, so that its blocks do not stand by themselves."
            )
    anatomy = Anatomy(names=names)
    sequence = template.third
    sizes = ((2, 2 * sequence, 1e-9), (3, 2 * sequence, 1 - 1e-7), (2, 3 * sequence, 0.5))
    traces = []
    try:
        with tracing(module, template):
            for samples, length, coin in sizes:  # a layer that is dropped now and then is found by the coins
                with FixedDraw(coin):
                    traces.append(_trace(module, blocks, template.shaped(samples, length), anatomy))
    except _RunAgain as again:  # a block's weights are gathered when it runs: it is no unit if that is not once
        return Anatomy(no_stages=str(again))
    except Exception as error:
        why = f"it does not run on a sample ({type(error).__name__}: {first_line(error)})."
        if isinstance(error, DataDependentOutputException):
            why = "its forward asks for values, and it is examined without any."
        anatomy.no_stages = str(error) if isinstance(error, _NoStages) else why
        return anatomy
    base, more_samples, longer = traces
    for shapes in zip(base, more_samples, longer, strict=True):
        dims = []
        for size, with_samples, with_sequence in zip(*shapes, strict=True):
            per_sample = with_samples - size
            per_token = (with_sequence - size) // sequence if template.has_sequence else 0
            dims.append((size - 2 * per_sample - 2 * sequence * per_token, per_sample, per_token))
        anatomy.shapes += (tuple(dims),)
    return anatomy


class _NoStages(Exception):
    pass


class _RunAgain(_NoStages):
    pass


def _trace(module: nn.Module, blocks: list[nn.Module], inputs: Inputs, anatomy: Anatomy) -> list[tuple[int, ...]]:
    """Shapes at every border; _NoStages where the blocks are no chain at all."""
    entered: list[Tensor] = []
    left: list[Tensor] = []
    handed: list[Tensor] = []

    def before(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if index < len(entered):
            raise _RunAgain(f"block {index} runs more than once.")
        if index > len(entered):
            raise _NoStages(f"block {index} does not run right after block {index - 1}.")
        hidden = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(hidden, Tensor):
            raise _NoStages(f"block {index} is not handed a tensor first.")
        if index and hidden is not handed[-1] and index not in anatomy.between:
            anatomy.between += (index,)
        entered.append(hidden)

    def after(index: int, args: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) and output else output
        if not isinstance(hidden, Tensor) or not hidden.is_floating_point():
            raise _NoStages(f"block {index} does not hand on a tensor of numbers.")
        returned = Returned.like(output)
        name = anatomy.names[index]
        if anatomy.returned.setdefault(name, returned) != returned:  # something in it depends on the sample's size
            anatomy.returned[name] = replace(returned, rest=tuple(ABSENT for _ in returned.rest))
        left.append(hidden)
        fresh = hidden.detach().requires_grad_()
        handed.append(fresh)
        return returned.made(fresh, output[1:] if returned.kind is not None else ())

    with hooked(dict(enumerate(blocks)), before, after):
        output, tensors = run_apart(module, inputs)
    if len(entered) != len(blocks):
        raise _NoStages(f"only {len(entered)} of its {len(blocks)} blocks run every time.")
    anatomy.no_stages = _dependence(module, anatomy, tensors, left, handed, floats(output))
    return [tuple(tensor.shape) for tensor in (entered[0], *left)]


@contextlib.contextmanager
def hooked(
    modules: Mapping[Any, nn.Module],
    before: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None = None,
    after: Callable[[Any, tuple[Any, ...], Any], Any] | None = None,
) -> Iterator[None]:
    """Within it, each module runs `before(key, args, kwargs)` and `after(key, args, output)`, as torch's hooks do."""
    with contextlib.ExitStack() as stack:
        for key, module in modules.items():
            if before is not None:
                hook: Any = lambda _, args, kwargs, key=key: before(key, args, kwargs)  # noqa: E731
                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            if after is not None:
                hook = lambda _, args, output, key=key: after(key, args, output)  # noqa: E731
                stack.callback(module.register_forward_hook(hook).remove)
        yield


def logits_of(output: Any, other: Any = None) -> Any:
    """The tensor called `logits` in a dict or as an attribute, else `other`."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else other


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [tensor for each in values for tensor in tensors_in(each)]


def floats(output: Any) -> list[Tensor]:
    """The tensors of an output that may carry a gradient."""
    return [tensor for tensor in tensors_in(output) if tensor.requires_grad]


def used_by(outputs: Sequence[Tensor], tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that any of the outputs depends on."""
    outputs = floats(outputs)
    if not outputs or not tensors:
        return []
    ones, wanted = [torch.ones_like(each) for each in outputs], list(tensors.values())
    gradients = torch.autograd.grad(outputs, wanted, ones, allow_unused=True, retain_graph=True)
    return [name for name, gradient in zip(tensors, gradients, strict=True) if gradient is not None]


def _dependence(
    module: nn.Module,
    anatomy: Anatomy,
    tensors: dict[str, Tensor],
    left: list[Tensor],
    handed: list[Tensor],
    output: list[Tensor],
) -> str:
    """Why stages cannot be cut, if so; else which parameters the two ends use is written down."""
    names = [name for name, _ in module.named_parameters() if tensors[name].requires_grad]
    # A tensor handed on by a block counts by that block's name.
    wanted = {name: tensors[name] for name in names} | dict(zip(anatomy.names, handed, strict=True))
    before: tuple[str, ...] = ()
    anatomy.before = anatomy.after = ()
    for index, hidden in enumerate(left):
        name = anatomy.names[index]
        given = anatomy.names[index - 1] if index else ""
        uses = used_by([hidden], wanted)
        others = [each for each in uses if each != given and not each.startswith(f"{name}.")]
        if index == 0:
            before = tuple(each for each in others if each not in anatomy.names and not anatomy.holds(each))
            others = [each for each in others if each not in before]
        if others:
            return f"block {index} also depends on {others[0]}, and not only on what it is handed."
        if given and given not in uses:
            return f"what block {index} hands on has no gradient for what it is handed."
    late = used_by(output, wanted)
    if anatomy.names[-1] not in late:
        return "what follows the blocks has no gradient for what the last one hands on."
    late.remove(anatomy.names[-1])
    inside = [name for name in late if name in anatomy.names or anatomy.holds(name)]
    if inside:
        return f"what follows the blocks also depends on {inside[0]}."
    # A parameter that nothing uses stays at the end, where it is in nobody's way.
    idle = [name for name in names if not anatomy.holds(name) and name not in before]
    aliases = Counter(id(value) for _, value in module.named_parameters(remove_duplicate=False))
    own = dict(module.named_parameters())
    for name in late:
        if name in before and aliases[id(own[name])] == 1:
            return f"{name} is used before and after the blocks, and has only one name to be held by in two stages."
    anatomy.before = before
    anatomy.after = tuple(late + [name for name in idle if name not in late])
    return ""
