"""Which network interface leads to another machine: gloo must be told, and nobody should have to look it up.

Left alone, gloo binds to whatever this machine's own name resolves to. On many machines that is 127.0.0.1, and
ranks of other machines then knock at their own door.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFCONF = 0x8912  # linux/sockios.h
_REQUEST_BYTES = 40  # sizeof(struct ifreq): a name of 16 bytes, then a sockaddr
_MOST_INTERFACES = 256


def address_towards(host: str, port: int) -> str:
    """Our own address on the way to `host`; empty where its name or a way there is not known. Nothing is sent."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def interface_of(address: str) -> str:
    """The interface that has this address; empty where none has."""
    try:
        wanted = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    if wanted.is_loopback:  # all of 127.0.0.0/8, of which the interface lists one
        return "lo"
    found = _interfaces_v4() if wanted.version == 4 else _interfaces_v6()
    return found.get(wanted, "")


def _interfaces_v4() -> dict[ipaddress.IPv4Address | ipaddress.IPv6Address, str]:
    """Every address, the second ones of an interface too, and the interface's name."""
    space = array.array("B", bytes(_MOST_INTERFACES * _REQUEST_BYTES))
    place, length = space.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iP", length, place))
    filled = struct.unpack("iP", answer)[0]
    found: dict[ipaddress.IPv4Address | ipaddress.IPv6Address, str] = {}
    for start in range(0, filled, _REQUEST_BYTES):
        name = space[start : start + 16].tobytes().partition(b"\0")[0].decode()
        found[ipaddress.IPv4Address(space[start + 20 : start + 24].tobytes())] = name.partition(":")[0]
    return found


def _interfaces_v6() -> dict[ipaddress.IPv4Address | ipaddress.IPv6Address, str]:
    listing = Path("/proc/net/if_inet6")
    rows = [line.split() for line in listing.read_text().splitlines()] if listing.exists() else []
    return {ipaddress.IPv6Address(bytes.fromhex(row[0])): row[5] for row in rows}
