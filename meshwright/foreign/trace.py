"""Any module -> what each of its layers runs and keeps, forward and backward, without values.

The module runs on fake tensors at a few sizes, one block of each run of equals; what it runs is written down
(`trace_record`), grouped into ops and fitted by polynomials (`trace_fit`). See docs/tracing.md.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from meshwright.core.profile import Layer, Op, Param, Poly, Profile, Site
from meshwright.foreign import examine as examining
from meshwright.foreign.examine import Anatomy, InputTemplate, equal_runs, pass_through
from meshwright.foreign.regions import Regions, SplitRegion
from meshwright.foreign.trace_fit import Summary, ops_of, summarise
from meshwright.foreign.trace_ops import one_kernel_each
from meshwright.foreign.trace_record import Label, OpRecorder, Record
from meshwright.ops.batch_norm import BatchNorm
from meshwright.ops.model_interface import Inputs, map_inputs

ENDS = ("first", "last")
Loss = Callable[[Any, Tensor], Tensor]
"""(the module's output, targets) -> one value for each target."""
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


Traced = tuple[list[tuple[Op, ...]], tuple[str, ...]]
"""Ops of each layer, and what could not be counted."""


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
    return ops, tuple(unpriced)


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
            tensors = examining.other_tensors(subject.module, other)
            for value in tensors.values():
                recorder.know(value, is_given=True)
            for value in given if isinstance(given, tuple) else (given,):
                recorder.know(value, is_input=True)
            hooks = torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda tensor: tensor)
            stand_ins = one_kernel_each(lambda: recorder.marked(role="loss"))
            with recorder, stand_ins:
                recorder.at_work = True
                with hooks:
                    step = functools.partial(subject.step, subject.module, given, is_fake)
                    loss = examining.call_with(subject.module, tensors, step)
                recorder.is_backward = True
                loss.backward()
                recorder.at_work = False
            for value in tensors.values():
                if value.grad is not None:
                    recorder.know(value.grad, is_gradient=True)
    except examining.VALUES_WANTED as error:
        func = getattr(error, "func", None) or (error.args[0] if error.args else error)
        what = {
            DataDependentOutputException: "asks for a value",
            DynamicOutputShapeException: "has an output whose size depends on values",
        }.get(type(error), "has no rule for running without values")
        raise Untraceable(f"{func} in {recorder.label.path or 'the model itself'} {what}.") from None
    return recorder.record


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
    with pass_through(subject.module, subject.aside), examining.hooked(modules, begin, end):
        yield


def profile_of_module(
    module: nn.Module,
    template: InputTemplate,
    anatomy: Anatomy,
    regions: Regions,
    *,
    name: str,
    uncut: Mapping[str, str],
    loss: Loss | None = None,
) -> Profile:
    blocks = [module.get_submodule(block) for block in anatomy.names]
    # What is done between blocks would be counted at the one that stands for its equals.
    same = list(range(len(blocks))) if anatomy.between else equal_runs(blocks, anatomy.shapes)
    (first, *inner, last), unpriced = _traced(module, template, anatomy, regions, same, loss)
    layers = [_end(module, anatomy, regions, 0, first)]
    ops_of = dict(zip(dict.fromkeys(same), inner, strict=True))
    kinds: Counter[str] = Counter()
    last_key = None
    for index, path in enumerate(anatomy.names):
        block, block_regions, ops = blocks[index], regions.get(path, ()), ops_of[same[index]]
        whole = [Param(name=each, shape=tuple(value.shape)) for each, value in block.named_parameters()]
        params = tuple(_cut_params(whole, block_regions))
        boundary = _boundary(anatomy, index + 1)
        sites = _sites(block_regions, [param.name for param in params]) + _statistics(list(block.modules()))
        key = (type(block), params, boundary, sites, ops)
        if key == last_key:
            layers[-1] = replace(layers[-1], repeat=layers[-1].repeat + 1)
            continue
        last_key = key
        kind = type(block).__name__
        kinds[kind] += 1
        title = kind if kinds[kind] == 1 else f"{kind}_{kinds[kind]}"
        layers.append(Layer(name=title, params=params, ops=ops, sites=sites, boundary=boundary, is_block=True))
    layers.append(_end(module, anatomy, regions, 1, last))
    hidden = anatomy.shapes[0][-1][0] if anatomy.shapes else 0
    names = anatomy.names
    path = names[0].rpartition(".")[0] if names else ""  # of the list that holds the blocks
    is_numbered = names == tuple(f"{path}.{i}".lstrip(".") for i in range(len(names)))
    return Profile(
        name=name,
        layers=tuple(layers),
        hidden_size=max(1, hidden),
        max_sequence=template.sequence,
        counts="tokens" if template.has_sequence else "samples",
        stream="parameters",
        block_path=path if is_numbered else ",".join(names),
        uncut=dict(uncut),
        unpriced=unpriced,
    )


