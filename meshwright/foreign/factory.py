"""A user's module, made by the function that a run file names and checked before use; a first look at any module."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from meshwright.core.errors import Problem, error_at, last_line, raise_problems
from meshwright.foreign.examine import VALUES_WANTED, hooked, quiet, run_apart, used_by
from meshwright.foreign.trace_ops import FixedDraw
from meshwright.ops.model_interface import Inputs, map_inputs


def call_factory(name: str, arguments: Mapping[str, Any], sequence: int) -> tuple[nn.Module, Any, Inputs]:
    """(module, loss or None, sample inputs) of `package.module:function`."""
    where = f"model.factory {name}"
    factory = _find(name, where)
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        raise error_at(where, f"does not take model.arguments: {error}.") from None
    except ValueError:  # a builtin without a signature
        pass
    try:
        made = factory(**arguments)
    except (Exception, SystemExit) as error:
        raise error_at(where, f"raised {last_line(error)}") from None
    parts = made if isinstance(made, tuple) else (made,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module):
        what = f"returned {_shown(made)}."
        raise error_at(where, what, "Return a module, (module, loss) or (module, loss, sample inputs).")
    module, loss, example = (*parts, None, None)[:3]
    problems = []
    if loss is not None and not callable(loss):
        problems.append(Problem(where=where, what=f"its loss is {_shown(loss)}, not a function."))
    if example is None and sequence < 1:
        what = "returned no sample inputs, and data.sequence is not given."
        fix = "Return (module, loss, inputs), inputs being a tensor (or tuple of tensors) of one or more samples."
        problems.append(Problem(where=where, what=what, fix=fix))
    tensors = example if isinstance(example, tuple) else (example,)
    are_inputs = bool(tensors) and all(isinstance(each, Tensor) and each.ndim >= 1 and len(each) for each in tensors)
    if example is not None and not are_inputs:
        fix = "Use a tensor, or a tuple of tensors, samples along dim 0."
        problems.append(Problem(where=where, what=f"its sample inputs are {_shown(example)}.", fix=fix))
    problems += _weight_problems(module, where)
    raise_problems(problems)
    return module, loss, torch.zeros(1, sequence, dtype=torch.int64) if example is None else example


def _weight_problems(module: nn.Module, where: str) -> Iterator[Problem]:
    """A rank copies the weights the module was made with: they must be there, whole, and be numbers to train."""
    parameters = dict(module.named_parameters())
    if not parameters:
        yield Problem(where=where, what="its module has no parameters.")
    for name, value in {**parameters, **dict(module.named_buffers())}.items():
        if isinstance(value, UninitializedParameter | UninitializedBuffer):
            fix = "Run the module once on a sample before you return it."
            yield Problem(where=where, what=f"{name} has no shape yet: its layer is lazy.", fix=fix)
            return
        elif value.device.type == "meta":
            fix = "Make the module on the CPU; each rank keeps its own piece only."
            yield Problem(where=where, what=f"{name} is on the meta device and has no values.", fix=fix)
            return  # so are others
    whole = [name for name, value in parameters.items() if not value.is_floating_point()]
    if whole:
        what = f"its parameter {whole[0]} holds {str(parameters[whole[0]].dtype).removeprefix('torch.')}."
        yield Problem(where=where, what=what, fix="Make it a buffer: only floating-point numbers train.")
    if parameters and not any(value.requires_grad for value in parameters.values()):
        fix = "Leave requires_grad on where it is to train."
        yield Problem(where=where, what="all its parameters are frozen: nothing is left to train.", fix=fix)


def _shown(value: Any) -> str:
    return f"a {type(value).__name__}" if not isinstance(value, tuple) else f"a tuple of {len(value)}"


def _find(name: str, where: str) -> Callable[..., Any]:
    path, _, function = name.partition(":")
    here = os.getcwd()
    if here not in sys.path:  # last, so that a `random.py` there is not taken for the standard library's
        sys.path.append(here)
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name and not path.startswith(error.name):
            raise error_at(where, f"importing {path} needs {error.name}, which is not installed.") from None
        fix = f"It is looked for in {here} and among installed packages."
        raise error_at(where, f"there is no module {path}.", fix) from None
    except (Exception, SystemExit) as error:
        raise error_at(where, f"importing {path} failed: {last_line(error)}") from None
    factory = getattr(module, function, None)
    if not callable(factory):
        names = [n for n, v in vars(module).items() if inspect.isfunction(v) or inspect.isclass(v)]
        place = getattr(module, "__file__", None) or "built in"
        raise error_at(
            where, f"{path} ({place}) has no function {function}.", f"It has {', '.join(sorted(names)[:8]) or 'none'}."
        )
    return factory


@dataclass(frozen=True, kw_only=True)
class Look:
    """What one forward on the sample inputs shows."""

    failure: Exception | None = None
    output: Any = None
    vocab_size: int = 0
    """Rows of the embedding that the inputs enter; 0: not known."""
    idle: tuple[str, ...] = ()
    """Parameters that nothing in the output depends on."""
    ran: tuple[str, ...] = ()
    """Modules as they were called, one after the other."""
    needs_values: bool = False
    """It asks for values: with others, other modules may run."""


def look(module: nn.Module, example: Inputs) -> Look:
    """Without values where that is possible: it costs nothing, whatever the size."""
    ran: list[str] = []
    sizes: list[int] = []
    """Rows of every embedding that is given an input as it is."""

    def note(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ran.append(name)
        each = module.get_submodule(name)
        if isinstance(each, nn.Embedding) and args and any(args[0] is tensor for tensor in given):
            sizes.append(int(each.num_embeddings))

    given: tuple[Tensor, ...] = ()
    with hooked(dict(module.named_modules()), note):
        try:
            with quiet(), FakeTensorMode(allow_non_fake_inputs=True), FixedDraw(0.5):
                inputs = map_inputs(example, lambda each: torch.zeros(each.shape, dtype=each.dtype))
                given = inputs if isinstance(inputs, tuple) else (inputs,)
                output, tensors = run_apart(module, inputs)
                parameters = {name: tensors[name] for name, _ in module.named_parameters()}
                used = used_by([output], parameters) or parameters
                idle = tuple(name for name in parameters if name not in used)
                return Look(output=output, vocab_size=min(sizes, default=0), idle=idle, ran=tuple(ran))
        except Exception as error:
            if any(value.device.type == "meta" for value in module.parameters()):
                return Look(failure=None if isinstance(error, VALUES_WANTED) else error, needs_values=True)
        ran.clear()
        try:
            return Look(output=run_apart(module, example)[0], ran=tuple(ran), needs_values=True)
        except Exception as error:
            return Look(failure=error)
