"""Any module -> what each of its layers runs and keeps, forward and backward, without values.

The module runs on fake tensors at a few sizes, one block of each run of equals; what it runs is written down
(`trace_record`), grouped into ops and fitted by polynomials (`trace_fit`). See docs/tracing.md.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from meshwright.core.profile import Op
from meshwright.foreign.examine import VALUES_WANTED, call_with, hooked, other_tensors
from meshwright.foreign.trace_fit import Summary, ops_of, summarise
from meshwright.foreign.trace_ops import one_kernel_each
from meshwright.foreign.trace_record import Label, OpRecorder, Record
from meshwright.ops.model_interface import Inputs, map_inputs

SHORT = 6
"""Tokens of the shortest sequence. Where a module goes through its tokens one by one, each is traced."""


@dataclass(frozen=True, kw_only=True)
class TracedLayer:
    """A layer of the module: a submodule, or (empty) what runs before and after those."""

    path: str
    is_block: bool = False
    columns: tuple[str, ...] = ()
    """Linears at which a region begins that may be split."""
    rows: tuple[str, ...] = ()
    """Linears at which one ends."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A module to be traced, and how it is run."""

    module: nn.Module
    step: Callable[[nn.Module, Inputs, bool], Tensor]
    """Forward and loss, one number to go backward from; under autocast if that is so and it runs without values."""
    inputs: Callable[[int, int], Inputs]
    """(samples, sequence length) -> inputs of that size."""
    places: Sequence[TracedLayer]
    aside: Mapping[str, str] = field(default_factory=dict)
    """Block -> the equal one before it that is traced in its place."""
    is_autocast: bool = True
    """Parameters in float32 and lower precision by autocast, as other people's modules run; else all in one dtype."""


@dataclass
class Traced:
    ops: list[tuple[Op, ...]]
    """Ops of each layer."""
    unpriced: tuple[str, ...] = ()


class Untraceable(Exception):
    """What stops a module from running without values: the operator, and the module that calls it."""


def trace(subject: Subject, longest: int, has_sequence: bool) -> Traced:
    """`longest`: sequence the inputs may have."""
    unpriced: dict[str, None] = {}
    runs: dict[tuple[int, int], Record] = {}
    points, is_fake = _points(subject, longest, has_sequence, runs, unpriced)
    summaries: list[Summary] = []
    for samples, sequence in reversed(points):
        record = runs.pop((samples, sequence), None) or _run(subject, subject.inputs(samples, sequence), is_fake)
        alike = summaries and summaries[0].num_events == len(record.events)
        summaries.append(summarise(record, sequence, summaries[0].peaks if alike else None))
        unpriced |= record.unpriced
    summaries.reverse()
    ops = []
    for layer, place in enumerate(subject.places):
        own_ops, unfitted = ops_of(layer, summaries, points, has_sequence, place.is_block, place.rows)
        ops.append(own_ops)
        if unfitted:
            where = f"{place.path or 'the ends'}: {', '.join(unfitted[:3])}{' and others' if unfitted[3:] else ''}"
            unpriced[f"{where} follow no polynomial of samples and sequence; fitted roughly"] = None
    return Traced(ops=ops, unpriced=tuple(unpriced))


def trace_at(subject: Subject, samples: int, sequence: int) -> Summary:
    """At one size only."""
    return summarise(_run(subject, subject.inputs(samples, sequence), True), sequence)


