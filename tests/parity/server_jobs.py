"""What workers of a parameter server run for `test_parameter_server`."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import tiny
import torch

from meshwright.core.codec import decode
from meshwright.core.plan import Plan
from meshwright.models.presets import DecoderConfig
from meshwright.optimizers.pulled_weights import ServerExchange
from meshwright.optimizers.update import OptimizerConfig
from meshwright.run.model import open_config
from meshwright.runtime.checkpointing import save
from meshwright.runtime.loop import NO_LIMITS
from meshwright.verify import parity


def paced_job(
    *, plan: dict[str, Any], optimizer: dict[str, Any], config: dict[str, Any], steps: int, seconds: list[float],
    folder: str = "", stop: list[int] | None = None, bad: list[int] | None = None, kill: int = -1, rank: int,
    num_ranks: int, rendezvous: str,
) -> dict[str, Any]:  # fmt: skip
    """Steps whose forward passes take up to so many `seconds` more on each rank. `stop`: (rank, step) that asks all to
    stop; `bad`: that has a loss of NaN; `kill`: the step before which the first rank kills its server."""
    parity.enter(rank, num_ranks, rendezvous)
    chosen, rates = Plan.from_json(json.dumps(plan)), decode(OptimizerConfig, optimizer, "optimizer")
    opened = open_config(decode(DecoderConfig, config, "config"), "tiny", 0)
    session = parity.open_session(chosen, opened, rates, dtype="float64", device=torch.device("cpu"))
    (exchange,) = (each for each in session.build.exchanges if isinstance(each, ServerExchange))
    samples = parity.random_samples(config["vocab_size"], chosen.batch, tiny.SEQUENCE)
    drawn = random.Random(rank)

    def wait(kind: str) -> None:
        if kind == "forward":
            time.sleep(drawn.uniform(0.5, 1) * seconds[rank])

    session.build.on_action.append(wait)
    answer: dict[str, Any] = {"losses": [], "norms": [], "seconds": [], "refused": []}
    for step in range(steps):
        if kill == step and rank == 0:
            os.kill(exchange.child.process.pid, signal.SIGKILL)
        start = time.monotonic()
        given = parity.own_samples(session, samples, step)
        if bad == [rank, step]:
            given = replace(given, weights=given.weights * math.nan)
        (result,) = session.loop.feed(given, rates.lr, stop=stop == [rank, step], limits=NO_LIMITS)
        answer["seconds"].append(time.monotonic() - start)
        answer["losses"].append(result.loss)
        answer["norms"].append(result.gradient_norm)
        answer["refused"] += [step] if result.refusal else []
        if result.must_stop:
            break
    answer["record"] = exchange.read(record=True)
    answer["figures"] = dict(exchange.take_figures())
    if folder:
        assert not save(Path(folder), len(answer["losses"]), session.build, session.loop.optimizer, {}, keep=9)
    answer["held"] = {name: value.flatten().tolist() for name, value in session.build.local_parameters()}
    parity.leave()
    return answer
