"""The regions of a whole module: in which blocks they are looked for, and how large what enters and leaves them is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from meshwright.core.profile import Poly
from meshwright.foreign.examine import Anatomy, Coins, InputTemplate, run_apart, tracing
from meshwright.foreign.regions import SplitRegion, entering, find_regions
from meshwright.foreign.trace import equal_runs, standing_aside
from meshwright.ops.model_interface import Inputs

Call = Callable[[nn.Module, Inputs], Any]
Regions = dict[str, list[SplitRegion]]
"""By the path of their block."""
LEAST_SHARE = 0.01
"""Of the parameters: where less would be split, nothing is."""


class _ReadsMore(Exception):
    pass


def regions_of(module: nn.Module, call: Call, template: InputTemplate, anatomy: Anatomy) -> tuple[Regions, str]:
    """The regions of all blocks, and why there are no others."""
    names = anatomy.names
    blocks = dict(_blocks(module, names))
    same = equal_runs([blocks[name] for name in names], anatomy.shapes)
    aside = {names[at]: names[first] for at, first in enumerate(same) if at != first}
    try:
        with standing_aside(module, aside):
            calls = _calls(module, call, template, {name: blocks[name] for name in blocks if name not in aside})
            regions, why = _found(module, blocks, calls)
            regions, more = _measured(module, call, template, regions)
    except _ReadsMore as reason:
        return {}, str(reason)
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0][:160]
        return {}, f"it does not run on a sample ({type(error).__name__}: {first})."
    regions |= {name: regions[first] for name, first in aside.items() if first in regions}
    why = why or more
    total = sum(value.numel() for value in module.parameters())
    cut = sum(block.get_parameter(name).numel() for block, name in _cut(blocks, regions))
    share = f"only {100 * cut / max(1, total):.1f} % of its parameters could be split"
    if cut < LEAST_SHARE * total:
        return {}, f"{share}: {why}" if cut else why or "none of its blocks has linears that lead back to their input."
    return regions, f"{share}: {why}" if why and 2 * cut < total else why


def _cut(blocks: Mapping[str, nn.Module], regions: Regions) -> Iterator[tuple[nn.Module, str]]:
    for path, found in regions.items():
        for region in found:
            yield from ((blocks[path], cut.name) for cut in region.cuts)


def _blocks(module: nn.Module, names: tuple[str, ...]) -> Iterator[tuple[str, nn.Module]]:
    """The blocks between which stages are cut, first; and those of other lists (an encoder's)."""
    yield from ((name, module.get_submodule(name)) for name in names)
    taken = list(names)
    for path, each in module.named_modules():
        is_apart = not any(path == other or path.startswith(f"{other}.") for other in taken)
        if path and isinstance(each, nn.ModuleList) and is_apart and not any(n.startswith(f"{path}.") for n in names):
            taken.append(path)
            yield from ((f"{path}.{child}", block) for child, block in each.named_children())


def _calls(module: nn.Module, call: Call, template: InputTemplate, blocks: Mapping[str, nn.Module]) -> dict[str, Any]:
    """What each block is called with. A block that reads more of another than its first output may read heads there,
    of which a rank would have a part only (T5 hands on its position bias): nothing is split then."""
    calls: dict[str, Any] = {}
    more: list[Tensor] = []

    def before(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(value is other for value in (*args, *kwargs.values()) for other in more):
            raise _ReadsMore(f"{path} reads more of another block than its first output.")
        calls.setdefault(path, (args, kwargs))

    with tracing(module, call, template), Coins(0.5), ExitStack() as hooks:
        for path, block in blocks.items():
            first = block.register_forward_pre_hook(
                lambda _, args, kwargs, path=path: before(path, args, kwargs), with_kwargs=True
            )
            last = block.register_forward_hook(
                lambda _, args, output: more.extend(
                    each for each in (output[1:] if isinstance(output, tuple) else ()) if isinstance(each, Tensor)
                )
            )
            hooks.callback(first.remove)
            hooks.callback(last.remove)
        run_apart(module, call, template.shaped(2, 2 * _third(template)))
    return calls


def _third(template: InputTemplate) -> int:
    """Three times as long is still no longer than a sample."""
    return max(1, min(8, template.sequence // 3))


def _found(module: nn.Module, blocks: Mapping[str, nn.Module], calls: Mapping[str, Any]) -> tuple[Regions, str]:
    uses = Counter(id(value) for _, value in module.named_parameters(remove_duplicate=False))
    known: dict[Any, tuple[list[SplitRegion], str]] = {}
    regions: Regions = {}
    reasons: list[str] = []
    for path, (args, kwargs) in calls.items():
        block = blocks[path]
        key = (type(block), _given(args, kwargs), tuple((n, tuple(p.shape)) for n, p in block.named_parameters()))
        if key not in known:
            known[key] = find_regions(block, args, kwargs)
        found, why = known[key]
        reasons.append(why)
        regions[path] = [
            region for region in found if all(uses[id(block.get_parameter(cut.name))] == 1 for cut in region.cuts)
        ]
        if len(regions[path]) < len(found):
            reasons.append(f"weights of {path} are used in more than one place.")
    return regions, next(filter(None, reasons), "")


def _given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(tuple(value.shape) if isinstance(value, Tensor) else None for value in (*args, *kwargs.values()))


def _measured(module: nn.Module, call: Call, template: InputTemplate, regions: Regions) -> tuple[Regions, str]:
    """The regions with the sizes of what enters and leaves; without those whose sizes follow no polynomial."""
    third = _third(template)
    sizes = [(2, 2 * third), (3, 2 * third), (2, third), (2, 3 * third), (3, 3 * third)]
    with tracing(module, call, template), Coins(0.5):
        runs = [_run(module, call, template.shaped(*size), regions) for size in sizes]
    kept: Regions = {}
    why = ""
    for path, found in regions.items():
        kept[path] = []
        for at, region in enumerate(found):
            seen = [run.get((path, at), ([], [])) for run in runs]
            fitted = [_fit(sizes, [len(each[side]) for each in seen], [each[side] for each in seen]) for side in (0, 1)]
            if all(fitted):
                kept[path].append(replace(region, enters=fitted[0], exits=fitted[1]))
            else:
                why = f"how many tokens {path}.{region.row} is given follows no polynomial of samples and sequence."
    return kept, why


def _run(module: nn.Module, call: Call, inputs: Inputs, regions: Regions) -> dict[Any, tuple[list[int], list[int]]]:
    """Elements of each tensor that enters a region, and of each that leaves it."""
    seen: dict[Any, tuple[list[int], list[int]]] = {}

    def enter(key: Any, entered: list[Tensor], each: nn.Module, args: Any, kwargs: Any) -> None:
        for tensor in entering(each, args, kwargs):
            if not any(tensor is other for other in entered):
                entered.append(tensor)
                seen.setdefault(key, ([], []))[0].append(tensor.numel())

    def leave(key: Any, entered: list[Tensor], output: Tensor) -> None:
        entered.clear()
        seen.setdefault(key, ([], []))[1].append(output.numel())

    with ExitStack() as hooks:
        for path, found in regions.items():
            block = module.get_submodule(path)
            for at, region in enumerate(found):
                entered: list[Tensor] = []
                common = {"key": (path, at), "entered": entered}
                for name in region.columns:
                    hook = block.get_submodule(name).register_forward_pre_hook(
                        lambda each, args, kwargs, c=common: enter(**c, each=each, args=args, kwargs=kwargs),
                        with_kwargs=True,
                    )
                    hooks.callback(hook.remove)
                hook = block.get_submodule(region.row).register_forward_hook(
                    lambda _, args, output, c=common: leave(**c, output=output)
                )
                hooks.callback(hook.remove)
        run_apart(module, call, inputs)
    return seen


def _fit(sizes: list[tuple[int, int]], counts: list[int], seen: list[list[int]]) -> tuple[Poly, ...]:
    """Each tensor's elements as one + b (x + y s + z s²), told by five sizes; empty where they do not agree."""
    if len(set(counts)) != 1:
        return ()
    (_, s), fitted = sizes[0], []
    third = s // 2
    for base, more, short, long, most in zip(*seen, strict=True):
        slope = more - base
        one = base - 2 * slope
        low, high = (short - one) / 2, (long - one) / 2
        square = (high - 2 * slope + low) / (2 * third * third)
        line = (slope - low) / third - 3 * third * square
        poly = Poly(one=one, b=low - line * third - square * third * third, bs=line, bss=square)
        if round(poly(3, 3 * third)) != most:
            return ()
        fitted.append(poly)
    return tuple(fitted)