def trace_module(module: nn.Module, example: Inputs, *, name: str, loss: Loss | None = None) -> Profile:
    """A module's profile from sample inputs of the right shapes; it needs no weights. Nothing of it is cut."""
    template = InputTemplate.like(example)
    # Equal blocks are looked at once, where that one hands on what it is given in the shape it came in.
    names = next(iter(examining.block_names(module)), ())
    same = equal_runs([module.get_submodule(name) for name in names], [None] * (len(names) + 1))
    with pass_through(module, {names[at]: names[first] for at, first in enumerate(same) if at != first}):
        anatomy = examining.examine(module, template)
    shapes = anatomy.shapes
    is_chain = bool(shapes) and anatomy.names == names and not anatomy.between
    if not is_chain or any(shapes[first] != shapes[first + 1] for at, first in enumerate(same) if at != first):
        anatomy = examining.examine(module, template)
    return profile_of_module(module, template, anatomy, {}, name=name, uncut={}, loss=loss)


def _traced(
    module: nn.Module, template: InputTemplate, anatomy: Anatomy, regions: Regions, same: list[int], loss: Loss | None
) -> Traced:
    names = anatomy.names

    def layer(path: str, prefixed: list[tuple[str, SplitRegion]]) -> TracedLayer:
        columns = tuple(prefix + region.columns[0] for prefix, region in prefixed)
        rows = tuple(prefix + region.row for prefix, region in prefixed)
        return TracedLayer(path=path, is_block=bool(path), columns=columns, rows=rows)

    ends = layer("", [(f"{path}.", region) for path, own in regions.items() if path not in names for region in own])
    blocks = [layer(names[at], [("", region) for region in regions.get(names[at], ())]) for at in dict.fromkeys(same)]
    places = [ends, *blocks, ends]
    notes: dict[str, None] = {}

    def step(module: nn.Module, inputs: Inputs, is_fake: bool) -> Tensor:
        """The loss for targets of the shape that the scores have, or the sum of the output."""
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_fake):
            output = examining.run_module(module, inputs)
        tensors = examining.floats(output)
        if loss is not None and tensors:
            scores = examining.logits_of(output, tensors[0])
            for make in (lambda: torch.zeros(scores.shape[:-1], dtype=torch.int64), lambda: torch.zeros_like(scores)):
                try:
                    return loss(output, make()).sum()
                except Exception:  # not of the kind it is for
                    continue
            notes["the loss: it took none of the targets made up for it"] = None
        return sum((each.sum() for each in tensors), torch.zeros(()))

    subject = Subject(
        module=module,
        step=step,
        inputs=template.shaped,
        places=places,
        aside={names[at]: names[first] for at, first in enumerate(same) if at != first},
    )
    try:
        with examining.quiet():
            ops, unpriced = trace(subject, template.sequence, template.has_sequence)
    except Untraceable as why:
        note = f"{why} It has no weights to run it with: nothing is counted. Make it without that, or with weights."
        return [()] * len(places), (note,)
    return ops, (*unpriced, *notes)


