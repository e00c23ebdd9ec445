"""What somebody else's module is made of: found by running it without values (on fake tensors).

    first ──> block 0 ──> block 1 ──> ... ──> last

The repeated blocks are the ModuleList or Sequential with the most parameters. Stages may be cut between them if each
needs nothing of the others but the one tensor it is handed: each block is given a fresh copy of that tensor, and
autograd then tells which parameters everything after it depends on.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.func import functional_call

from meshwright.ops.model import Inputs, map_inputs

Dim = tuple[int, int, int]
"""A size as constant + per sample + per token of the sequence."""


@dataclass(frozen=True, kw_only=True)
class Template:
    """Inputs of any number of samples and any sequence, like an example of them."""

    example: Inputs
    has_sequence: bool

    @classmethod
    def like(cls, example: Inputs) -> Template:
        first = example[0] if isinstance(example, tuple) else example
        return cls(example=example, has_sequence=first.ndim >= 2 and not first.is_floating_point())

    @property
    def sequence(self) -> int:
        first = self.example[0] if isinstance(self.example, tuple) else self.example
        return int(first.shape[1]) if self.has_sequence else 1

    def shaped(self, samples: int, sequence: int) -> Inputs:
        def make(tensor: Tensor) -> Tensor:
            shape = [samples, *tensor.shape[1:]]
            if self.has_sequence and tensor.ndim >= 2 and tensor.shape[1] == self.sequence:
                shape[1] = sequence
            return torch.zeros(shape, dtype=tensor.dtype, device="cpu")

        return map_inputs(self.example, make)


@dataclass(kw_only=True)
class Anatomy:
    """The blocks of a module, and whether stages may be cut between them."""

    path: str
    """Of the list of blocks; empty where there is none worth the name."""
    num_blocks: int
    before: tuple[str, ...] = ()
    """Parameters used before the first block."""
    after: tuple[str, ...] = ()
    """Parameters used after the last one; tied ones may be in both."""
    no_stages: str = ""
    """Why stages cannot be cut; empty if they can."""
    returns_tuple: int = 0
    """Length of the tuple a block returns, its first entry being what it hands on; 0: it returns the tensor."""
    shapes: list[tuple[Dim, ...]] = field(default_factory=list)
    """Of what enters each block, and what leaves the last."""
    calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    """A block's arguments in the trace."""


@contextlib.contextmanager
def tracing(module: nn.Module, call: Callable[[nn.Module, Inputs], Any], template: Template) -> Iterator[None]:
    """Fake tensors inside, if the module runs on them; a forward that looks at values is run with values."""
    with quiet():
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                run_apart(module, call, template.shaped(1, min(2, template.sequence)))
            mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
        except Exception:
            if any(value.device.type == "meta" for value in module.parameters()):
                raise
            mode = contextlib.nullcontext()
        with mode:
            yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What fails on fake tensors is told by us, in a line."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def run_apart(
    module: nn.Module, call: Callable[[nn.Module, Inputs], Any], inputs: Inputs
) -> tuple[Any, dict[str, Tensor]]:
    """Run a module on other tensors than its own (fake ones, where that is on): (its output, those tensors)."""
    tensors: dict[str, Tensor] = {}
    same: dict[int, Tensor] = {}  # tied ones stay one
    for path, each in module.named_modules():  # one that stands in two places comes once: else it is not put back
        for name, value in (*each._parameters.items(), *each._buffers.items()):
            if value is None:
                continue
            if id(value) not in same:
                may_train = isinstance(value, nn.Parameter) and value.is_floating_point()
                same[id(value)] = _stand_in(value).requires_grad_(may_train)
            tensors[f"{path}.{name}".lstrip(".")] = same[id(value)]

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self) -> Any:
            return call(self.inner, inputs)

    inner = {f"inner.{name}": value for name, value in tensors.items()}
    return functional_call(Caller(), inner, (), tie_weights=False), tensors


def _stand_in(value: Tensor) -> Tensor:
    if FakeTensorMode.is_infra_mode() and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return torch.empty(value.shape, dtype=value.dtype, device="cpu")
    return value.detach().clone()


