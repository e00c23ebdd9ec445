"""Somebody else's module: from a function they name, or from transformers. What they return is checked before use."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from meshwright.core.errors import MeshwrightError, Problem
from meshwright.foreign.examine import Coins, floats, hooked, quiet, run_apart
from meshwright.ops.model_interface import Inputs, map_inputs
from meshwright.ops.routing import transformers_experts

OUR_EXPERTS = "meshwright"
_VALUES_WANTED = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


def _refuse(where: str, what: str, fix: str = "") -> MeshwrightError:
    return MeshwrightError([Problem(where=where, what=what, fix=fix)])


def call_factory(name: str, arguments: Mapping[str, Any], sequence: int) -> tuple[nn.Module, Any, Inputs]:
    """(module, loss or None, sample inputs) of `package.module:function`."""
    where = f"model.factory {name}"
    made = _call(_find(name, where), arguments, where)
    parts = made if isinstance(made, tuple) else (made,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module):
        what = f"returned {_shown(made)}."
        raise _refuse(where, what, "Return a module, (module, loss) or (module, loss, sample inputs).")
    module, loss, example = (*parts, None, None)[:3]
    problems = []
    if loss is not None and not callable(loss):
        problems.append(Problem(where=where, what=f"its loss is {_shown(loss)}, not a function."))
    if example is None and sequence < 1:
        what = "returned no sample inputs, and data.sequence is not given."
        fix = "Return (module, loss, inputs), inputs being a tensor (or tuple of tensors) of one or more samples."
        problems.append(Problem(where=where, what=what, fix=fix))
    if example is not None and not _are_inputs(example):
        what = f"its sample inputs are {_shown(example)}."
        problems.append(
            Problem(where=where, what=what, fix="Use a tensor, or a tuple of tensors, samples along dim 0.")
        )
    problems += _weight_problems(module, where)
    if problems:
        raise MeshwrightError(problems)
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


def _are_inputs(value: Any) -> bool:
    tensors = value if isinstance(value, tuple) else (value,)
    return bool(tensors) and all(isinstance(each, Tensor) and each.ndim >= 1 and len(each) for each in tensors)


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
            raise _refuse(where, f"importing {path} needs {error.name}, which is not installed.") from None
        fix = f"It is looked for in {here} and among installed packages."
        raise _refuse(where, f"there is no module {path}.", fix) from None
    except (Exception, SystemExit) as error:
        raise _refuse(where, f"importing {path} failed: {last_line(error)}") from None
    found = getattr(module, function, None)
    if not callable(found):
        names = [n for n, v in vars(module).items() if inspect.isfunction(v) or inspect.isclass(v)]
        place = getattr(module, "__file__", None) or "built in"
        raise _refuse(
            where, f"{path} ({place}) has no function {function}.", f"It has {', '.join(sorted(names)[:8]) or 'none'}."
        )
    return found


def _call(function: Callable[..., Any], arguments: Mapping[str, Any], where: str) -> Any:
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise _refuse(where, f"does not take model.arguments: {error}.") from None
    except ValueError:  # a builtin without a signature
        pass
    try:
        return function(**arguments)
    except (Exception, SystemExit) as error:
        raise _refuse(where, f"raised {last_line(error)}") from None


def last_line(error: BaseException) -> str:
    """What was raised, and where in the user's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    others = ("site-packages", f"{os.sep}meshwright{os.sep}", "<")
    own = [frame for frame in frames if not any(other in frame.filename for other in others)]
    place = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    if isinstance(error, SyntaxError):  # says itself where it is
        place = ""
    return f"{type(error).__name__}: {str(error).strip().rstrip('.') or 'no message'}{place}."


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


