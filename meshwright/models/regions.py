"""Where the inside of somebody else's block can be split over ranks, each place proved by numbers before it is used.

    x ──> columns (several linears that read x) ──> ... ──> row (a linear back to x's size)

Candidates come from transformers' own `tp_plan`, or from the shapes of the linears in the order they run. The proof
runs the block whole and in pieces, on random weights in float64: a piece of the columns must give exactly that piece of
what `row` reads, and a parameter used in between must have gradients that add up over the pieces. So whatever a forward
does in between (heads, norms, gates, masks), a wrong cut is never made; it is refused, with the reason. (Float32 where
a block knows no float64. Many compute their norms in float32 anyway: a wrong cut is wrong by far more.)
"""

from __future__ import annotations

import copy
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

_MOST_WAYS = 16
"""Pieces tried where a block does not say how many heads it has."""
_TOLERANCE = 1e-4
_HEADS = re.compile(r"head|group", re.IGNORECASE)
_NOT_HEADS = re.compile(r"dim|size|per_|_groups$", re.IGNORECASE)


Order = list[tuple[str, Tensor]]
"""(linear, what it read) in the order they run."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A region of a block, by the names of its linears inside of the block."""

    columns: tuple[str, ...]
    row: str
    units: int
    """Into how many pieces it may be cut; and into any divisor of that."""
    inside: tuple[str, ...] = ()
    """Parameters between them that stay whole and see a part of the gradient."""
    counts: tuple[tuple[str, str], ...] = ()
    """(module, attribute) that counts heads, and is to be divided."""
    is_tail: bool = False
    """Nothing that backward needs comes after `row` in its block."""


def linear_dims(module: nn.Module) -> tuple[int, int] | None:
    """(dim of inputs, dim of outputs) of a linear's weight; None for what is not one."""
    if isinstance(module, nn.Linear):
        return 1, 0
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # transformers' GPT-2: lies the other way round
        return 0, 1
    return None


def plan_roles(module: nn.Module, path: str) -> dict[str, str]:
    """Linear inside of a block -> colwise or rowwise, as the module's own `tp_plan` has it."""
    start = re.escape(f"{path}.") + r"(?:\*|\d+)\."
    plan: Mapping[str, str] = getattr(module, "_tp_plan", None) or {}
    roles = {re.sub(f"^{start}", "", name): role for name, role in plan.items() if re.match(start, name)}
    return {name: role for name, role in roles.items() if role in ("colwise", "rowwise")}


def find_regions(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], roles: Mapping[str, str]
) -> tuple[list[Found], str]:
    """The regions that hold, and why others do not (empty if all do)."""
    why = ""
    for dtype in (torch.float64, torch.float32):
        generator = torch.Generator().manual_seed(0)
        fill = functools.partial(_real, dtype=dtype, generator=generator)
        real = _filled(block, fill)
        values = [fill(value) for value in args], {key: fill(value) for key, value in kwargs.items()}
        try:
            order, last = _watch(real, *values)
        except Exception as error:
            why = f"its block does not run by itself ({type(error).__name__}: {str(error).splitlines()[0][:120]})."
            continue
        return _proved(real, values, order, last, roles)
    return [], why


def _proved(
    block: nn.Module, values: Any, order: Order, last: str, roles: Mapping[str, str]
) -> tuple[list[Found], str]:
    found, reasons = [], []
    candidates = _by_plan(order, roles) if roles else _by_shape(block, order)
    for columns, row in candidates:
        region = _prove(block, columns, row, values)
        if region is None:
            reasons.append(f"pieces of {', '.join(columns)} are not pieces of what {row} reads")
        else:
            found.append(replace(region, is_tail=row == last))
    paired = {name for columns, row in candidates for name in (*columns, row)}
    alone = [name for name, _ in order if name not in paired]
    if alone:
        sizes = " -> ".join(map(str, _sizes(block.get_submodule(alone[0]))))
        reasons.append(f"{alone[0]} ({sizes}) has no linear after it that leads back from its size")
    return found, "; ".join(reasons) + "." if reasons else ""


