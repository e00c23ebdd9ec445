"""The profile of somebody else's module: parameters exactly, its work as the tracer finds it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.profile import Layer, Op, Param, Poly, Profile, Site
from meshwright.foreign.examine import (
    Anatomy,
    InputTemplate,
    block_names,
    examine,
    floats,
    list_path,
    quiet,
    run_module,
)
from meshwright.foreign.regions import SplitRegion
from meshwright.foreign.trace import Subject, Traced, TracedLayer, Untraceable, equal_runs, pass_through, trace
from meshwright.ops.batch_norm import BatchNorm
from meshwright.ops.model_interface import Inputs

ENDS = ("first", "last")
Loss = Callable[[Any, Tensor], Tensor]


def profile_of_module(
    module: nn.Module,
    template: InputTemplate,
    anatomy: Anatomy,
    regions: Mapping[str, list[SplitRegion]],
    *,
    name: str,
    uncut: Mapping[str, str],
    loss: Loss | None = None,
) -> Profile:
    blocks = [module.get_submodule(block) for block in anatomy.names]
    # What is done between blocks would be counted at the one that stands for its equals.
    same = list(range(len(blocks))) if anatomy.between else equal_runs(blocks, anatomy.shapes)
    traced = _traced(module, template, anatomy, regions, same, loss)
    first, *inner, last = traced.ops
    layers = [_end(module, anatomy, regions, 0, first)]
    ops_of = dict(zip(dict.fromkeys(same), inner, strict=True))
    kinds: Counter[str] = Counter()
    last_key = None
    for index, path in enumerate(anatomy.names):
        block, block_regions, ops = blocks[index], regions.get(path, []), ops_of[same[index]]
        whole = [Param(name=each, shape=tuple(value.shape)) for each, value in block.named_parameters()]
        params = tuple(_cut_params(whole, block_regions))
        boundary = _boundary(anatomy, index + 1) if anatomy.shapes else Poly()
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
    names, path = anatomy.names, list_path(anatomy.names)
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
        unpriced=traced.unpriced,
    )


def trace_module(module: nn.Module, example: Inputs, *, name: str, loss: Loss | None = None) -> Profile:
    """A module's profile from sample inputs of the right shapes; it needs no weights. Nothing of it is cut."""
    template = InputTemplate.like(example)
    # Equal blocks are looked at once, where that one hands on what it is given in the shape it came in.
    names = next(iter(block_names(module)), ())
    same = equal_runs([module.get_submodule(name) for name in names], [None] * (len(names) + 1))
    with pass_through(module, {names[at]: names[first] for at, first in enumerate(same) if at != first}):
        anatomy = examine(module, template)
    shapes = anatomy.shapes
    is_chain = bool(shapes) and anatomy.names == names and not anatomy.between
    if not is_chain or any(shapes[first] != shapes[first + 1] for at, first in enumerate(same) if at != first):
        anatomy = examine(module, template)
    return profile_of_module(module, template, anatomy, {}, name=name, uncut={}, loss=loss)


def _traced(
    module: nn.Module,
    template: InputTemplate,
    anatomy: Anatomy,
    regions: Mapping[str, list[SplitRegion]],
    same: list[int],
    loss: Loss | None,
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
            output = run_module(module, inputs)
        tensors = floats(output)
        if loss is not None and tensors:
            scores = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
            scores = scores if isinstance(scores, Tensor) else tensors[0]
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
        with quiet():
            traced = trace(subject, template.sequence, template.has_sequence)
    except Untraceable as why:
        told = f"{why} It has no weights to run it with: nothing is counted. Make it without that, or with weights."
        return Traced(ops=[()] * len(places), unpriced=(told,))
    traced.unpriced += tuple(notes)
    return traced


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


def _end(
    module: nn.Module, anatomy: Anatomy, regions: Mapping[str, list[SplitRegion]], which: int, ops: tuple[Op, ...]
) -> Layer:
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
    boundary = Poly()
    if which == 0 and anatomy.shapes:
        boundary = _boundary(anatomy, 0)
    owners = dict.fromkeys(name.rpartition(".")[0] for name in names[which])
    sites += _statistics([module.get_submodule(owner) for owner in owners])
    return Layer(name=ENDS[which], params=tuple(params), ops=ops, sites=sites, boundary=boundary, unit="ends")


def _boundary(anatomy: Anatomy, index: int) -> Poly:
    """Elements of a product of dims, each constant + per sample + per token; only products that make sense."""
    total = Poly(one=1.0)
    for one, sample, token in anatomy.shapes[index]:
        if sample:
            total = Poly(b=total.one * sample, bs=total.bs)
        elif token:
            total = Poly(b=total.b * one, bs=total.b * token)
        else:
            total = Poly(one=total.one * one, b=total.b * one, bs=total.bs * one, bss=total.bss * one)
    return total


def _cut_params(params: list[Param], block_regions: list[SplitRegion], prefix: str = "") -> list[Param]:
    """The parameters of a block, or of what has them with a prefix, with where they may be cut."""
    cuts = {prefix + cut.name: (cut.dim, region.units) for region in block_regions for cut in region.cuts}
    inside = {prefix + name for region in block_regions for name in region.inside}
    return [
        replace(param, cut=cuts[param.name][0], units=cuts[param.name][1])
        if param.name in cuts
        else replace(param, inside=param.inside or param.name in inside)
        for param in params
    ]


def _sites(block_regions: list[SplitRegion], names: list[str], prefix: str = "") -> tuple[Site, ...]:
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
