"""What ranks of the pool run for `test_sanity`: a trainer on data of which some batches are bad in their first row."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import time
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
from meshwright.runtime.sanity import PARTS, StragglerWatch, TrainingTrouble
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


def flip_bit(trainer: Trainer, kind: str) -> None:
    """In the last of what the rank holds of this kind."""
    held = {"parameter": [value for _, value in trainer.build.local_parameters()]}
    for state in trainer.optimizer.state():
        held.setdefault(state[0], []).append(state[2])
    held[kind][-1].view(-1)[-1:].view(torch.int32).bitwise_xor_(1 << 12)


def follow(trainer: Trainer, folder: str, answer: dict[str, Any], flip: dict[str, Any]) -> None:
    """Train, compare replicas after every step, save when it is due, and roll back where the trainer asks for it."""
    while trainer.step < trainer.settings.steps:
        try:
            for step in trainer.steps():
                trouble = step.trouble
                told = [step.step, step.loss, step.is_skipped, "" if trouble is None else trouble.reason]
                is_resting = not trainer.fed
                answer["steps"].append([*told, trainer.cursor, digest(trainer) if is_resting else ""])
                if trainer.mesh.rank == flip.get("rank") and step.step == flip["step"]:
                    flip_bit(trainer, flip.pop("kind"))
                    flip.clear()
                trainer.check_replicas()
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
            if error.moves_on:
                trainer.cursor = trouble.cursor + trainer.plan.batch
            answer["steps"].append([trainer.step, 0.0, False, "rolled back", trainer.cursor, digest(trainer)])
    answer["last"] = [trainer.step, trainer.cursor, digest(trainer)]


def train_job(
    *, plan: dict[str, Any], settings: dict[str, Any], factors: dict[str, float], folder: str = "", jump: int = -1,
    flip: dict[str, Any] | None = None, rank: int, num_ranks: int, rendezvous: str,
) -> dict[str, Any]:  # fmt: skip
    """`jump`: a step that is left out, as if it had been skipped. `flip`: a bit of a rank's state after a step."""
    if num_ranks > 1:
        parity.enter(rank, num_ranks, rendezvous)
    answer: dict[str, Any] = {"steps": [], "raised": []}
    chosen = Plan.from_json(json.dumps(plan))
    trainer = opened(chosen, settings, {int(step): float(factor) for step, factor in factors.items()})
    if jump >= 0:
        whole, trainer.settings = trainer.settings, replace(trainer.settings, steps=jump)
        assert len(list(trainer.steps())) == jump
        trainer.settings, trainer.step, trainer.cursor = whole, jump + 1, (jump + 1) * chosen.batch
    follow(trainer, folder, answer, flip or {})
    if num_ranks > 1:
        del trainer
        parity.leave()
    return answer


def straggler_job(
    *, plan: dict[str, Any], slow_rank: int, part: str, ratio: float, steps: int, rank: int, num_ranks: int,
    rendezvous: str,
) -> list[Any]:  # fmt: skip
    """What is flagged, each with its step, where a rank computes `ratio` times as long from the 11th step on."""
    parity.enter(rank, num_ranks, rendezvous)
    chosen = Plan.from_json(json.dumps(plan))
    trainer = opened(chosen, {"batch": chosen.batch, "steps": steps}, {})
    watch, told, usual = StragglerWatch(trainer.build), [], []

    def dawdle(kind: str) -> None:
        """In one action of a step, for a share of what the whole step has taken so far."""
        if rank == slow_rank and len(usual) >= 9 and kind == part:
            time.sleep((ratio - 1) * float(np.median(usual)) / chosen.num_microbatches)

    trainer.build.on_action += [watch.look, dawdle]
    for step in trainer.steps():
        if step.step < 10 and watch.before is not None:
            marks = watch.before[0]
            pairs = itertools.pairwise(marks)
            usual.append(sum(end - start for (name, start), (_, end) in pairs if name in PARTS))
        if (found := watch.end_step(step.data_seconds)) is not None:
            told.append([step.step, found.rank, found.part, found.ratio])
    del trainer
    parity.leave()
    return told


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


class Hungry(Poisoned):
    """Wants 16 TiB where a microbatch has two rows, from the fourth step on."""

    calls = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = super().forward(tokens)
        self.calls += self.training and torch.is_grad_enabled() and type(tokens) is torch.Tensor
        if self.calls > 3 and len(tokens) > 1:
            x = x + torch.empty(1 << 44, dtype=torch.uint8).sum()
        return x


def hungry() -> torch.nn.Module:
    return Hungry()


class Frail(Poisoned):
    """Its rank 1 is killed in the second step of every start."""

    calls = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += self.training and torch.is_grad_enabled() and type(tokens) is torch.Tensor
        if self.calls > 2 and os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(tokens)


def frail() -> torch.nn.Module:
    return Frail()