def look(module: nn.Module, call: Callable[[nn.Module, Inputs], Any], example: Inputs) -> Look:
    """Without values where that is possible: it costs nothing, whatever the size."""
    names, modules = zip(*module.named_modules(), strict=True)
    ran: list[str] = []
    with hooked(modules, lambda index, *_: ran.append(names[index]), lambda *_: None):
        try:
            with quiet(), FakeTensorMode(allow_non_fake_inputs=True), Coins(0.5):
                inputs = map_inputs(example, lambda each: torch.zeros(each.shape, dtype=each.dtype))
                sizes: list[int] = []
                with _embeddings(module, inputs, sizes):
                    output, tensors = run_apart(module, call, inputs)
                idle = _idle(module, tensors, floats(output))
                return Look(output=output, vocab_size=min(sizes, default=0), idle=idle, ran=tuple(ran))
        except Exception as error:
            if any(value.device.type == "meta" for value in module.parameters()):
                return Look(failure=None if isinstance(error, _VALUES_WANTED) else error, needs_values=True)
        ran.clear()
        try:
            return Look(output=run_apart(module, call, example)[0], ran=tuple(ran), needs_values=True)
        except Exception as error:
            return Look(failure=error)


@contextlib.contextmanager
def _embeddings(module: nn.Module, inputs: Inputs, sizes: list[int]) -> Iterator[None]:
    """Notes the size of every embedding that is given an input as it is."""
    given = inputs if isinstance(inputs, tuple) else (inputs,)

    def note(each: nn.Module, args: tuple[Any, ...]) -> None:
        if args and any(args[0] is tensor for tensor in given):
            sizes.append(int(each.num_embeddings))

    tables = [each for each in module.modules() if isinstance(each, nn.Embedding)]
    handles = [each.register_forward_pre_hook(note) for each in tables]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _idle(module: nn.Module, tensors: Mapping[str, Tensor], outputs: list[Tensor]) -> tuple[str, ...]:
    names = [name for name, _ in module.named_parameters()]
    if not outputs:
        return ()
    wanted, ones = [tensors[name] for name in names], [torch.ones_like(each) for each in outputs]
    found = torch.autograd.grad(outputs, wanted, ones, allow_unused=True)
    return tuple(name for name, gradient in zip(names, found, strict=True) if gradient is None)


def transformers_module(folder: str, sequence: int) -> tuple[nn.Module, Inputs]:
    """The module of a Hugging Face folder that our decoder cannot stand for; its parameters on the meta device."""
    from meshwright.hf.config_json import read_folder

    known = read_folder(folder)
    where = f"model.hf {folder}"
    try:
        import transformers
    except ImportError:
        what = f"{known.architecture} is not one of our decoders ({known.reason}), and transformers is not installed."
        raise _refuse(where, what, "pip install 'meshwright[hf]'") from None
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        kind = getattr(transformers, known.architecture, None)
        if not known.architecture:  # what models of this type are called where they continue texts
            kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        if not isinstance(kind, type) or not issubclass(kind, nn.Module):
            raise _refuse(where, f"transformers has no {known.architecture or config.model_type}.", f"({known.reason})")
        with parameters_on_meta():
            module = kind(config)
    except MeshwrightError:
        raise
    except Exception as error:
        raise _refuse(where, f"transformers cannot make it: {last_line(error)}") from None
    config = module.config
    if getattr(config, "is_encoder_decoder", False):
        what = f"{known.architecture} reads two texts."
        raise _refuse(where, what, "Write a factory that returns a module of the inputs your data has.")
    keys = ("max_position_embeddings", "max_seq_len", "n_positions")
    longest = next((int(getattr(config, key)) for key in keys if getattr(config, key, None)), sequence)
    return module, torch.zeros(1, max(1, min(sequence, longest)), dtype=torch.int64)


def take_over_experts(module: nn.Module) -> None:
    """Let transformers' experts run by our grouped product, unless somebody chose another way."""
    moe: Any = sys.modules.get("transformers.integrations.moe")
    for each in module.modules() if moe is not None else ():
        config: Any = getattr(each, "config", None)
        if getattr(config, "_experts_implementation", "") == "grouped_mm" and hasattr(each, "_is_expert_parallel"):
            moe.ALL_EXPERTS_FUNCTIONS.register(OUR_EXPERTS, transformers_experts)
            config._experts_implementation_internal = OUR_EXPERTS


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules made inside have their buffers, and parameters without memory."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, value: nn.Parameter | None) -> None:
        if value is not None and value.device.type != "meta":
            value = nn.Parameter(value.detach().to("meta"), requires_grad=value.requires_grad)
        register(self, name, value)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register