def _points(
    subject: Subject, longest: int, has_sequence: bool, runs: dict[tuple[int, int], Record], unpriced: dict[str, None]
) -> tuple[list[tuple[int, int]], bool]:
    """Sizes to trace at, the largest last, and whether without values. What was run to find that out is in `runs`.

    Large sizes, so that the fullest moment is the one of real sizes; but small ones where every token is gone through
    by itself.
    """
    short = _unlike(subject.module, min(SHORT, max(1, longest // 3))) if has_sequence else 1
    is_fake = True
    try:
        runs[2, short] = _run(subject, subject.inputs(2, short), is_fake)
    except Untraceable as why:  # then it is run with its values, if it has any
        if any(value.device.type == "meta" for value in subject.module.parameters()):
            raise
        unpriced[f"{why} It was run with its values instead: counts hold for such values."] = None
        is_fake = False
    if not has_sequence:
        return [(2, 1), (3, 1), (8 if is_fake else 4, 1)], is_fake
    base = _unlike(subject.module, min(1024, longest // 2) // 2 * 2)
    if is_fake and base > 2 * short:
        runs[2, 2 * short] = _run(subject, subject.inputs(2, 2 * short), is_fake)
        if len(runs[2, short].events) == len(runs[2, 2 * short].events):
            return [(2, short), (2, 2 * short), (2, base), (3, base), (3, 2 * base)], is_fake
        unpriced[f"kernels: their number grows with the sequence; counted at {3 * short} tokens"] = None
    return [(2, short), (3, short), (2, 2 * short), (3, 2 * short), (3, 3 * short)], is_fake


def _unlike(module: nn.Module, base: int) -> int:
    """Near `base`; where possible such that no size of the module's can be taken for the sequence."""
    sizes = {size for value in module.parameters() for size in value.shape}
    tried = (base - less for less in range(0, min(base, 40), 2))
    return next((n for n in tried if n > 0 and not {n, 2 * n, 3 * n} & sizes), base)


def _run(subject: Subject, inputs: Inputs, is_fake: bool) -> Record:
    narrow = frozenset({torch.bfloat16, torch.float16} if is_fake else {torch.float32, torch.float64})
    recorder = OpRecorder(narrow)
    mode: Any = FakeTensorMode(allow_non_fake_inputs=True) if is_fake else contextlib.nullcontext()
    wide = torch.float32 if subject.is_autocast else torch.bfloat16

    def other(value: Tensor) -> Tensor:
        """In place of an input or of one of the module's own: parameters float32 where autocast casts, else narrow."""
        is_parameter = isinstance(value, nn.Parameter)
        dtype = wide if value.is_floating_point() and is_parameter else value.dtype
        made = torch.empty(value.shape, dtype=dtype) if is_fake else value.detach().clone()
        return made.requires_grad_(is_parameter and value.requires_grad)

    try:
        with mode, _watched(subject, recorder):
            given = map_inputs(inputs, other)
            tensors = other_tensors(subject.module, other)
            for value in tensors.values():
                recorder.know(value, is_given=True)
            for value in given if isinstance(given, tuple) else (given,):
                recorder.know(value, is_input=True)
            hooks = torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda tensor: tensor)
            stand_ins = one_kernel_each(lambda: recorder.marked(role="loss"))
            with recorder, stand_ins:
                recorder.at_work = True
                with hooks:
                    loss = call_with(subject.module, tensors, lambda: subject.step(subject.module, given, is_fake))
                recorder.is_backward = True
                loss.backward()
                recorder.at_work = False
            for value in tensors.values():
                if value.grad is not None:
                    recorder.know(value.grad, is_gradient=True)
    except VALUES_WANTED as error:
        func = getattr(error, "func", None) or (error.args[0] if error.args else error)
        what = {
            DataDependentOutputException: "asks for a value",
            DynamicOutputShapeException: "has an output whose size depends on values",
        }.get(type(error), "has no rule for running without values")
        raise Untraceable(f"{func} in {recorder.label.path or 'the model itself'} {what}.") from None
    return recorder.record


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


@contextlib.contextmanager
def _watched(subject: Subject, recorder: OpRecorder) -> Iterator[None]:
    """Every module tells the recorder when it begins and ends."""
    layers = {place.path: index for index, place in enumerate(subject.places) if place.path}
    stacks: dict[str, list[Label]] = defaultdict(list)

    def place_of(path: str) -> tuple[str, TracedLayer]:
        """The path inside of its layer, and that layer."""
        owner = next((p for p in layers if path == p or path.startswith(f"{p}.")), "")
        return (path[len(owner) + 1 :] if owner else path), subject.places[layers[owner] if owner else 0]

    places = {path: place_of(path) for path, _ in subject.module.named_modules() if path}

    def begin(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inner, place = places[path]
        stacks[path].append(recorder.label)
        changes: dict[str, Any] = {"path": inner}
        if path in layers:
            changes |= {"layer": layers[path], "cut": "none", "is_block": subject.places[layers[path]].is_block}
            for each in (*args, *kwargs.values())[:1]:
                if isinstance(each, Tensor):
                    recorder.know(each, is_handed=True)
        if inner in place.columns:
            changes["cut"] = "tensor"
        recorder.label = recorder.label._replace(**changes)

    def end(path: str, args: Any, output: Any) -> None:
        inner, place = places[path]
        before = stacks[path].pop() if stacks[path] else recorder.label
        label = recorder.label._replace(path=before.path)
        if path in layers:
            after = layers[path] + 1
            is_next = after < len(subject.places) and not subject.places[after].is_block
            layer = after if is_next else layers[path]
            label = label._replace(layer=layer, is_block=subject.places[layer].is_block)
        if inner in place.rows:
            label = label._replace(cut="none")
        recorder.label = label

    modules = {path: each for path, each in subject.module.named_modules() if path}
    with pass_through(subject.module, subject.aside), hooked(modules, begin, end):
        yield


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
