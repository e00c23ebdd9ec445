"""`mw ckpt import` and `mw ckpt export`: weights from elsewhere as a checkpoint of ours, and ours as a folder that
transformers loads.

An import writes step 0: parameters only, in pieces of bounded size. An export goes tensor by tensor: the header of a
shard is written before its first tensor is read, so the model is never in memory, and the folder has another name until
every tensor of it has been read back and compared with the checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from meshwright.checkpoint.dcp import open_dcp
from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.manifest import DTYPES
from meshwright.checkpoint.safetensors_folder import (
    INDEX,
    WEIGHTS,
    StoredTensors,
    flat_bytes,
    open_folder,
    safetensors_chunks,
)
from meshwright.checkpoint.save import begin, commit, disk_errors, write_rank_file
from meshwright.checkpoint.step_folders import discard, list_steps, newest_good, temporary_name, usable_folders, verify
from meshwright.core.box import Box
from meshwright.core.codec import decode, encode
from meshwright.core.errors import Problem, error_at, raise_problems
from meshwright.core.files import fsync_folder, json_object, make_folder, read_plain, write_new
from meshwright.core.units import pretty_bytes
from meshwright.hf.config_json import CONFIG, MAX_CONFIG_BYTES, config_for, read_folder
from meshwright.hf.weights_read import (
    FLOATS,
    TensorPart,
    parameter_shapes,
    parts_of_decoder,
    problems_of,
    read_parts,
    row_blocks,
)
from meshwright.models.dimensions import Adapter
from meshwright.models.presets import DecoderConfig
from meshwright.ops.packed_weights import plain_decode

FILE_ELEMENTS = 1 << 28
"""A file of 1 GiB in float32: that much is in memory at once."""
SHARD_BYTES = 5_000_000_000
PARAMETER = "parameter."
BUFFER = "buffer."
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_ALONG = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "generation_config.json"),
)
"""Files of the original folder that a model needs to be used."""
_MAX_ALONG_BYTES = 256 << 20
_PEFT_CONFIG, _PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

Item = TypeVar("Item")
Report = Callable[[str], None]


def import_hf(folder: str | Path, root: str | Path, *, dtype: str = "float32", report: Report = print) -> Path:
    """A Hugging Face folder; what our decoder cannot be keeps its own names, for transformers' module."""
    model, weights = read_folder(folder), open_folder(folder)
    if model.config is None:
        report(f"{model.reason} It keeps its own names, for transformers' module.")
    return _import(weights, Path(root), model.config, {"model_kind": "hf", "hf_config": model.raw}, dtype, report)


def import_dcp(
    folder: str | Path,
    root: str | Path,
    config: DecoderConfig | None = None,
    *,
    dtype: str = "float32",
    report: Report = print,
) -> Path:
    """A torch Distributed Checkpoint: its model's tensors, by our names or by the family's where `config` is given."""
    return _import(open_dcp(folder), Path(root), config, {"model_kind": "module"}, dtype, report)


def _import(
    weights: StoredTensors, root: Path, config: DecoderConfig | None, about: dict[str, Any], dtype: str, report: Report
) -> Path:
    """A checkpoint of step 0; a large parameter goes by rows over several files."""
    if steps := list_steps(root):
        what = f"has checkpoints already (steps {', '.join(map(str, steps[:5]))})."
        raise error_at(root, what, "Name a new run folder.")
    # By their own names: all tensors of floating point.
    shapes = {name: tuple(each.shape) for name, each in weights.tensors.items() if each.dtype in FLOATS}
    parts: dict[str, tuple[TensorPart, ...]] = {
        name: (TensorPart.whole(name, shape),) for name, shape in shapes.items()
    }
    if config is not None:
        about |= {"model_kind": "decoder", "model_config": encode(config)}
        ours = parameter_shapes(config)
        if not ours.items() <= shapes.items():
            raise_problems(problems_of(weights, config))
            parts = parts_of_decoder(config, weights.tensors.keys())
        shapes = ours
    elif not shapes:
        raise error_at(weights.where, "has no weights in floating point.")
    elif left := len(weights.tensors) - len(shapes):
        report(f"{left} tensors of whole numbers are left out")
    sizes = {
        (name, box): math.prod(box.size) for name, shape in shapes.items() for box in row_blocks(shape, FILE_ELEMENTS)
    }
    tmp = begin(root, 0)
    try:
        entries = []
        for number, pieces in enumerate(_in_groups(sizes, FILE_ELEMENTS)):
            stored = getattr(torch, dtype)
            read = ((f"{PARAMETER}{name}", box, read_parts(weights, parts[name], box, stored)) for name, box in pieces)
            entries.append(write_rank_file(tmp, number, read))
        final = commit(root, 0, tmp, entries, {"weights_only": True, **about}, keep=1)
    except BaseException:
        discard(tmp)
        raise
    finally:
        weights.close()
    report(f"{final}: {len(shapes)} parameters, {sum(sizes.values()):,} numbers")
    return final


