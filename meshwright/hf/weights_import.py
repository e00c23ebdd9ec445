"""Weights from elsewhere as a checkpoint of ours at step 0: parameters only, in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.dcp import open_dcp
from meshwright.checkpoint.durable import discard
from meshwright.checkpoint.format import list_steps
from meshwright.checkpoint.safetensors_folder import open_folder
from meshwright.checkpoint.save import begin, commit, write_rank_file
from meshwright.core.box import Box
from meshwright.core.codec import encode
from meshwright.core.errors import MeshwrightError, Problem
from meshwright.hf.config_json import read_folder
from meshwright.hf.weights_names import Shape, TensorPart, parameter_shapes
from meshwright.hf.weights_read import (
    FLOATS,
    Source,
    Tensors,
    row_blocks,
    source_of_decoder,
    source_of_parts,
)
from meshwright.hf.weights_write import PARAMETER, Report
from meshwright.models.presets import DecoderConfig

FILE_ELEMENTS = 1 << 28
"""A file of 1 GiB in float32: that much is in memory at once."""


def import_hf(folder: str | Path, root: str | Path, *, dtype: str = "float32", report: Report = print) -> Path:
    """A Hugging Face folder; what our decoder cannot be keeps its own names, for transformers' module."""
    model, held = read_folder(folder), open_folder(folder)
    state: dict[str, Any] = {"weights_only": True, "model_kind": "hf", "hf_config": model.raw}
    try:
        if model.config is None:
            report(f"{model.reason} It keeps its own names, for transformers' module.")
            shapes, source = _by_own_names(held, report)
        else:
            state |= _decoder_state(model.config)
            shapes, source = parameter_shapes(model.config), source_of_decoder(held, model.config)
        return _write(Path(root), shapes, source, getattr(torch, dtype), state, report)
    finally:
        held.close()


def import_dcp(
    folder: str | Path,
    root: str | Path,
    config: DecoderConfig | None = None,
    *,
    dtype: str = "float32",
    report: Report = print,
) -> Path:
    """A torch Distributed Checkpoint: its model's tensors, by our names or by the family's where `config` is given."""
    held = open_dcp(folder)
    state: dict[str, Any] = {"weights_only": True, "model_kind": "module"}
    try:
        if config is None:
            shapes, source = _by_own_names(held, report)
        else:
            state |= _decoder_state(config)
            shapes = parameter_shapes(config)
            source = _by_own_names(held, report)[1] if _has_all(held, shapes) else source_of_decoder(held, config)
        return _write(Path(root), shapes, source, getattr(torch, dtype), state, report)
    finally:
        held.close()


def _decoder_state(config: DecoderConfig) -> dict[str, Any]:
    return {"model_kind": "decoder", "model_config": encode(config)}


def _has_all(held: Tensors, shapes: Mapping[str, Shape]) -> bool:
    return all(name in held.tensors and tuple(held.tensors[name].shape) == shape for name, shape in shapes.items())


def _by_own_names(held: Tensors, report: Report) -> tuple[dict[str, Shape], Source]:
    shapes = {name: tuple(each.shape) for name, each in held.tensors.items() if each.dtype in FLOATS}
    if not shapes:
        raise MeshwrightError([Problem(where=held.where, what="has no weights in floating point.")])
    left = len(held.tensors) - len(shapes)
    if left:
        report(f"{left} tensors of whole numbers are left out")
    return shapes, source_of_parts(held, {name: (TensorPart.whole(name, shape),) for name, shape in shapes.items()})


def _write(
    root: Path,
    shapes: Mapping[str, Shape],
    source: Source,
    dtype: torch.dtype,
    state: Mapping[str, Any],
    report: Report,
) -> Path:
    steps = list_steps(root)
    if steps:
        what = f"has checkpoints already (steps {', '.join(map(str, steps[:5]))})."
        raise MeshwrightError([Problem(where=str(root), what=what, fix="Name a new run folder.")])
    tmp = begin(root, 0)
    try:
        entries = []
        for number, pieces in enumerate(_files(shapes)):
            read = ((f"{PARAMETER}{name}", box, source(name, box, dtype)) for name, box in pieces)
            entries.append(write_rank_file(tmp, number, read))
        final = commit(root, 0, tmp, entries, state, keep=1)
    except BaseException:
        discard(tmp)
        raise
    num_elements = sum(torch.Size(shape).numel() for shape in shapes.values())
    report(f"{final}: {len(shapes)} parameters, {num_elements:,} numbers")
    return final


def _files(shapes: Mapping[str, Shape]) -> Iterator[list[tuple[str, Box]]]:
    """The pieces of each file, a large parameter by rows over several."""
    held: list[tuple[str, Box]] = []
    num_elements = 0
    for name, shape in shapes.items():
        for box in row_blocks(shape, FILE_ELEMENTS):
            size = torch.Size(box.size).numel()
            if held and num_elements + size > FILE_ELEMENTS:
                yield held
                held, num_elements = [], 0
            held.append((name, box))
            num_elements += size
    yield held
