"""`mw ckpt list|verify|export|import`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.checkpoint.step_folders import describe, verify_all
from meshwright.core.errors import error_at
from meshwright.core.units import pretty_bytes
from meshwright.report.terminal import FigureTable, stdout

if TYPE_CHECKING:
    from meshwright.models.presets import DecoderConfig


def run(arguments: Namespace) -> int:
    folder, action = Path(arguments.folder), arguments.action
    if not folder.is_dir():
        raise error_at(folder, "there is no such folder.")
    root = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    console = stdout()
    if action == "list":
        table = FigureTable("step", "size", "files", "tensors", "saved", last="state")
        for row in describe(root):
            sizes = (str(row.step), pretty_bytes(row.bytes), str(row.num_files), str(row.num_tensors))
            table.add_row(*sizes, row.when_utc, row.damage or "complete")
        console.print(table)
        return 0
    if action == "verify":
        checked = verify_all(root)
        if not checked:
            raise error_at(root, "has no checkpoints.")
        for step, problems in checked.items():
            console.print(f"step {step}: {'whole' if not problems else 'DAMAGED'}")
            for problem in problems:
                console.print(f"  {problem}")
        return 1 if any(checked.values()) else 0
    if not arguments.target:
        wanted = "OUT, the folder to write" if action == "export" else "RUN_FOLDER, the run to begin"
        raise error_at("mw ckpt", f"{action} needs a second folder: {wanted}.")
    from meshwright.hf.weights_import_export import chosen_step, export, import_dcp, import_hf

    def say(line: str) -> None:
        console.print(line)

    target, dtype = Path(arguments.target) / "checkpoints", arguments.dtype or "float32"
    if action == "export":
        config, original = _model(arguments.model)
        checkpoint = chosen_step(root, arguments.step, say)
        chosen = {"dtype": arguments.dtype or "", "original": original, "adapter_only": arguments.adapter_only}
        export(checkpoint, arguments.target, config, **chosen, report=say)
    elif (root / ".metadata").exists():
        import_dcp(root, target, _model(arguments.model)[0], dtype=dtype, report=say)
    else:
        import_hf(root, target, dtype=dtype, report=say)
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
            raise error_at("--model", f"{name} is no decoder, and is written by its own names.", "Leave --model out.")
        return config, None
    return read_folder(name).config, Path(name)
