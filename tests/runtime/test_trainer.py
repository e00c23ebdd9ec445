"""A trainer whose loop reads late: every step told once, nothing of a bad one kept, scales restored exactly."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from meshwright.checkpoint.memory_folder import MemoryFolder
from meshwright.checkpoint.step_folders import list_steps, step_folder
from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named
from meshwright.data.dataset import Batch
from meshwright.models.presets import DecoderConfig
from meshwright.ops.device_mesh import Mesh
from meshwright.optimizers.update import OptimizerConfig
from meshwright.run.model import open_config
from meshwright.run.run_file import TrainSection
from meshwright.runtime.trainer import Trainer, TrainStep, is_due, samples_on

CONFIG = DecoderConfig(**tiny.LLAMA)
BATCH, STEPS = 4, 6


class MadeData:
    """Random tokens; the weights of some steps are multiplied by something."""

    num_held_out, fingerprint, file_states = 0, "made", {}

    def __init__(self, factors: dict[int, float] | None = None):
        self.factors, self.info = factors or {}, SimpleNamespace(num_bytes_per_token=0)

    def batch(self, cursor: int, batch: int, *place: Any) -> Batch:
        rows = np.random.default_rng(cursor).integers(0, CONFIG.vocab_size, (batch, tiny.SEQUENCE + 1))
        weights = np.full((batch, tiny.SEQUENCE), self.factors.get(cursor // batch, 1.0), dtype=np.float32)
        return Batch(inputs=rows[:, :-1], targets=rows[:, 1:], weights=weights, num_tokens=float(batch * tiny.SEQUENCE))


def trainer_of(
    data: MadeData,
    *,
    dtype: str = "fp32",
    steps: int = STEPS,
    name: str = "adamw",
    checkpoint: Path | MemoryFolder | None = None,
) -> Trainer:
    plan = Plan(batch=BATCH, microbatch=2, techniques=(technique_named("precision")(dtype=dtype),))
    optimizer = OptimizerConfig(name=name, lr=1e-2, schedule="constant")
    settings = TrainSection(batch=BATCH, steps=steps, optimizer=optimizer, save_every=3)
    mesh = Mesh.make({}, torch.device("cpu"))
    made: Any = data
    return Trainer(plan, open_config(CONFIG, "tiny", 0), made, settings, mesh, checkpoint=checkpoint)


def run(trainer: Trainer, folder: Path | None = None) -> list[TrainStep]:
    told = []
    for step in trainer.steps():
        told.append(step)
        if folder is not None and is_due(trainer.step, trainer.settings.save_every):
            assert trainer.save(folder) == ""
    return told


def state_of(trainer: Trainer) -> list[torch.Tensor]:
    optimizer = trainer.optimizer
    values = [*(value for _, value in trainer.build.local_parameters()), *(kept[2] for kept in optimizer.state())]
    counts = [kept["step"] for kept in optimizer.rule.inner.state.values()]  # type: ignore[attr-defined]
    return [value.clone() for value in (*values, *counts, torch.tensor(optimizer.num_steps))]


def assert_same(one: Trainer, other: Trainer) -> None:
    assert all(torch.equal(a, b) for a, b in zip(state_of(one), state_of(other), strict=True))
    assert one.build.loss_scaling == other.build.loss_scaling


def test_every_step_is_told_once_with_its_own_loss() -> None:
    trainer, waiting = trainer_of(MadeData()), trainer_of(MadeData(), name="lion")
    assert trainer.loop.reads_late
    assert not waiting.loop.reads_late
    told = run(trainer)
    assert [step.step for step in told] == list(range(STEPS))
    twin = trainer_of(MadeData())
    for step, known in enumerate(told):
        wanted = twin.loop.step(samples_on(twin.data.batch(step * BATCH, BATCH, 0, 1, ()), twin.mesh.device), known.lr)
        assert (known.loss, known.gradient_norm) == (wanted.loss, wanted.gradient_norm)
        assert 0 < known.data_seconds < known.seconds
    assert [step.step for step in run(waiting)] == list(range(STEPS))


def test_a_wish_to_stop_is_heard_in_the_same_step() -> None:
    stop = SimpleNamespace(is_set=False)
    trainer, told = trainer_of(MadeData()), []
    for step in trainer.steps(stop):
        told.append(step)
        stop.is_set = step.step == 0  # while the second step has been launched
    assert [step.must_stop for step in told] == [False, False, True]


@pytest.mark.parametrize("bad", [0, 1, 2, 5])
def test_a_bad_step_leaves_the_state_before_it_in_memory_and_on_disk(bad: int, tmp_path: Path) -> None:
    """The first, one in the middle, the one before a save, and the last."""
    trainer = trainer_of(MadeData({bad: float("nan")}))
    with pytest.raises(MeshwrightError, match="this step was not taken"):
        run(trainer, tmp_path)
    assert trainer.step == bad
    assert trainer.cursor == bad * BATCH
    twin = trainer_of(MadeData(), steps=max(bad, 1))
    if bad:
        run(twin)
    assert_same(trainer, twin)
    assert list(list_steps(tmp_path)) == ([3] if bad > 2 else [])


def test_steps_that_are_left_and_taken_up_again_are_the_same_steps() -> None:
    trainer, whole = trainer_of(MadeData()), trainer_of(MadeData())
    first = list(itertools.islice(trainer.steps(), 2))  # a third one is under way
    told = [*first, *run(trainer)]
    assert [(step.step, step.loss) for step in told] == [(step.step, step.loss) for step in run(whole)]
    assert_same(trainer, whole)


def test_a_step_before_an_error_of_the_data_is_told_first() -> None:
    class Broken(MadeData):
        def batch(self, cursor: int, batch: int, *place: Any) -> Batch:
            if cursor == 2 * BATCH:
                raise OSError("gone")
            return super().batch(cursor, batch, *place)

    trainer = trainer_of(Broken())
    steps = trainer.steps()
    assert [next(steps).step for _ in range(2)] == [0, 1]
    with pytest.raises(OSError, match="gone"):
        next(steps)
    assert (trainer.step, trainer.cursor, trainer.optimizer.num_steps) == (2, 2 * BATCH, 2)
    trainer.loop.require_rest()


def test_an_error_inside_a_bad_step_refuses_no_later_one() -> None:
    trainer = trainer_of(MadeData({0: float("nan")}))
    update = trainer.optimizer.update

    def fail(*given: Any) -> None:
        trainer.optimizer.update = update  # type: ignore[method-assign]
        raise KeyboardInterrupt

    trainer.optimizer.update = fail  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run(trainer)
    before, good = state_of(trainer), MadeData()
    trainer.loop.step(samples_on(good.batch(0, BATCH), trainer.mesh.device), 1e-2)
    assert not all(torch.equal(a, b) for a, b in zip(before[:-1], state_of(trainer)[:-1], strict=True))


OVERFLOWS = {0: 1e30, 2: 1e30, 4: 1e30}


def test_an_overflow_of_fp16_skips_the_step_and_halves_the_scale() -> None:
    trainer = trainer_of(MadeData(OVERFLOWS), dtype="fp16")
    before = state_of(trainer)
    told = []
    for step in trainer.steps():
        told.append(step)
        if step.is_skipped:
            assert all(torch.equal(a, b) for a, b in zip(before, state_of(trainer), strict=True))
        before = state_of(trainer)
    assert [step.is_skipped for step in told] == [True, False, True, False, True, False]
    assert [step.loss_scale for step in told] == [2.0**n for n in (16, 15, 15, 14, 14, 13)]
    assert trainer.optimizer.num_steps == 3
    assert (trainer.step, trainer.cursor) == (STEPS, STEPS * BATCH)


def test_a_resumed_run_of_fp16_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    whole = trainer_of(MadeData(OVERFLOWS), dtype="fp16")
    run(whole, tmp_path)
    resumed = trainer_of(MadeData(OVERFLOWS), dtype="fp16", checkpoint=step_folder(tmp_path, 3))
    assert resumed.build.loss_scaling is not None
    assert (resumed.build.loss_scaling.scale, resumed.build.loss_scaling.num_good) == (2.0**14, 0)
    assert (resumed.step, resumed.optimizer.num_steps) == (3, 1)
    run(resumed)
    assert_same(resumed, whole)
    other = trainer_of(MadeData(OVERFLOWS), checkpoint=step_folder(tmp_path, 3))  # in float32 from here on
    assert other.build.loss_scaling is None
    assert other.optimizer.num_steps == 1


def test_a_scale_that_cannot_help_ends_the_run() -> None:
    trainer = trainer_of(MadeData(dict.fromkeys(range(40), float("inf"))), dtype="fp16", steps=40)
    with pytest.raises(MeshwrightError, match="17 steps in a row, and the loss scale has fallen") as caught:
        run(trainer)
    assert caught.value.exit_code == 1


def test_an_evaluation_ends_when_somebody_asks_to_stop() -> None:
    seen: list[int] = []

    class Held(MadeData):
        num_held_out = 8

        def held_out_batches(self, *place: Any, **about: Any) -> Any:
            for number in range(8):
                seen.append(number)
                yield self.batch(number, BATCH)

    trainer = trainer_of(Held())
    run(trainer)
    stop = SimpleNamespace(is_set=False)
    assert trainer.evaluate(stop)["held_out_loss"] > 0
    assert seen == list(range(8))
    stop.is_set = True
    assert trainer.evaluate(stop) == {}
    assert seen == [*range(8), 0]
