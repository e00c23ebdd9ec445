"""Functions the pool's workers call in the tests. Torch is imported where used: workers have it already."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any


def join(rank: int, num_ranks: int, rendezvous: str) -> Any:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(rendezvous, num_ranks), rank=rank, world_size=num_ranks)
    return dist


def sum_of_ranks(rank: int, num_ranks: int, rendezvous: str, offset: int) -> dict[str, Any]:
    import torch

    print("a print must not garble the answer")
    dist = join(rank, num_ranks, rendezvous)
    total = torch.tensor([rank + offset], dtype=torch.float64)
    dist.all_reduce(total)
    return {"total": total.item(), "rank": rank, "pid": os.getpid(), "threads": torch.get_num_threads()}


def rank_one_raises(rank: int, num_ranks: int, rendezvous: str) -> None:
    import torch

    dist = join(rank, num_ranks, rendezvous)
    if rank == 1:
        raise ValueError("rank one does not like this")
    dist.all_reduce(torch.ones(1))


def rank_one_is_killed(rank: int, num_ranks: int, rendezvous: str) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(300)


def sleep_for_ever(rank: int, num_ranks: int, rendezvous: str) -> None:
    time.sleep(300)


def answer_a_set(rank: int, num_ranks: int, rendezvous: str) -> set[int]:
    return {rank}


def long_answer(rank: int, num_ranks: int, rendezvous: str, text: str) -> str:
    return text * 2


def start_threads(*, count: int, rank: int, num_ranks: int, rendezvous: str) -> int:
    """Threads that stay, and this process."""
    for _ in range(count):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    return os.getpid()


KEPT: list[Any] = []


def keep_store(rank: int, num_ranks: int, rendezvous: str) -> None:
    """Hold the store beyond the run, as modules do that hold their process groups."""
    import torch.distributed as dist

    KEPT.append(dist.FileStore(rendezvous, num_ranks))


def drop_store(rank: int, num_ranks: int, rendezvous: str) -> None:
    KEPT.clear()
