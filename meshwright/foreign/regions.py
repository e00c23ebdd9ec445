"""Where the inside of somebody else's block can be split over ranks, each place proved by numbers before it is used.

    x ──> columns (linears that read x) ──> ... ──> row (a linear)          x ──> a stack of experts

Candidates come from what each linear's input depends on. The proof runs the block whole and in pieces, on random
weights in float64, as ranks would run it: what the pieces give after `row` must add up to what the whole gives, and so
must the gradients of what enters and of the parameters used in between; nothing else before the region may depend on
it. So whatever a forward does in between (heads, norms, gates, masks), a wrong cut is never made; it is refused, with
the reason. (Float32 where a block knows no float64. Many compute their norms in float32 anyway: a wrong cut is wrong by
far more.)

Where several matrices are fused in one weight (query, key and value; gate and up), each is cut by itself: `groups`.
`regions_of` looks for regions in the blocks of a whole module, and measures how large what enters and leaves them is.
"""

from __future__ import annotations

import copy
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.errors import first_line
from meshwright.core.profile import Poly
from meshwright.foreign import examine as examining
from meshwright.foreign.examine import Anatomy, InputTemplate, hooked, run_apart, tensors_in, tracing
from meshwright.foreign.trace_fit import fit
from meshwright.foreign.trace_ops import FixedDraw
from meshwright.ops.model_interface import Inputs

LEAST_SHARE = 0.01
"""Of the parameters: where less would be split, nothing is."""
_MOST_WAYS = 16
"""Pieces tried where a block does not say how many heads it has."""
_TOLERANCE = 1e-4
_HEADS = re.compile(r"head|group", re.IGNORECASE)
_HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "d_head", "key_value_proj_dim")
_NOT_HEADS = re.compile(r"dim|size|per_|_groups$", re.IGNORECASE)
Counts = tuple[tuple[str, str], ...]
"""(module, attribute) that counts heads or columns, and is to be divided; `config.x`: of a copy of its config."""


@dataclass(frozen=True, kw_only=True)
class Cutting:
    """A parameter that is cut along `dim`: each of `groups` by itself, where several matrices are fused in it."""

    name: str
    dim: int
    groups: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Slicing:
    """A tensor given to a module, one of whose dims counts heads, or samples x heads."""

    module: str
    argument: int | str
    dim: int
    heads: int

    def slice(self, value: Tensor, index: int, ways: int) -> Tensor:
        size = self.heads // ways
        apart = value.unflatten(self.dim, (-1, self.heads))
        return apart.narrow(self.dim + 1, index * size, size).flatten(self.dim, self.dim + 1)


@dataclass(frozen=True, kw_only=True)
class SplitRegion:
    """A region of a block, by the names of its modules inside of the block."""

    columns: tuple[str, ...]
    row: str
    """The last linear; or the stack of experts, which is then the only column, too."""
    units: int
    """Into how many pieces it may be cut; and into any divisor of that."""
    cuts: tuple[Cutting, ...]
    inside: tuple[str, ...] = ()
    """Parameters between them that stay whole and see a part of the gradient."""
    counts: Counts = ()
    slices: tuple[Slicing, ...] = ()
    is_tail: bool = False
    """Nothing that backward needs comes after `row` in its block."""
    enters: tuple[Poly, ...] = ()
    """Elements of each tensor that enters, as measured."""
    exits: tuple[Poly, ...] = ()

    def split(self, block: nn.Module, index: int, ways: int) -> None:
        """Make the block's own numbers those of a piece."""
        for path, attribute in self.counts:
            set_count(block.get_submodule(path), attribute, ways)
        for each in self.slices:
            _slice_argument(block, each, index, ways)


def linear_dims(module: nn.Module) -> tuple[int, int] | None:
    """(dim of inputs, dim of outputs) of a linear's weight; None for what is not one."""
    if isinstance(module, nn.Linear):
        return 1, 0
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # transformers' GPT-2: lies the other way round
        return 0, 1
    return None


def _stacks(module: nn.Module) -> list[str]:
    """The parameters of a stack of experts, the last of them leading back; empty for what is none."""
    named = [name for name, value in module._parameters.items() if value is not None and value.ndim == 3]
    return named if len(named) >= 2 else []


