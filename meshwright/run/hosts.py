"""The supervisor of one of several hosts: torchrun's agent as its child, and the ranks of this host. No torch.

    `mw train` on each host: guard ──> supervisor ──> agent (runtime/host_agent.py): who takes part, in rounds
                                                 └──> the ranks of this host, watched as on one host

The agents meet; each complete round says which ranks are this host's. When ranks end, or hosts come or go, all meet
again: rank 0 of the new round plans for what there is, and all go on from the last good checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.checkpoint.step_folders import list_steps
from meshwright.core.errors import MeshwrightError, error_at
from meshwright.core.files import open_to_append
from meshwright.core.process import start_child
from meshwright.core.time_ledger import note_time
from meshwright.core.units import counted
from meshwright.launch.failure import cause
from meshwright.launch.guard import cause_of_restart, tell_guard
from meshwright.launch.local_ranks import LaunchOutcome, Standby, Stopped, StopRequests, launch
from meshwright.launch.rank_job import PREEMPTED_EXIT_CODE
from meshwright.machine.probe import count_gpus
from meshwright.run.recovery import Attempt, remedy_for
from meshwright.run.run import Run

_POLL_SECONDS = 0.1
_STOPPED: dict[str, Any] = {"exit_code": PREEMPTED_EXIT_CODE, "text": "a host was stopped, and too few are left"}


class Agent:
    """The child process, and a thread that reads what it says."""

    def __init__(self, settings: Mapping[str, Any], log: Path, outer: StopRequests):
        self.said = queue.Queue[dict[str, Any] | None]()
        """None: it has ended."""
        self.stop = self._outer = outer
        """Of the ranks that run; the user's requests are also these."""
        with os.fdopen(open_to_append(log), "ab") as errors:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
            self.child = start_child(0, ("meshwright.runtime.host_agent",), environment=os.environ, **pipes)
        self.tell(settings)
        threading.Thread(target=self._read, name="agent", daemon=True).start()

    def _read(self) -> None:
        assert self.child.process.stdout is not None
        for line in self.child.process.stdout:
            told = json.loads(line)
            if told["event"] == "stop":
                self.stop.request()
            else:
                self.renew()  # before the ranks start: what is asked from here on is for these
                self.said.put(told)
        self.said.put(None)
        self.stop.request()

    def renew(self) -> None:
        self.stop = StopRequests(self._outer)

    def tell(self, told: Mapping[str, Any]) -> None:
        assert self.child.process.stdin is not None
        try:
            self.child.process.stdin.write(json.dumps(told).encode() + b"\n")
            self.child.process.stdin.flush()
        except BrokenPipeError:  # the thread sees its end
            pass

    def hear(self, *, is_ending: bool = False) -> dict[str, Any] | None:
        """What it says next; raises at a stop; where it `is_ending` anyway, only if that is urgent."""
        while True:
            try:
                return self.said.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if self._outer.is_urgent or (self._outer.first_seconds < math.inf and not is_ending):
                    raise Stopped from None