def end_names(module: nn.Module, anatomy: Anatomy) -> tuple[list[str], list[str]]:
    """Parameters before the blocks and after them, a tied one in both."""
    if not anatomy.num_blocks:
        return [name for name, _ in module.named_parameters()], []
    outside = [name for name, _ in module.named_parameters(remove_duplicate=False) if not anatomy.holds(name)]
    same = {id(value): name for name, value in module.named_parameters()}
    canonical = {name: same[id(value)] for name, value in module.named_parameters(remove_duplicate=False)}
    if not anatomy.before and not anatomy.after:  # no stages: it does not matter
        return [name for name in outside if canonical[name] == name], []
    before = [name for name in outside if canonical[name] == name and name in anatomy.before]
    # Of two names of one parameter, the second is the one used late.
    aliases = {canonical[name]: name for name in outside if canonical[name] != name}
    after = [aliases[name] if name in before else name for name in anatomy.after if name in canonical]
    return before, after


def _end(module: nn.Module, anatomy: Anatomy, regions: Regions, which: int, ops: tuple[Op, ...]) -> Layer:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    for name, value in parameters.items():
        first.setdefault(id(value), name)
    names = end_names(module, anatomy)
    params = []
    for name in names[which]:
        canonical = first[id(parameters[name])]
        tied = f"{ENDS[0]}.{canonical}" if canonical != name and canonical in names[0] else ""
        params.append(Param(name=name, shape=tuple(parameters[name].shape), tied=tied))
    sites: tuple[Site, ...] = ()
    for path, block_regions in regions.items():
        own = {f"{path}.{cut.name}" for region in block_regions for cut in region.cuts}
        if own.intersection(names[which]):
            params = _cut_params(params, block_regions, f"{path}.")
            sites += _sites(block_regions, names[which], f"{path}.")
    boundary = Poly() if which else _boundary(anatomy, 0)
    owners = dict.fromkeys(name.rpartition(".")[0] for name in names[which])
    sites += _statistics([module.get_submodule(owner) for owner in owners])
    return Layer(name=ENDS[which], params=tuple(params), ops=ops, sites=sites, boundary=boundary, unit="ends")


def _boundary(anatomy: Anatomy, index: int) -> Poly:
    """Elements of a product of dims, each constant + per sample + per token; only products that make sense."""
    total = Poly(one=1.0) if anatomy.shapes else Poly()
    for one, sample, token in anatomy.shapes[index] if anatomy.shapes else ():
        if sample:
            total = Poly(b=total.one * sample, bs=total.bs)
        elif token:
            total = Poly(b=total.b * one, bs=total.b * token)
        else:
            total = Poly(one=total.one * one, b=total.b * one, bs=total.bs * one, bss=total.bss * one)
    return total


def _cut_params(params: list[Param], block_regions: Sequence[SplitRegion], prefix: str = "") -> list[Param]:
    """The parameters of a block, or of what has them with a prefix, with where they may be cut."""
    cuts = {prefix + cut.name: (cut.dim, region.units) for region in block_regions for cut in region.cuts}
    inside = {prefix + name for region in block_regions for name in region.inside}
    return [
        replace(param, cut=cuts[param.name][0], units=cuts[param.name][1])
        if param.name in cuts
        else replace(param, inside=param.inside or param.name in inside)
        for param in params
    ]


def _sites(block_regions: Sequence[SplitRegion], names: list[str], prefix: str = "") -> tuple[Site, ...]:
    """Parameters are taken to be used in the order they are listed in, as is usual; it matters for frozen ones only."""
    sites: list[Site] = []
    for region in block_regions:
        after = names.index(prefix + region.cuts[0].name)
        sites += [Site(kind="enter", elements=elements, after=after) for elements in region.enters]
        sites += [Site(kind="exit", elements=elements, tail=region.is_tail) for elements in region.exits]
    return tuple(sites)


def _statistics(modules: list[nn.Module]) -> tuple[Site, ...]:
    norms = [module for module in modules if isinstance(module, BatchNorm)]
    return tuple(Site(kind="statistics", elements=Poly(one=2 * norm.weight.numel())) for norm in norms)


def hidden_shape(anatomy: Anatomy, block: int, samples: int, sequence: int) -> tuple[int, ...]:
    dims = anatomy.shapes[block]
    return tuple(one + sample * samples + token * sequence for one, sample, token in dims)