def _in_groups(sizes: Mapping[Item, int], most: int) -> list[list[Item]]:
    """The items in order, as groups that are as large as they may be; a larger item is a group of its own."""
    groups: list[list[Item]] = []
    room = -1
    for item, size in sizes.items():
        if not groups or size > room:
            groups.append([])
            room = most
        groups[-1].append(item)
        room -= size
    return groups


@dataclass(frozen=True, kw_only=True)
class HFExport:
    """A checkpoint as the tensors of a Hugging Face folder."""

    reader: Reader
    parts: Mapping[str, tuple[TensorPart, ...]]
    """Tensor of the checkpoint -> its parts in theirs."""
    config: dict[str, Any] | None
    """Their config.json; None where there is none."""
    dtype: str
    """Dtype of floating-point tensors; "" keeps that of the checkpoint."""
    adapter: Adapter | None = None
    """Low-rank adapters to be added to the weights."""

    @classmethod
    def of(cls, reader: Reader, config: DecoderConfig | None, dtype: str = "") -> HFExport:
        """A decoder by the names of its family, with its adapters merged; any other module by its own names."""
        tensors, where = reader.manifest.tensors, reader.folder
        stored = {each.dtype for name, each in tensors.items() if name.startswith(PARAMETER)}
        dtype = dtype or ("float32" if stored == {"float32", "bfloat16"} else "")  # frozen ones may be narrow
        ours = {n.removeprefix(PARAMETER): e.shape for n, e in tensors.items() if n.startswith(PARAMETER)}
        if not ours:
            raise error_at(where, "has no parameters.")
        if reader.state.get("model_kind", "decoder") != "decoder" and config is None:
            known = reader.state.get("hf_config")
            own = {
                name: (TensorPart.whole(name.partition(".")[2], tensors[name].shape),)
                for name in sorted(tensors, key=lambda name: name.startswith(BUFFER))
                if name.startswith((PARAMETER, BUFFER))
            }
            return cls(
                reader=reader, parts=own, config=dict(known) if isinstance(known, Mapping) else None, dtype=dtype
            )
        stated = reader.state.get("model_config")
        if config is None and stated is None:
            fix = "Say it: --model NAME, or the Hugging Face folder it came from."
            raise error_at(where, "does not tell which model it is.", fix)
        if config is None or (stated or {}).get("adapter") or (stated or {}).get("local_heads"):
            told = decode(DecoderConfig, stated, "model_config")
            config = replace(config or told, adapter=told.adapter, local_heads=told.local_heads)
        adapter = config.adapter
        plain, needed = replace(config, adapter=None, local_heads=0), parameter_shapes(config)
        wrong = []
        for name, shape in needed.items():
            if tuple(ours.get(name, ())) != shape:
                has = f"has {name!r} of shape {tuple(ours[name])}" if name in ours else f"has no {name!r}"
                wrong.append(f"{has}, the model needs {shape}.")
        wrong += [f"{name!r} is no parameter of the model." for name in sorted(ours.keys() - needed.keys())]
        raise_problems(Problem(where=str(where), what=what) for what in wrong)
        parts = {f"{PARAMETER}{name}": each for name, each in parts_of_decoder(plain).items()}
        dtype = dtype or ("float32" if adapter else "")
        return cls(reader=reader, parts=parts, config=config_for(plain), dtype=dtype, adapter=adapter)

    def adapters(self, given: str, base_folder: str) -> tuple[HFExport, bytes]:
        """The adapters alone, by the names that PEFT gives them in `adapter_model.safetensors`, and its configuration
        of them; `given`: the dtype asked for."""
        if self.adapter is None:
            raise error_at(self.reader.folder, "has no adapters.", "Leave out --adapter-only.")
        parts: dict[str, tuple[TensorPart, ...]] = {}
        targets = set()
        for name, (part, *_) in self.parts.items():
            stem = name.removesuffix(".weight")
            for own in (f"{stem}.lora_A", f"{stem}.lora_B") if f"{stem}.lora_A" in self.reader.manifest.tensors else ():
                if part.is_transposed:
                    what = (
                        f"{part.name} is stored with its sides exchanged or beside others: no adapter of ours fits it."
                    )
                    raise error_at(self.reader.folder, what, "Leave out --adapter-only: adapters are then merged.")
                theirs = part.name.removesuffix(".weight")
                targets.add(theirs.rpartition(".")[2])
                shape = self.reader.manifest.tensors[own].shape
                named = f"base_model.model.{theirs}.{own.rpartition('.')[2]}.weight"
                parts[own] = (TensorPart.whole(named, tuple(shape)),)
        settings: dict[str, Any] = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_folder,
        }
        settings |= {"r": self.adapter.rank, "lora_alpha": self.adapter.scale * self.adapter.rank, "lora_dropout": 0.0}
        settings |= {"target_modules": sorted(targets), "bias": "none", "inference_mode": True}
        content = json.dumps(settings, indent=2).encode() + b"\n"
        return replace(self, parts=parts, config=None, dtype=given, adapter=None), content

    @cached_property
    def uses(self) -> dict[str, list[tuple[str, TensorPart]]]:
        """Their tensor -> the tensors of the checkpoint that it holds."""
        uses: dict[str, list[tuple[str, TensorPart]]] = {}
        for name, parts in self.parts.items():
            for part in parts:
                uses.setdefault(part.name, []).append((name, part))
        return uses

    def dtype_of(self, name: str) -> str:
        """As which a tensor of the checkpoint is written."""
        own = self.reader.manifest.tensors[name].dtype
        return self.dtype if self.dtype and ("float" in own or self.adapter) else own

    def stored(self, name: str, box: Box) -> Tensor:
        """A piece of a tensor as it is in the checkpoint."""
        piece = torch.empty(box.size, dtype=getattr(torch, self.reader.manifest.tensors[name].dtype))
        self.reader.read_into(name, box, piece)
        return piece

    def value(self, name: str, box: Box) -> Tensor:
        """A piece (rows of a matrix) of a tensor of the checkpoint, in the dtype it is written as."""
        entry, first, second = self.reader.manifest.tensors, *(name.replace(".weight", f".lora_{x}") for x in "AB")
        if self.adapter and entry[name].dtype == "uint8":
            rows = Box(entry[name].shape, (box.offset[0], 0, 0), (box.size[0], *entry[name].shape[1:]))
            piece = plain_decode(self.stored(name, rows), torch.float32)
        else:
            piece = self.stored(name, box)
        if self.adapter and name.endswith(".weight") and first in entry:
            rows = Box(entry[second].shape, (box.offset[0], 0), (box.size[0], self.adapter.rank))
            low = self.stored(second, rows).float() @ self.stored(first, Box.whole(entry[first].shape)).float()
            piece = piece.float() + self.adapter.scale * low
        cast = piece.to(getattr(torch, self.dtype_of(name)))
        if cast.dtype == torch.float16 and piece.dtype != cast.dtype and (cast.isinf() & piece.isfinite()).any():
            what = f"has values up to {piece.abs().max():.3g}, too large for float16."
            raise error_at(name.partition(".")[2], what, "Use --dtype bfloat16.")
        return cast

    def tensor(self, theirs: str) -> Tensor:
        """A tensor of theirs, from the parameters of ours it holds, a few rows at a time."""
        uses = self.uses[theirs]
        out = torch.empty(uses[0][1].shape, dtype=getattr(torch, self.dtype_of(uses[0][0])))
        for name, part in uses:
            for block in row_blocks(part.at.size):
                offset = tuple(a + b for a, b in zip(part.at.offset, block.offset, strict=True))
                box = Box(part.at.shape, offset, block.size)
                out[part.stored_box(box).slices].copy_(part.as_stored(self.value(name, box)))
        return out

    def write(self, folder: Path, max_shard_bytes: int) -> int:
        """Shards and, when there are several, their index; the bytes of all tensors."""
        entries = {name: (self.dtype_of(uses[0][0]), tuple(uses[0][1].shape)) for name, uses in self.uses.items()}
        sizes = {name: math.prod(shape) * DTYPES[dtype][1] for name, (dtype, shape) in entries.items()}
        shards = _in_groups(sizes, max_shard_bytes)
        index: dict[str, str] = {}
        for number, names in enumerate(shards, start=1):
            file = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            listed = {name: entries[name] for name in names}
            write_new(folder / file, safetensors_chunks(listed, map(self.tensor, names), format="pt"))
            index |= dict.fromkeys(names, file)
        if len(shards) > 1:
            text = json.dumps({"metadata": {"total_size": sum(sizes.values())}, "weight_map": index}, indent=2)
            write_new(folder / INDEX, [text.encode() + b"\n"])
        return sum(sizes.values())

    def compare(self, folder: Path) -> None:
        """Read the folder as an import would, and hold every parameter against the checkpoint, bit by bit."""
        written = open_folder(folder)
        try:
            for name, parts in self.parts.items():
                for box in row_blocks(parts[0].at.shape):
                    value = self.value(name, box)
                    if not torch.equal(flat_bytes(read_parts(written, parts, box, value.dtype)), flat_bytes(value)):
                        what = f"{name.partition('.')[2]!r} was read back with other values; the export is not kept."
                        raise error_at(folder, what, exit_code=1)
        finally:
            written.close()


