"""Parameters that are not trained, by patterns of their names, and what backward then leaves out. No torch."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, takewhile
from typing import Any

from meshwright.core.errors import Problem, nearest, raise_problems
from meshwright.core.profile import Layer, Op, Param, Poly, Profile

IsFrozen = Callable[[str], bool]


def frozen_by(freeze: Sequence[str], train: Sequence[str]) -> IsFrozen:
    """Whatever `freeze` matches is frozen; if `train` is given, so is whatever it does not match."""

    def is_frozen(name: str) -> bool:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in freeze):
            return True
        return bool(train) and not any(fnmatch.fnmatchcase(name, pattern) for pattern in train)

    return is_frozen


def _unfolded(profile: Profile) -> Iterator[tuple[Layer, str]]:
    """Every layer, blocks one by one, and what the names of its parameters begin with."""
    number = 0
    for layer in profile.layers:
        for _ in range(layer.repeat):
            prefix = "" if layer.unit == "ends" else f"{layer.name}."
            if layer.is_block:
                prefix, number = f"{profile.block_name(number)}.", number + 1
            yield layer, prefix


def mark(profile: Profile, is_frozen: IsFrozen) -> Profile:
    """The profile with parameters marked and costs as they are; blocks that then differ are no longer folded."""

    def marked(layer: Layer, prefix: str) -> Layer:
        def mark(param: Param) -> Param:
            name = param.tied.removeprefix("first.") or f"{prefix}{param.name}"
            return replace(param, frozen=param.frozen or is_frozen(name))

        return replace(layer, params=tuple(map(mark, layer.params)))

    layers: list[Layer] = []
    for layer, units in groupby(_unfolded(profile), key=lambda unit: unit[0]):
        for i, (one, run) in enumerate(groupby(marked(*unit) for unit in units)):
            layers.append(replace(one, repeat=len(list(run)), name=f"{layer.name}+{i}" if i else layer.name))
    return replace(profile, layers=tuple(layers))


def freeze(profile: Profile, is_frozen: IsFrozen) -> Profile:
    """The profile with parameters marked, without what backward leaves out and what is then not kept for it.

    Of equal layers that are trained, the first one may pass no gradient back: each costs what they cost on average.
    """
    before, profile = profile, mark(profile, is_frozen)
    if profile == before:  # nothing is frozen, or all of it was before
        return profile
    layers, arrives = [], False
    for layer in profile.layers:
        first, passes = _needed_ops(layer, arrives)
        others, arrives = _needed_ops(layer, passes)
        share = 1.0 / layer.repeat
        ops = [replace(one, **_mean(one, other, share)) for one, other in zip(first, others, strict=True)]
        layers.append(replace(layer, ops=tuple(ops)))
    return replace(profile, layers=tuple(layers), unfrozen=profile.fingerprint)


def _needed_ops(layer: Layer, arrives: bool) -> tuple[list[Op], bool]:
    """A layer's ops as far as they are needed, and whether anything up to its end is trained (`arrives`: before it)."""
    ops, later, used = [], arrives, [_used_by(op, layer) for op in layer.ops]
    is_product = [op.kind == "matmul" and bool(own) for op, own in zip(layer.ops, used, strict=True)]
    is_traced = any(op.role == "matmul" and its for op, its in zip(layer.ops, is_product, strict=True))
    for place, (op, own) in enumerate(zip(layer.ops, used, strict=True)):
        if not is_product[place]:  # products side by side have one input
            arrives = later
        trained = [param for param in own if not param.frozen]
        later = later or bool(trained)
        needed = float(arrives or bool(trained) or op.role == "loss")
        back = kept = needed
        if is_product[place]:
            into_weight = not own[0].frozen
            # Where the input has no gradient (an image), all of backward is the weight's.
            back = (arrives + into_weight) / 2.0 if op.backward_kernels > op.kernels else float(into_weight)
        elif own and op.role in ("bias", "embedding"):
            back = kept = len(trained) / len(own)
        elif own and op.role == "norm" and arrives != bool(trained):  # gradient and input are read for either
            alone = 2.0 * _size(op.saved) / max(_size(op.backward_moved), 1.0)
            back = alone if trained else 1.0 - alone
        if op.role in _HANDS_ON and not is_traced and _size(op.saved):
            # What a product reads is kept for its weight's gradient.
            at = next((at for at in range(place + 1, len(layer.ops)) if is_product[at]), None)
            if at is not None and (op.role == "layout" or not any(each.kernels for each in layer.ops[place + 1 : at])):
                beside = takewhile(lambda at: is_product[at], range(at, len(layer.ops)))
                matrices = [param for at in beside for param in used[at] if len(param.shape) > 1]
                is_read = any(not param.frozen for param in matrices)
                product = layer.ops[at]
                read = min(1.0, _size(product.flops) / (2.0 * product.shape[0] * _size(op.saved)))
                if op.role != "activation":
                    kept = float(is_read)
                elif read < 1.0:  # and what it is made of
                    kept = read * is_read + (1.0 - read) * needed
                else:  # in place
                    kept = float(is_read or bool(needed))
        ops.append(replace(op, **_scaled(op, back, kept)))
    return ops, later


