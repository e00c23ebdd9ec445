"""A tiny model that one rank trains in this process, from the start or from a checkpoint."""

from __future__ import annotations

from typing import Any

import tiny
import torch

from meshwright.checkpoint.load import Reader
from meshwright.core.plan import Plan
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.runtime.checkpointing import restore_optimizer, source_of
from meshwright.verify import parity

RATE = 1e-2


def session_of(opened: Any, *techniques: object, reader: Reader | None = None) -> parity.Session:
    """`reader`: of a checkpoint, whose weights and states it begins with."""
    plan = Plan(techniques=techniques, batch=4, microbatch=4)  # type: ignore[arg-type]
    if reader is not None:
        opened.source = source_of(reader, opened.source, ())
    where = torch.device("cpu")
    session = parity.open_session(plan, opened, OptimizerConfig(lr=RATE), dtype="float32", device=where)
    if reader is not None:
        restore_optimizer(reader, session.build, session.loop.optimizer)
    return session


def train(session: parity.Session, steps: range, vocab_size: int) -> list[float]:
    samples = parity.random_samples(vocab_size, 4, tiny.SEQUENCE)
    return [session.loop.step(samples(step, 0, 1), RATE).loss for step in steps]
