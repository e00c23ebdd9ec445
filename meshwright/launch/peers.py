"""Other machines' ranks: which network interface leads to them, and who of them is gone. No torch.

Gloo must be told the interface: left alone, it binds to whatever this machine's own name resolves to, on many machines
127.0.0.1, and ranks of other machines then knock at their own door.

A collective waits: for a rank that died on another machine, and for ten minutes or more if that machine went
away without closing its connections (power, cable). So each rank watches its own connections. A process that
ends closes them at once. Of a machine that went silent the kernel finds out by asking it (TCP keep-alive): one
that only computes for long still answers, as its kernel does.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.launch.failure import GONE

POLL_SECONDS = 0.2
_SECONDS_OF_A_CONNECTION = 1e-3
"""Waited for each that is looked at, so that looking at thousands takes a hundredth of the time."""
SILENT_SECONDS = 30.0
"""How long a machine may not answer before it counts as gone."""
SILENT_SECONDS_NAME = "MESHWRIGHT_SILENT_SECONDS"
TOGETHER_SECONDS = 1.0
"""Ranks lost this soon after the first went with it; later ones left because of it."""
_SOMEWHERE_ELSE = "198.51.100.1"  # an address for documents (RFC 5737): the way there is the default route
_ESTABLISHED = 1  # the first byte of TCP_INFO, linux/tcp.h
_V4_IN_V6 = "::ffff:"
_SIOCGIFCONF = 0x8912  # linux/sockios.h
_REQUEST_BYTES = 40  # sizeof(struct ifreq): a name of 16 bytes, then a sockaddr
_MOST_INTERFACES = 256

Endpoint = tuple[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankHost:
    """Where a rank runs."""

    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.name} ({self.address})" if self.address else self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """An open socket of this process, by its number and by what the kernel calls it: numbers are used again."""

    number: int
    kernel_name: str
    ours: Endpoint
    theirs: Endpoint

    @property
    def is_open(self) -> bool:
        """Open on both ends. One that its owner has closed is not."""
        with contextlib.suppress(OSError), _borrowed(self.number) as connection:
            is_same = os.readlink(f"/proc/self/fd/{self.number}") == self.kernel_name
            return is_same and connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED
        return False

    def ask_when_silent(self, seconds: float) -> None:
        """Have the kernel close it when the other machine has not answered for about so long."""
        between = max(1, round(seconds / 4))
        settings = {
            socket.TCP_KEEPIDLE: between,
            socket.TCP_KEEPINTVL: between,
            socket.TCP_KEEPCNT: 3,
            socket.TCP_USER_TIMEOUT: round(seconds * 1000),  # for what was sent and is not acknowledged
        }
        with contextlib.suppress(OSError), _borrowed(self.number) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in settings.items():
                connection.setsockopt(socket.IPPROTO_TCP, name, value)


def connections() -> list[Connection]:
    """This process's TCP connections, whoever made them."""
    result = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or no connection
            kernel_name = os.readlink(f"/proc/self/fd/{name}")
            if kernel_name.startswith("socket:"):
                with _borrowed(int(name)) as each:
                    if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                        ours, theirs = _endpoint(each.getsockname()), _endpoint(each.getpeername())
                        result.append(Connection(number=int(name), kernel_name=kernel_name, ours=ours, theirs=theirs))
    return result


@contextlib.contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """The socket under another number, so that its owner's stays open afterwards."""
    with socket.socket(fileno=os.dup(number)) as borrowed:
        yield borrowed


def _endpoint(name: Sequence[Any]) -> Endpoint:
    return str(name[0]).removeprefix(_V4_IN_V6), int(name[1])


def silent_seconds(environ: Mapping[str, str]) -> float:
    """As the environment says; a value that is no number of seconds is not obeyed."""
    given = environ.get(SILENT_SECONDS_NAME, "")
    return max(2.0, float(given)) if given.replace(".", "", 1).isdecimal() else SILENT_SECONDS


