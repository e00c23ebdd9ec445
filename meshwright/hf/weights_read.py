"""Weights of a Hugging Face folder for any plan: each rank reads the slices its boxes need, and nothing else.

Which of their tensors a parameter of ours is made of is a small value, `TensorPart`, that reads both ways:

    ours  blocks.3.attention.key.weight  (out, in)        theirs  transformer.h.3.attn.c_attn.weight  (in, 3 out)

          +-----+   at: all of it                          start: row `out`, transposed
          | key |  <-------------------------------------  +-------+-------+-------+
          +-----+                                          | query |  key  | value |
                                                           +-------+-------+-------+
Import asks for a box of ours and reads the slices of theirs; export asks for a tensor of theirs and gathers ours.

Transformers' own modules have stored tensors of other names or shapes. It renames (GPT-NeoX's `embed_out` is
`lm_head`), stacks (experts) and splits them by rules of its own; here the same rules are run on the names in a folder's
headers, so that a renamed or stacked parameter is still read by slices; any other is read whole, one at a time.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.checkpoint.safetensors_folder import StoredTensors, open_folder
from meshwright.core.box import Box
from meshwright.core.errors import Problem, Problems, raise_problems
from meshwright.hf.config_json import FAMILIES, KNOWN, family_of
from meshwright.models.presets import DecoderConfig
from meshwright.zoo.decoder import Decoder

Shape = tuple[int, ...]
_OURS = re.compile(r"blocks\.(\d+)\.(.+?)(\.weight|\.bias|)")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPart:
    """The box `at` of a parameter of ours, as it lies in the tensor `name`."""

    name: str
    shape: Shape
    """The whole tensor's, as it is stored."""
    at: Box
    start: Shape
    """Where the box begins there, in our dims."""
    is_transposed: bool = False

    @classmethod
    def whole(cls, name: str, shape: Shape) -> TensorPart:
        return cls(name=name, shape=shape, at=Box.whole(shape), start=(0,) * len(shape))

    def stored_box(self, both: Box) -> Box:
        """Where a box of ours that lies within `at` is stored."""
        offset = [o - a + s for o, a, s in zip(both.offset, self.at.offset, self.start, strict=True)]
        size = list(both.size)
        if len(self.shape) < len(size):  # one expert of ours is one tensor of theirs
            del offset[0], size[0]
        if self.is_transposed:
            offset[-2:], size[-2:] = offset[:-3:-1], size[:-3:-1]
        return Box(self.shape, tuple(offset), tuple(size))

    def as_stored(self, piece: torch.Tensor) -> torch.Tensor:
        """A piece of ours with their dims; a view, so that reading into it fills ours."""
        piece = piece[0] if len(self.shape) < piece.dim() else piece
        return piece.transpose(-1, -2) if self.is_transposed else piece


def parameter_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Shapes of our decoder's parameters by name; a tied head is not listed."""
    with torch.device("meta"):
        return {name: tuple(each.shape) for name, each in Decoder(config).named_parameters()}


def parts_of_decoder(config: DecoderConfig, stored: Container[str] | None = None) -> dict[str, tuple[TensorPart, ...]]:
    """Parameter of ours -> its parts, named as in `stored`, or as transformers writes them."""
    weights = FAMILIES[family_of(config)].weights
    parts = {name: _parts_of(name, shape, weights) for name, shape in parameter_shapes(config).items()}
    if stored is None:
        return parts
    if config.num_experts and any(f"{at}layers.0.mlp.experts.gate_up_proj" in stored for at in ("model.", "")):
        parts |= {name: _stacked(name, each) for name, each in parts.items() if ".mlp." in name}
    embedding = parts["embed.tokens.weight"][0].name
    prefix, _, bare = embedding.partition(".")
    if embedding in stored or bare not in stored:
        return parts
    return {
        name: tuple(replace(part, name=part.name.removeprefix(f"{prefix}.")) for part in each)
        for name, each in parts.items()
    }


