"""Checkpoints and plans that earlier versions have written load for ever, bit for bit.

`checkpoint-DATE/` were written by the version of that day, `checkpoint-trained-DATE/` after three steps of `SMALL`.
`tensors.json` says what they hold (XXH3-128 of each whole tensor). Nothing here is ever changed; add what is new.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / folder) for folder in ("parity", "runtime")]

from test_trainer import MadeData  # noqa: E402

from meshwright.checkpoint.load import Reader  # noqa: E402
from meshwright.checkpoint.safetensors_folder import flat_bytes  # noqa: E402
from meshwright.checkpoint.step_folders import verify  # noqa: E402
from meshwright.core.box import Box  # noqa: E402
from meshwright.core.codec import load_artefact  # noqa: E402
from meshwright.core.plan import Plan  # noqa: E402
from meshwright.models.presets import DecoderConfig  # noqa: E402
from meshwright.ops.device_mesh import Mesh  # noqa: E402
from meshwright.optimizers.optimizer_config import OptimizerConfig  # noqa: E402
from meshwright.run.model import open_config  # noqa: E402
from meshwright.run.run_file import TrainSection  # noqa: E402
from meshwright.runtime.trainer import Trainer  # noqa: E402

SMALL: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 8,
    "num_heads": 2,
    "num_kv_heads": 2,
    "ffn_size": 12,
    "vocab_size": 36,
    "max_sequence": 32,
}


def checkpoints() -> list[Path]:
    return sorted(path for path in HERE.glob("checkpoint-*") if path.is_dir())


def plans() -> list[Path]:
    return sorted(HERE.glob("plan-*.json"))


def digests(folder: Path) -> dict[str, str]:
    reader, found = Reader(folder), {}
    for name, entry in reader.manifest.tensors.items():
        out = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        reader.read_into(name, Box.whole(entry.shape), out)
        found[name] = xxhash.xxh3_128(flat_bytes(out).numpy()).hexdigest()
    return found


def small_trainer(steps: int, checkpoint: Path | None = None) -> Trainer:
    data: Any = MadeData()
    settings = TrainSection(batch=4, steps=steps, optimizer=OptimizerConfig(lr=1e-2, schedule="constant"))
    plan, mesh = Plan(batch=4, microbatch=2, techniques=()), Mesh.make({}, torch.device("cpu"))
    return Trainer(plan, open_config(DecoderConfig(**SMALL), "small", 0), data, settings, mesh, checkpoint=checkpoint)


def load_checkpoint(folder: Path) -> None:
    assert verify(folder) == ()
    wanted = json.loads((HERE / "tensors.json").read_text(encoding="utf-8"))[folder.name]
    assert digests(folder) == wanted["tensors"]
    if "trained" in folder.name:
        trainer = small_trainer(5, folder)
        assert trainer.step == 3
        assert [step.loss for step in trainer.steps()] == pytest.approx(wanted["losses"], rel=1e-4)


def load_plan(path: Path) -> None:
    plan = load_artefact(Plan, path)
    assert Plan.from_json(plan.to_json()) == plan
    said = json.loads(path.read_text(encoding="utf-8"))
    assert [each.name for each in plan.techniques] == [each["name"] for each in said["techniques"]]
    assert (plan.batch, plan.microbatch) == (said["batch"], said["microbatch"])
    wanted = json.loads((HERE / "plans.json").read_text(encoding="utf-8"))[path.name]
    assert str(plan) == wanted


@pytest.mark.parametrize("folder", checkpoints(), ids=lambda folder: folder.name)
def test_every_released_checkpoint_loads(folder: Path) -> None:
    load_checkpoint(folder)


@pytest.mark.parametrize("path", plans(), ids=lambda path: path.name)
def test_every_released_plan_loads(path: Path) -> None:
    load_plan(path)


def test_every_version_so_far_is_here() -> None:
    assert {json.loads(path.read_text(encoding="utf-8"))["version"] for path in plans()} == set(
        range(1, Plan.VERSION + 1)
    )
    assert {Reader(folder).manifest.version for folder in checkpoints()} == {1}
