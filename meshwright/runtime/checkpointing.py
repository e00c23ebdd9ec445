"""Between a running model and its checkpoints: which pieces this rank writes, and where it reads its own from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.save import begin, commit, discard, write_rank_file
from meshwright.core.box import Box
from meshwright.core.errors import MeshwrightError
from meshwright.ops.collectives import gather_json, share_json
from meshwright.ops.initial_weights import Source
from meshwright.optimizers.update import Optimizer
from meshwright.runtime.build import RankBuild


def _pieces(build: RankBuild, optimizer: Optimizer) -> Iterable[tuple[str, Box, Tensor]]:
    for name, value in build.local_parameters():
        if build.owns(name):
            yield from as_it_lies(f"parameter.{name}", build.boxes[name], value)
    for kind, name, value, box in optimizer.owned_state():
        yield from as_it_lies(f"optimizer.{kind}.{name}", box, value)
    if build.answers_for_buffers():
        for name, value in build.lasting_buffers():
            yield f"buffer.{name}", Box.whole(tuple(value.shape)), value


def as_it_lies(name: str, box: Box, value: Tensor) -> Iterable[tuple[str, Box, Tensor]]:
    """A piece as boxes that any other plan can read."""
    if box.order is None:
        yield name, box, value
        return
    dim, boxes = box.order[0], box.in_order()
    for each, part in zip(boxes, value.split([each.size[dim] for each in boxes], dim), strict=True):
        yield name, each, part


def save(root: Path, step: int, build: RankBuild, optimizer: Optimizer, state: Mapping[str, Any], keep: int) -> str:
    """Write a checkpoint together. Returns "" or, on every rank, why it could not be written; the run goes on."""
    mesh = build.mesh
    tmp = share_json(mesh.control, _attempt(lambda: str(begin(root, step))) if mesh.rank == 0 else None)
    if "error" in tmp:
        return tmp["error"]
    folder = Path(tmp["value"])
    written = _attempt(lambda: write_rank_file(folder, mesh.rank, _pieces(build, optimizer)))
    entries = gather_json(mesh.control, written)
    failed = [entry["error"] for entry in entries if "error" in entry]
    done: dict[str, Any] = {"error": failed[0]} if failed else {}
    if failed and mesh.rank == 0:
        discard(folder)  # gives its space back
    if not failed and mesh.rank == 0:
        parts = [entry["value"] for entry in entries]
        done = _attempt(lambda: str(commit(root, step, folder, parts, state, keep)))
    return share_json(mesh.control, done).get("error", "")


def _attempt(action: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": action()}
    except (MeshwrightError, OSError) as error:
        return {"error": str(error)}


def source_of(reader: Reader, first: Source, buffers: Collection[str]) -> Source:
    """Parameters from a checkpoint, buffers as they first are (`restore_buffers` comes after)."""
    known = set(reader.tensor_names())

    def read(name: str, box: Box, dtype: torch.dtype) -> Tensor:
        key = f"parameter.{name}"
        if key not in known and not box.is_empty and name in buffers:
            return first(name, box, dtype)
        entry = reader.manifest.tensors.get(key)
        # Weights of a run that stored them in 16 bits, or in 32: a plan may change that, and nothing else.
        is_other_width = entry is not None and {entry.dtype, str(dtype)[6:]} == {"float32", "bfloat16"}
        out = torch.empty(box.size, dtype=getattr(torch, entry.dtype) if entry and is_other_width else dtype)
        if not box.is_empty:
            reader.read_into(key, box, out)
        return out.to(dtype)

    return read


@torch.no_grad()
def restore_parameters(reader: Reader, build: RankBuild, optimizer: Optimizer) -> None:
    """In place: those of a model that has been trained on since."""
    read = source_of(reader, build.source, ())
    for name, value in build.local_parameters():
        for _, box, part in as_it_lies(name, build.boxes[name], value):
            part.copy_(read(name, box, value.dtype))
    optimizer.reload()


def restore_buffers(reader: Reader, build: RankBuild) -> None:
    for name, value in build.lasting_buffers():
        if f"buffer.{name}" in reader.tensor_names():
            staged = torch.empty(value.shape, dtype=value.dtype)
            reader.read_into(f"buffer.{name}", Box.whole(tuple(value.shape)), staged)
            value.copy_(staged)


def restore_optimizer(reader: Reader, build: RankBuild, optimizer: Optimizer) -> None:
    for state in optimizer.rule.kept():
        if not state.box.is_empty:
            for _, each, part in as_it_lies(state.name, state.box, state.value):
                staged = torch.empty(each.size, dtype=state.value.dtype)
                reader.read_into(f"optimizer.{state.kind}.{state.name}", each, staged)
                part.copy_(staged)
            optimizer.rule.restore(state)
    optimizer.set_num_steps(reader.step)
