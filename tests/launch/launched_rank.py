"""A rank for the launch tests, run with `-m`: each function is one way a rank can end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from meshwright.core.errors import MeshwrightError
from meshwright.launch.rank_job import Job, StopFlag, run_rank


def ok(job: Job, stop: StopFlag) -> int:
    print(f"rank {job.rank} says hello", flush=True)
    return 0


def show_environment(job: Job, stop: StopFlag) -> int:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS")
    print(*(f"{name}={os.environ[name]}" for name in names))
    return 0


def raise_value_error(job: Job, stop: StopFlag) -> int:
    raise ValueError("three is not four")


def raise_lost_peer(job: Job, stop: StopFlag) -> int:
    raise RuntimeError("[../gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]:1234")


def raise_meshwright_error(job: Job, stop: StopFlag) -> int:
    raise MeshwrightError("tensor: 12 heads cannot be cut 8 ways. Use 1, 2, 3, 4, 6 or 12.")


def kill_itself(job: Job, stop: StopFlag) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def crash(job: Job, stop: StopFlag) -> int:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0


def raise_at_a_collective(job: Job, stop: StopFlag) -> int:
    """The highest rank raises while the others wait for it in a real collective."""
    import torch
    import torch.distributed as dist

    if meet(job):
        raise ValueError("no more")
    dist.all_reduce(torch.ones(1))
    return 0


def die_at_a_collective(job: Job, stop: StopFlag) -> int:
    import torch
    import torch.distributed as dist

    return kill_itself(job, stop) if meet(job) else bool(dist.all_reduce(torch.ones(1 << 20)))


def die_before_a_send(job: Job, stop: StopFlag) -> int:
    """As in a pipeline: each waits for the rank above it, and only the highest is gone."""
    import torch
    import torch.distributed as dist

    return kill_itself(job, stop) if meet(job) else dist.recv(torch.ones(1 << 20), src=job.rank + 1)


def meet(job: Job) -> bool:
    """Join the others; whether this is the highest rank, the one that fails."""
    import torch.distributed as dist

    store = dist.FileStore(job.rendezvous, job.num_ranks)
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.num_ranks)
    dist.barrier()
    return job.rank == job.num_ranks - 1


def exit_three(job: Job, stop: StopFlag) -> int:
    sys.exit(3)


def hang(job: Job, stop: StopFlag) -> int:
    """Deaf to the flag, with a child of its own that must not be left behind either."""
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    folder = Path(str(job.arguments["pids"]))
    (folder / f"pid-{job.rank}").write_text(f"{os.getpid()} {sleeper.pid}")
    time.sleep(300)
    return 0


def show_imports(job: Job, stop: StopFlag) -> int:
    """Where a module of the standard library and one of the working folder come from."""
    import random

    import own_module

    print(random.__file__, own_module.__file__)
    return 0


def stick_in_native_code(job: Job, stop: StopFlag, may_leave: bool = True) -> int:
    """With nothing to save, where no handler of Python's can run: on a mutex that is never unlocked."""
    import ctypes

    stop.leave_at_once(may_leave)
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    (Path(str(job.arguments["pids"])) / f"pid-{job.rank}").write_text(str(os.getpid()))
    return int(libc.pthread_mutex_lock(mutex))


def save_for_ever(job: Job, stop: StopFlag) -> int:
    """Where a grace ends, whatever the main thread waits for: a mutex that is never unlocked."""
    stop.grace_seconds = 2.0
    return stick_in_native_code(job, stop, may_leave=False)


def work_until_stopped(job: Job, stop: StopFlag) -> int:
    folder = Path(str(job.arguments["pids"]))
    (folder / f"pid-{job.rank}").write_text(str(os.getpid()))
    while not stop.is_set:
        time.sleep(0.01)
    (folder / f"saved-{job.rank}").touch()
    return 75


def train_and_die(job: Job, stop: StopFlag) -> int:
    """Steps until a file says that it is enough."""
    from meshwright.launch.sections import SectionStamp

    stamp, folder = SectionStamp(job.sections, job.rank), Path(str(job.arguments["pids"]))
    stamp.begin(0)
    step = 0
    while not (folder / "enough").exists():
        stamp.look("forward")
        time.sleep(0.01)
        stamp.end_step(step := step + 1)
    return kill_itself(job, stop)


def train(job: Job, stop: StopFlag, hangs_in: str = "") -> int:
    """Steps as a training makes them, until one hangs; at most 12 s."""
    from meshwright.launch.sections import SectionStamp

    folder, stamp = Path(str(job.arguments["pids"])), SectionStamp(job.sections, job.rank)
    stamp.begin(100)
    (folder / f"pid-{job.rank}").write_text(str(os.getpid()))
    for step in range(100, 340):
        for kind in ("data", "begin", "forward", "backward", "exchange", "update"):
            stamp.look(kind)
            time.sleep(0.008)
            if step == 110 and kind == hangs_in:
                while True:
                    pass
            while step == 110 and kind == "exchange" and hangs_in == "" and job.arguments["waits"]:
                time.sleep(0.1)
        stamp.end_step(step + 1)
        if step == 105:
            with stamp.within("save"):
                time.sleep(4.0)
    return 0


def hang_in_backward(job: Job, stop: StopFlag) -> int:
    return train(job, stop, "backward")


def main(job: Job, stop: StopFlag) -> int:
    behaviours = job.arguments["behaviours"]
    return int(globals()[behaviours[job.rank]](job, stop))


if __name__ == "__main__":
    if "IMPORTS_UNTIL" in os.environ:  # like torch, whose import takes long
        gate = Path(os.environ["IMPORTS_UNTIL"])
        gate.with_name("importing").write_text(str(os.getpid()))
        while not gate.exists():
            time.sleep(0.01)
    run_rank(main)
