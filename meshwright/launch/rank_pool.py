"""Rank processes that stay: torch is imported once (2 s), then a run on N ranks costs milliseconds.

    with RankPool(4) as pool:
        sums = pool.run("package.module:function", {"seed": 1}, num_ranks=2)     # one JSON value per rank

Each rank calls `function(rank=, num_ranks=, rendezvous=, **arguments)`; `rendezvous` is a path, new for every
run, for torch's FileStore. Requests and answers are JSON lines on what were a worker's stdin and stdout; both are moved
to private descriptors first, and what user code prints goes to the log, so that it cannot garble an answer. A worker
ends when its requests do. After a failure the peers may be stuck in a collective, so all workers are killed
and the next run starts new ones. Use a pool from one thread: workers die with the thread that started them.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from meshwright.core.errors import MeshwrightError, Problem
from meshwright.core.files import memory_file
from meshwright.core.process import Child, start_child
from meshwright.launch.failure import Failure, cause, error_as_json, failure_from_error, failure_from_exit, log_tail
from meshwright.launch.rank_job import rank_environment, rank_names, show_stacks_on_crash

START_SECONDS = 120.0  # importing torch takes 2 s, and far longer from a cold or busy disk
POLL_SECONDS = 0.05
LAST_WORDS_SECONDS = 1.0  # after one rank failed, for the others to fail by themselves
MOST_THREADS = 100
"""Beyond, a worker asks to be replaced. What torch keeps of a run (sharded or compiled modules) keeps its process
groups, and the threads of each wake up a hundred times a second."""
MOST_FILES = 500
"""Likewise: every run leaves its rendezvous file open, and the sockets of such groups."""
STACKS_SECONDS = 5.0  # at most, for a hung worker to write where it hangs into its log


class RankError(MeshwrightError):
    """A function failed in a rank. The text is the cause and its traceback; `failures` has every rank's."""

    def __init__(self, failures: Sequence[Failure], num_ranks: int):
        self.failures, self.num_ranks = tuple(failures), num_ranks
        first = cause(failures)
        text = f"{first.sentence(num_ranks)}\n{first.details}".rstrip()
        super().__init__((Problem(where="", what=text),), exit_code=first.exit_code)


@dataclass(kw_only=True)
class Worker:
    """One worker seen from here: its process, its log, and the part of an answer that has come so far."""

    child: Child
    log: Path
    log_start: int = 0
    received: bytes = b""
    is_ready: bool = False

    @property
    def descriptor(self) -> int:
        return cast(IO[bytes], self.child.process.stdout).fileno()

    @property
    def has_shown_stacks(self) -> bool:
        """Whether faulthandler, asked by SIGQUIT, has come to the main thread, the last that it shows."""
        return "Current thread" in log_tail(self.log, self.log_start)

    def ask(self, request: Mapping[str, Any]) -> None:
        self.log_start = self.log.stat().st_size
        requests = cast(IO[bytes], self.child.process.stdin)
        with contextlib.suppress(BrokenPipeError):  # it is dead, which `collect` will notice and explain
            requests.write(json.dumps(request).encode() + b"\n")
            requests.flush()

    def read(self) -> bytes:
        """What has arrived, kept in `received`; empty at the end of the pipe."""
        chunk = os.read(self.descriptor, 1 << 16)
        self.received += chunk
        return chunk

    def take_answer(self) -> dict[str, Any] | None:
        line, newline, rest = self.received.partition(b"\n")
        if not newline:
            return None
        self.received = rest
        return cast(dict[str, Any], json.loads(line))

    def failure(self, why_ended: str = "") -> Failure:
        """How it ended without an answer."""
        tail = log_tail(self.log, self.log_start)
        code = self.child.exit_code
        if code is None:
            said: dict[str, Any] = {"message": f"killed by us: {why_ended}", "details": tail}
            return Failure(rank=self.child.rank, kind="signal", is_secondary=False, log=self.log, **said)
        return failure_from_exit(self.child.rank, code, self.child.why_ended, tail, self.log)


