"""Weights of a Hugging Face folder for any plan: each rank reads the slices its boxes need, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshwright.checkpoint.safetensors_folder import open_folder, raise_first
from meshwright.core.box import Box
from meshwright.core.errors import Problem, Problems
from meshwright.hf.weights_convert import Conversion, conversions
from meshwright.hf.weights_names import Shape, TensorPart, parts_by_name, parts_of_decoder
from meshwright.models.presets import DecoderConfig

Source = Callable[[str, Box, torch.dtype], Tensor]
"""(name, piece, dtype) -> its values, as `runtime/init.py` asks for them."""
FLOATS = ("float64", "float32", "float16", "bfloat16")
_NOT_WEIGHTS = re.compile(r"(?:.*\.)?(?:rotary_emb\.inv_freq|attn\.(?:masked_)?bias)")
"""Buffers that old versions saved along with the weights."""
_BLOCK_ELEMENTS = 1 << 22


class Tensors(Protocol):
    """Named tensors somewhere on a disk: safetensors or a torch Distributed Checkpoint."""

    @property
    def where(self) -> str: ...

    @property
    def tensors(self) -> Mapping[str, Any]:
        """Name -> something with a dtype (its name) and a shape."""

    def read_into(self, name: str, box: Box, out: Tensor) -> None: ...


def source_of_folder(folder: str | Path, config: DecoderConfig) -> Source:
    """The weights of our decoder; everything missing or wrong in the folder is said first."""
    return source_of_decoder(open_folder(folder), config)


def source_of_decoder(held: Tensors, config: DecoderConfig) -> Source:
    raise_first(list(problems_of(held, config)))
    return source_of_parts(held, parts_of_decoder(config, held.tensors.keys()))


def source_of_named(folder: str | Path, module: nn.Module) -> Source:
    """The weights of transformers' own module; everything missing or wrong in the folder is said first.

    Its lasting buffers are filled at once.
    """
    held = open_folder(folder)
    named = NamedTensors(held, module)
    raise_first(list(named.problems()))
    named.fill_buffers()
    return named.read


class NamedTensors:
    """A module's parameters in a folder: by their own names, or by transformers' rules for loading."""

    def __init__(self, held: Tensors, module: nn.Module):
        self.held, self.module = held, module
        self.renamed, self.converted = conversions(module, held.tensors)
        names: dict[int, list[str]] = {}
        for name, value in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(value), []).append(name)
        self.names = {each: own for own in names.values() for each in own}
        """Tied parameters have several names, and the folder may have any of them."""

    def problems(self) -> Iterator[Problem]:
        """Every parameter must be there; what else the folder has is not this module's concern."""
        for name, value in self.module.named_parameters():
            shape, where = tuple(value.shape), self.held.where
            parts, conversion = self._found(name, shape)
            if conversion is not None:
                made = conversion.shapes(self.held.tensors)
                parts = tuple(
                    TensorPart.whole(each, tuple(self.held.tensors[each].shape)) for _, each in conversion.taken
                )
                if shape not in [made.get(each) for each in self.names[name]]:
                    what = f"what is stored for {name!r} has shape {made.get(name)}, this model needs {shape}."
                    yield Problem(where=where, what=what)
            elif not parts:
                fix = "If transformers loads it under other names, load it in a factory: from_pretrained(FOLDER)."
                yield Problem(where=where, what=f"has no tensor {name!r}.", fix=fix)
            yield from _part_problems(self.held, parts)

    def read(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        parts, conversion = self._found(name, tuple(box.shape))
        if conversion is None:
            return read_parts(self.held, parts, box, dtype)
        made = conversion.made(self._whole)
        return next(made[each] for each in self.names[name] if each in made)[box.slices].to(dtype)

    def fill_buffers(self) -> None:
        """Those that are part of what was learnt, such as a router's corrections."""
        lasting = self.module.state_dict()
        for name, buffer in self.module.named_buffers():
            stored = self.held.tensors.get(self.renamed.get(name, name))
            if name in lasting and stored is not None and tuple(stored.shape) == tuple(buffer.shape):
                buffer.copy_(self._whole(self.renamed.get(name, name)))

    def _whole(self, stored: str) -> Tensor:
        return _read(self.held, stored, Box.whole(tuple(self.held.tensors[stored].shape)))

    def _found(self, name: str, shape: Shape) -> tuple[tuple[TensorPart, ...], Conversion | None]:
        """A parameter's parts, or the rule that makes it; neither where it is missing."""
        for each in self.names.get(name, [name]):
            if each in self.renamed:
                return (TensorPart.whole(self.renamed[each], shape),), None
            if each in self.converted:
                parts = self.converted[each].stacked(shape, self.held.tensors)
                return parts, None if parts else self.converted[each]
            if parts := parts_by_name(each, shape, self.held.tensors):
                return parts, None
        return (), None


def source_of_parts(held: Tensors, parts: Mapping[str, tuple[TensorPart, ...]]) -> Source:
    return lambda name, box, dtype: read_parts(held, parts[name], box, dtype)


def read_parts(held: Tensors, parts: tuple[TensorPart, ...], box: Box, dtype: torch.dtype) -> Tensor:
    """A box of a parameter of ours, gathered from the parts that meet it."""
    out = torch.empty(box.size, dtype=dtype)
    for part in () if box.is_empty else parts:
        both = part.at.overlap(box)
        if both is not None:
            held.read_into(part.name, part.stored_box(both), part.as_stored(out[both.within(box)]))
    return out


def problems_of(held: Tensors, config: DecoderConfig) -> Problems:
    """Missing, wrongly shaped and unknown tensors, from headers alone; only a head that should be tied is read."""
    parts = parts_of_decoder(config, held.tensors.keys())
    wanted = [part for each in parts.values() for part in each]
    problems = list(_part_problems(held, wanted))
    known = {part.name for part in wanted}
    extra = [name for name in held.tensors if name not in known and not _NOT_WEIGHTS.fullmatch(name)]
    if config.tied and "lm_head.weight" in extra:
        extra.remove("lm_head.weight")
        if not problems:
            problems += _untied(held, parts["embed.tokens.weight"][0].name)
    problems += [Problem(where=held.where, what=f"{name[:80]!r} is no tensor of this model.") for name in extra]
    return tuple(problems)


def _missing(held: Tensors, name: str) -> Problem:
    return Problem(where=held.where, what=f"has no tensor {name!r}.")


def _part_problems(held: Tensors, parts: Collection[TensorPart]) -> Iterator[Problem]:
    seen: set[str] = set()
    for part in parts:
        if part.name in seen:
            continue
        seen.add(part.name)
        found = held.tensors.get(part.name)
        if found is None:
            yield _missing(held, part.name)
        elif tuple(found.shape) != tuple(part.shape):
            what = f"{part.name!r} has shape {tuple(found.shape)}, this model needs {tuple(part.shape)}."
            yield Problem(where=held.where, what=what)
        elif found.dtype not in FLOATS:
            what = f"{part.name!r} is {found.dtype}: weights must be one of {', '.join(FLOATS)}."
            yield Problem(where=held.where, what=what, fix="Quantised folders are not read; use the original one.")


def _untied(held: Tensors, embedding: str) -> list[Problem]:
    """A tied head may be stored a second time, but then it must be the same."""
    shape = tuple(held.tensors[embedding].shape)
    head = held.tensors["lm_head.weight"]
    is_same = tuple(head.shape) == shape and all(
        torch.equal(*(_read(held, name, box) for name in (embedding, "lm_head.weight"))) for box in row_blocks(shape)
    )
    if is_same:
        return []
    what = f"'lm_head.weight' differs from {embedding!r}, but config.json ties them."
    return [Problem(where=held.where, what=what, fix="Set tie_word_embeddings to false in config.json.")]


def _read(held: Tensors, name: str, box: Box) -> Tensor:
    out = torch.empty(box.size, dtype=getattr(torch, held.tensors[name].dtype))
    held.read_into(name, box, out)
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
