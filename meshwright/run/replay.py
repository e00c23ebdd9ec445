"""`mw replay`: a step of a run again, from the checkpoint before it, in processes of its own. No torch.

Nothing in the run's folder changes; the run may go on meanwhile.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.checkpoint.step_folders import usable_folders, verify
from meshwright.core.cluster import Cluster
from meshwright.core.codec import encode, load_artefact
from meshwright.core.errors import error_at
from meshwright.core.files import json_rows, refuse_link
from meshwright.core.plan import Plan
from meshwright.launch.rank_pool import RankPool
from meshwright.run.model import describe_run
from meshwright.run.prepare import RUN_FILE
from meshwright.run.run_file import RunConfig, read_run

TROUBLES = "troubles.jsonl"
"""In a run's folder: see `runtime.sanity.Trouble`."""
_DEADLINE_SECONDS = 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class LayerNorms:
    name: str
    output: float | None
    """Of the layer's last output, largest absolute value over all microbatches; None where it has not run."""
    weights: float
    gradients: float


@dataclass(frozen=True, kw_only=True)
class ReplayedStep:
    step: int
    """The first is 1."""
    cursor: int
    from_step: int
    """Of the checkpoint; 0 where the run begins."""
    plan: str
    loss: float
    gradient_norm: float
    recorded_loss: float | None
    """Of the run; None where it was not written down."""
    recorded_gradient_norm: float | None
    samples: tuple[int, ...]
    layers: tuple[LayerNorms, ...]
    first_bad: tuple[str, ...]
    """Of each rank that met any, the first tensor that was not finite, in words."""
    bad_samples: tuple[int, ...]
    """Whose rows were not finite in it."""


def config_of_run(path: str | Path) -> RunConfig:
    """What a run was started with: from its folder, or its file."""
    path = Path(path)
    if not path.is_dir():
        return read_run(path)
    refuse_link(path / RUN_FILE)
    if not (path / RUN_FILE).exists():
        what = f"no {RUN_FILE} is there, so no run was started in it."
        raise error_at(path, what, "Give a run's folder (run.folder) or its file.")
    config = load_artefact(RunConfig, path / RUN_FILE)
    return replace(config, run=replace(config.run, folder=str(path)))


def _rows(path: Path) -> list[dict[str, Any]]:
    with contextlib.suppress(OSError):
        return [row for row in json_rows(path.read_bytes()) if isinstance(row.get("step"), int)]
    return []


def troubled_steps(folder: Path) -> tuple[int, ...]:
    return tuple(dict.fromkeys(row["step"] for row in _rows(folder / TROUBLES)))


def replay(path: str | Path, steps: Sequence[int] = (), *, on_one_rank: bool = False) -> list[ReplayedStep]:
    """Steps again, or without any the troubled ones. `on_one_rank`: in one process in place of the plan's."""
    config = config_of_run(path)
    folder = Path(config.run.folder)
    plan = load_artefact(Plan, folder / "plan.json")
    if on_one_rank:
        techniques = tuple(each for each in plan.techniques if not each.axis)
        plan = Plan(techniques=techniques, batch=plan.batch, microbatch=plan.microbatch)
    asked = tuple(steps) or troubled_steps(folder)
    if not asked:
        raise error_at(folder, "has no troubled step.", "Name one: `mw replay RUN STEP`; the first is 1.")
    if min(asked) < 1:
        raise error_at("STEP", f"is {min(asked)}.", "The first step is 1.")
    if (last := config.train.steps) < max(asked):
        raise error_at("STEP", f"is {max(asked)}, and the run has {last} steps.", f"Use 1 to {last}.")
    device = load_artefact(Cluster, folder / "cluster.json").device.kind
    told: dict[str, Any] = {"run": encode(config), "model": encode(describe_run(config)), "plan": encode(plan)}
    found = []
    with RankPool(plan.num_ranks, threads_per_rank=max(1, len(os.sched_getaffinity(0)) // plan.num_ranks)) as pool:
        for step in asked:
            place = _place(folder, step, plan.batch)
            arguments = {**told, "kind": device, "step": step, **place}
            answers = pool.run("meshwright.runtime.replay:replay_step", arguments, plan.num_ranks, _DEADLINE_SECONDS)
            found.append(_joined(folder, step, place, str(plan), answers))
    return found


def _place(folder: Path, step: int, batch: int) -> dict[str, Any]:
    """The checkpoint to start from, and where in the data the run went on from it."""
    good = {made: each for made, each in usable_folders(folder / "checkpoints").items() if made < step}
    made, checkpoint = next((each for each in sorted(good.items(), reverse=True) if not verify(each[1])), (0, None))
    # A roll back writes the checkpoint again with the cursor moved past the batch that was to blame.
    cursors = [row.get("cursor") for row in _rows(folder / TROUBLES) if row["step"] == step]
    cursor = cursors[-1] - (step - 1 - made) * batch if cursors and isinstance(cursors[-1], int) else None
    return {"checkpoint": "" if checkpoint is None else str(checkpoint), "from_step": made, "cursor": cursor}


def _joined(folder: Path, step: int, place: Mapping[str, Any], plan: str, answers: Sequence[Any]) -> ReplayedStep:
    """One answer from those of the ranks."""
    rows = [*_rows(folder / "metrics.jsonl"), *_rows(folder / TROUBLES)]
    recorded: dict[str, Any] = next((row for row in reversed(rows) if row["step"] == step and "loss" in row), {})
    first = answers[0]
    layers: dict[str, list[Any]] = {}
    for rank in answers:
        for name, *numbers in rank["layers"]:
            layers.setdefault(name, []).append(numbers)
    norms = []
    for name, told in layers.items():
        outputs = [output for output, _, _ in told if output is not None]
        squares = [sum(float(each[column]) for each in told) for column in (1, 2)]
        norms.append(
            LayerNorms(
                name=name,
                output=max(map(float, outputs), default=None),
                weights=squares[0] ** 0.5,
                gradients=squares[1] ** 0.5,
            )
        )
    return ReplayedStep(
        step=step,
        cursor=first["cursor"],
        from_step=place["from_step"],
        plan=plan,
        loss=float(first["loss"]),
        gradient_norm=float(first["gradient_norm"]),
        recorded_loss=_number(recorded.get("loss")),
        recorded_gradient_norm=_number(recorded.get("gradient_norm")),
        samples=tuple(first["samples"]),
        layers=tuple(norms),
        first_bad=tuple(rank["first_bad"] for rank in answers if rank["first_bad"]),
        bad_samples=tuple(sorted({sample for rank in answers for sample in rank["bad_samples"]})),
    )


def _number(value: Any) -> float | None:
    """What is not finite is a text in JSON."""
    with contextlib.suppress(TypeError, ValueError):
        return float(value)
    return None
