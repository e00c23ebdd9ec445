"""A shard in this process: gradients of a fixed age on a fixed problem, with and without corrections."""

from __future__ import annotations

import socket
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from meshwright.core.codec import decode
from meshwright.ops.server_link import ServerLink
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.optimizers.server_process import ShardServer, ShardSettings

WORKERS, UPDATES, RATE = 4, 16, 0.05
WANTED = torch.linspace(0.5, 2, 8, dtype=torch.float64)


def loss(weights: Tensor) -> Tensor:
    """Of Poisson rates: steep on one side, so that old gradients carry weights far beyond the minimum."""
    return (weights.exp() - WANTED * weights).sum()


def trained(**corrections: Any) -> tuple[float, Counter[int]]:
    """The loss after updates by workers in turn, each of whose gradients is three updates old; and those ages."""
    settings = {"name": "sgd", "momentum": 0.0, "clip": 0.0, "lr": RATE, "weight_decay": 0.0}
    about = {"index": 0, "shards": 1, "workers": WORKERS, "staleness": None, "backups": 0, "token": "", **corrections}
    about = {"compensation": 0.0, "scales_rate": False, **about, "runs": ((8, 1.0, 0.0),), "dtype": "float64"}
    server = ShardServer(ShardSettings(optimizer=decode(OptimizerConfig, settings, "optimizer"), **about))
    ends = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for worker in range(WORKERS):
            ends.append(ServerLink(socket.create_connection(listener.getsockname())))
            server.links[worker] = ServerLink(listener.accept()[0])
    weights = torch.full((WORKERS, 8), 3.0, dtype=torch.float64)
    ends[0].send({"kind": "set", "num_updates": 0}, weights[0])
    server.take(0, server.receive(0))
    assert ends[0].receive() == {}
    push = {"kind": "push", "is_idle": False, "lr": RATE, "divisor": 1.0, "most": [], "asked": 0, "is_busy": False}
    for update in range(UPDATES):
        worker, link = update % WORKERS, ends[update % WORKERS]
        at = weights[worker].clone().requires_grad_()
        value = loss(at)
        (gradient,) = torch.autograd.grad(value / WORKERS, at)
        numbers = {"loss": float(value.detach()) / WORKERS, "square": float(gradient.square().sum())}
        link.send({**push, **numbers, "clock": update // WORKERS + 1}, gradient)
        server.take(worker, server.receive(worker))
        assert link.receive()["loss"] == numbers["loss"] * WORKERS
        assert link.receive() == {}
        link.fill(weights[worker])
    for link in (*ends, *server.links.values()):
        link.close()
    return float(loss(server.weights)), server.clock.ages


def test_corrected_gradients_learn_more_at_equal_ages() -> None:
    plain, ages = trained()
    compensated, same_ages = trained(compensation=0.02)
    scaled, still_the_same = trained(scales_rate=True)
    assert ages == same_ages == still_the_same == {0: 1, 1: 1, 2: 1, 3: UPDATES - 3}
    least = float(loss(WANTED.log()))
    assert plain - least > 3
    assert compensated - least < (plain - least) / 10
    assert scaled - least < (plain - least) / 5