def _sizes(module: nn.Module) -> tuple[int, int]:
    dims = linear_dims(module)
    assert dims is not None
    return module.weight.shape[dims[0]], module.weight.shape[dims[1]]


@dataclass(kw_only=True)
class _Values:
    """A block with random weights, and what it is called with."""

    block: nn.Module
    args: list[Any]
    kwargs: dict[str, Any]

    def run(self) -> None:
        self.block(*self.args, **self.kwargs)

    def given(self) -> list[Tensor]:
        """What may carry a gradient to something before the block."""
        return [each for each in tensors_in((self.args, self.kwargs)) if each.requires_grad]


def find_regions(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[SplitRegion], str]:
    """The regions that hold, and why others do not (empty if all do)."""
    why = ""
    for dtype in (torch.float64, torch.float32):
        fill = functools.partial(_real, dtype=dtype, generator=torch.Generator().manual_seed(0))
        try:
            real = copy.deepcopy(block)  # with random weights
            for module in real.modules():
                for name, value in list(module._parameters.items()):
                    if value is not None:
                        weight, is_trained = fill(value).detach() * 0.3, value.is_floating_point()
                        module._parameters[name] = nn.Parameter(weight, requires_grad=is_trained)
                for name, buffer in list(module._buffers.items()):
                    if buffer is not None:
                        module._buffers[name] = fill(buffer)
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
            values = _Values(block=real, args=[], kwargs={})
            seen: list[tuple[dict[str, _Seen], str]] = []
            for _ in range(2):
                values.args, values.kwargs = [fill(a) for a in args], {key: fill(v) for key, v in kwargs.items()}
                seen.append(_watch(values))
        except Exception as error:
            why = f"its block does not run by itself ({type(error).__name__}: {first_line(error)})."
            continue
        (order, last), (again, _) = seen
        for module in values.block.modules():  # without randomness; statistics stay those of the batch
            module.training = isinstance(module, nn.modules.batchnorm._BatchNorm)
        steady = {name for name, each in order.items() if name in again and each.shapes == again[name].shapes}
        return _proved(values, order, steady, last)
    return [], why


def _real(value: Any, dtype: torch.dtype, generator: torch.Generator) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_real(each, dtype, generator) for each in value)
    if not isinstance(value, Tensor):
        return value
    if value.is_floating_point():
        made = torch.empty(value.shape, dtype=dtype).normal_(0, 1, generator=generator)
        return made.requires_grad_(value.requires_grad)
    if value.dtype == torch.bool and value.ndim and value.shape[-1] > 1:
        # A mask lets every other token through, whether true stands for seen or for hidden.
        return (torch.arange(value.shape[-1]) % 2 == 0).expand(value.shape).clone()
    return torch.full(value.shape, value.dtype == torch.bool, dtype=value.dtype)


@dataclass(kw_only=True)
class _Seen:
    """How a linear, or a stack of experts, was called."""

    after: set[str]
    """Those whose output its input depends on, and not only through another."""
    shapes: list[torch.Size] = field(default_factory=list)


