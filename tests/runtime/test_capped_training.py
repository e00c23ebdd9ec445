"""Training under `train.memory_cap`: the same bits within the cap, in trainers and in runs of several ranks.

Tests of `runtime/trainer.py`, `runtime/loop.py`, `run/run_file.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from command import mw, write_plan, write_run
from test_train import tensors
from test_trainer import CONFIG, MadeData

from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.ops.device_mesh import Mesh
from meshwright.optimizers.update import OptimizerConfig
from meshwright.run.model import open_config
from meshwright.run.run_file import TrainSection
from meshwright.runtime.trainer import Trainer

DEEP = replace(CONFIG, num_layers=8)
PLANS = ((), (tiny.RECOMPUTE_SOME,), (tiny.BF16,), (tiny.IN_BACKWARD,), (tiny.CHUNKED, tiny.LOW_BIT))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trained(techniques: tuple[Any, ...], cap_bytes: int, copy_rate: float = 0.0) -> tuple[Trainer, list[Any]]:
    """Three steps of two microbatches each, where there may be two; 0 bytes: without a cap."""
    optimizer = OptimizerConfig(lr=1e-2, schedule="constant", clip=0.0 if tiny.IN_BACKWARD in techniques else 1.0)
    cap = f"{cap_bytes}B" if cap_bytes else ""
    settings = TrainSection(batch=8, steps=3, optimizer=optimizer, memory_cap=cap)
    mesh, data = Mesh.make({}, torch.device("cpu")), MadeData()
    plan = Plan(batch=8, microbatch=8 if tiny.IN_BACKWARD in techniques else 4, techniques=techniques)
    trainer = Trainer(plan, open_config(DEEP, "tiny", 0), data, settings, mesh)  # type: ignore[arg-type]
    if trainer.loop.cap is not None and copy_rate:
        trainer.loop.cap.copy_rate = copy_rate
    return trainer, list(trainer.steps())


def state_of(trainer: Trainer) -> list[torch.Tensor]:
    states = [kept[2] for kept in trainer.optimizer.state()]
    return [*(value for _, value in trainer.build.local_parameters()), *states]


@pytest.mark.parametrize("techniques", PLANS, ids=tiny.joined)
def test_a_trainer_gives_the_same_bits_under_a_cap(techniques: tuple[Any, ...]) -> None:
    free, steps = trained(techniques, 0)
    assert free.loop.cap is None
    assert not any(step.evicted for step in steps)
    loose, _ = trained(techniques, 2**40)
    assert loose.loop.cap is not None
    peak = loose.loop.cap.peak_bytes
    for copy_rate, way in ((1e3, "dropped_bytes"), (1e12, "swapped_bytes")):
        tight, told = trained(techniques, int(0.75 * peak), copy_rate)
        assert tight.loop.cap is not None
        assert tight.loop.cap.peak_bytes <= 0.75 * peak
        assert all(torch.equal(a, b) for a, b in zip(state_of(free), state_of(tight), strict=True))
        assert [step.loss for step in told] == [step.loss for step in steps]
        assert all(step.evicted["evictions"] and step.evicted[way] for step in told[1:])


@contextmanager
def suppress_cap_error(places: set[str]) -> Iterator[None]:
    """Notes where the memory was not enough."""
    try:
        yield
    except MeshwrightError as caught:
        found = re.search(r"^train.memory_cap: is .* a step needs [0-9.]+ KiB in (blocks|layers)", str(caught))
        places.add(found[1] if found and caught.exit_code == 1 else str(caught))


def test_a_cap_that_nothing_can_meet_is_told_with_the_place_and_the_bytes() -> None:
    loose, _ = trained((), 2**40)
    assert loose.loop.cap is not None
    places: set[str] = set()
    for share in range(10, 50, 2):
        with suppress_cap_error(places):
            trained((), loose.loop.cap.peak_bytes * share // 100)
    assert places == {"blocks", "layers"}


@pytest.mark.parametrize("cap", ["0GiB", "-1GiB", "abc", "20", "20GiBit", "x2"])
def test_what_is_no_size_is_refused(cap: str) -> None:
    with pytest.raises(MeshwrightError, match="memory_cap"):
        TrainSection(batch=1, steps=1, memory_cap=cap)


@pytest.mark.parametrize(
    ("technique", "why"),
    [
        (tiny.COMPILE, "single pieces"),
        (tiny.ZBV, "gradients of weights"),
        (tiny.t("pipeline", size=2, schedule="async"), "overlap"),
    ],
)
def test_plans_it_cannot_hold_with_are_refused(technique: Any, why: str) -> None:
    settings, plan = TrainSection(batch=8, steps=1, memory_cap="1GiB"), Plan(batch=8, techniques=(technique,))
    (problem,) = settings.problems_with(plan)
    assert technique.name in problem.what
    assert why in problem.what
    assert not replace(settings, memory_cap="").problems_with(plan)


CHANGES = ("train.batch=32", "train.steps=3", "train.save_every=3", "data.sequence=64", "model.change={num_layers=6}")


def run(folder: Path, technique: dict[str, object], *changes: str) -> Any:
    """A plan without recomputation: its forecast knows nothing of a cap."""
    words = [word for change in (*CHANGES, *changes) for word in ("--set", change)]
    plan = write_plan(folder, technique, microbatch=8, batch=32)
    return mw("train", write_run(folder), "--plan", plan, *words)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("pipeline", "shard")]


@pytest.mark.parametrize("name", ["tensor", *SLOW])
def test_ranks_train_the_same_bits_under_a_cap_below_their_peak(name: str, tmp_path: Path) -> None:
    free, capped = tmp_path / "free", tmp_path / "capped"
    for folder, changes in ((free, ()), (capped, ("train.memory_cap=4MiB",))):
        folder.mkdir()
        done = run(folder, {"name": name, "size": 2}, *changes)
        assert done.returncode == 0, done.stderr
    assert tensors(capped, 3) == tensors(free, 3)
    lines = [json.loads(line) for line in (capped / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["evictions"] > 0 for line in lines if "loss" in line)
    summary = json.loads((capped / "run" / "summary.json").read_text())
    assert summary["evicted"]["swapped_bytes"] > 4 * 2**20
    assert "memory cap 4MiB: " in done.stderr
    assert json.loads((free / "run" / "summary.json").read_text())["evicted"] == {}


def test_a_run_says_which_cap_it_cannot_meet_or_hold(tmp_path: Path) -> None:
    done = run(tmp_path, {"name": "replicate", "size": 2}, "train.memory_cap=1MiB")
    assert done.returncode == 1
    assert "train.memory_cap: is 1.0 MiB; with all evicted that can be, a step needs" in done.stderr
    done = run(tmp_path, {"name": "compile"}, "train.memory_cap=1MiB")
    assert done.returncode == 2
    assert "cannot hold with compile" in done.stderr
    done = run(tmp_path, {"name": "replicate", "size": 2}, "train.memory_cap=much")
    assert done.returncode == 2
    assert 'train.memory_cap: "much" is no amount.' in done.stderr