_HANDS_ON = ("input", "layout", "cast", "activation", "dispatch")
"""Roles of ops that keep what a product reads."""


def _used_by(op: Op, layer: Layer) -> list[Param]:
    """The parameters of an op, the weight first."""
    own = [param for param in layer.params if f"{param.name}.".startswith(f"{op.name}.")]
    if own or op.role not in ("linear", "convolution", "bias", "norm"):
        return own
    plain = [param for param in layer.params if "." not in param.name]  # of a layer that is one module
    if plain and op.role != "norm":
        return [param for param in plain if (param.name == "bias") == (op.role == "bias")]
    ends = "bias" if op.role == "bias" else "_norm.weight"  # one op for several
    return [param for param in layer.params if param.name.endswith(ends) and param.name[:5] == op.name[:5]]


def _size(poly: Poly) -> float:
    return poly.b + poly.bs


def _scaled(op: Any, back: float, kept: float) -> dict[str, Any]:
    """Fields of an op, or of what a compiler leaves of it, that backward decides."""
    changed: dict[str, Any] = {"backward_moved": op.backward_moved.times(back), "saved": op.saved.times(kept)}
    changed["backward_kernels"] = op.backward_kernels * back
    if isinstance(op, Op):
        changed["backward_flops"] = op.backward_flops.times(back)
        changed["fused"] = op.fused and replace(op.fused, **_scaled(op.fused, back, kept))
    return changed


def _mean(one: Any, other: Any, share: float) -> dict[str, Any]:
    """The same fields, of two that differ in nothing else."""
    changed = {}
    for name in _scaled(one, 1.0, 1.0):
        first, second = getattr(one, name), getattr(other, name)
        if name == "fused":
            changed[name] = first and replace(first, **_mean(first, second, share))
        elif isinstance(first, Poly):
            changed[name] = first.times(share).plus(second.times(1.0 - share))
        else:
            changed[name] = share * first + (1.0 - share) * second
    return changed


def names_of(profile: Profile) -> list[str]:
    """Every parameter's name, tied ones once."""
    return [f"{prefix}{param.name}" for layer, prefix in _unfolded(profile) for param in layer.params if not param.tied]


def check_patterns(profile: Profile, freeze: Sequence[str], train: Sequence[str]) -> None:
    """Every pattern must match something, and something must be left to train."""
    names = names_of(profile)
    known = {re.sub(r"\.\d+\.", ".*.", name) for name in names}  # blocks have the same names
    problems, count = [], profile.num_blocks
    last = f", whose last block is {profile.block_name(count - 1)}" if count else ""
    if profile.group_borders and (freeze or train):
        what = f"{profile.name} has local heads, of which a frozen group would leave nothing."
        problems.append(Problem(where="model.freeze", what=what, fix="Use local_heads = 0, or train everything."))
    for where, patterns in (("model.freeze", freeze), ("model.train", train)):
        for pattern in patterns:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                what = f'"{pattern}" matches no parameter of {profile.name}{last}.'
                problems.append(Problem(where=where, what=what, fix=nearest(pattern, known)))
    is_frozen = frozen_by(freeze, train)
    if not problems and all(map(is_frozen, names)):
        problems.append(Problem(where="model.freeze", what="nothing is left to train."))
    raise_problems(problems)
