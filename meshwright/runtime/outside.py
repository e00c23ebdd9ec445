"""`mw train` inside torchrun or Slurm: rank 0 plans, everyone gets the plan, every process is a rank.

Nobody stands above the ranks here who sees one die, perhaps on another machine: they watch each other.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from meshwright.core.codec import decode
from meshwright.core.errors import MeshwrightError, Problem
from meshwright.core.plan import Plan
from meshwright.launch.admission import Admission, code_version, group_proof, require_group, run_secret
from meshwright.launch.cpu_bf16 import limit_isa_for_bf16
from meshwright.launch.environment import RankPlace, how_to_go_on
from meshwright.launch.failure import speaks_of_lost_peer
from meshwright.launch.peers import (
    PeerWatch,
    RankHost,
    address_towards,
    connections,
    interface_of,
    outward_address,
    silent_seconds,
)
from meshwright.launch.rank_job import PREEMPTED_EXIT_CODE, STOP_SIGNALS, Job, StopFlag, report_error
from meshwright.launch.sections import SectionStamp
from meshwright.machine.named_clusters import preset_of_device
from meshwright.ops.collectives import gather_json
from meshwright.ops.device_mesh import join
from meshwright.run.comparison import Promise
from meshwright.run.out_of_memory import examine, failure_of
from meshwright.run.prepare import PreparedRun, load_plan, prepare
from meshwright.run.result import RunResult
from meshwright.run.run import Run
from meshwright.runtime.rank import RankTraining, device_of, on_first

Tell = Callable[[Run], object]
_NOTICE_SECONDS = 2.0
"""For the watch to see what a collective has just complained of."""
MEETING_SECONDS = 600.0
_ROUND_SECONDS = 120.0
"""To meet, for ranks whose hosts have met already."""
_LOCK_SECONDS = 120.0
"""A network file system keeps the lock of a host that is gone, for a while."""
PACKAGE = Path(__file__).parents[1]


def run_outside(run: Run, place: RankPlace, before: Tell, after: Callable[[RunResult], object]) -> int:
    """Train as one rank; `before` and `after` tell the user, on rank 0. A failure ends the process where it stands."""
    stop = StopFlag()
    watch = PeerWatch(place.rank, give_up=lambda: _leave_without(watch, stop))
    try:
        if place.rank == 0:
            how = how_to_go_on(os.environ)
            stop.say = lambda why: print(f"mw train: stopped, {why}; {how}", file=sys.stderr, flush=True)
        stop.take((signal.SIGINT, signal.SIGHUP, *STOP_SIGNALS))
        return _run(run, place, watch, before, after, stop)
    except MeshwrightError as error:
        if place.rank == 0 or not error.is_everywhere:
            for problem in error.problems:
                print(f"mw train: {problem}", file=sys.stderr)
        _leave(error.exit_code)
    except Exception as error:
        if speaks_of_lost_peer(str(error)) and watch.lost(wait_seconds=_NOTICE_SECONDS):
            _leave_without(watch, stop)
        print(f"mw train: rank {place.rank} of {place.num_ranks} failed:", file=sys.stderr)
        traceback.print_exc()
        _leave(1)


def run_supervised(run: Run, job: Job, stop: StopFlag, before: Tell, after: Callable[[RunResult], object]) -> int:
    """Train as one rank of several hosts, whose supervisors see how it ends (`run/hosts.py`)."""
    own: dict[str, Any] = {"rank": job.rank, "num_ranks": job.num_ranks, "local_rank": int(os.environ["LOCAL_RANK"])}
    place = RankPlace(kind="hosts", **own, **job.arguments["place"])

    def lost() -> ConnectionError:
        return ConnectionError(watch.sentence(watch.lost()).removesuffix("."))

    watch = PeerWatch(place.rank, give_up=lambda: os._exit(report_error(job, lost())))
    try:
        return _run(run, place, watch, before, after, stop, job)
    except Exception as error:
        is_lost = not isinstance(error, MeshwrightError) and speaks_of_lost_peer(str(error))
        if is_lost and watch.lost(wait_seconds=_NOTICE_SECONDS):
            raise lost() from error
        raise


def _leave_without(watch: PeerWatch, stop: StopFlag) -> NoReturn:
    """Some are gone, so this run is over. One rank of each machine says so."""
    lost = watch.lost()
    if watch.is_teller(lost):
        fix = "The same command, or another plan on what is left, resumes from the last checkpoint."
        print(f"mw train: {watch.sentence(lost)} {fix}", file=sys.stderr)
    # Where all were asked to stop, some have left at once; a launcher also asks once it has seen one fail.
    _leave(PREEMPTED_EXIT_CODE if stop.is_set else 1)


def _leave(code: int) -> NoReturn:
    """Without the interpreter's orderly end: threads that wait for lost peers would hold it up."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def _run(
    run: Run,
    place: RankPlace,
    watch: PeerWatch,
    before: Tell,
    after: Callable[[RunResult], object],
    stop: StopFlag,
    job: Job | None = None,
) -> int:
    """`job`: of a rank that is supervised."""
    stop.leave_at_once(True)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        limit_isa_for_bf16()  # it forks, so before any tensor
    device = device_of(kind, place.local_rank)
    secret = run_secret(Path(run.config.run.folder), os.environ)
    own_address, session = _meet(place, device, secret)
    earlier = connections()
    control = dist.new_group(backend="gloo")
    # The control group's own: nobody closes these before the end, and each rank has one to every other.
    mine = [each for each in connections() if each not in earlier]
    proof = group_proof(session, place.rank)
    ends = [each.ours for each in mine]
    ranks = gather_json(control, {"host": socket.gethostname(), "address": own_address, "ends": ends, "proof": proof})
    require_group(session, [rank["proof"] for rank in ranks])
    hosts = [RankHost(name=rank["host"], address=rank["address"]) for rank in ranks]
    watch.start(mine, hosts, [rank["ends"] for rank in ranks], silent_seconds(os.environ))

    again = {name: job.arguments[name] for name in ("restart", "changed_since")} if job is not None else {}

    def plan() -> dict[str, Any]:
        run.open(wait_seconds=_LOCK_SECONDS if again else 0.0)
        run.note_start()
        arguments = run.adopt(_prepare(run, place, kind), is_start=not again.get("restart"))
        before(run)
        return {**arguments, **again}

    arguments = on_first(control, plan)
    used = decode(Plan, arguments["plan"], "plan")
    try:
        stamp = SectionStamp(job.sections, place.local_rank) if job is not None else None
        code = RankTraining(arguments, used, device, stop, stamp).go(stop)
    except MeshwrightError as error:
        if (failure := failure_of(error.facts)) is not None:
            machine = decode(Promise, arguments["promise"], "promise").cluster
            told = examine(run.config, run.description.profile, machine, used, failure, run.command)
            print(told.text(), file=sys.stderr)
        raise
    watch.stop()
    dist.destroy_process_group()
    if place.rank == 0:
        after(run.conclude(code))
        run.close()
    return code


