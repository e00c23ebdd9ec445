"""torchrun's agent of one host: which hosts take part, and which ranks are whose. A child of `run/hosts.py`.

    supervisor (without torch)            this process
    settings                  ─────────>  store, admission of the host, rendezvous
    start the ranks           <─────────  a round is complete: the first rank, how many there are, where they meet
    how they have ended       ─────────>  FAILED, UNHEALTHY: the next round; SUCCEEDED: wait for the others
    stop the ranks            <─────────  hosts have come, a new round
    end all hosts             ─────────>  the reason goes into the store, the rendezvous is closed
    end                       <─────────  exit code and reason

One JSON object a line. The rendezvous is torch's own (c10d): its state in the store is a pickle, so it is sealed with
the run's secret, and what is not sealed is never read.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import select
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousParameters, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, create_handler

from meshwright.core.errors import MeshwrightError, error_at
from meshwright.core.units import counted, pretty_seconds
from meshwright.launch.admission import SECRET_NAME, code_version, run_secret
from meshwright.launch.peers import address_towards, interface_of, outward_address, silent_seconds
from meshwright.runtime.outside import PACKAGE, listening_store

_RUN = "meshwright"
_KNOCK_SECONDS, _POLL_SECONDS = 2.0, 0.2
_READ_SECONDS = 60.0
"""For an answer of the store."""
_LINGER_SECONDS = 20.0
"""The store ends with its process: so long it waits for the others to have read why the run is over."""
_ENDLESS = 10**9
"""Restarts are counted by the supervisor, which knows of checkpoints."""


class RunOver(Exception):
    """The supervisor has ended the run, for this host or for all."""

    def __init__(self, told: Mapping[str, Any]):
        super().__init__()
        self.told = told


class Channel:
    """Lines of JSON from and to the supervisor. What else is printed goes to the log."""

    def __init__(self) -> None:
        self.writer = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(self, event: str, **about: Any) -> None:
        self.writer.write(json.dumps({"event": event, **about}) + "\n")
        self.writer.flush()

    def read(self) -> dict[str, Any]:
        line = sys.stdin.readline()
        if not line:
            sys.exit(1)  # the supervisor is gone
        return dict(json.loads(line))


class Seal:
    """Texts that only those can write who know the run's secret."""

    def __init__(self, secret: bytes, place: str):
        self.key, self.place = hmac.new(secret, b"hosts", hashlib.sha256).digest(), place

    def close(self, text: bytes) -> bytes:
        return hmac.new(self.key, text, hashlib.sha256).hexdigest().encode() + text

    def open(self, sealed: bytes) -> bytes:
        proof, text = sealed[:64], sealed[64:]
        if not hmac.compare_digest(proof, self.close(text)[:64]):
            what = "another run meets there, or somebody who does not know this run's secret."
            fix = f"All hosts must share run.folder, or have the same {SECRET_NAME}; each run needs a port of its own."
            raise error_at(f"run.rendezvous {self.place}", what, fix)
        return text


class SealedBackend(RendezvousBackend):
    """torch's own, whose state nobody else can write."""

    def __init__(self, inner: RendezvousBackend, seal: Seal):
        self.inner, self.seal = inner, seal

    @property
    def name(self) -> str:
        return self.inner.name

    def get_state(self) -> tuple[bytes, Any] | None:
        found = self.inner.get_state()
        return None if found is None else (self.seal.open(found[0]), found[1])

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        found = self.inner.set_state(self.seal.close(state), token)
        return None if found is None else (self.seal.open(found[0]), found[1], found[2])


class HostAgent(SimpleElasticAgent):
    """torch's agent; its workers are ranks that the supervisor starts and watches."""

    def __init__(self, spec: WorkerSpec, channel: Channel, store: dist.Store):
        super().__init__(spec, exit_barrier_timeout=_READ_SECONDS)
        self.channel, self.is_under_way, self.rounds = channel, False, store

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        workers = worker_group.workers
        self.channel.say(
            "start",
            first_rank=workers[0].global_rank,
            num_ranks=workers[0].world_size,
            num_hosts=worker_group.group_world_size,
            is_first_round=worker_group.group_rank == 0 and self.rounds.add("rounds", 1) == 1,
            master_address=worker_group.master_addr,
            master_port=worker_group.master_port,
        )
        self.is_under_way = True
        return {worker.local_rank: worker.global_rank for worker in workers}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if not select.select([sys.stdin], [], [], 0)[0]:
            return RunResult(state=WorkerState.HEALTHY)
        told = self.channel.read()
        self.is_under_way = False
        if "end" in told:
            raise RunOver(told["end"])
        values = {worker.global_rank: None for worker in worker_group.workers}
        return RunResult(state=WorkerState[told["state"]], return_values=values)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        if self.is_under_way:
            self.channel.say("stop")
            while self.is_under_way:
                self._monitor_workers(worker_group)
                time.sleep(_POLL_SECONDS)

    def _shutdown(self, *_: Any, **__: Any) -> None:
        self._stop_workers(self._worker_group)


def resolved(host: str) -> str:
    """Its address; empty where the name is not known."""
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    return ""


