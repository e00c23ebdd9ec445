"""A checkpoint of any plan out as a folder that transformers loads.

Tensor by tensor: the header of a shard is written before its first tensor is read, so the model is never in memory. The
folder has another name until every tensor of it has been read back and compared with the checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.durable import fresh_suffix, fsync_folder, make_folder, refusals, write_durably
from meshwright.checkpoint.format import newest_good, usable_folders, verify
from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.manifest import DTYPES
from meshwright.checkpoint.safetensors_folder import INDEX, WEIGHTS, open_folder, raise_first
from meshwright.core.box import Box
from meshwright.core.codec import decode
from meshwright.core.errors import MeshwrightError, Problem
from meshwright.core.plain_files import json_object, read_plain
from meshwright.core.units import pretty_bytes
from meshwright.hf.config_json import CONFIG, MAX_CONFIG_BYTES, config_for
from meshwright.hf.weights_names import Shape, TensorPart, parts_of_decoder
from meshwright.hf.weights_read import read_parts, row_blocks
from meshwright.models.presets import DecoderConfig

SHARD_BYTES = 5_000_000_000
PARAMETER = "parameter."
BUFFER = "buffer."
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_ALONG = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
"""Files of the original folder that a model needs to be used."""
_MAX_ALONG_BYTES = 256 << 20

Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outgoing:
    """What will be written: each parameter's parts, and the config.json that goes with them (None: there is none)."""

    parts: Mapping[str, tuple[TensorPart, ...]]
    config: dict[str, Any] | None

    def tensors(self) -> dict[str, list[tuple[str, TensorPart]]]:
        """Their tensor -> the parameters of ours that it holds."""
        found: dict[str, list[tuple[str, TensorPart]]] = {}
        for name, parts in self.parts.items():
            for part in parts:
                found.setdefault(part.name, []).append((name, part))
        return found


def export(
    checkpoint: str | Path,
    out: str | Path,
    config: DecoderConfig | None = None,
    *,
    dtype: str = "",
    max_shard_bytes: int = SHARD_BYTES,
    original: str | Path | None = None,
    report: Report = print,
) -> Path:
    """Write a committed checkpoint folder (see `chosen_step`) as a Hugging Face folder, and compare the two.

    `config`: for a checkpoint that does not tell its own. `dtype`: "" keeps the checkpoint's. `original`: the Hugging
    Face folder the model came from; its tokenizer and special tokens go along.
    """
    out, reader = Path(out), Reader(Path(checkpoint))
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise MeshwrightError([Problem(where=str(out), what="is there already.", fix="Name a new folder.")])
    going = outgoing(reader, config)
    settings = _settings(reader, going, dtype, Path(original) if original else None)
    tmp = out.with_name(out.name + fresh_suffix("tmp"))
    try:
        with refusals("writing the export", out, tmp=tmp):
            make_folder(out.parent)
            os.mkdir(tmp)
            num_bytes = _write_weights(reader, going, tmp, dtype, max_shard_bytes)
            for name, data in settings.items():
                write_durably(tmp / name, [data])
            report(f"wrote {pretty_bytes(num_bytes)}; reading it back")
            compare(reader, going, tmp, dtype)
            fsync_folder(tmp)
            os.rename(tmp, out)  # also onto an empty folder
            fsync_folder(out.parent)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    report(f"{out}: {len(going.tensors())} tensors, each equal to step {reader.step} of the run")
    return out


def chosen_step(root: Path, step: int | None, report: Report) -> Path:
    """The newest undamaged checkpoint, or the one of that step, every byte checked."""
    found = usable_folders(root)
    if step is None:
        newest = newest_good(root, report=report) if found else None
        if newest is None:
            raise MeshwrightError([Problem(where=str(root), what="has no checkpoints.")])
        return newest
    if step not in found:
        listed = ", ".join(map(str, found)) or "none"
        raise MeshwrightError([Problem(where=str(root), what=f"has no step {step}.", fix=f"It has {listed}.")])
    problems = verify(found[step])
    if problems:
        raise MeshwrightError(problems, exit_code=1)
    return found[step]


def outgoing(reader: Reader, config: DecoderConfig | None) -> Outgoing:
    """A decoder by the names of its family; any other module by its own names."""
    held = {
        name.removeprefix(PARAMETER): entry.shape
        for name, entry in reader.manifest.tensors.items()
        if name.startswith(PARAMETER)
    }
    if not held:
        raise MeshwrightError([Problem(where=str(reader.folder), what="has no parameters.")])
    if reader.state.get("model_kind", "decoder") != "decoder" and config is None:
        known = reader.state.get("hf_config")
        held |= {
            name.removeprefix(BUFFER): entry.shape
            for name, entry in reader.manifest.tensors.items()
            if name.startswith(BUFFER)
        }
        parts = {name: (TensorPart.whole(name, shape),) for name, shape in held.items()}
        return Outgoing(parts=parts, config=dict(known) if isinstance(known, Mapping) else None)
    if config is None:
        stated = reader.state.get("model_config")
        if stated is None:
            what = "does not tell which model it is."
            fix = "Say it: --model NAME, or the Hugging Face folder it came from."
            raise MeshwrightError([Problem(where=str(reader.folder), what=what, fix=fix)])
        config = decode(DecoderConfig, stated, "model_config")
    going = Outgoing(parts=parts_of_decoder(config), config=config_for(config))
    raise_first(_misfits(going, held, str(reader.folder)))
    return going