def _filled(block: nn.Module, fill: Callable[[Any], Any]) -> nn.Module:
    """A copy with random weights and without randomness."""
    real = copy.deepcopy(block)
    for module in real.modules():
        for name, value in list(module._parameters.items()):
            if value is not None:
                module._parameters[name] = nn.Parameter(fill(value) * 0.3, requires_grad=value.is_floating_point())
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = fill(buffer)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return real


def _real(value: Any, dtype: torch.dtype, generator: torch.Generator) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_real(each, dtype, generator) for each in value)
    if not isinstance(value, Tensor):
        return value
    if value.is_floating_point():
        return torch.empty(value.shape, dtype=dtype).normal_(0, 1, generator=generator)
    fill = torch.ones if value.dtype == torch.bool else torch.zeros  # masks let everything through
    return fill(value.shape, dtype=value.dtype)


@contextmanager
def _reading(block: nn.Module, seen: Order) -> Iterator[None]:
    handles = [
        module.register_forward_pre_hook(lambda _, args, n=name: seen.append((n, args[0])))
        for name, module in block.named_modules()
        if linear_dims(module) is not None
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _watch(block: nn.Module, args: Any, kwargs: Any) -> tuple[Order, str]:
    """The linears in order; and the last one, if autograd keeps nothing after it."""
    seen: Order = []
    kept_after = [0]
    handles = [
        module.register_forward_hook(lambda *_: kept_after.__setitem__(0, 0))
        for module in block.modules()
        if linear_dims(module) is not None
    ]

    def pack(tensor: Tensor) -> Tensor:
        kept_after[0] += 1
        return tensor

    given = [a.requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    with _reading(block, seen), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        block(*given, **kwargs)
    for handle in handles:
        handle.remove()
    return seen, seen[-1][0] if seen and not kept_after[0] else ""


def _by_plan(order: Order, roles: Mapping[str, str]) -> list[tuple[tuple[str, ...], str]]:
    regions, pending = [], []
    for name, _ in order:
        if roles.get(name) == "colwise":
            pending.append(name)
        elif roles.get(name) == "rowwise" and pending:
            regions.append((tuple(pending), name))
            pending = []
    return regions


def _by_shape(block: nn.Module, order: Order) -> list[tuple[tuple[str, ...], str]]:
    """Linears that read one tensor, then one that reads their size and gives the tensor's size back."""
    regions: list[tuple[tuple[str, ...], str]] = []
    pending: list[str] = []
    shared: Tensor | None = None
    for name, given in order:
        num_in, num_out = _sizes(block.get_submodule(name))
        if pending and shared is not None:
            widths = [_sizes(block.get_submodule(each))[1] for each in pending]
            if num_in in widths and num_out == shared.shape[-1] and given is not shared:
                regions.append((tuple(pending), name))
                pending, shared = [], None
                continue
        if given is shared:
            pending.append(name)
        else:
            pending, shared = [name], given
    return regions


def _sizes(module: nn.Module) -> tuple[int, int]:
    dims = linear_dims(module)
    assert dims is not None
    weight = module.weight
    return weight.shape[dims[0]], weight.shape[dims[1]]


def _prove(block: nn.Module, columns: tuple[str, ...], row: str, values: Any) -> Found | None:
    widths = [_sizes(block.get_submodule(name))[1] for name in columns]
    most = math.gcd(*widths)
    base = _holder(*columns, row)
    parent = block.get_submodule(base)
    numbers = {
        (f"{base}.{path}".strip("."), attribute): value
        for path, module in parent.named_modules()
        for attribute, value in vars(module).items()
        if type(value) is int and value > 1 and linear_dims(module) is None
    }
    heads = {at: n for at, n in numbers.items() if _HEADS.search(at[1]) and not _NOT_HEADS.search(at[1])}
    sizes = {at: n for at, n in numbers.items() if n in widths}
    hints = [math.gcd(*heads.values())] if heads else []
    hints += [most // value for value in _head_sizes(parent) if most % value == 0]
    tried = sorted({n for n in (*hints, *range(2, _MOST_WAYS + 1)) if 2 <= n <= most and most % n == 0}, reverse=True)
    for ways in tried:
        for counts in ({}, heads, heads | sizes):
            if any(value % ways for value in counts.values()):
                continue
            inside = _holds(block, columns, row, ways, tuple(counts), values)
            if inside is not None:
                return Found(columns=columns, row=row, units=ways, inside=inside, counts=tuple(counts))
    return None


def _head_sizes(module: nn.Module) -> list[int]:
    names = ("head_dim", "head_size", "attention_head_size", "d_head", "key_value_proj_dim")
    return [value for name in names if type(value := getattr(module, name, None)) is int and value > 0]


def _holder(*names: str) -> str:
    """The path of the innermost module that holds all of them."""
    parts = [name.split(".")[:-1] for name in names]
    shared = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return ".".join(shared)


def _holds(
    block: nn.Module,
    columns: tuple[str, ...],
    row: str,
    ways: int,
    counts: tuple[tuple[str, str], ...],
    values: Any,
) -> tuple[str, ...] | None:
    """Parameters in between, if the pieces are pieces; None if not."""
    cut = tuple(f"{name}." for name in (*columns, row))
    # What makes the input of the columns has its gradient summed at the entry, with that of the input.
    earlier = _depends_on(_read_by(block, columns[0], values), dict(block.named_parameters()))
    others = {n: p for n, p in block.named_parameters() if not n.startswith(cut) and n not in earlier}
    whole = _read_by(block, row, values)
    direction = torch.empty_like(whole).normal_(0, 1, generator=torch.Generator().manual_seed(1))
    wanted = _gradients((whole * direction).sum(), list(others.values()))
    sums: list[Tensor | None] = [None] * len(wanted)
    size = whole.shape[-1] // ways
    for index in range(ways):
        piece = piece_of(block, columns, row, index, ways, counts)
        try:
            part = _read_by(piece, row, values)
        except Exception:
            return None
        mine = whole[..., index * size : (index + 1) * size]
        if part.shape != mine.shape or not _is_close(part, mine):
            return None
        aim = (part * direction[..., index * size : (index + 1) * size]).sum()
        own = dict(piece.named_parameters())
        gradients = _gradients(aim, [own[name] for name in others])
        sums = [g if s is None else s if g is None else s + g for s, g in zip(sums, gradients, strict=True)]
    inside = []
    for name, expected, total in zip(others, wanted, sums, strict=True):
        if (expected is None) != (total is None):
            return None
        if expected is not None and total is not None:
            if not _is_close(total, expected):
                return None
            inside.append(name)
    return tuple(inside)


def _is_close(found: Tensor, wanted: Tensor) -> bool:
    with torch.no_grad():
        return float((found - wanted).abs().max()) <= _TOLERANCE * float(wanted.abs().max())


def _gradients(aim: Tensor, parameters: list[nn.Parameter]) -> tuple[Tensor | None, ...]:
    if not parameters or not aim.requires_grad:
        return (None,) * len(parameters)
    return torch.autograd.grad(aim, parameters, allow_unused=True)


def _depends_on(tensor: Tensor, parameters: dict[str, nn.Parameter]) -> set[str]:
    found = _gradients(tensor.sum(), list(parameters.values()))
    return {name for name, gradient in zip(parameters, found, strict=True) if gradient is not None}


def _read_by(block: nn.Module, linear: str, values: Any) -> Tensor:
    seen: Order = []
    args, kwargs = values
    with _reading(block, seen):
        block(*args, **kwargs)
    return next(given for name, given in seen if name == linear)


def piece_of(
    block: nn.Module, columns: tuple[str, ...], row: str, index: int, ways: int, counts: tuple[tuple[str, str], ...]
) -> nn.Module:
    """A copy of the block with one piece of the region, the rest of it whole."""
    piece = copy.deepcopy(block)
    for name in (*columns, row):
        module = piece.get_submodule(name)
        dims = linear_dims(module)
        assert dims is not None
        dim = dims[0] if name == row else dims[1]
        module.weight = nn.Parameter(module.weight.detach().chunk(ways, dim)[index])
        if name != row and getattr(module, "bias", None) is not None:
            module.bias = nn.Parameter(module.bias.detach().chunk(ways)[index])
        if hasattr(module, "nf") and name != row:
            module.nf = module.nf // ways
    set_counts(piece, counts, ways)
    return piece


def set_counts(block: nn.Module, counts: tuple[tuple[str, str], ...], ways: int) -> None:
    for path, attribute in counts:
        module = block.get_submodule(path)
        setattr(module, attribute, getattr(module, attribute) // ways)
