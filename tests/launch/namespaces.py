"""Hosts for tests: Linux network namespaces with an address each, on one bridge, seeing the same files."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PORT = "29511"
# Its own name, and names for addresses: torch looks up every peer's, and asking a name server that is out of
# reach takes many seconds. The mounts are seen by this process and its children alone.
_ENTER = 'hostname "$0"; mount --bind "$1" /etc/hosts; mount --bind /dev/null /etc/resolv.conf; shift; exec "$@"'


_NUMBERS = itertools.count()


class IpFailed(Exception):
    """What `ip` complained of."""


def why_there_are_none() -> str:
    """Why no host can be made here: not root, no `ip` command, a container that forbids it. Else nothing."""
    if shutil.which("ip") is None:
        return "there is no `ip` command (package iproute2)"
    name = _new_prefix()
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
        _ip("link", "add", name, "type", "bridge")
        _ip("link", "del", name)
    except IpFailed as reason:
        return str(reason)
    return ""


def _new_prefix() -> str:
    """Never the same twice: the kernel takes a while to forget a host's name and cable."""
    return f"mw{os.getpid()}x{next(_NUMBERS)}"


@dataclass
class Hosts:
    """`count` hosts; the first (0) is where ranks meet."""

    prefix: str
    count: int
    folder: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def namespace(self, host: int) -> str:
        return f"{self.prefix}-{host}"

    def cable(self, host: int) -> str:
        """The switch's end of this host's cable."""
        return f"{self.prefix}c{host}"

    def make(self) -> None:
        names = ["127.0.0.1 localhost", *(f"{self.address(host)} node{host}" for host in range(self.count))]
        (self.folder / "hosts").write_text("\n".join(names) + "\n")
        _ip("link", "add", f"{self.prefix}b", "type", "bridge")
        _ip("link", "set", f"{self.prefix}b", "up")
        for host in range(self.count):
            inside = ("-n", self.namespace(host))
            _ip("netns", "add", self.namespace(host))
            _ip("link", "add", self.cable(host), "type", "veth", "peer", "name", "eth0", "netns", self.namespace(host))
            _ip("link", "set", self.cable(host), "master", f"{self.prefix}b", "up")
            _ip(*inside, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _ip(*inside, "link", "set", "eth0", "up")
            _ip(*inside, "link", "set", "lo", "up")

    def remove(self) -> None:
        """All that `make` made, also half of it, and what still runs there."""
        for host in range(self.count):
            with contextlib.suppress(IpFailed):
                self.kill(host)
            with contextlib.suppress(IpFailed):  # before its host: a dead host's sockets keep it for minutes
                _ip("link", "del", self.cable(host))
            with contextlib.suppress(IpFailed):
                _ip("netns", "del", self.namespace(host))
        for process in self.started:
            process.kill()
            process.communicate()
        with contextlib.suppress(IpFailed):
            _ip("link", "del", f"{self.prefix}b")

    def start(self, host: int, *words: str, **variables: str) -> subprocess.Popen[str]:
        """`python -m words...` on a host that calls itself node0, node1, ... and knows the others by these names."""
        command = ["ip", "netns", "exec", self.namespace(host), "unshare", "--uts", "--mount", "sh", "-ec", _ENTER]
        names = self.folder / "hosts"
        process = subprocess.Popen(
            [*command, f"node{host}", str(names), sys.executable, "-m", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=_environment() | variables,
        )
        self.started.append(process)
        return process

    def start_rank(self, host: int, *words: str, **variables: str) -> subprocess.Popen[str]:
        """`mw words...` as the only rank of this host, by torchrun's contract and without torchrun."""
        place = {
            "RANK": str(host),
            "WORLD_SIZE": str(self.count),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": PORT,
        }
        return self.start(host, "meshwright.cli.main", *words, **(place | variables))

    def start_torchrun(self, host: int, num_ranks: int, *words: str, **variables: str) -> subprocess.Popen[str]:
        flags = [f"--nnodes={self.count}", f"--nproc-per-node={num_ranks}", f"--node-rank={host}"]
        flags += [f"--master-addr={self.address(0)}", f"--master-port={PORT}"]
        return self.start(host, "torch.distributed.run", *flags, "-m", "meshwright.cli.main", *words, **variables)

    def kill(self, host: int) -> None:
        """kill -9 for every process of a host."""
        listed = _ip("netns", "pids", self.namespace(host))
        for pid in map(int, listed.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill_rank(self, rank: int) -> None:
        """kill -9 for one rank, on whichever host it is."""
        listed = (pid for host in range(self.count) for pid in _ip("netns", "pids", self.namespace(host)).split())
        mine = [pid for pid in listed if f"\0RANK={rank}\0" in f"\0{Path(f'/proc/{pid}/environ').read_text()}"]
        assert len(mine) == 1, mine
        os.kill(int(mine[0]), signal.SIGKILL)

    def pull_cable(self, host: int) -> None:
        """No packet reaches it or leaves it, and nobody is told."""
        _ip("link", "set", self.cable(host), "down")


@contextlib.contextmanager
def hosts_made(count: int, folder: Path) -> Iterator[Hosts]:
    hosts = Hosts(prefix=_new_prefix(), count=count, folder=folder)
    try:
        hosts.make()
        yield hosts
    finally:
        hosts.remove()


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise IpFailed(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _environment() -> Mapping[str, str]:
    """Without anything that says where ranks meet or how they reach each other: users do not say it either."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "GLOO_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in ours} | {"OMP_NUM_THREADS": "1"}
