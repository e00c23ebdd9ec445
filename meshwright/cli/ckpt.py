"""`mw ckpt list|verify|export|import`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from meshwright.checkpoint.step_folders import describe, verify_all
from meshwright.core.errors import MeshwrightError, Problem
from meshwright.core.units import pretty_bytes
from meshwright.report.terminal import stdout

if TYPE_CHECKING:
    from meshwright.models.presets import DecoderConfig


def run(arguments: Namespace) -> int:
    folder = Path(arguments.folder)
    if not folder.is_dir():
        raise MeshwrightError([Problem(where=str(folder), what="there is no such folder.")])
    root = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    actions = {"list": _list, "verify": _verify}
    if arguments.action in actions:
        return actions[arguments.action](root)
    if not arguments.target:
        wanted = "OUT, the folder to write" if arguments.action == "export" else "RUN_FOLDER, the run to begin"
        what = f"{arguments.action} needs a second folder: {wanted}."
        raise MeshwrightError([Problem(where="mw ckpt", what=what)])
    return (_export if arguments.action == "export" else _import)(root, arguments)


def _list(root: Path) -> int:
    table = Table("step", "size", "files", "tensors", "saved", "state", box=None, header_style="bold")
    for row in describe(root):
        sizes = (str(row.step), pretty_bytes(row.bytes), str(row.num_files), str(row.num_tensors))
        table.add_row(*sizes, row.when_utc, row.damage or "complete")
    stdout().print(table)
    return 0


def _verify(root: Path) -> int:
    console = stdout()
    checked = verify_all(root)
    if not checked:
        raise MeshwrightError([Problem(where=str(root), what="has no checkpoints.")])
    for step, problems in checked.items():
        console.print(f"step {step}: {'whole' if not problems else 'DAMAGED'}")
        for problem in problems:
            console.print(f"  {problem}", markup=False)
    return 1 if any(checked.values()) else 0


def _say(line: str) -> None:
    stdout().print(line, markup=False, soft_wrap=True)


def _export(root: Path, arguments: Namespace) -> int:
    from meshwright.hf.weights_import_export import chosen_step, export

    config, original = _model(arguments.model)
    checkpoint = chosen_step(root, arguments.step, _say)
    export(checkpoint, arguments.target, config, dtype=arguments.dtype or "", original=original, report=_say)
    return 0


def _import(folder: Path, arguments: Namespace) -> int:
    from meshwright.hf.weights_import_export import import_dcp, import_hf

    root, dtype = Path(arguments.target) / "checkpoints", arguments.dtype or "float32"
    if (folder / ".metadata").exists():
        import_dcp(folder, root, _model(arguments.model)[0], dtype=dtype, report=_say)
    else:
        import_hf(folder, root, dtype=dtype, report=_say)
    return 0


def _model(name: str | None) -> tuple[DecoderConfig | None, Path | None]:
    """`--model`: a named model, or a Hugging Face folder, whose tokenizer then goes along."""
    from meshwright.hf.config_json import read_folder
    from meshwright.models.presets import DecoderConfig, preset

    if not name:
        return None, None
    if not Path(name).is_dir():
        config = preset(name)
        if not isinstance(config, DecoderConfig):
            what = f"{name} is no decoder, and is written by its own names."
            raise MeshwrightError([Problem(where="--model", what=what, fix="Leave --model out.")])
        return config, None
    return read_folder(name).config, Path(name)
