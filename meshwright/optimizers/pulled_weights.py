"""A worker of a parameter server: gradients go to the shards, and the weights that come back are the update."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.core.build import Build, Exchange, OptimizerState
from meshwright.core.codec import encode
from meshwright.core.errors import error_at
from meshwright.core.process import start_child
from meshwright.ops.collectives import gather_json, share_json
from meshwright.ops.host_memory import flat_views
from meshwright.ops.server_clock import SAVE, STOP
from meshwright.ops.server_link import ServerLink
from meshwright.optimizers import server_process
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.optimizers.rule import ParameterPiece, UpdateRule, write_copies

if TYPE_CHECKING:
    from meshwright.techniques.parameter_server import ParameterServer

EXIT_SECONDS = 2.0
"""For a process that has closed its connections to end."""


class PulledWeights(UpdateRule):
    """The update is made elsewhere: a step takes what was pulled."""

    rolls_back = True

    def __init__(self, server: ServerExchange, *given: Any):
        super().__init__(*given)
        self.server = server
        server.open(self.config, self.pieces)

    def begin(self, lr: float, count: int) -> None:
        # A step that is left out makes no gradients, and takes the newest weights like any other.
        self.updated = {piece.name for piece in self.pieces} if self.server.leaves_out() else set()

    def step(self, lr: float, count: int) -> None:
        self.server.take_weights()

    def reload(self) -> None:
        self.server.is_set = False

    def set_num_steps(self, count: int) -> None:
        self.server.num_steps = count


class ServerExchange(Exchange):
    def __init__(self, build: Build, settings: ParameterServer):
        self.settings, self.control = settings, build.mesh.control
        self.group, self.index = build.mesh.group(settings.axis), build.mesh.index(settings.axis)
        self.boxes = build.boxes
        self.keeps_pace = settings.bound == 0 and not settings.backups
        self.pieces: list[ParameterPiece] = []
        self.links: list[ServerLink] = []
        self.child: Any = None
        self.kinds: list[str] = []
        """Of what the optimizer remembers."""
        self.states: list[Tensor] = []
        """The first worker's copy of it, flat, from a checkpoint to the servers or back; empty between."""
        self.is_set = False
        """The servers have the weights of the workers, or newer ones."""
        self.num_steps = self.clock = self.complete = 0
        self.has_weights = False
        self.figures: dict[str, float] = {}

    def open(self, config: OptimizerConfig, pieces: list[ParameterPiece]) -> None:
        """Start this worker's shard, if it has one, and connect to all."""
        given, self.pieces = self.settings, pieces
        hosts = set(gather_json(self.control, socket.gethostname()))
        if len(hosts) > 1:
            what = f"its servers listen on one host's loopback, and the workers are on {', '.join(sorted(hosts))}."
            raise error_at(given.name, what, "Start all workers on one host, or use replicate.")
        count, shards = sum(piece.value.numel() for piece in pieces), given.shards
        self.count, self.size = count, -(-count // shards)
        dtype = pieces[0].value.dtype
        self.pushed, self.pulled = (torch.zeros(self.size * shards, dtype=dtype) for _ in range(2))
        token = share_json(self.control, secrets.token_hex(16))
        port = 0
        if self.index < shards:
            about: dict[str, Any] = {
                "workers": given.size,
                "staleness": given.bound,
                "backups": given.backups,
                "shards": shards,
            }
            about |= {"compensation": given.compensation, "scales_rate": given.scaled_rate, "index": self.index}
            about |= {"optimizer": encode(config), "runs": self.runs(), "dtype": str(dtype)[6:], "token": token}
            port = self.start_shard(about)
        ports = [port for port in gather_json(self.control, port) if port]
        for shard, each in enumerate(ports):
            link = ServerLink(socket.create_connection(("127.0.0.1", each)), self.group.group_name)
            more = {"ports": ports[1:]} if (shard, self.index) == (0, 0) else {}
            link.send({"worker": self.index, "token": token, **more})
            self.links.append(link)
        for link in self.links:
            self.kinds = list(link.receive()["states"])

    def start_shard(self, settings: Mapping[str, Any]) -> int:
        """A child that is a shard; its port."""
        pipe = subprocess.PIPE
        self.child = start_child(
            self.index, (server_process.__name__,), environment=os.environ, stdin=pipe, stdout=pipe
        )
        weakref.finalize(self, self.child.end)
        with self.child.process.stdin as stream:
            stream.write(json.dumps(settings).encode() + b"\n")
        line = self.child.process.stdout.readline()
        if not line:
            raise error_at(
                self.settings.name, f"the process of shard {self.index} did not begin.", "See the rank's log."
            )
        return int(json.loads(line)["port"])

    def runs(self) -> list[list[float]]:
        """Of this rank's shard: elements in a row of equal rate and decay."""
        runs: list[list[float]] = []
        at, first, last = 0, self.index * self.size, (self.index + 1) * self.size
        for piece in self.pieces:
            size = min(at + piece.value.numel(), last) - max(at, first)
            at += piece.value.numel()
            if size <= 0:
                continue
            if runs and runs[-1][1:] == [piece.lr_scale, piece.weight_decay]:
                runs[-1][0] += size
            else:
                runs.append([size, piece.lr_scale, piece.weight_decay])
        filled = sum(int(size) for size, *_ in runs)
        return [*runs, [self.size - filled, 1.0, 0.0]] if filled < self.size else runs

    def leaves_out(self) -> bool:
        return self.is_set and self.clock + 1 <= self.complete

    @torch.no_grad()
    def agree(self, message: Tensor, lr: float, divisor: float, most: Sequence[float]) -> Tensor:
        loss, square, requests, unused = message[:4].tolist()
        if unused:
            names = [piece.name for piece in self.pieces if piece.value.grad is None]
            what = f"{(names or ['a parameter'])[0]} took no part in a step, and servers update all parameters."
            raise error_at(self.settings.name, what, "Freeze it, or use replicate.")
        is_idle = self.leaves_out()
        if self.is_set:
            self.states = []  # were for a checkpoint
        self.set_servers()
        self.clock += 1
        header = {"kind": "push", "clock": self.clock, "is_idle": is_idle, "loss": loss, "square": square, "lr": lr}
        header |= {"divisor": divisor, "most": list(most), "is_busy": requests % 1 > 0}
        header["asked"] = STOP * (requests >= 2) | SAVE * (int(requests) % 2)
        if not is_idle:
            gradients = [piece.value.grad for piece in self.pieces]
            self.pushed[: self.count] = torch.cat([each.flatten() for each in gradients if each is not None])
        # The first shard decides, so it is told last: what it decides on is then on its way to all others.
        for at in reversed(range(len(self.links))):
            parts = [] if is_idle else [self._part(self.pushed, at)]
            if at == 0 or parts:
                with self._to(at) as link:
                    link.send(header, *parts)
        with self._to(0) as link:
            answer = link.receive()
        self.complete, self.has_weights = answer["complete"], answer["has_weights"]
        self.figures = answer.get("figures", {})
        for at in range(len(self.links)) if self.has_weights else ():
            with self._to(at) as link:
                link.receive()
                link.fill(self._part(self.pulled, at))
        asked = answer["asked"]
        told = 2.0 * bool(asked & STOP) + bool(asked & SAVE) + 2.0**-20 * answer["is_busy"]
        whole = [answer["loss"], answer["square"], told, 0.0]
        return torch.tensor(whole + [answer["square"]] * (len(message) - len(whole)), dtype=torch.float64)

    def _part(self, flat: Tensor, shard: int) -> Tensor:
        return flat[shard * self.size : (shard + 1) * self.size]

    @contextmanager
    def _to(self, shard: int) -> Iterator[ServerLink]:
        """Says who has ended, where a connection does. The run's supervisor starts again after such a failure."""
        try:
            yield self.links[shard]
        except OSError as error:
            code = 0
            if self.child is not None and shard == self.index:
                end = time.monotonic() + EXIT_SECONDS
                while (code := self.child.exit_code or 0) == 0 and time.monotonic() < end:
                    time.sleep(0.01)
            why = f"with exit code {code}" if code else f"or left as a worker had: {error or 'connection was closed'}"
            text = f"{self.settings.name}: shard {shard} of {len(self.links)} of the server has ended, {why}"
            raise RuntimeError(text) from None

    @torch.no_grad()
    def take_weights(self) -> None:
        if self.has_weights:
            values = [piece.value for piece in self.pieces]
            torch._foreach_copy_(values, list(flat_views(self.pulled[: self.count], values)))

    @torch.no_grad()
    def set_servers(self) -> None:
        """The servers take the first worker's weights, where they have none yet or somebody else has changed them; and
        what a checkpoint said that the optimizer remembers."""
        if self.is_set:
            return
        self.clock = self.complete = 0
        if self.index == 0:
            self.pulled[: self.count] = torch.cat([piece.value.flatten() for piece in self.pieces])
            about: dict[str, Any] = {"kind": "set"}
            if self.states:
                about["num_updates"] = self.num_steps * (self.settings.size if self.settings.bound is None else 1)
            for at in range(len(self.links)):
                with self._to(at) as link:
                    link.send(about, *(self._part(flat, at) for flat in (self.pulled, *self.states)))
                    link.receive()
        self.states, self.is_set = [], True
        dist.barrier(self.control)

    @torch.no_grad()
    def fetch(self, flats: Sequence[Tensor], *, record: bool = False) -> dict[str, Any]:
        """The newest weights, and what the optimizer remembers if there is room for it, while all workers rest."""
        found: dict[str, Any] = {}
        for at in range(len(self.links)):
            with self._to(at) as link:
                link.send({"kind": "read", "states": len(flats) > 1, "record": record})
                found = link.receive() | found  # the first shard decides
                for flat in flats:
                    link.fill(self._part(flat, at))
        return found

    @torch.no_grad()
    def read(self, *, record: bool = False) -> list[list[Any]]:
        """Take the newest weights, once all workers rest; the decisions so far."""
        dist.barrier(self.control)
        found = self.fetch([self.pulled], record=record)
        self.has_weights, self.figures = True, found["figures"]
        self.take_weights()
        write_copies(self.pieces)
        return list(found["record"])

    def before_evaluation(self) -> None:
        if self.is_set:
            self.read()

    before_saving = before_evaluation

    def take_figures(self) -> Mapping[str, float]:
        figures, self.figures = self.figures, {}
        return figures

    def kept(self) -> Iterator[OptimizerState]:
        if self.index:
            return
        if not self.states:
            self.states = [torch.zeros_like(self.pulled) for _ in self.kinds]
            if self.is_set and self.states:
                self.fetch([self.pulled, *self.states])
        for kind, flat in zip(self.kinds, self.states, strict=True):
            views = flat_views(flat[: self.count], [piece.value for piece in self.pieces])
            for piece, view in zip(self.pieces, views, strict=True):
                yield OptimizerState(kind, piece.name, view, piece.box)