class PeerWatch:
    """Watches the connections to the other ranks, and ends this process if it does not end by itself."""

    def __init__(self, rank: int, *, give_up: Callable[[], None], patience_seconds: float = 3.0):
        """`give_up` is called from the watch's own thread: a peer was lost and we are still here."""
        self.rank, self.give_up, self.patience_seconds = rank, give_up, patience_seconds
        self.hosts: tuple[RankHost, ...] = ()
        self._connections: list[tuple[int, Connection]] = []
        self._lost: dict[int, float] = {}
        self._is_over = threading.Event()

    @property
    def poll_seconds(self) -> float:
        return max(POLL_SECONDS, len(self._connections) * _SECONDS_OF_A_CONNECTION)

    def start(
        self,
        mine: Sequence[Connection],
        hosts: Sequence[RankHost],
        ends: Sequence[Sequence[Sequence[Any]]],
        seconds: float,
    ) -> None:
        """`hosts` by rank, and the `ends` of its connections: what is theirs to us is ours to one of them."""
        self.hosts = tuple(hosts)
        owner = {_endpoint(end): rank for rank, those in enumerate(ends) for end in those}
        for each in mine:
            rank = owner.get(each.theirs, self.rank)
            if rank != self.rank:
                each.ask_when_silent(seconds)
                self._connections.append((rank, each))
        threading.Thread(target=self._watch, name="peers", daemon=True).start()

    def stop(self) -> None:
        """From now on the others may leave."""
        self._is_over.set()

    def lost(self, wait_seconds: float = 0.0) -> tuple[int, ...]:
        """The ranks that were lost first; waits as long for the first of them, then for those that went with it."""
        deadline = time.monotonic() + (max(wait_seconds, 2 * self.poll_seconds) if wait_seconds else 0.0)
        while not self._lost and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 2)
        if not self._lost:
            return ()
        last = min(self._lost.values()) + TOGETHER_SECONDS
        time.sleep(max(0.0, last - time.monotonic()))
        return tuple(sorted(rank for rank, when in self._lost.items() if when <= last))

    def is_teller(self, lost: Sequence[int]) -> bool:
        """Whether it is ours to tell the user: one rank of each machine that is left does."""
        mine = self.hosts[self.rank]
        here = [rank for rank, host in enumerate(self.hosts) if host == mine and rank not in lost]
        return self.rank == min(here, default=self.rank)

    def sentence(self, lost: Sequence[int]) -> str:
        who = f"rank{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))} of {len(self.hosts)}"
        where = ", ".join(sorted({str(self.hosts[rank]) for rank in lost}))
        verb = "are" if len(lost) > 1 else "is"
        return f"{who} on {where} {verb} {GONE}, or the machine does not answer."

    def _watch(self) -> None:
        while not self._is_over.wait(self.poll_seconds):
            now = time.monotonic()
            for rank, each in self._connections:
                if rank not in self._lost and not each.is_open:
                    self._lost[rank] = now
            if self._lost and now > min(self._lost.values()) + self.patience_seconds:
                self.give_up()
                return


def address_towards(host: str, port: int) -> str:
    """Our own address on the way to `host`; empty where its name or a way there is not known. Nothing is sent."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def outward_address(host: str, port: int) -> str:
    """Our own address towards `host` as others reach it: many machines call their own name 127.0.1.1."""
    address = address_towards(host, port)
    return address_towards(_SOMEWHERE_ELSE, port) or address if interface_of(address) == "lo" else address


def interface_of(address: str) -> str:
    """The interface that has this address; empty where none has."""
    try:
        wanted = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    if wanted.is_loopback:  # all of 127.0.0.0/8, of which the interface lists one
        return "lo"
    if wanted.version == 6:
        listing = Path("/proc/net/if_inet6")
        rows = [line.split() for line in listing.read_text().splitlines()] if listing.exists() else []
        return next((row[5] for row in rows if bytes.fromhex(row[0]) == wanted.packed), "")
    # Every address, the second ones of an interface too, and the interface's name.
    space = array.array("B", bytes(_MOST_INTERFACES * _REQUEST_BYTES))
    place, length = space.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iP", length, place))
    for start in range(0, struct.unpack("iP", answer)[0], _REQUEST_BYTES):
        if space[start + 20 : start + 24].tobytes() == wanted.packed:
            name = space[start : start + 16].tobytes().partition(b"\0")[0].decode()
            return name.partition(":")[0]
    return ""