def _parts_of(name: str, shape: Shape, weights: str) -> tuple[TensorPart, ...]:
    """Linears of GPT-2 are stored transposed; its query, key and value are one tensor."""
    names, is_gpt2 = KNOWN.weights[weights], weights == "gpt2"
    of_block = _OURS.fullmatch(name)
    stored = f"{names['blocks']}.{of_block[1]}.{names[of_block[2]]}{of_block[3]}" if of_block else names[name]
    if "{}" in stored:
        one = (1, *shape[1:])
        return tuple(
            TensorPart(name=stored.format(n), shape=shape[1:], at=Box(shape, (n, 0, 0), one), start=(0, 0, 0))
            for n in range(shape[0])
        )
    is_fused = ".c_attn." in stored
    third = ("query", "key", "value").index(name.split(".")[3]) if is_fused else 0
    whole = (3 * shape[0], *shape[1:]) if is_fused else shape
    is_transposed = is_gpt2 and of_block is not None and len(shape) == 2
    start, stored_shape = (third * shape[0], *(0 for _ in shape[1:])), whole[::-1] if is_transposed else whole
    at = Box.whole(shape)
    return (TensorPart(name=stored, shape=stored_shape, at=at, start=start, is_transposed=is_transposed),)


def _stacked(name: str, parts: tuple[TensorPart, ...]) -> tuple[TensorPart, ...]:
    """As transformers 5 holds experts in memory: one tensor for all, gate above up."""
    first = parts[0]
    moved = first.name.replace("block_sparse_moe", "mlp")
    if ".mlp.experts." not in name:
        return (replace(first, name=moved),)
    shape, stem = first.at.shape, moved.partition(".experts.")[0]
    if name.endswith(".down"):
        return (TensorPart.whole(f"{stem}.experts.down_proj", shape),)
    num_experts, ffn, hidden = shape
    row = 0 if name.endswith(".gate") else ffn
    stacked = (num_experts, 2 * ffn, hidden)
    return (TensorPart(name=f"{stem}.experts.gate_up_proj", shape=stacked, at=Box.whole(shape), start=(0, row, 0)),)


_STACK = [("MergeModulelist", 0), ("Concatenate", 1)]


