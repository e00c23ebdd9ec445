"""What ranks of the pool run for `test_sanity`: a trainer on data of which some batches are bad in their first row."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import tiny
import torch

from meshwright.checkpoint.step_folders import newest_good
from meshwright.core.codec import decode
from meshwright.core.plan import Plan
from meshwright.data.dataset import Batch, part_rows
from meshwright.models.presets import DecoderConfig
from meshwright.ops.device_mesh import Mesh
from meshwright.run.model import open_config
from meshwright.run.run_file import TrainSection
from meshwright.runtime.sanity import TrainingTrouble
from meshwright.runtime.trainer import Trainer, is_due
from meshwright.verify import parity


class SpoiledData:
    """Random tokens of which every batch is the same, but for its first row; that of some batches is spoiled."""

    num_held_out, fingerprint, file_states = 0, "made", {}

    def __init__(self, batch: int, factors: dict[int, float]):
        self.size, self.factors = batch, factors
        self.info = SimpleNamespace(num_bytes_per_token=0)

    def batch(self, cursor: int, batch: int, part: int = 0, num_parts: int = 1, shares: Any = ()) -> Batch:
        tokens = np.random.default_rng(0).integers(0, tiny.LLAMA["vocab_size"], (batch, tiny.SEQUENCE + 1))
        tokens[0] = np.random.default_rng(cursor).integers(0, tiny.LLAMA["vocab_size"], tiny.SEQUENCE + 1)
        weights = np.ones((batch, tiny.SEQUENCE), dtype=np.float32)
        weights[0] *= self.factors.get(cursor // self.size, 1.0)
        rows = part_rows(batch, part, num_parts, shares)
        numbers = {"targets": tokens[rows, 1:].copy(), "weights": weights[rows]}
        return Batch(inputs=tokens[rows, :-1].copy(), num_tokens=float(batch * tiny.SEQUENCE), **numbers)


def digest(trainer: Trainer) -> str:
    trainer.loop.optimizer.rule.finish()
    found = hashlib.sha256(str(trainer.optimizer.num_steps).encode())
    for value in (*(v for _, v in trainer.build.local_parameters()), *(k[2] for k in trainer.optimizer.state())):
        found.update(value.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def opened(plan: Plan, settings: dict[str, Any], factors: dict[int, float], **given: Any) -> Trainer:
    section = decode(TrainSection, settings, "train")
    mesh = Mesh.make(plan.mesh, torch.device("cpu"))
    data: Any = SpoiledData(plan.batch, factors)
    return Trainer(plan, open_config(DecoderConfig(**tiny.LLAMA), "tiny", 0), data, section, mesh, **given)


def follow(trainer: Trainer, folder: str, answer: dict[str, Any]) -> None:
    """Train, save when it is due, and roll back where the trainer asks for it."""
    while trainer.step < trainer.settings.steps:
        try:
            for step in trainer.steps():
                trouble = step.trouble
                told = [step.step, step.loss, step.is_skipped, "" if trouble is None else trouble.reason]
                is_resting = not trainer.fed
                answer["steps"].append([*told, trainer.cursor, digest(trainer) if is_resting else ""])
                if folder and is_due(trainer.step, trainer.settings.save_every):
                    assert trainer.save(Path(folder)) == ""
        except TrainingTrouble as error:
            trouble = error.trouble
            answer["raised"].append([trouble.step, trouble.reason, trouble.action, str(error), error.is_state_good])
            if trouble.action == "stop":
                break
            newest = newest_good(Path(folder), report=print)
            assert newest is not None
            trainer.roll_back(newest)
            trainer.cursor = trouble.cursor + trainer.plan.batch
            answer["steps"].append([trainer.step, 0.0, False, "rolled back", trainer.cursor, digest(trainer)])
    answer["last"] = [trainer.step, trainer.cursor, digest(trainer)]


def train_job(
    *, plan: dict[str, Any], settings: dict[str, Any], factors: dict[str, float], folder: str = "", jump: int = -1,
    rank: int, num_ranks: int, rendezvous: str,
) -> dict[str, Any]:  # fmt: skip
    """`jump`: a step that is left out, as if it had been skipped."""
    if num_ranks > 1:
        parity.enter(rank, num_ranks, rendezvous)
    answer: dict[str, Any] = {"steps": [], "raised": []}
    chosen = Plan.from_json(json.dumps(plan))
    trainer = opened(chosen, settings, {int(step): float(factor) for step, factor in factors.items()})
    if jump >= 0:
        whole, trainer.settings = trainer.settings, replace(trainer.settings, steps=jump)
        assert len(list(trainer.steps())) == jump
        trainer.settings, trainer.step, trainer.cursor = whole, jump + 1, (jump + 1) * chosen.batch
    follow(trainer, folder, answer)
    if num_ranks > 1:
        del trainer
        parity.leave()
    return answer


class Poisoned(torch.nn.Module):
    """A small language model whose second block turns the letter Z into numbers that are not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.scores = torch.nn.Embedding(256, 16), torch.nn.Linear(16, 256)
        self.blocks = torch.nn.ModuleList(PoisonedBlock() for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        is_poison = (tokens == ord("Z")).unsqueeze(-1)
        for number, block in enumerate(self.blocks):
            x = block(x, is_poison if number == 1 else is_poison & False)
        return self.scores(x)


class PoisonedBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = torch.nn.LayerNorm(16), torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)

    def forward(self, x: torch.Tensor, is_poison: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.relu(self.wide(self.norm(x)))).masked_fill(is_poison, float("inf"))


def poisoned() -> torch.nn.Module:
    return Poisoned()
