"""What peers run for `test_gossip`."""

from __future__ import annotations

import json
from typing import Any

import tiny
import torch

from meshwright.core.codec import decode
from meshwright.core.plan import Plan
from meshwright.models.presets import DecoderConfig
from meshwright.ops.gossip import NeighbourAverages
from meshwright.ops.traffic import TrafficRecorder
from meshwright.optimizers.update import OptimizerConfig
from meshwright.run.model import open_config
from meshwright.verify import parity


def apart_job(
    *, plan: dict[str, Any], config: dict[str, Any], steps: int, rank: int, num_ranks: int, rendezvous: str
) -> dict[str, Any]:
    """Peers whose parameters differ by noise take steps at a rate of 0, so that nothing but meetings changes them.

    Answers what this rank holds before the first step and after each, what is evaluated then, and the figures.
    """
    parity.enter(rank, num_ranks, rendezvous)
    chosen, rates = Plan.from_json(json.dumps(plan)), decode(OptimizerConfig, tiny.ADAMW, "optimizer")
    opened = open_config(decode(DecoderConfig, config, "config"), "tiny", 0)
    session = parity.open_session(chosen, opened, rates, dtype="float64", device=torch.device("cpu"))
    samples = parity.random_samples(config["vocab_size"], chosen.batch, tiny.SEQUENCE)
    build = session.build
    (exchange,) = (each for each in build.exchanges if isinstance(each, NeighbourAverages))
    generator = torch.Generator().manual_seed(77 + session.mesh.index("gossip"))
    with torch.no_grad():
        for _, value in build.local_parameters():
            value += torch.randn(value.shape, generator=generator, dtype=value.dtype)

    def whole() -> list[float]:
        return torch.cat([value.flatten() for _, value in build.local_parameters()]).tolist()

    answer: dict[str, Any] = {"held": [whole()], "averages": [], "distances": [], "sent": []}
    for step in range(steps):
        given = parity.own_samples(session, samples, step)
        with TrafficRecorder(session.mesh.axis_of_group()) as recorder:
            session.loop.step(given, 0.0)
        answer["sent"].append(sorted([*key, count] for key, count in recorder.traffic.items()))
        answer["held"].append(whole())
        exchange.before_evaluation()
        answer["averages"].append(whole())
        exchange.after_evaluation()
        answer["distances"].append(exchange.take_figures()["consensus_distance"])
        assert not exchange.take_figures(), "a figure is recorded twice"
        assert whole() == answer["held"][-1], "an evaluation changes what is trained"
    parity.leave()
    return answer