@dataclass(kw_only=True)
class Conversion:
    """A rule of transformers and the stored tensors it makes one parameter or several of."""

    rule: Any
    first: str
    module: nn.Module
    sources: list[tuple[str, str]] = field(default_factory=list)
    """(pattern of the rule, stored tensor)."""

    def convert(self, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        rule = copy.deepcopy(self.rule)
        for pattern, stored in self.sources:
            rule.add_tensor(self.first, stored, pattern, read(stored))
        values = rule.convert(self.first, model=self.module, config=self.module.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in values.items()}

    def shapes(self, stored: Mapping[str, Any]) -> dict[str, Shape]:
        made = self.convert(lambda name: torch.empty(tuple(stored[name].shape), device="meta", dtype=torch.float32))
        return {name: tuple(value.shape) for name, value in made.items()}

    def stacked(self, shape: Shape, stored: Mapping[str, Any]) -> tuple[TensorPart, ...]:
        """Where it only stacks matrices, and one kind of them above another: each as a part of the whole."""
        steps = [(type(each).__name__, getattr(each, "dim", None)) for each in self.rule.operations]
        if len(shape) != 3 or steps not in (_STACK[:1], _STACK):
            return ()
        parts, row = [], 0
        for pattern in self.rule.source_patterns:
            names = [name for each, name in self.sources if each == pattern]
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
        groups.setdefault(target, Conversion(rule=rule, first=target, module=module)).sources.append((pattern, name))

    converted: dict[str, Conversion] = {}
    for group in groups.values():
        with contextlib.suppress(Exception):  # a rule that fails makes nothing: its parameters are missing
            converted |= dict.fromkeys(group.shapes(stored), group)
    return renamed, {name: group for name, group in converted.items() if name not in renamed}


Source = Callable[[str, Box, torch.dtype], Tensor]
"""(name, piece, dtype) -> its values, as `ops/initial_weights.py` asks for them."""
FLOATS = ("float64", "float32", "float16", "bfloat16")
_NOT_WEIGHTS = re.compile(r"(?:.*\.)?(?:rotary_emb\.inv_freq|attn\.(?:masked_)?bias)")
"""Buffers that old versions saved along with the weights."""
_BLOCK_ELEMENTS = 1 << 22


def source_of_folder(folder: str | Path, config: DecoderConfig) -> Source:
    """The weights of our decoder; everything missing or wrong in the folder is said first."""
    weights = open_folder(folder)
    raise_problems(problems_of(weights, config))
    parts = parts_of_decoder(config, weights.tensors.keys())
    return lambda name, box, dtype: read_parts(weights, parts[name], box, dtype)


def source_of_named(folder: str | Path, module: nn.Module) -> Source:
    """The weights of transformers' own module; everything missing or wrong in the folder is said first.

    Its lasting buffers are filled at once.
    """
    weights = open_folder(folder)
    named = NamedTensors(weights, module)
    raise_problems(named.problems())
    named.fill_buffers()
    return named.read


class NamedTensors:
    """A module's parameters in a folder: by their own names, or by transformers' rules for loading."""

    def __init__(self, weights: StoredTensors, module: nn.Module):
        self.weights, self.module = weights, module
        self.renamed, self.converted = conversions(module, weights.tensors)
        names: dict[int, list[str]] = {}
        for name, value in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(value), []).append(name)
        self.names = {each: own for own in names.values() for each in own}
        """Tied parameters have several names, and the folder may have any of them."""

    def problems(self) -> Iterator[Problem]:
        """Every parameter must be there; what else the folder has is not this module's concern."""
        for name, value in self.module.named_parameters():
            shape, where = tuple(value.shape), self.weights.where
            parts, conversion = self._place_of(name, shape)
            if conversion is not None:
                made = conversion.shapes(self.weights.tensors)
                parts = tuple(
                    TensorPart.whole(each, tuple(self.weights.tensors[each].shape)) for _, each in conversion.sources
                )
                if shape not in [made.get(each) for each in self.names[name]]:
                    what = f"what is stored for {name!r} has shape {made.get(name)}, this model needs {shape}."
                    yield Problem(where=where, what=what)
            elif not parts:
                fix = "If transformers loads it under other names, load it in a factory: from_pretrained(FOLDER)."
                yield Problem(where=where, what=f"has no tensor {name!r}.", fix=fix)
            yield from _part_problems(self.weights, parts)

    def read(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        parts, conversion = self._place_of(name, tuple(box.shape))
        if conversion is None:
            return read_parts(self.weights, parts, box, dtype)
        made = conversion.convert(self._whole)
        return next(made[each] for each in self.names[name] if each in made)[box.slices].to(dtype)

    def fill_buffers(self) -> None:
        """Those that are part of what was learnt, such as a router's corrections."""
        lasting = self.module.state_dict()
        for name, buffer in self.module.named_buffers():
            stored = self.weights.tensors.get(self.renamed.get(name, name))
            if name in lasting and stored is not None and tuple(stored.shape) == tuple(buffer.shape):
                buffer.copy_(self._whole(self.renamed.get(name, name)))

    def _whole(self, stored: str) -> Tensor:
        return _read(self.weights, stored, Box.whole(tuple(self.weights.tensors[stored].shape)))

    def _place_of(self, name: str, shape: Shape) -> tuple[tuple[TensorPart, ...], Conversion | None]:
        """A parameter's parts, or the rule that makes it; neither where it is missing."""
        for each in self.names.get(name, [name]):
            if each in self.renamed:
                return (TensorPart.whole(self.renamed[each], shape),), None
            if each in self.converted:
                parts = self.converted[each].stacked(shape, self.weights.tensors)
                return parts, None if parts else self.converted[each]
            old = each.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            for known in (each, each.partition(".")[2], f"model.{each}", f"transformer.{each}", old):
                if known in self.weights.tensors:
                    return (TensorPart.whole(known, shape),), None
        return (), None


def read_parts(weights: StoredTensors, parts: tuple[TensorPart, ...], box: Box, dtype: torch.dtype) -> Tensor:
    """A box of a parameter of ours, gathered from the parts that meet it."""
    out = torch.empty(box.size, dtype=dtype)
    for part in () if box.is_empty else parts:
        both = part.at.overlap(box)
        if both is not None:
            weights.read_into(part.name, part.stored_box(both), part.as_stored(out[both.within(box)]))
    return out


def problems_of(weights: StoredTensors, config: DecoderConfig) -> Problems:
    """Missing, wrongly shaped and unknown tensors, from headers alone; only a head that should be tied is read."""
    parts = parts_of_decoder(config, weights.tensors.keys())
    wanted = [part for each in parts.values() for part in each]
    problems = list(_part_problems(weights, wanted))
    known = {part.name for part in wanted}
    extra = [name for name in weights.tensors if name not in known and not _NOT_WEIGHTS.fullmatch(name)]
    if config.tied and "lm_head.weight" in extra:
        extra.remove("lm_head.weight")
        embedding = parts["embed.tokens.weight"][0].name
        # A tied head may be stored a second time, but then it must be the same.
        if not problems and not _are_equal(weights, embedding, "lm_head.weight"):
            what = f"'lm_head.weight' differs from {embedding!r}, but config.json ties them."
            fix = "Set tie_word_embeddings to false in config.json."
            problems.append(Problem(where=weights.where, what=what, fix=fix))
    problems += [Problem(where=weights.where, what=f"{name[:80]!r} is no tensor of this model.") for name in extra]
    return tuple(problems)


def _part_problems(weights: StoredTensors, parts: Collection[TensorPart]) -> Iterator[Problem]:
    for part in {part.name: part for part in parts}.values():
        stored = weights.tensors.get(part.name)
        if stored is None:
            yield Problem(where=weights.where, what=f"has no tensor {part.name!r}.")
        elif tuple(stored.shape) != tuple(part.shape):
            what = f"{part.name!r} has shape {tuple(stored.shape)}, this model needs {tuple(part.shape)}."
            yield Problem(where=weights.where, what=what)
        elif stored.dtype not in FLOATS:
            what = f"{part.name!r} is {stored.dtype}: weights must be one of {', '.join(FLOATS)}."
            yield Problem(where=weights.where, what=what, fix="Quantised folders are not read; use the original one.")


def _are_equal(weights: StoredTensors, one: str, other: str) -> bool:
    shape = tuple(weights.tensors[one].shape)
    return tuple(weights.tensors[other].shape) == shape and all(
        torch.equal(_read(weights, one, box), _read(weights, other, box)) for box in row_blocks(shape)
    )


def _read(weights: StoredTensors, name: str, box: Box) -> Tensor:
    out = torch.empty(box.size, dtype=getattr(torch, weights.tensors[name].dtype))
    weights.read_into(name, box, out)
    return out


def row_blocks(shape: Shape, most_elements: int = _BLOCK_ELEMENTS) -> Iterator[Box]:
    """A whole tensor as boxes of rows, none much larger than `most_elements`."""
    whole = Box.whole(shape)
    if not shape or whole.is_empty:
        yield whole
        return
    count = -(-torch.Size(shape).numel() // most_elements)
    pieces = (whole.chunk(0, index, min(count, shape[0])) for index in range(min(count, shape[0])))
    yield from (piece for piece in pieces if not piece.is_empty)
