"""What islands run for `test_local_steps` and `test_compress_gradients`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tiny
import torch

from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.step_folders import step_folder
from meshwright.core.codec import decode
from meshwright.core.plan import Plan
from meshwright.models.presets import DecoderConfig
from meshwright.ops.gradient_codecs import CodedSum
from meshwright.ops.traffic import TrafficRecorder
from meshwright.optimizers.update import OptimizerConfig
from meshwright.run.model import open_config
from meshwright.runtime.checkpointing import restore_optimizer, save, source_of
from meshwright.verify import parity

CPU = torch.device("cpu")


def trained_job(
    *, plan: dict[str, Any], optimizer: dict[str, Any], steps: int, folder: str, config: dict[str, Any] = tiny.LLAMA,
    first: int = 0, save_at: int = 0, resume: str = "", last: int = 0, traffic: bool = False, rank: int,
    num_ranks: int, rendezvous: str,
) -> dict[str, Any]:  # fmt: skip
    """Steps from `first` on. A checkpoint in `folder` at the end, and before at `save_at`; step `last` is the run's.

    Answers what an evaluation says after each step, what this rank holds at the end, the figures and the traffic of
    all steps.
    """
    parity.enter(rank, num_ranks, rendezvous)
    chosen, rates = Plan.from_json(json.dumps(plan)), decode(OptimizerConfig, optimizer, "optimizer")
    shape = decode(DecoderConfig, config, "config")
    opened = open_config(shape, "tiny", 0)
    reader = Reader(step_folder(Path(resume), first)) if resume else None
    if reader is not None:
        opened.source = source_of(reader, opened.source, ())
    session = parity.open_session(chosen, opened, rates, dtype="float64", device=CPU)
    if reader is not None:
        restore_optimizer(reader, session.build, session.loop.optimizer)
    samples = parity.random_samples(shape.vocab_size, chosen.batch, tiny.SEQUENCE)
    answer: dict[str, Any] = {"evaluated": [], "losses": [], "norms": [], "figures": []}
    recorder = TrafficRecorder(session.mesh.axis_of_group())
    for step in range(first, first + steps):
        session.build.is_last_step = step + 1 == last
        given = parity.own_samples(session, samples, step)
        with recorder:
            result = session.loop.step(given, rates.lr)
        answer["losses"].append(result.loss)
        answer["norms"].append(result.gradient_norm)
        answer["figures"].append([dict(exchange.take_figures()) for exchange in session.build.exchanges])
        if not traffic:
            total, tokens, _ = session.loop.evaluate([given])
            answer["evaluated"].append(total / tokens)
        if step + 1 == save_at:
            assert not save(Path(folder), save_at, session.build, session.loop.optimizer, {}, keep=9)
    if folder:
        assert not save(Path(folder), first + steps, session.build, session.loop.optimizer, {}, keep=9)
    answer["traffic"] = sorted([*key, count] for key, count in recorder.traffic.items())
    answer["held"] = {name: value.flatten().tolist() for name, value in session.build.local_parameters()}
    parity.leave()
    return answer


def repeated_sum_job(
    *, settings: dict[str, Any], rounds: int, rank: int, num_ranks: int, rendezvous: str
) -> dict[str, float]:
    """How far the mean of equal sums, again and again, is from the sum: with and without feedback."""
    parity.enter(rank, num_ranks, rendezvous)
    found = {}
    plan = tiny.plan_of(tiny.REPLICATE)
    for feedback in (True, False):
        opened = open_config(decode(DecoderConfig, tiny.LLAMA, "config"), "tiny", 0)
        rates = decode(OptimizerConfig, tiny.ADAMW, "optimizer")
        build = parity.open_session(plan, opened, rates, dtype="float64", device=CPU).build
        name = "blocks.0.mlp.up.weight"
        given = torch.randn(24, 16, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        coding: Any = tiny.t("compress_gradients", **settings, feedback=feedback)
        coded, total = CodedSum(build, coding, "dp", [name], [given]), torch.zeros_like(given)
        for _ in range(rounds):
            values = [given.clone()]
            coded(values)
            coded.commit()
            total += values[0] / rounds
        wanted = given.clone()
        torch.distributed.all_reduce(wanted)
        found["with" if feedback else "without"] = float((total - wanted).norm() / wanted.norm())
    parity.leave()
    return found
