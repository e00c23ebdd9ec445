"""What a traced module costs: parameters exactly, work and kept activations by counting operators without values.

Counts are taken at a few sizes and fitted by polynomials in samples and sequence. Backward is taken as twice forward.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from meshwright.core.profile import Layer, Op, Param, Poly, Profile, Site
from meshwright.models.examine import Anatomy, Template, run_apart, tracing
from meshwright.models.regions import Found, linear_dims
from meshwright.ops.batch_norm import BatchNorm
from meshwright.ops.model import Inputs

ENDS = ("first", "last")
Counts = Mapping[tuple[int, str], float]
"""(layer, quantity) -> elements or flops; layer -1 is what comes before the blocks, the largest what comes after."""


class _Counter(TorchDispatchMode):
    """Flops and elements of every operator, by the layer that runs and whether a region that may be split does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.cut = -1, "none"
        self.counts: dict[tuple[int, str], float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            packet = func._overloadpacket
            if packet in flop_registry:
                self.add("flops", float(flop_registry[packet](*args, **(kwargs or {}), out_val=out)))
            self.add("moved", sum(map(_numel, (*args, out))))
        return out

    def add(self, quantity: str, amount: float) -> None:
        self.counts[self.layer, f"{quantity}.{self.cut}"] += amount


def _numel(value: Any) -> float:
    if isinstance(value, Tensor):
        return float(value.numel())
    return sum(map(_numel, value)) if isinstance(value, list | tuple) else 0.0


def count(
    module: nn.Module,
    call: Callable[[nn.Module, Inputs], Any],
    inputs: Inputs,
    anatomy: Anatomy,
    regions: Mapping[int, list[Found]],
) -> Counts:
    counter = _Counter()
    blocks = list(module.get_submodule(anatomy.path).children()) if anatomy.num_blocks else []
    handles = []
    for index, block in enumerate(blocks):
        handles.append(block.register_forward_pre_hook(lambda *_, i=index: setattr(counter, "layer", i)))
        for found in regions.get(index, ()):
            first, row = block.get_submodule(found.columns[0]), block.get_submodule(found.row)
            handles.append(first.register_forward_pre_hook(lambda *_: setattr(counter, "cut", "tensor")))
            handles.append(row.register_forward_hook(lambda *_: setattr(counter, "cut", "none")))
    if blocks:
        end = len(blocks)
        handles.append(blocks[-1].register_forward_hook(lambda *_: setattr(counter, "layer", end)))
    kept: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # A weight, and a view of one, is there anyway.
        if (
            storage._cdata not in kept
            and not tensor.is_leaf
            and not (tensor._base is not None and tensor._base.is_leaf)
        ):
            kept.add(storage._cdata)
            counter.add("saved", float(tensor.numel()))
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), counter:
            run_apart(module, call, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return counter.counts


def fit(points: list[tuple[int, int]], values: list[float], has_sequence: bool) -> Poly:
    """The polynomial through the values at these (samples, sequence)."""
    terms = [[1.0, b, b * s, b * s * s] if has_sequence else [1.0, b] for b, s in points]
    solved = np.linalg.lstsq(np.array(terms), np.array(values), rcond=None)[0]
    scale = max(map(abs, values)) or 1.0
    clean = [max(0.0, float(x)) if abs(x) * t > 1e-6 * scale else 0.0 for x, t in zip(solved, terms[-1], strict=True)]
    names = ("one", "b", "bs", "bss") if has_sequence else ("one", "b")
    return Poly(**{name: round(x, 6) for name, x in zip(names, clean, strict=True)})


def profile_of_module(
    module: nn.Module,
    call: Callable[[nn.Module, Inputs], Any],
    template: Template,
    anatomy: Anatomy,
    regions: Mapping[int, list[Found]],
    *,
    name: str,
    uncut: Mapping[str, str],
) -> Profile:
    base = max(2, min(16, template.sequence // 4)) if template.has_sequence else 1
    points = [(1, base), (2, base), (1, 2 * base), (2, 3 * base)] if template.has_sequence else [(1, 1), (2, 1)]
    try:
        with tracing(module, call, template):
            counted = [count(module, call, template.shaped(b, s), anatomy, regions) for b, s in points]
    except Exception:  # a forward that looks at values: its parameters are all that is known
        counted = [{} for _ in points]

    def poly(layer: int, quantity: str) -> Poly:
        return fit(points, [counts.get((layer, quantity), 0.0) for counts in counted], template.has_sequence)

    layers = [_end(module, anatomy, 0, poly)]
    layers += _blocks(module, anatomy, regions, template, poly)
    layers.append(_end(module, anatomy, 1, poly))
    hidden = anatomy.shapes[0][-1][0] if anatomy.shapes else 0
    return Profile(
        name=name,
        layers=tuple(layers),
        hidden_size=max(1, hidden),
        max_sequence=template.sequence,
        counts="tokens" if template.has_sequence else "samples",
        stream="parameters",
        block_path=anatomy.path,
        uncut=dict(uncut),
    )


def end_names(module: nn.Module, anatomy: Anatomy) -> tuple[list[str], list[str]]:
    """Parameters before the blocks and after them, a tied one in both."""
    prefix = f"{anatomy.path}." if anatomy.path else ""
    if not anatomy.num_blocks:
        return [name for name, _ in module.named_parameters()], []
    outside = [name for name, _ in module.named_parameters(remove_duplicate=False) if not name.startswith(prefix)]
    if not prefix:
        return [], []
    same = {id(value): name for name, value in module.named_parameters()}
    canonical = {name: same[id(value)] for name, value in module.named_parameters(remove_duplicate=False)}
    if not anatomy.before and not anatomy.after:  # no stages: it does not matter
        return [name for name in outside if canonical[name] == name], []
    before = [name for name in outside if canonical[name] == name and name in anatomy.before]
    # Of two names of one parameter, the second is the one used late.
    aliases = {canonical[name]: name for name in outside if canonical[name] != name}
    after = [aliases[name] if name in before else name for name in anatomy.after if name in canonical]
    return before, after


def _end(module: nn.Module, anatomy: Anatomy, which: int, poly: Callable[[int, str], Poly]) -> Layer:
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
    boundary = Poly()
    if which == 0 and anatomy.shapes:
        boundary = _boundary(anatomy, 0)
    place = (-1, anatomy.num_blocks)[which]
    ops = _ops(place, poly)
    owners = dict.fromkeys(name.rpartition(".")[0] for name in names[which])
    sites = _statistics([module.get_submodule(owner) for owner in owners])
    return Layer(name=ENDS[which], params=tuple(params), ops=ops, sites=sites, boundary=boundary, unit="ends")


def _ops(layer: int, poly: Callable[[int, str], Poly]) -> tuple[Op, ...]:
    ops = []
    for cut in ("none", "tensor"):
        flops, moved = poly(layer, f"flops.{cut}"), poly(layer, f"moved.{cut}")
        common: dict[str, Any] = {"cut": cut, "saved": poly(layer, f"saved.{cut}")}
        if moved != Poly():
            kind = "matmul" if flops != Poly() else "memory"
            back = {"backward_flops": _times(flops, 2), "backward_moved": _times(moved, 2)}
            ops.append(Op(name=f"work.{cut}", kind=kind, flops=flops, moved=moved, **back, **common))  # type: ignore[arg-type]
    return tuple(ops)


def _times(poly: Poly, factor: float) -> Poly:
    return Poly(one=poly.one * factor, b=poly.b * factor, bs=poly.bs * factor, bss=poly.bss * factor)


def _boundary(anatomy: Anatomy, index: int) -> Poly:
    """Elements of a product of dims, each constant + per sample + per token; only products that make sense."""
    total = Poly(one=1.0)
    for one, sample, token in anatomy.shapes[index]:
        if sample:
            total = Poly(b=total.one * sample, bs=total.bs)
        elif token:
            total = Poly(b=total.b * one, bs=total.b * token)
        else:
            total = _times(total, one)
    return total


def _blocks(
    module: nn.Module,
    anatomy: Anatomy,
    regions: Mapping[int, list[Found]],
    template: Template,
    poly: Callable[[int, str], Poly],
) -> list[Layer]:
    if not anatomy.num_blocks:
        return []
    layers: list[Layer] = []
    names: Counter[str] = Counter()
    last_key = None
    for index, block in enumerate(module.get_submodule(anatomy.path).children()):
        found = regions.get(index, [])
        params = _block_params(block, found)
        boundary = _boundary(anatomy, index + 1) if anatomy.shapes else Poly()
        sites = _sites(anatomy, index, found, [param.name for param in params]) + _statistics(list(block.modules()))
        key = (type(block), params, boundary, sites)
        if key == last_key:
            layers[-1] = Layer(**{**_fields(layers[-1]), "repeat": layers[-1].repeat + 1})
            continue
        last_key = key
        kind = type(block).__name__
        names[kind] += 1
        name = kind if names[kind] == 1 else f"{kind}_{names[kind]}"
        layers.append(
            Layer(name=name, params=params, ops=_ops(index, poly), sites=sites, boundary=boundary, is_block=True)
        )
    return layers


def _fields(layer: Layer) -> dict[str, Any]:
    return {name: getattr(layer, name) for name in layer.__dataclass_fields__}


def _block_params(block: nn.Module, found: list[Found]) -> tuple[Param, ...]:
    columns = {name: region.units for region in found for name in region.columns}
    rows = {region.row: region.units for region in found}
    inside = {name for region in found for name in region.inside}
    params = []
    for name, value in block.named_parameters():
        owner, _, kind = name.rpartition(".")
        cut, units = None, 0
        if owner in columns or (owner in rows and kind == "weight"):
            dims = linear_dims(block.get_submodule(owner))
            assert dims is not None
            cut = 0 if kind == "bias" else dims[0] if owner in rows else dims[1]
            units = columns.get(owner) or rows[owner]
        params.append(Param(name=name, shape=tuple(value.shape), cut=cut, units=units, inside=name in inside))
    return tuple(params)


def _sites(anatomy: Anatomy, index: int, found: list[Found], names: list[str]) -> tuple[Site, ...]:
    """Parameters are taken to be used in the order they are listed in, as is usual; it matters for frozen ones only."""
    elements = _boundary(anatomy, index) if anatomy.shapes else Poly()
    return tuple(
        site
        for region in found
        for site in (
            Site(kind="enter", elements=elements, after=names.index(f"{region.columns[0]}.weight")),
            Site(kind="exit", elements=elements, tail=region.is_tail),
        )
    )


def _statistics(modules: list[nn.Module]) -> tuple[Site, ...]:
    norms = [module for module in modules if isinstance(module, BatchNorm)]
    return tuple(Site(kind="statistics", elements=Poly(one=2 * norm.weight.numel())) for norm in norms)


def hidden_shape(anatomy: Anatomy, block: int, samples: int, sequence: int) -> tuple[int, ...]:
    dims = anatomy.shapes[block]
    return tuple(one + sample * samples + token * sequence for one, sample, token in dims)