def _prepare(run: Run, place: RankPlace, kind: str) -> PreparedRun:
    config = run.config
    if not config.run.cluster:
        # The ranks are already running: measuring now would disturb them, so the nearest preset stands in.
        result = "laptop"
        if kind == "cuda":
            name = torch.cuda.get_device_name()
            known = preset_of_device(name)
            if known is None:
                fix = "Run `mw probe -o this.cluster.json` on one node and set run.cluster to that file."
                raise MeshwrightError([Problem(where="run.cluster", what=f"{name} has no preset.", fix=fix)])
            result = known.name
        run.report(f"planning with the figures of {result}")
        config = replace(config, run=replace(config.run, cluster=result))
    geometry = (place.num_local, place.num_ranks // place.num_local)
    given = run.plan
    if config.run.elastic or (place.kind == "hosts" and len(set(config.run.host_range)) > 1):
        earlier = load_plan(config, run.plan, run.description.profile)
        if earlier is not None and earlier.num_ranks != place.num_ranks:
            config, given = replace(config, plan=replace(config.plan, file="")), ""
    prepared = prepare(config, given, run.report, geometry, run.description)
    if prepared.plan.num_ranks != place.num_ranks:
        what = f"needs {prepared.plan.num_ranks} ranks, {place.kind} started {place.num_ranks}."
        raise MeshwrightError([Problem(where=f"plan {prepared.plan}", what=what)])
    return prepared


def _meet(place: RankPlace, device: torch.device, secret: bytes) -> tuple[str, bytes]:
    """Join the others; our address, and the key of those who know the secret.

    Slurm does not set torchrun's variables, and torch reads nothing else.
    """
    os.environ.setdefault("MASTER_ADDR", place.master_address)
    os.environ.setdefault("MASTER_PORT", str(place.master_port))
    os.environ.setdefault("RANK", str(place.rank))
    os.environ.setdefault("WORLD_SIZE", str(place.num_ranks))
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(place.num_local))
    address = "127.0.0.1" if place.is_one_host else address_towards(place.master_address, place.master_port)
    if place.num_local < place.num_ranks:
        address = outward_address(place.master_address, place.master_port)
    interface = interface_of(address)
    if interface:  # NCCL is left alone: it finds its ways by itself, and may use several at once
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if place.is_one_host:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    about = {"host": socket.gethostname(), "torch": torch.__version__, "meshwright": code_version(PACKAGE)}
    try:
        store = _store(place, address)
        admission = Admission(secret=secret, rank=place.rank, num_ranks=place.num_ranks, about=about)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        session = admission.admit(dist.PrefixStore(f"meshwright {attempt}", store))
        prefix = hmac.new(session, b"store", "sha256").hexdigest()  # whoever reaches the store can list its keys
        join(place.rank, place.num_ranks, device, store=dist.PrefixStore(prefix, store))
    except RuntimeError as error:  # torch's own distributed errors are such
        if place.kind == "hosts":  # the next round is the remedy
            raise
        where, reason = f"{place.master_address}:{place.master_port}", str(error).splitlines()[0]
        fix = "Choose a free port (MASTER_PORT, or torchrun --master-port)."
        if "address already in use" not in reason.lower():
            used = os.environ.get("GLOO_SOCKET_IFNAME", "unset")
            fix = f"Start all {place.num_ranks} ranks; is GLOO_SOCKET_IFNAME ({used}) the interface the others reach?"
        raise MeshwrightError([Problem(where=where, what=f"cannot meet the others: {reason}.", fix=fix)]) from None
    return address, session


def _store(place: RankPlace, address: str) -> dist.TCPStore:
    """Where ranks meet: torchrun's own, which listens everywhere; else rank 0 opens one on its one address."""
    seconds = _ROUND_SECONDS if place.kind == "hosts" else MEETING_SECONDS
    host = place.master_address
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not is_torchruns and place.is_one_host:
        host = "127.0.0.1"
    if is_torchruns or place.rank:
        return dist.TCPStore(host, place.master_port, is_master=False, timeout=timedelta(seconds=seconds))
    return listening_store(address or host, place.master_port, place.num_ranks, seconds)


def listening_store(address: str, port: int, num_ranks: int | None, timeout_seconds: float) -> dist.TCPStore:
    """A store that listens on one address alone."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            listener.listen(1024)
            return dist.TCPStore(
                address,
                port,
                num_ranks,
                is_master=True,
                timeout=timedelta(seconds=timeout_seconds),
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
    except OSError as error:
        raise RuntimeError(f"{address}: {error.strerror}") from None
