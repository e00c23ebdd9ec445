"""What `mw ckpt list` and `mw ckpt verify` say: one row per checkpoint, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.checkpoint.format import read_manifest, usable_folders, verify
from meshwright.core.codec import decode
from meshwright.core.errors import MeshwrightError, Problems
from meshwright.core.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRow:
    step: int
    bytes: int
    num_files: int
    num_tensors: int
    when_utc: str
    plan: str | None
    damage: str = ""
    """Why its manifest cannot be read; the counts are then 0. Shards are not read here: see `verify_all`."""


def describe(root: Path) -> list[CheckpointRow]:
    """Every checkpoint, oldest first, from its manifest."""
    return [_describe(step, folder) for step, folder in usable_folders(root).items()]


def _describe(step: int, folder: Path) -> CheckpointRow:
    try:
        manifest = read_manifest(folder)
    except MeshwrightError as error:
        damage = str(error.problems[0])
        return CheckpointRow(step=step, bytes=0, num_files=0, num_tensors=0, when_utc="", plan=None, damage=damage)
    return CheckpointRow(
        step=step,
        bytes=manifest.total_bytes,
        num_files=len(manifest.files),
        num_tensors=len(manifest.tensors),
        when_utc=manifest.saved_utc,
        plan=_plan_text(manifest.state.get("plan")),
    )


def _plan_text(plan: Any) -> str | None:
    """The plan as its one line; the names of its techniques when this program does not know them all."""
    if not isinstance(plan, Mapping):
        return plan if isinstance(plan, str) else None
    try:
        return str(decode(Plan, plan, "plan"))
    except MeshwrightError:
        techniques = plan.get("techniques")
        listed = techniques if isinstance(techniques, list) else []
        return " + ".join(str(t.get("name")) for t in listed if isinstance(t, Mapping)) or None


def verify_all(root: Path) -> dict[int, Problems]:
    """Step -> everything wrong with that checkpoint (an empty tuple when every byte is right)."""
    return {step: verify(folder) for step, folder in usable_folders(root).items()}