def export(
    checkpoint: str | Path,
    out: str | Path,
    config: DecoderConfig | None = None,
    *,
    dtype: str = "",
    max_shard_bytes: int = SHARD_BYTES,
    original: str | Path | None = None,
    adapter_only: bool = False,
    report: Report = print,
) -> Path:
    """Write a committed checkpoint folder (see `chosen_step`) as a Hugging Face folder, and compare the two.

    `config`: for a checkpoint that does not tell its own. `dtype`: "" keeps the checkpoint's. `original`: the Hugging
    Face folder the model came from; its tokenizer and special tokens go along. `adapter_only`: low-rank adapters by
    themselves, as PEFT loads them; they are merged otherwise.
    """
    out, reader = Path(out), Reader(Path(checkpoint))
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise error_at(out, "is there already.", "Name a new folder.")
    exported = HFExport.of(reader, config, dtype)
    files: dict[str, bytes] = {}
    before: Any = reader.state.get("hf_config")
    if adapter_only:
        base = str(original or reader.state.get("hf_folder", ""))
        exported, files[_PEFT_CONFIG] = exported.adapters(dtype, base)
        max_shard_bytes = 1 << 62  # PEFT reads one file
    elif original is not None:
        folder = Path(original)
        before = json_object(read_plain(folder, CONFIG, MAX_CONFIG_BYTES), str(folder / CONFIG))
        files = {name: read_plain(folder, name, _MAX_ALONG_BYTES) for name in _ALONG if os.path.lexists(folder / name)}
    if exported.config is not None:
        settings = exported.config | {"torch_dtype": exported.dtype_of(next(iter(exported.parts)))}
        settings.pop("dtype", None)
        if isinstance(before, Mapping):
            settings |= {key: before[key] for key in _TOKENS if key in before}
        files[CONFIG] = json.dumps(settings, indent=2).encode() + b"\n"
    tmp = temporary_name(out)
    try:
        with disk_errors("writing the export", out, tmp=tmp):
            make_folder(out.parent)
            os.mkdir(tmp)
            num_bytes = exported.write(tmp, max_shard_bytes)
            for name, data in files.items():
                write_new(tmp / name, [data])
            report(f"wrote {pretty_bytes(num_bytes)}; reading it back")
            exported.compare(tmp)
            if adapter_only:
                os.rename(tmp / WEIGHTS, tmp / _PEFT_WEIGHTS)
            fsync_folder(tmp)
            os.rename(tmp, out)  # also onto an empty folder
            fsync_folder(out.parent)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    report(f"{out}: {len(exported.uses)} tensors, each equal to step {reader.step} of the run")
    return out


def chosen_step(root: Path, step: int | None, report: Report) -> Path:
    """The newest undamaged checkpoint, or the one of that step, every byte checked."""
    folders = usable_folders(root)
    if step is None:
        newest = newest_good(root, report=report) if folders else None
        if newest is None:
            raise error_at(root, "has no checkpoints.")
        return newest
    if step not in folders:
        listed = ", ".join(map(str, folders)) or "none"
        raise error_at(root, f"has no step {step}.", f"It has {listed}.")
    raise_problems(verify(folders[step]), exit_code=1)
    return folders[step]