def _watch(values: _Values) -> tuple[dict[str, _Seen], str]:
    """The linears in order; and the last one, if autograd keeps nothing after it."""
    seen: dict[str, _Seen] = {}
    outputs: dict[str, Tensor] = {}
    kept_after = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept_after
        kept_after += 1
        return tensor

    def before(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [each for each in tensors_in((args, kwargs)) if each.is_floating_point()]
        after = set(examining.used_by(given, outputs))
        seen.setdefault(name, _Seen(after=after)).shapes += [each.shape for each in given]

    def leave(name: str, args: Any, output: Tensor) -> Tensor:
        nonlocal kept_after
        kept_after = 0
        outputs[name] = output.detach().requires_grad_()
        return outputs[name].clone()  # its own leaf could not be changed in place

    modules = dict(values.block.named_modules())
    nodes = {name: each for name, each in modules.items() if linear_dims(each) is not None or _stacks(each)}
    with hooked(nodes, before, leave), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        values.run()
    return seen, list(seen)[-1] if seen and not kept_after else ""


def _proved(values: _Values, order: dict[str, _Seen], steady: set[str], last: str) -> tuple[list[SplitRegion], str]:
    block, regions, reasons = values.block, list[SplitRegion](), list[str]()
    tried: set[str] = set()
    for row, seen in order.items():
        module = block.get_submodule(row)
        columns = (row,) if _stacks(module) else tuple(n for n in order if n in seen.after and n not in tried)
        is_linear = all(linear_dims(block.get_submodule(name)) is not None for name in (row, *columns))
        if not columns or (is_linear and _sizes(module)[1] != _sizes(block.get_submodule(columns[0]))[0]):
            continue
        if not is_linear and columns != (row,):
            continue
        tried |= {row, *columns}
        if not steady.issuperset({row, *columns}):
            reasons.append(f"how many tokens {row} is given depends on their values")
            continue
        region = _prove(values, columns, row)
        if region is None:
            reasons.append(f"pieces of {', '.join(columns)} are not pieces of what {row} reads")
        else:
            regions.append(replace(region, is_tail=row == last))
    alone = [name for name in order if name not in tried]
    if alone:
        module = block.get_submodule(alone[0])
        sizes = f" ({' -> '.join(map(str, _sizes(module)))})" if linear_dims(module) else ""
        reasons.append(f"{alone[0]}{sizes} has no linear after it that leads back from its size")
    return regions, "; ".join(reasons) + "." if reasons else ""


def _layouts(block: nn.Module, columns: tuple[str, ...], row: str) -> Iterator[tuple[tuple[Cutting, ...], int, int]]:
    """Ways in which the region's weights may lie: (cuts, what pieces must divide, columns of one matrix)."""
    module = block.get_submodule(row)
    dot = f"{row}." if row else ""
    stacks = _stacks(module)
    if stacks:
        *ups, down = stacks
        for dim, back in ((1, 2), (2, 1)):
            num_in = module._parameters[down].shape[back]
            widths = {module._parameters[name].shape[dim] for name in ups}
            for groups in _fused(min(widths), num_in) if len(ups) == 1 else [()]:
                cuts = tuple(Cutting(name=f"{dot}{name}", dim=dim, groups=groups) for name in ups)
                yield (*cuts, Cutting(name=f"{dot}{down}", dim=back)), math.gcd(num_in, *widths, *groups), num_in
        return
    num_in, dims = _sizes(module)[0], linear_dims(module)
    assert dims is not None
    row_cut = Cutting(name=f"{dot}weight", dim=dims[0])
    outputs = [_sizes(block.get_submodule(name))[1] for name in columns]
    for groups in _fused(outputs[0], num_in) if len(columns) == 1 else [()]:
        column_cuts = []
        for name in columns:
            column = block.get_submodule(name)
            dims = linear_dims(column)
            assert dims is not None
            column_cuts.append(Cutting(name=f"{name}.weight", dim=dims[1], groups=groups))
            if getattr(column, "bias", None) is not None:
                column_cuts.append(Cutting(name=f"{name}.bias", dim=0, groups=groups))
        yield (*column_cuts, row_cut), math.gcd(num_in, *outputs, *groups), num_in


def _fused(width: int, num_in: int) -> list[tuple[int, ...]]:
    """Matrices that a weight wider than what it leads to may hold: equal ones, queries with fewer keys and values, or
    one, whose rows belong together as they lie."""
    layouts: list[tuple[int, ...]] = []
    if width > num_in and width % num_in == 0:
        layouts.append((num_in,) * (width // num_in))
    if num_in < width < 3 * num_in and (width - num_in) % 2 == 0:
        layouts.append((num_in, (width - num_in) // 2, (width - num_in) // 2))
    return [*layouts, ()]


def _prove(values: _Values, columns: tuple[str, ...], row: str) -> SplitRegion | None:
    block = values.block
    # The path of the innermost module that holds all of them.
    levels = zip(*(name.split(".")[:-1] for name in (*columns, row)), strict=False)
    base = ".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))
    nf = tuple((name, "nf") for name in columns if hasattr(block.get_submodule(name), "nf"))
    whole = _run(values, columns, row)
    for cuts, most, num_in in _layouts(block, columns, row):
        sizes = {num_in, *(size for cut in cuts for size in cut.groups)}
        sizes |= {block.get_parameter(cut.name).shape[cut.dim] for cut in cuts}
        heads, options = _numbers(block, base, sizes)
        hints = [math.gcd(*heads)] if heads else []
        named = [getattr(block.get_submodule(base), name, None) for name in _HEAD_SIZES]
        hints += [most // size for size in named if type(size) is int and size > 0 and most % size == 0]
        ways = sorted({n for n in (*hints, *range(2, _MOST_WAYS + 1)) if 2 <= n <= most and most % n == 0})
        slices = _sliceable(values, base, max(heads, default=0))
        trials = [(counts, ()) for counts in options] + [(counts, slices) for counts in options if slices]
        for counts, sliced in trials:
            trial = SplitRegion(columns=columns, row=row, units=1, cuts=cuts, counts=counts + nf, slices=sliced)
            primes = (n for n in ways if all(n % factor for factor in range(2, n)))
            if not any(_holds(values, whole, trial, n) is not None for n in primes):
                continue
            for n in reversed(ways):
                inside = _holds(values, whole, trial, n)
                if inside is not None:
                    return replace(trial, units=n, inside=inside)
    return None


def _numbers(block: nn.Module, base: str, sizes: set[int]) -> tuple[list[int], list[Counts]]:
    """Counts of heads near a region, and sets of numbers that may have to be divided."""
    own: dict[tuple[str, str], int] = {}
    config: dict[tuple[str, str], int] = {}
    for path, module in block.get_submodule(base).named_modules():
        at = f"{base}.{path}".strip(".")
        if linear_dims(module) is None:
            own |= {(at, name): n for name, n in vars(module).items() if type(n) is int and n > 1}
        settings = vars(getattr(module, "config", None) or object) if hasattr(module, "config") else {}
        config |= {(at, f"config.{name}"): n for name, n in settings.items() if type(n) is int and n > 1}

    def heads(numbers: dict[tuple[str, str], int]) -> list[tuple[str, str]]:
        return [at for at in numbers if _HEADS.search(at[1]) and not _NOT_HEADS.search(at[1])]

    few, named = heads(own), heads(config)
    many = [at for at, n in own.items() if n in sizes and at not in few]
    options = [(), tuple(few), tuple(few + many), tuple(few + named), tuple(few + many + named)]
    return [own[at] for at in few], list(dict.fromkeys(options))


def _sliceable(values: _Values, base: str, heads: int) -> tuple[Slicing, ...]:
    """What the region's holder is given that has a dim of heads."""
    given: dict[int | str, Any] = {}

    def note(_: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given.update(dict(enumerate(args)) | kwargs)
        raise _Reached

    with hooked({base: values.block.get_submodule(base)}, note), suppress(_Reached):
        values.run()
    samples = next((value.shape[0] for value in given.values() if isinstance(value, Tensor) and value.ndim), 1)
    slices = []
    for name, value in given.items() if heads > 1 else ():
        if isinstance(value, Tensor) and not value.requires_grad:
            dims = [dim for dim, size in enumerate(value.shape) if size in (heads, samples * heads)]
            slices += [Slicing(module=base, argument=name, dim=dim, heads=heads) for dim in dims[:1]]
    return tuple(slices)


class _Reached(Exception):
    """Ends a forward when all is seen that it was run for."""


@dataclass(kw_only=True)
class _Ran:
    """A region's run: what entered it, what `row` read and gave (without its bias)."""

    originals: list[Tensor] = field(default_factory=list)
    entered: list[Tensor] = field(default_factory=list)
    """In their places, without a past."""
    read: Tensor = field(default_factory=lambda: torch.zeros(()))
    out: Tensor = field(default_factory=lambda: torch.zeros(()))


def entering(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """What enters a region by a module: a linear's input; all that experts are given that carries a gradient."""
    if linear_dims(module) is not None:
        return list(args[:1])
    return [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.requires_grad]


def _run(values: _Values, columns: tuple[str, ...], row: str) -> _Ran:
    ran, block = _Ran(), values.block

    def enter(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        fresh: dict[int, Tensor] = {}
        for each in entering(block.get_submodule(name), args, kwargs):
            known = next((i for i, other in enumerate(ran.originals) if other is each), len(ran.originals))
            if known == len(ran.originals):
                ran.originals.append(each)
                ran.entered.append(each.detach().clone().requires_grad_())
            fresh[id(each)] = ran.entered[known]
        return tuple(fresh.get(id(a), a) for a in args), {key: fresh.get(id(v), v) for key, v in kwargs.items()}

    def leave(name: str, args: tuple[Any, ...], output: Tensor) -> None:
        module = block.get_submodule(name)
        bias = getattr(module, "bias", None) if linear_dims(module) is not None else None
        ran.read, ran.out = args[0], output if bias is None else output - bias
        raise _Reached

    entries = {name: block.get_submodule(name) for name in columns}
    with hooked(entries, enter), hooked({row: block.get_submodule(row)}, after=leave), suppress(_Reached):
        values.run()
        raise AssertionError(f"{row} does not run")
    return ran


def _holds(values: _Values, whole: _Ran, trial: SplitRegion, ways: int) -> tuple[str, ...] | None:
    """Parameters in between, if the pieces add up to the whole and nothing before sees another gradient; else None."""
    block = values.block
    cut = {each.name for each in trial.cuts} | {f"{trial.row}.bias"}
    others = {name: value for name, value in block.named_parameters() if name not in cut}
    direction = torch.empty_like(whole.out).normal_(0, 1, generator=torch.Generator().manual_seed(1))

    def gradients(ran: _Ran) -> list[Tensor | None]:
        return list(_gradients((ran.out * direction).sum(), [*ran.entered, *others.values(), *values.given()]))

    wanted = gradients(whole)
    first, last = len(whole.entered), len(whole.entered) + len(others)
    inside = tuple(name for name, gradient in zip(others, wanted[first:last], strict=True) if gradient is not None)
    earlier = [_gradients(each.sum(), [others[name] for name in inside]) for each in whole.originals]
    if any(gradient is not None for gradient in (*wanted[last:], *(g for row in earlier for g in row))):
        return None  # a second way from before the region to its inside, past the columns
    total, sums = torch.zeros_like(whole.out), [None if g is None else torch.zeros_like(g) for g in wanted]
    for index in range(ways):
        try:
            with _piece(block, trial, index, ways):
                ran = _run(values, trial.columns, trial.row)
        except Exception:
            return None
        if trial.columns != (trial.row,):  # known after one piece
            mine = whole.read.chunk(ways, -1)[index]
            if ran.read.shape != mine.shape or not _is_close(ran.read, mine):
                return None
        parts = gradients(ran)
        if ran.out.shape != total.shape or [g is None for g in parts] != [g is None for g in wanted]:
            return None
        total = total + ran.out.detach()
        sums = [None if s is None or g is None else s + g for s, g in zip(sums, parts, strict=True)]
    pairs = [(total, whole.out), *((s, w) for s, w in zip(sums, wanted, strict=True) if s is not None)]
    return inside if all(w is not None and _is_close(s, w) for s, w in pairs) else None


def _is_close(value: Tensor, wanted: Tensor) -> bool:
    with torch.no_grad():
        return float((value - wanted).abs().max()) <= _TOLERANCE * float(wanted.abs().max())


def _gradients(aim: Tensor, leaves: list[Any]) -> tuple[Tensor | None, ...]:
    if not leaves or not aim.requires_grad:
        return (None,) * len(leaves)
    return torch.autograd.grad(aim, leaves, allow_unused=True, retain_graph=True)


@contextmanager
def _piece(block: nn.Module, trial: SplitRegion, index: int, ways: int) -> Iterator[None]:
    """The block with one piece of the region, the rest of it whole."""
    with ExitStack() as undo:
        for each in trial.cuts:
            path, _, name = each.name.rpartition(".")
            held, value = block.get_submodule(path)._parameters, block.get_parameter(each.name)
            groups = value.detach().split(each.groups or (value.shape[each.dim],), each.dim)
            part = torch.cat([group.chunk(ways, each.dim)[index] for group in groups], each.dim)
            held[name] = nn.Parameter(part)
            undo.callback(held.__setitem__, name, value)
        for path, attribute in trial.counts:
            module = block.get_submodule(path)
            undo.callback(setattr, module, attribute.partition(".")[0], getattr(module, attribute.partition(".")[0]))
            if _count(module, attribute) % ways:
                raise ValueError(f"{attribute} cannot be divided")
            set_count(module, attribute, ways)
        for slicing in trial.slices:
            undo.callback(_slice_argument(block, slicing, index, ways))
        yield


def _count(module: nn.Module, attribute: str) -> int:
    owner, _, name = attribute.rpartition(".")
    return int(vars(getattr(module, owner) if owner else module)[name])


def set_count(module: nn.Module, attribute: str, ways: int) -> None:
    owner, _, name = attribute.rpartition(".")
    if owner:  # others read the same one
        setattr(module, owner, copy.copy(getattr(module, owner)))
    vars(getattr(module, owner) if owner else module)[name] = _count(module, attribute) // ways


def _slice_argument(block: nn.Module, each: Slicing, index: int, ways: int) -> Callable[[], None]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        held: Any = dict(enumerate(args)) | kwargs
        if isinstance(held.get(each.argument), Tensor):
            held[each.argument] = each.slice(held[each.argument], index, ways)
        return tuple(held[i] for i in range(len(args))), {key: held[key] for key in kwargs}

    return block.get_submodule(each.module).register_forward_pre_hook(hook, with_kwargs=True).remove


Regions = Mapping[str, tuple[SplitRegion, ...]]
"""By the path of their block."""


class _ReadsMore(Exception):
    pass


def regions_of(module: nn.Module, template: InputTemplate, anatomy: Anatomy) -> tuple[Regions, str]:
    """The regions of all blocks, and why there are no others."""
    names = anatomy.names
    blocks = {name: module.get_submodule(name) for name in names}
    # Behind the blocks between which stages are cut, those of other lists (an encoder's).
    taken = list(names)
    for path, each in module.named_modules():
        is_apart = not any(path == other or path.startswith(f"{other}.") for other in taken)
        if path and isinstance(each, nn.ModuleList) and is_apart and not any(n.startswith(f"{path}.") for n in names):
            taken.append(path)
            blocks |= {f"{path}.{child}": block for child, block in each.named_children()}
    calls: dict[str, Any] = {}  # what each block is called with
    more: list[Tensor] = []  # what blocks return behind their first output

    def before(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # More of another block than its first output may be heads, of which a rank would have a part only (T5 hands on
        # its position bias): nothing is split then.
        if any(value is other for value in (*args, *kwargs.values()) for other in more):
            raise _ReadsMore(f"{path} reads more of another block than its first output.")
        calls.setdefault(path, (args, kwargs))

    def after(path: str, args: Any, output: Any) -> None:
        more.extend(each for each in (output[1:] if isinstance(output, tuple) else ()) if isinstance(each, Tensor))

    same = examining.equal_runs([blocks[name] for name in names], anatomy.shapes)
    aside = {names[at]: names[first] for at, first in enumerate(same) if at != first}
    try:
        with examining.pass_through(module, aside):
            looked_at = {name: blocks[name] for name in blocks if name not in aside}
            with tracing(module, template), FixedDraw(0.5), hooked(looked_at, before, after):
                run_apart(module, template.shaped(2, 2 * template.third))
            regions, why = _regions_of_calls(module, blocks, calls)
            regions, unmeasured = _measured(module, template, regions)
    except _ReadsMore as reason:
        return {}, str(reason)
    except Exception as error:
        return {}, f"it does not run on a sample ({type(error).__name__}: {first_line(error)})."
    regions = {**regions, **{name: regions[first] for name, first in aside.items() if first in regions}}
    why = why or unmeasured
    total = sum(value.numel() for value in module.parameters())
    cuts = [(path, cut) for path, own in regions.items() for region in own for cut in region.cuts]
    num_cut = sum(blocks[path].get_parameter(cut.name).numel() for path, cut in cuts)
    share = f"only {100 * num_cut / max(1, total):.1f} % of its parameters could be split"
    if num_cut < LEAST_SHARE * total:
        none = "none of its blocks has linears that lead back to their input."
        return {}, f"{share}: {why}" if num_cut else why or none
    return regions, f"{share}: {why}" if why and 2 * num_cut < total else why


def _regions_of_calls(
    module: nn.Module, blocks: Mapping[str, nn.Module], calls: Mapping[str, Any]
) -> tuple[Regions, str]:
    uses = Counter(id(value) for _, value in module.named_parameters(remove_duplicate=False))
    known: dict[Any, tuple[list[SplitRegion], str]] = {}
    regions: dict[str, tuple[SplitRegion, ...]] = {}
    reasons: list[str] = []
    for path, (args, kwargs) in calls.items():
        block = blocks[path]
        given = tuple(tuple(value.shape) if isinstance(value, Tensor) else None for value in (*args, *kwargs.values()))
        key = (type(block), given, tuple((n, tuple(p.shape)) for n, p in block.named_parameters()))
        if key not in known:
            known[key] = find_regions(block, args, kwargs)
        all_regions, why = known[key]
        reasons.append(why)
        regions[path] = tuple(
            region for region in all_regions if all(uses[id(block.get_parameter(cut.name))] == 1 for cut in region.cuts)
        )
        if len(regions[path]) < len(all_regions):
            reasons.append(f"weights of {path} are used in more than one place.")
    return regions, next(filter(None, reasons), "")


def _measured(module: nn.Module, template: InputTemplate, regions: Regions) -> tuple[Regions, str]:
    """The regions with the sizes of what enters and leaves; without those whose sizes follow no polynomial."""
    third = template.third
    sizes = [(2, 2 * third), (3, 2 * third), (2, third), (2, 3 * third), (3, 3 * third)]
    with tracing(module, template), FixedDraw(0.5):
        runs = [_elements(module, template.shaped(*size), regions) for size in sizes]
    kept: dict[str, tuple[SplitRegion, ...]] = {}
    why = ""
    for path, own in regions.items():
        kept[path] = ()
        for at, region in enumerate(own):
            seen = [[run.get((path, at), ([], []))[side] for run in runs] for side in (0, 1)]
            enters, exits = (_polynomials(sizes, template.has_sequence, each) for each in seen)
            if enters and exits:
                kept[path] += (replace(region, enters=enters, exits=exits),)
            else:
                why = f"how many tokens {path}.{region.row} is given follows no polynomial of samples and sequence."
    return kept, why


def _elements(module: nn.Module, inputs: Inputs, regions: Regions) -> dict[Any, tuple[list[int], list[int]]]:
    """Elements of each tensor that enters a region, and of each that leaves it."""
    seen: dict[Any, tuple[list[int], list[int]]] = {}
    entered: dict[Any, list[Tensor]] = {}
    every = [(path, at, region) for path, own in regions.items() for at, region in enumerate(own)]
    at_path = lambda path, name: module.get_submodule(f"{path}.{name}".rstrip("."))  # noqa: E731
    columns = {(path, at, name): at_path(path, name) for path, at, region in every for name in region.columns}
    rows = {(path, at): at_path(path, region.row) for path, at, region in every}

    def enter(key: tuple[str, int, str], args: Any, kwargs: Any) -> None:
        before = entered.setdefault(key[:2], [])
        for tensor in entering(columns[key], args, kwargs):
            if not any(tensor is other for other in before):
                before.append(tensor)
                seen.setdefault(key[:2], ([], []))[0].append(tensor.numel())

    def leave(key: tuple[str, int], args: Any, output: Tensor) -> None:
        entered.pop(key, None)
        seen.setdefault(key, ([], []))[1].append(output.numel())

    with hooked(columns, enter), hooked(rows, after=leave):
        run_apart(module, inputs)
    return seen


def _polynomials(sizes: list[tuple[int, int]], has_sequence: bool, seen: list[list[int]]) -> tuple[Poly, ...]:
    """Each tensor's elements, as a polynomial of samples and sequence; empty where none tells all of them."""
    if len({len(each) for each in seen}) != 1:
        return ()
    counts = list(zip(*seen, strict=True))
    polys = tuple(fit(sizes, values, has_sequence, is_signed=True) for values in counts)
    fitted = [tuple(round(poly(*size)) for size in sizes) for poly in polys]
    return polys if fitted == counts else ()
