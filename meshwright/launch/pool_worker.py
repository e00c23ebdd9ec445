"""The process behind one rank of a `RankPool`: imports torch once, then calls functions as it is told.

Requests and answers are JSON lines on what were stdin and stdout; both are moved to private descriptors
first, and what user code prints goes to the log, so that it cannot garble an answer. A worker ends when its
requests do.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from typing import IO, Any

from meshwright.launch.failure import error_as_json
from meshwright.launch.rank_job import rank_names, show_stacks_on_crash

MOST_THREADS = 100
"""Beyond, a worker asks to be replaced. What torch keeps of a run (sharded or compiled modules) keeps its process
groups, and the threads of each wake up a hundred times a second."""
MOST_FILES = 500
"""Likewise: every run leaves its rendezvous file open, and the sockets of such groups."""


def main() -> None:
    threads = int(sys.argv[1])
    show_stacks_on_crash()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, answers = take_pipes()

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


def take_pipes() -> tuple[IO[str], IO[str]]:
    """Move stdin and stdout to descriptors children do not inherit; leave /dev/null and the log in place."""
    requests, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, answers


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
    main()