def _misfits(going: Outgoing, held: Mapping[str, Shape], where: str) -> list[Problem]:
    problems = []
    for name, parts in going.parts.items():
        shape = parts[0].at.shape
        if tuple(held.get(name, ())) != shape:
            has = f"has {name!r} of shape {tuple(held[name])}" if name in held else f"has no {name!r}"
            problems.append(Problem(where=where, what=f"{has}, the model needs {shape}."))
    extra = held.keys() - going.parts.keys()
    problems += [Problem(where=where, what=f"{name!r} is no parameter of the model.") for name in sorted(extra)]
    return problems


def _settings(reader: Reader, going: Outgoing, dtype: str, original: Path | None) -> dict[str, bytes]:
    """The small files of the folder."""
    files: dict[str, bytes] = {}
    config = going.config
    before: Any = reader.state.get("hf_config")
    if original is not None:
        before = json_object(read_plain(original, CONFIG, MAX_CONFIG_BYTES), str(original / CONFIG))
        files = {
            name: read_plain(original, name, _MAX_ALONG_BYTES) for name in _ALONG if os.path.lexists(original / name)
        }
    if config is not None:
        first = next(iter(going.parts))
        config = config | {"torch_dtype": _dtype_of(reader, first, dtype)}
        config.pop("dtype", None)
        if isinstance(before, Mapping):
            config |= {key: before[key] for key in _TOKENS if key in before}
        files[CONFIG] = json.dumps(config, indent=2).encode() + b"\n"
    return files


def _write_weights(reader: Reader, going: Outgoing, folder: Path, dtype: str, max_shard_bytes: int) -> int:
    """Shards and, when there are several, their index; the bytes of all tensors."""
    sizes = {name: _num_bytes(reader, uses, dtype) for name, uses in going.tensors().items()}
    shards: list[list[str]] = [[]]
    for name, num_bytes in sizes.items():
        if shards[-1] and sum(sizes[each] for each in shards[-1]) + num_bytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(name)
    index: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_durably(folder / file, _shard_chunks(reader, going, names, dtype))
        index |= dict.fromkeys(names, file)
    total = sum(sizes.values())
    if len(shards) > 1:
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
        write_durably(folder / INDEX, [text.encode() + b"\n"])
    return total


def _key(reader: Reader, name: str) -> str:
    """A parameter's name in the checkpoint, or a buffer's."""
    return PARAMETER + name if PARAMETER + name in reader.manifest.tensors else BUFFER + name


def _dtype_of(reader: Reader, name: str, dtype: str) -> str:
    own = reader.manifest.tensors[_key(reader, name)].dtype
    return dtype if dtype and "float" in own else own


def _num_bytes(reader: Reader, uses: list[tuple[str, TensorPart]], dtype: str) -> int:
    return math.prod(uses[0][1].shape) * DTYPES[_dtype_of(reader, uses[0][0], dtype)][1]


def _shard_chunks(reader: Reader, going: Outgoing, names: list[str], dtype: str) -> Iterator[Any]:
    uses, end = going.tensors(), 0
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name in names:
        start, end = end, end + _num_bytes(reader, uses[name], dtype)
        code = DTYPES[_dtype_of(reader, uses[name][0][0], dtype)][0]
        entries[name] = {"dtype": code, "shape": list(uses[name][0][1].shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield memoryview(_bits(_gathered(reader, uses[name], dtype)).numpy())


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _gathered(reader: Reader, uses: list[tuple[str, TensorPart]], dtype: str) -> Tensor:
    """A tensor of theirs, from the parameters of ours it holds, a few rows at a time."""
    wanted = getattr(torch, _dtype_of(reader, uses[0][0], dtype))
    out = torch.empty(uses[0][1].shape, dtype=wanted)
    for name, part in uses:
        for block in row_blocks(part.at.size):
            offset = tuple(a + b for a, b in zip(part.at.offset, block.offset, strict=True))
            box = Box(part.at.shape, offset, block.size)
            piece = _value(reader, name, box, wanted)
            out[part.stored_box(box).slices].copy_(part.as_stored(piece))
    return out


def _value(reader: Reader, name: str, box: Box, wanted: torch.dtype) -> Tensor:
    key = _key(reader, name)
    held = getattr(torch, reader.manifest.tensors[key].dtype)
    piece = torch.empty(box.size, dtype=held)
    reader.read_into(key, box, piece)
    cast = piece.to(wanted)
    if wanted == torch.float16 and held != wanted and (cast.isinf() & piece.isfinite()).any():
        what = f"has values up to {piece.abs().max():.3g}, too large for float16."
        raise MeshwrightError([Problem(where=name, what=what, fix="Use --dtype bfloat16.")])
    return cast


def compare(reader: Reader, going: Outgoing, folder: Path, dtype: str) -> None:
    """Read the folder as an import would, and hold every parameter against the checkpoint, bit by bit."""
    written = open_folder(folder)
    try:
        for name, parts in going.parts.items():
            wanted = getattr(torch, _dtype_of(reader, name, dtype))
            for box in row_blocks(parts[0].at.shape):
                found = read_parts(written, parts, box, wanted)
                if not torch.equal(_bits(found), _bits(_value(reader, name, box, wanted))):
                    what = f"{name!r} was read back with other values; the export is not kept."
                    raise MeshwrightError([Problem(where=str(folder), what=what)], exit_code=1)
    finally:
        written.close()
