"""Parameters of transformers' own modules whose stored tensors have other names or shapes, as transformers loads them.

It renames (GPT-NeoX's `embed_out` is `lm_head`), stacks (experts) and splits tensors by rules of its own; here the same
rules are run on the names in a folder's headers, so that a rank still reads only what its pieces need: a renamed or
stacked parameter by slices, any other whole, one at a time.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.box import Box
from meshwright.hf.weights_names import Shape, TensorPart

_STACK = [("MergeModulelist", 0), ("Concatenate", 1)]


@dataclass(kw_only=True)
class Conversion:
    """A rule of transformers and the stored tensors it takes; it makes one parameter or several."""

    rule: Any
    first: str
    module: nn.Module
    taken: list[tuple[str, str]] = field(default_factory=list)
    """(pattern of the rule, stored tensor)."""

    def made(self, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        rule = copy.deepcopy(self.rule)
        for pattern, stored in self.taken:
            rule.add_tensor(self.first, stored, pattern, read(stored))
        values = rule.convert(self.first, model=self.module, config=self.module.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in values.items()}

    def shapes(self, stored: Mapping[str, Any]) -> dict[str, Shape]:
        def empty(name: str) -> Tensor:
            return torch.empty(tuple(stored[name].shape), device="meta", dtype=torch.float32)

        return {name: tuple(value.shape) for name, value in self.made(empty).items()}

    def stacked(self, shape: Shape, stored: Mapping[str, Any]) -> tuple[TensorPart, ...]:
        """Where it only stacks matrices, and one kind of them above another: each as a part of the whole."""
        steps = [(type(each).__name__, getattr(each, "dim", None)) for each in self.rule.operations]
        if len(shape) != 3 or steps not in (_STACK[:1], _STACK):
            return ()
        parts, row = [], 0
        for pattern in self.rule.source_patterns:
            names = [name for each, name in self.taken if each == pattern]
            rows = stored[names[0]].shape[0] if names else 0
            for number, name in enumerate(names):
                at = Box(shape, (number, row, 0), (1, rows, shape[2]))
                parts.append(TensorPart(name=name, shape=(rows, shape[2]), at=at, start=(0, 0, 0)))
            row += rows
        return tuple(parts)


def conversions(module: nn.Module, stored: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Conversion]]:
    """(parameter -> what its tensor is called in the folder, parameter -> what it is made of). Only what is found."""
    try:
        from transformers import PreTrainedModel
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    except ImportError:  # before 5 modules were called as they are stored
        return {}, {}
    if not isinstance(module, PreTrainedModel):
        return {}, {}
    known = module.state_dict()
    rules = get_model_conversion_mapping(module)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    prefix = module.base_model_prefix
    renamed: dict[str, str] = {}
    groups: dict[str, Conversion] = {}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:
            target, pattern = rename_source_key(name, [], [], prefix, known)
        if target not in known:
            continue
        if pattern is None:
            renamed[target] = name
            continue
        rule = next(rule for rule in converters if pattern in rule.source_patterns)
        groups.setdefault(target, Conversion(rule=rule, first=target, module=module)).taken.append((pattern, name))

    converted: dict[str, Conversion] = {}
    for group in groups.values():
        with contextlib.suppress(Exception):  # a rule that fails makes nothing: its parameters are missing
            converted |= dict.fromkeys(group.shapes(stored), group)
    return renamed, {name: group for name, group in converted.items() if name not in renamed}