class HostSupervisor:
    """Takes part in a run for as long as it lasts."""

    def __init__(self, run: Run, module: str, arguments: Mapping[str, Any], stop: StopRequests):
        """`module`, `arguments`: of a rank."""
        self.run, self.module, self.arguments, self.stop = run, module, arguments, stop
        self.settings, self.name = run.config.run, socket.gethostname()
        self.least, self.most = self.settings.host_range
        self.num_local = self.settings.ranks or count_gpus() or len(os.sched_getaffinity(0))
        self.attempts: list[Attempt] = []
        self.why, self.noticed_seconds, self.shape = cause_of_restart(), 0.0, (0, 0)
        """Of the launch before: how it ended and when, its hosts and ranks."""
        self.logs = run.folder / "logs" / "".join(each if each.isalnum() or each in ".-" else "_" for each in self.name)

    def supervise(self) -> int:
        """The exit code."""
        tell_guard(self.run.folder.absolute(), self.settings.restarts)
        self.logs.mkdir(parents=True, exist_ok=True)
        told = {
            "folder": str(self.run.folder.absolute()),
            "endpoints": self.settings.endpoints,
            "hosts": str(self.settings.hosts),
            "least": self.least,
            "most": self.most,
            "num_local": self.num_local,
            "wait_seconds": 60 * self.settings.wait_minutes,
        }
        many = f"{self.least} to {self.most}" if self.least < self.most else str(self.most)
        self.run.report(f"{self.name}: one of {many} hosts, which meet at {self.settings.rendezvous}")
        in_vain = 0
        while in_vain <= self.settings.restarts:
            agent, in_vain = Agent(told, self.logs / "agent.log", self.stop), in_vain + 1
            try:
                with Standby() as standby:
                    verdict, is_ending = dict[str, Any](), False
                    while (heard := agent.hear(is_ending=is_ending)) is not None:
                        if heard["event"] == "end":
                            return self._end(heard)
                        in_vain = 0
                        outcome = self._launch(agent, heard, standby if self.settings.standby else None)
                        verdict = self._judge(outcome, heard)
                        is_ending = verdict.get("state", "SUCCEEDED") == "SUCCEEDED"
                        agent.tell(verdict)
            finally:
                agent.child.end()
            if is_ending:
                return self._end(verdict.get("end", {"exit_code": 0}))
            self.why = self.why or f"{self.name} has lost the others"
            self.run.report(f"{self.name} has lost the others (see {self.logs / 'agent.log'}); meeting them again")
        raise error_at(
            "run.rendezvous", f"the agent of this host ends by itself, see {self.logs / 'agent.log'}.", "", 1
        )

    def _launch(self, agent: Agent, place: Mapping[str, Any], standby: Standby | None) -> LaunchOutcome:
        """The ranks of this host in one round, until they have ended."""
        before, self.shape = self.shape, (place["num_hosts"], place["num_ranks"])
        changed_since = 0.0
        if before[0] and before != self.shape:
            told = [f"{counted(hosts, 'host')} ({counted(ranks, 'rank')})" for hosts, ranks in (self.shape, before)]
            self.why, changed_since = f"Going on with {told[0]} in place of {told[1]}. {self.why}", self.noticed_seconds
        elif not (before[0] or place["is_first_round"]):
            self.why = self.why or f"{self.name} has joined"
        first = place["first_rank"]
        where = {"num_local": self.num_local, "is_one_host": place["num_hosts"] == 1}
        where |= {name: place[name] for name in ("master_address", "master_port")}
        arguments = {**self.arguments, "restart": self.why, "changed_since": changed_since, "place": where}
        outcome = launch(
            self.module,
            arguments,
            self.num_local,
            log_folder=self.logs,
            grace_seconds=self.settings.grace_seconds,
            environment={"KINETO_LOG_LEVEL": "9"},
            stop=agent.stop,
            patience_seconds=60 * self.settings.patience_minutes,
            standby=standby,
            first_rank=first,
            num_in_all=place["num_ranks"],
        )
        self.noticed_seconds = outcome.noticed_seconds or min(agent.stop.first_seconds, time.monotonic())
        if first == 0:
            about = {"exit_code": outcome.exit_code, "cause": outcome.message()}
            note_time(self.run.folder, "end", **about, noticed_monotonic=self.noticed_seconds)
        return outcome

    def _judge(self, outcome: LaunchOutcome, place: Mapping[str, Any]) -> dict[str, Any]:
        """What the agent is told of an outcome: another round, or the end."""
        if outcome.exit_code == 0:
            return {"state": "SUCCEEDED"}
        if self.stop.first_seconds < math.inf:
            has_failed = any(not failure.is_secondary for failure in outcome.failures)
            about = {"exit_code": outcome.exit_code, "text": outcome.message()} if has_failed else _STOPPED
            return {"end": {**about, "is_for_all": place["num_hosts"] <= self.least}}
        if outcome.exit_code == PREEMPTED_EXIT_CODE:
            self.why = "Hosts have come or gone"
            return {"state": "UNHEALTHY"}
        steps, restarts = list_steps(self.run.folder / "checkpoints"), self.settings.restarts
        self.attempts.append(Attempt(outcome=outcome, saved_step=steps[-1] if steps else -1))
        if restarts and cause(outcome.failures).is_secondary:  # the host of the cause is the one to give up
            restarts = 2 * restarts + 1
        remedy = remedy_for(self.attempts, restarts=restarts, is_stopped=False)
        if remedy.action == "give up":
            text = replace(outcome, advice=remedy.why).message()
            return {"end": {"exit_code": remedy.exit_code, "text": f"{self.name}: {text}", "is_for_all": True}}
        self.why = remedy.why
        self.run.report(self.why)
        self.stop.wait(remedy.pause_seconds)
        return {"state": "FAILED"}

    def _end(self, told: Mapping[str, Any]) -> int:
        """The exit code, where the end is none that has to be explained."""
        code = int(told["exit_code"])
        if code == PREEMPTED_EXIT_CODE and self.stop.first_seconds == math.inf:
            self.run.report(f"{told['text']}; the same command goes on")
        if code not in (0, PREEMPTED_EXIT_CODE):
            raise MeshwrightError(str(told["text"]), code)
        return code