def own_address(host: str, port: int) -> str:
    """Of this host, as the others reach it; the loopback only where the endpoint itself says so."""
    return address_towards(host, port) if resolved(host) == host else outward_address(host, port)


def open_store(endpoints: Sequence[str], wait_seconds: float, turn_seconds: float) -> tuple[dist.TCPStore, str, bool]:
    """The store of the first endpoint that answers, its place, and whether it is ours: where none answers, the first
    endpoint's host opens it, and each later one after waiting for those before it."""
    begun = time.monotonic()
    places = [(host, int(port)) for host, _, port in (endpoint.rpartition(":") for endpoint in endpoints)]
    own = next((turn for turn, (host, _) in enumerate(places) if interface_of(resolved(host))), len(places))
    while True:
        for host, port in places:
            with contextlib.suppress(OSError, RuntimeError):
                socket.create_connection((host, port), _KNOCK_SECONDS).close()
                timeout = timedelta(seconds=_READ_SECONDS)
                return dist.TCPStore(host, port, is_master=False, timeout=timeout), f"{host}:{port}", False
        waited = time.monotonic() - begun
        if own < len(places) and waited >= own * turn_seconds:
            host, port = places[own]
            return listening_store(own_address(host, port), port, None, _READ_SECONDS), f"{host}:{port}", True
        if waited > wait_seconds:
            what = f"does not answer, after {pretty_seconds(waited)}."
            fix = "Start the same command on the host of that name, or name this one in run.rendezvous."
            raise error_at(f"run.rendezvous {', '.join(endpoints)}", what, fix, exit_code=1)
        time.sleep(_POLL_SECONDS)


def require_same(store: dist.Store, seal: Seal, settings: Mapping[str, Any]) -> None:
    """Refuse this host where it differs from the one that came first; nobody else hears of it."""
    about = {
        "torch": torch.__version__,
        "Meshwright": code_version(PACKAGE),
        "ranks on this host": settings["num_local"],
        "run.hosts": settings["hosts"],
    }
    sealed = seal.close(json.dumps(about).encode()).decode()
    first = json.loads(seal.open(store.compare_set("about", "", sealed)))
    if wrong := [name for name, value in about.items() if first.get(name) != value]:
        told = ", ".join(f"{name} {about[name]} (the run: {first.get(name)})" for name in wrong)
        fix = "Use the same Python environment and run file on every host; the others go on without this one."
        raise error_at(f"host {socket.gethostname()}", f"has {told}.", fix)


def follow(channel: Channel, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Take part until the run is over: its exit code and why."""
    secret = run_secret(Path(settings["folder"]), os.environ)
    silent, least, most = round(silent_seconds(os.environ)), settings["least"], settings["most"]
    last_call = max(1, silent // 2)
    store, place, is_ours = open_store(settings["endpoints"], settings["wait_seconds"], last_call)
    seal = Seal(secret, place)
    require_same(store, seal, settings)
    host, _, port = place.rpartition(":")
    handler = create_handler(
        store,
        SealedBackend(C10dRendezvousBackend(store, _RUN), seal),
        RendezvousParameters(
            backend="c10d",
            endpoint=place,
            run_id=_RUN,
            min_nodes=least,
            max_nodes=most,
            local_addr=own_address(host, int(port)),
            join_timeout=max(1, round(settings["wait_seconds"])),
            last_call_timeout=last_call,
            keep_alive_interval=max(1, silent // 6),
            keep_alive_max_attempt=3,
        ),
    )
    spec = WorkerSpec(
        role="rank",
        local_world_size=settings["num_local"],
        rdzv_handler=handler,
        entrypoint="mw train",
        max_restarts=_ENDLESS,
        monitor_interval=_POLL_SECONDS,
    )
    agent, end = HostAgent(spec, channel, store), dict[str, Any](exit_code=0, text="")
    try:
        agent.run()
    except RunOver as over:
        end = dict(over.told)
        if not end.pop("is_for_all"):
            return end
    except RendezvousClosedError:
        pass
    except RendezvousTimeoutError:
        others = handler._state_holder.state.participants.keys() - {handler._this_node}
        found = counted(1 + len(others), "host")
        what = f"{found} of at least {least} came within {pretty_seconds(settings['wait_seconds'])}."
        raise error_at("run.hosts", what, "Start the same command on the others, or lower run.hosts.", 1) from None
    with contextlib.suppress(RuntimeError):  # what was written first counts for all
        end = json.loads(seal.open(store.compare_set("end", "", seal.close(json.dumps(end).encode()).decode())))
    handler.shutdown()
    with contextlib.suppress(RuntimeError):  # the store may be gone already
        deadline, left = time.monotonic() + _LINGER_SECONDS, store.add("left", 1)
        while is_ours and left < agent.get_worker_group().group_world_size and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            left = store.add("left", 0)
    return end


def main() -> int:
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # ranks have a store of their own, on one address
    channel = Channel()
    try:
        channel.say("end", **follow(channel, channel.read()))
    except MeshwrightError as error:
        channel.say("end", exit_code=error.exit_code, text=str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