def block_list(module: nn.Module, hint: str = "") -> tuple[str, nn.Module | None]:
    """(path, list) of the repeated blocks: what the module says itself, or the list with the most parameters."""
    found: list[tuple[int, str, nn.Module]] = []
    for path, each in module.named_modules():
        if isinstance(each, nn.ModuleList | nn.Sequential) and len(each) >= 2:
            if path == hint and hint:
                return path, each
            is_alike = isinstance(each, nn.Sequential) or len({type(child) for child in each}) == 1
            if is_alike:
                found.append((sum(p.numel() for p in each.parameters()), path, each))
    total = sum(p.numel() for p in module.parameters())
    size, path, best = max(found, key=lambda item: item[0], default=(0, "", None))
    return (path, best) if best is not None and 2 * size >= total > 0 else ("", None)


def blocks_hint(module: nn.Module) -> str:
    """The path transformers' own pipeline plan gives to the repeated layers."""
    plan = getattr(module, "_pp_plan", None) or {}
    lists = [path for path in plan if isinstance(_submodule(module, path), nn.ModuleList)]
    return lists[0] if lists else ""


def _submodule(module: nn.Module, path: str) -> nn.Module | None:
    with contextlib.suppress(AttributeError):
        return module.get_submodule(path)
    return None


def examine(module: nn.Module, call: Callable[[nn.Module, Inputs], Any], template: Template) -> Anatomy:
    path, blocks = block_list(module, blocks_hint(module))
    if blocks is None:
        return Anatomy(path="", num_blocks=0, no_stages="it has no list of blocks that holds most of its parameters.")
    if shared := _shared(module, list(blocks)):
        return Anatomy(path="", num_blocks=0, no_stages=f"{shared}, so that its blocks do not stand by themselves.")
    anatomy = Anatomy(path=path, num_blocks=len(list(blocks)))
    sequence = max(1, min(8, template.sequence // 3))  # three times as long is still no longer than a sample
    try:
        with tracing(module, call, template):
            traces = [
                _trace(module, list(blocks), call, template.shaped(b, s), anatomy)
                for b, s in ((2, 2 * sequence), (3, 2 * sequence), (2, 3 * sequence))
            ]
    except _RunAgain as why:  # a block's weights are gathered when it runs: it is no unit if that is not once
        return Anatomy(path="", num_blocks=0, no_stages=str(why))
    except _NoStages as why:
        anatomy.no_stages = str(why)
        return anatomy
    except DataDependentOutputException:
        anatomy.no_stages = "its forward asks for values, and it is examined without any."
        return anatomy
    except Exception as error:
        anatomy.no_stages = f"it does not run on a sample ({type(error).__name__}: {_first_line(error)})."
        return anatomy
    base, more_samples, longer = traces
    for shapes in zip(base, more_samples, longer, strict=True):
        dims = []
        for size, with_samples, with_sequence in zip(*shapes, strict=True):
            per_sample = with_samples - size
            per_token = (with_sequence - size) // sequence if template.has_sequence else 0
            dims.append((size - 2 * per_sample - 2 * sequence * per_token, per_sample, per_token))
        anatomy.shapes.append(tuple(dims))
    return anatomy


def _shared(module: nn.Module, blocks: list[nn.Module]) -> str:
    """A parameter that is in two blocks, or in one and outside of them; empty if there is none."""
    inside = {id(each) for block in blocks for each in block.modules()}
    places = [(value, i) for i, block in enumerate(blocks) for value in block.parameters()]
    places += [(value, -1) for each in module.modules() if id(each) not in inside for value in each.parameters(False)]
    first: dict[int, int] = {}
    for value, place in places:
        if first.setdefault(id(value), place) != place:
            name = next(name for name, each in module.named_parameters() if each is value)
            return f"{name} is in more than one place"
    return ""


class _NoStages(Exception):
    pass


class _RunAgain(_NoStages):
    pass


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:160]


def _trace(
    module: nn.Module,
    blocks: list[nn.Module],
    call: Callable[[nn.Module, Inputs], Any],
    inputs: Inputs,
    anatomy: Anatomy,
) -> list[tuple[int, ...]]:
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
        if index and hidden is not handed[-1]:
            raise _NoStages(f"something happens between block {index - 1} and block {index}.")
        anatomy.calls[index] = (args, kwargs)
        entered.append(hidden)

    def after(index: int, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        if not isinstance(hidden, Tensor):
            raise _NoStages(f"block {index} does not hand on a tensor.")
        anatomy.returns_tuple = len(output) if isinstance(output, tuple) else 0
        left.append(hidden)
        fresh = hidden.detach().requires_grad_()
        handed.append(fresh)
        return (fresh, *output[1:]) if isinstance(output, tuple) else fresh

    with _hooked(blocks, before, after):
        output, tensors = run_apart(module, call, inputs)
    if len(entered) != len(blocks):
        raise _NoStages(f"only {len(entered)} of its {len(blocks)} blocks run.")
    anatomy.no_stages = _dependence(module, anatomy, tensors, left, handed, floats(output))
    return [tuple(tensor.shape) for tensor in (*entered, left[-1])]


@contextlib.contextmanager
def _hooked(blocks: list[nn.Module], before: Any, after: Any) -> Iterator[None]:
    handles = []
    for index, block in enumerate(blocks):
        handles.append(
            block.register_forward_pre_hook(lambda _, args, kwargs, i=index: before(i, args, kwargs), with_kwargs=True)
        )
        handles.append(block.register_forward_hook(lambda _, args, output, i=index: after(i, output)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def floats(output: Any) -> list[Tensor]:
    """The tensors of an output that may carry a gradient."""
    if isinstance(output, Tensor):
        return [output] if output.requires_grad else []
    values = output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else ()
    return [tensor for value in values for tensor in floats(value)]


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
    prefix = f"{anatomy.path}." if anatomy.path else ""

    def used(outputs: list[Tensor], own: Tensor | None) -> list[str]:
        """Parameters these depend on; a tensor handed on by another block counts by that block."""
        if not outputs or not any(each.requires_grad for each in outputs):
            return []
        wanted = [tensors[name] for name in names] + handed
        ones = [torch.ones_like(each) for each in outputs if each.requires_grad]
        outputs = [each for each in outputs if each.requires_grad]
        found = torch.autograd.grad(outputs, wanted, ones, allow_unused=True, retain_graph=True)
        labels = names + [f"{prefix}{i}." for i in range(len(handed))]
        return [
            label
            for label, gradient, tensor in zip(labels, found, wanted, strict=True)
            if gradient is not None and tensor is not own
        ]

    before: tuple[str, ...] = ()
    anatomy.before = anatomy.after = ()
    for index, hidden in enumerate(left):
        own = handed[index - 1] if index else None
        others = [name for name in used([hidden], own) if not name.startswith(f"{prefix}{index}.")]
        if index == 0 and prefix:
            before = tuple(name for name in others if not name.startswith(prefix))
            others = [name for name in others if name.startswith(prefix)]
        if others:
            return f"block {index} also depends on {others[0].rstrip('.')}, and not only on what it is handed."
    late = used(output, handed[-1])
    inside = [name for name in late if prefix and name.startswith(prefix)]
    if inside:
        return f"what follows the blocks also depends on {inside[0].rstrip('.')}."
    # A parameter that nothing uses stays at the end, where it is in nobody's way.
    idle = [name for name in names if not (prefix and name.startswith(prefix)) and name not in before]
    aliases = Counter(id(value) for _, value in module.named_parameters(remove_duplicate=False))
    own = dict(module.named_parameters())
    for name in late:
        if name in before and aliases[id(own[name])] == 1:
            return f"{name} is used before and after the blocks, and has only one name to be held by in two stages."
    anatomy.before = before
    anatomy.after = tuple(late + [name for name in idle if name not in late]) if prefix else ()
    return ""