class RankPool:
    """Up to `num_ranks` warm rank processes, started when first needed."""

    def __init__(self, num_ranks: int, *, log_folder: Path | None = None, threads_per_rank: int = 1):
        if num_ranks < 1 or threads_per_rank < 1:
            raise MeshwrightError(f"rank pool: {num_ranks} ranks of {threads_per_rank} threads. Use 1 or more of each.")
        self.num_ranks = num_ranks
        self.threads_per_rank = threads_per_rank
        self._log_folder = log_folder
        if log_folder is not None:
            log_folder.mkdir(parents=True, exist_ok=True)
        self._held = contextlib.ExitStack()  # logs in memory, where no folder is given
        self._workers: dict[int, Worker] = {}

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        """End every worker. The pool may not be used afterwards."""
        self._end_workers()
        self._held.close()

    def start(self, num_ranks: int) -> None:
        """Start the first `num_ranks` workers that do not run, without waiting until they are ready."""
        if not 1 <= num_ranks <= self.num_ranks:
            raise MeshwrightError(f"rank pool: {num_ranks} ranks asked of a pool of {self.num_ranks}.")
        for rank in range(num_ranks):
            if (worker := self._workers.get(rank)) is not None:
                if worker.child.exit_code is None:
                    continue
                worker.child.end()
            in_folder = self._log_folder and self._log_folder / f"worker-{rank}.log"
            log = in_folder or Path(self._held.enter_context(memory_file()))
            environment = rank_environment(rank, self.num_ranks, self.threads_per_rank)
            words = ("meshwright.launch.rank_pool", str(self.threads_per_rank))
            pipe = subprocess.PIPE
            with log.open("ab") as stream:
                size = stream.tell()
                child = start_child(rank, words, environment=environment, stdin=pipe, stdout=pipe, stderr=stream)
            self._workers[rank] = Worker(child=child, log=log, log_start=size)

    def run(
        self,
        function: str,
        arguments: Mapping[str, Any],
        num_ranks: int,
        timeout_seconds: float = 120,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> list[Any]:
        """Call `function` ("package.module:name") on the first `num_ranks` ranks; their values by rank.

        Values cross as JSON, so a tuple comes back as a list. Starting workers is not counted as time of it.
        `meanwhile` is called now and then while the ranks work.
        """
        self.start(num_ranks)
        workers = [self._workers[rank] for rank in range(num_ranks)]
        new = [worker for worker in workers if not worker.is_ready]
        self._collect(new, num_ranks, START_SECONDS, "starting up")
        for worker in new:
            worker.is_ready = True
        with memory_file() as rendezvous:
            request = {"function": function, "arguments": dict(arguments), "num_ranks": num_ranks}
            for worker in workers:
                worker.ask(request | {"rendezvous": rendezvous, "rank": worker.child.rank})
            answers = self._collect(workers, num_ranks, timeout_seconds, function, meanwhile)
        for rank in range(num_ranks):
            if answers[rank].get("is_worn"):
                self._workers.pop(rank).child.end()
        return [answers[rank]["value"] for rank in range(num_ranks)]

    def _end_workers(self) -> None:
        for worker in self._workers.values():
            worker.child.end()
        self._workers.clear()

    def _collect(
        self,
        workers: Sequence[Worker],
        num_ranks: int,
        timeout_seconds: float,
        what: str,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> dict[int, dict[str, Any]]:
        """One answer from each worker, or a `RankError` with all workers ended."""
        try:
            answers, failures = collect(workers, timeout_seconds, meanwhile)
            silent = [worker for worker in workers if worker.child.rank not in answers]
            if silent and not failures:
                for worker in silent:
                    if worker.is_ready:  # before that, SIGQUIT would kill it; now it writes where it hangs
                        os.kill(worker.child.process.pid, signal.SIGQUIT)
                deadline = time.monotonic() + STACKS_SECONDS
                while any(w.is_ready and not w.has_shown_stacks for w in silent) and time.monotonic() < deadline:
                    time.sleep(POLL_SECONDS)
                why = f"no answer from {what} within {timeout_seconds:g} s"
                failures = [worker.failure(why) for worker in silent]
            if failures:
                raise RankError(failures, num_ranks)
            return answers
        except BaseException:  # also Ctrl-C: a late answer must not be taken for the next run's
            self._end_workers()
            raise


def collect(
    workers: Sequence[Worker], timeout_seconds: float, meanwhile: Callable[[], object]
) -> tuple[dict[int, dict[str, Any]], list[Failure]]:
    """Answers by rank and failures, until all are in, time is over, or shortly after the first failure."""
    answers: dict[int, dict[str, Any]] = {}
    failures: list[Failure] = []
    waiting = {worker.child.rank: worker for worker in workers}
    deadline = time.monotonic() + timeout_seconds
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.descriptor, selectors.EVENT_READ, worker)
        while waiting and time.monotonic() < deadline:
            meanwhile()
            ended = {rank for rank, worker in waiting.items() if worker.child.exit_code is not None}
            talking: set[int] = set()
            for key, _ in selector.select(POLL_SECONDS):
                if key.data.read():
                    talking.add(key.data.child.rank)
                else:
                    selector.unregister(key.fd)
            for rank, worker in tuple(waiting.items()):
                answer = worker.take_answer()
                if answer is not None and "error" not in answer:
                    answers[rank] = answer
                elif answer is not None:
                    failures.append(failure_from_error(rank, answer["error"], worker.log))
                elif rank in ended and rank not in talking:
                    failures.append(worker.failure())
                else:
                    continue
                del waiting[rank]
            if failures:
                deadline = min(deadline, time.monotonic() + LAST_WORDS_SECONDS)
    return answers, failures


def work() -> None:
    """A worker's whole life: torch is imported once, then functions are called as requests say."""
    threads = int(sys.argv[1])
    show_stacks_on_crash()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # To descriptors that children do not inherit; /dev/null and the log are left in their place.
    requests, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)

    import torch
    import torch.distributed

    from meshwright.launch.cpu_bf16 import limit_isa_for_bf16

    limit_isa_for_bf16()  # it forks, so before the first tensor op
    torch.set_num_threads(threads)
    tell(answers, {"is_ready": True})
    for line in requests:
        answered = answer(json.loads(line))
        tell(answers, answered | {"is_worn": count("task") > MOST_THREADS or count("fd") > MOST_FILES})
    os._exit(0)


def tell(answers: IO[str], message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """`{"value": ...}` or `{"error": ...}`; a value that is not JSON is an error of the function."""
    import torch.distributed

    rank, num_ranks = request["rank"], request["num_ranks"]
    os.environ.update(rank_names(rank, num_ranks))
    try:
        module, name = request["function"].split(":")
        function = getattr(importlib.import_module(module), name)
        # The descriptor stays open here, so that the path stays valid: torch's store writes into its file when it is
        # destroyed, which may be long after the run. By then the pool's descriptor of the same number can be another
        # file, and the store would damage it, or read from it for ever.
        rendezvous = f"/proc/self/fd/{os.open(request['rendezvous'], os.O_RDWR)}"
        value = function(rank=rank, num_ranks=num_ranks, rendezvous=rendezvous, **request["arguments"])
        json.dumps(value)
        if torch.distributed.is_initialized():  # the next run starts its own group, perhaps of another size
            torch.distributed.destroy_process_group()
    except BaseException as error:
        return {"error": error_as_json(error)}
    return {"value": value}


def count(kind: str) -> int:
    """Threads ("task") or open files ("fd") of this process."""
    return len(os.listdir(f"/proc/self/{kind}"))


if __name__ == "__main__":
    work()
