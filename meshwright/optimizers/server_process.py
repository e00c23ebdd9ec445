"""One process of a parameter server: it has a shard of the flat parameters, sums gradients, and runs the optimizer.

The first shard decides (`ServerClock`); the others are told what it has decided, and do the same in the same order, so
that all shards have the same version at any place of that order. The norm by which an update is clipped is that of all
shards: the others tell theirs, and the first one tells the factor.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import selectors
import socket
import sys
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.core.box import Box
from meshwright.core.codec import decode
from meshwright.ops.host_memory import flat_views
from meshwright.ops.server_clock import NOT_FINITE, Drop, Release, ServerClock, Update
from meshwright.ops.server_link import ServerLink
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.optimizers.rule import ParameterPiece

DECIDER = -1
"""In place of a worker's number: the first shard, as the others see it."""
HELLO_SECONDS = 30.0
MOST_RECORDED = 10_000
"""Decisions that are kept for whoever asks."""


@dataclass(frozen=True, kw_only=True)
class ShardSettings:
    index: int
    shards: int
    workers: int
    staleness: int | None
    backups: int
    compensation: float
    scales_rate: bool
    optimizer: OptimizerConfig
    runs: tuple[tuple[int, float, float], ...]
    """Elements in a row that have one scale of the rate and one weight decay: (how many, scale, decay)."""
    dtype: str
    token: str


