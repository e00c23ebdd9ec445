"""Parameters that are not trained, by patterns of their names. No torch."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from meshwright.core.errors import Problem, nearest, raise_problems
from meshwright.core.profile import Layer, Param, Profile

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


def freeze(profile: Profile, is_frozen: IsFrozen) -> Profile:
    """The profile with parameters marked; blocks that then differ are no longer folded."""

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


def names_of(profile: Profile) -> list[str]:
    """Every parameter's name, tied ones once."""
    return [f"{prefix}{param.name}" for layer, prefix in _unfolded(profile) for param in layer.params if not param.tied]


def check_patterns(profile: Profile, freeze: Sequence[str], train: Sequence[str]) -> None:
    """Every pattern must match something, and something must be left to train."""
    names = names_of(profile)
    known = {re.sub(r"\.\d+\.", ".*.", name) for name in names}  # blocks have the same names
    problems = []
    for where, patterns in (("model.freeze", freeze), ("model.train", train)):
        for pattern in patterns:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                what = f'"{pattern}" matches no parameter of {profile.name}.'
                problems.append(Problem(where=where, what=what, fix=nearest(pattern, known)))
    is_frozen = frozen_by(freeze, train)
    if not problems and all(map(is_frozen, names)):
        problems.append(Problem(where="model.freeze", what="nothing is left to train."))
    raise_problems(problems)