class ShardServer:
    def __init__(self, settings: ShardSettings):
        self.settings = settings
        sizes = [size for size, _, _ in settings.runs]
        self.weights = torch.zeros(sum(sizes), dtype=getattr(torch, settings.dtype))
        pieces = [
            ParameterPiece(
                name=str(at), value=value, box=Box.whole((size,)), is_owned=True, lr_scale=lr, weight_decay=wd
            )
            for at, ((size, lr, wd), value) in enumerate(zip(settings.runs, self.weights.split(sizes), strict=True))
        ]
        self.rule: Any = settings.optimizer.rule(settings.optimizer, pieces, None, {})  # type: ignore[arg-type]
        self.clock = self._new_clock()
        self.num_updates = 0
        self.gradients: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        """(worker, clock) -> a gradient that it has pushed and nobody has used, and the weights that it is of."""
        self.headers: dict[tuple[int, int], dict[str, Any]] = {}
        """What came with it."""
        self.seen: dict[int, Tensor] = {}
        """The weights that each worker has, where gradients are compensated for their age."""
        self.total = self.weights
        """Of the update under way."""
        self.results: dict[int, tuple[float, float]] = {}
        """Clock -> loss and squared norm of its update, for workers that wait for it."""
        self.own_results = dict.fromkeys(range(settings.workers), (0.0, 0.0))
        """Of each worker's last gradient that was finite, as if it were the whole batch's."""
        self.told: deque[dict[str, Any]] = deque()
        """Decisions that wait for gradients to arrive."""
        self.record: deque[list[Any]] = deque(maxlen=MOST_RECORDED)
        self.links: dict[int, ServerLink] = {}
        self.others: list[ServerLink] = []
        """The first shard's, to the others."""
        self.gone: set[int] = set()

    def _new_clock(self) -> ServerClock:
        given = self.settings
        return ServerClock(workers=given.workers, staleness=given.staleness, backups=given.backups)

    @property
    def has_own_results(self) -> bool:
        """Workers are not at one clock: each is told of its own gradient."""
        return self.settings.staleness != 0

    def admit(self, listener: socket.socket) -> None:
        """Wait for all workers, and for the first shard."""
        expected = {*range(self.settings.workers), *([DECIDER] if self.settings.index else [])}
        while set(self.links) != expected:
            end, _ = listener.accept()
            end.settimeout(HELLO_SECONDS)
            link = ServerLink(end)
            try:
                hello = link.receive()
            except (OSError, ValueError, RecursionError):
                link.close()
                continue
            who, token = hello.get("worker"), str(hello.get("token", "")).encode()
            is_known = hmac.compare_digest(token, self.settings.token.encode())
            if not is_known or not isinstance(who, int) or who not in expected or who in self.links:
                link.close()
                continue
            end.settimeout(None)
            self.links[who] = link
            for port in hello.get("ports", ()):
                other = ServerLink(socket.create_connection(("127.0.0.1", port)))
                other.send({"worker": DECIDER, "token": self.settings.token})
                self.others.append(other)
        listener.close()
        for who, link in self.links.items():
            if who != DECIDER:
                link.send({"states": list(self.rule.state)})

    def serve(self) -> None:
        """Until all workers are gone, or some wait for one that is."""
        with selectors.DefaultSelector() as selector:
            for who, link in self.links.items():
                selector.register(link.end, selectors.EVENT_READ, who)
            while True:
                for key, _ in selector.select():
                    try:
                        header = self.receive(key.data)
                    except ConnectionError:
                        selector.unregister(key.fileobj)
                        self.gone.add(key.data)
                    else:
                        self.take(key.data, header)
                    is_stuck = bool(self.clock.waiting) and len(self.gone) > self.settings.backups
                    if DECIDER in self.gone or is_stuck or len(self.gone) == self.settings.workers:
                        return

    def receive(self, who: int) -> dict[str, Any]:
        """A message, its numbers in their place."""
        link = self.links[who]
        header = link.receive()
        if header["kind"] == "push" and not header["is_idle"]:
            gradient = torch.empty_like(self.weights)
            link.fill(gradient)
            self.gradients[who, int(header["clock"])] = gradient, self.seen.get(who, self.weights)
        elif header["kind"] == "set":
            for part in (self.weights, *(self._states() if "num_updates" in header else ())):
                link.fill(part)
        return header

    def _states(self) -> list[Tensor]:
        return [value for values in self.rule.state.values() for value in values]

    def _answer(self, worker: int, header: dict[str, Any], *parts: Tensor) -> None:
        if worker not in self.gone:
            with contextlib.suppress(ConnectionError):  # its end is seen where it is read
                self.links[worker].send(header, *parts)

    @torch.no_grad()
    def take(self, who: int, header: dict[str, Any]) -> None:
        kind = header["kind"]
        if kind == "push":
            if self.settings.index == 0:
                self.decide((who, int(header["clock"])), header)
        elif kind == "set":
            self.clock = self._new_clock()
            if "num_updates" in header:
                self.num_updates = int(header["num_updates"])
                self.rule.set_num_steps(self.num_updates)
            self.gradients, self.headers, self.results = {}, {}, {}
            workers = range(self.settings.workers if self.settings.compensation else 0)
            self.seen = {worker: self.weights.clone() for worker in workers}
            self._answer(who, {})
        elif kind == "read":
            self._show(who)
            self.clock.note_pull(who)
            record = list(self.record) if header["record"] else []
            self.record.append(["read", who])
            about = {"record": record, "figures": self.clock.figures()}
            self._answer(who, about, self.weights, *(self._states() if header["states"] else ()))
        else:
            self.told.append(header)
        while self.told and all(tuple(key) in self.gradients for key in self.told[0].get("keys", ())):
            self._obey(self.told.popleft())

    def decide(self, key: tuple[int, int], header: dict[str, Any]) -> None:
        is_finite = math.isfinite(header["loss"] + header["square"])
        asked = int(header["asked"]) | (NOT_FINITE if self.has_own_results and not is_finite else 0)
        if is_finite and not header["is_idle"]:
            ways = self.settings.workers
            self.own_results[key[0]] = header["loss"] * ways, header["square"] * ways**2
        self.headers[key] = header
        about = {"is_idle": bool(header["is_idle"]), "is_busy": bool(header["is_busy"])}
        for decision in self.clock.push(key[0], asked=asked, **about):
            if isinstance(decision, Update):
                self.update(decision)
            elif isinstance(decision, Drop):
                self._tell({"kind": "drop", "keys": [(decision.worker, decision.clock)]})
            else:
                self.release(decision)
        left_by_all = min(self.clock.released)
        self.headers = {
            (worker, clock): value
            for (worker, clock), value in self.headers.items()
            if (worker, clock) in self.gradients or clock > self.clock.released[worker]
        }
        self.results = {clock: value for clock, value in self.results.items() if clock > left_by_all}

    def _tell(self, order: dict[str, Any]) -> float:
        """All shards do the same; the sum of what they answer."""
        for other in self.others:
            other.send(order)
        answer = self._obey(order)
        if order["kind"] == "sum":
            answer += sum(float(other.receive()["square"]) for other in self.others)
        return answer

    def update(self, update: Update) -> None:
        given, keys = self.settings, [(worker, update.clock) for worker in update.workers]
        headers = [self.headers[key] for key in keys]
        share = given.workers / len(keys)
        square = self._tell({"kind": "sum", "keys": keys, "share": share})
        loss, norm, first = share * sum(header["loss"] for header in headers), square**0.5, headers[0]
        most_loss, most_norm = (math.inf, math.inf) if self.has_own_results else first["most"]
        is_kept = math.isfinite(loss + norm) and loss / first["divisor"] <= most_loss and norm <= most_norm
        clip, lr = given.optimizer.clip, float(first["lr"])
        if given.scales_rate:
            lr /= max(1, *update.staleness)
        factor = clip / norm if clip and norm > clip else 1.0
        self.num_updates += is_kept
        self._tell({"kind": "step", "lr": lr, "factor": factor, "count": self.num_updates, "is_kept": is_kept})
        self.results[update.clock] = loss, square
        self.record.append(["update", update.clock, list(update.workers), list(update.staleness)])

    def release(self, release: Release) -> None:
        worker, clock = release.worker, release.clock
        loss, square = self.own_results[worker] if self.has_own_results else self.results[clock]
        if release.asked & NOT_FINITE:  # on all workers at once, whoever it was
            loss = math.nan
        answer: dict[str, Any] = {"loss": loss, "square": square, **release._asdict()}
        if worker == 0:
            answer["figures"] = self.clock.figures()
        self.record.append(["release", worker, clock, release.has_weights])
        self._answer(worker, answer)
        if release.has_weights:
            self._tell({"kind": "release", "worker": worker})

    def _obey(self, order: dict[str, Any]) -> float:
        kind = order["kind"]
        if kind == "sum":
            self.sum_up(order)
            square = float(self.total.double().square().sum())
            if self.settings.index:
                self.links[DECIDER].send({"square": square})
            return square
        if kind == "step" and order["is_kept"]:
            if order["factor"] != 1:
                self.total.mul_(order["factor"])
            for value, gradient in zip(self.rule.values, flat_views(self.total, self.rule.values), strict=True):
                value.grad = gradient
            self.rule.step(order["lr"], order["count"])
        elif kind == "drop":
            del self.gradients[tuple(order["keys"][0])]
        elif kind == "release":
            self._show(order["worker"])
            self._answer(order["worker"], {}, self.weights)
        return 0.0

    def _show(self, worker: int) -> None:
        if self.settings.compensation:
            self.seen[worker] = self.weights.clone()

    def sum_up(self, order: dict[str, Any]) -> None:
        strength, sums = self.settings.compensation * self.settings.workers, []
        for worker, clock in order["keys"]:
            gradient, base = self.gradients.pop((worker, clock))
            if strength:  # of workers / 1 of each gradient, which is a share of the mean (Zheng et al. 2017)
                gradient.addcmul_(gradient.square(), self.weights - base, value=strength)
            sums.append(gradient)
        self.total = sums[0]
        for gradient in sums[1:]:
            self.total.add_(gradient)
        if order["share"] != 1:
            self.total.mul_(order["share"])


def main() -> None:
    settings = decode(ShardSettings, json.loads(sys.stdin.readline()), "")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
        server = ShardServer(settings)
        server.admit(listener)
    server.serve()


if __name__ == "__main__":
    main()
