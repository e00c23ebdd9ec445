"""Messages between workers and the processes of a parameter server: a JSON header, then numbers as they lie in memory.

The numbers go through operators of ours, so that whoever watches the traffic of a step sees them.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from typing import Any

import torch
from torch import Tensor

MOST_HEADER_BYTES = 1 << 22
_LENGTH = struct.Struct("<I")

_LIBRARY = torch.library.Library("meshwright", "FRAGMENT")
_LIBRARY.define("push(Tensor part, int connection, str group, int tag) -> ()")
_LIBRARY.define("pull(Tensor(a!) part, int connection, str group, int tag) -> ()")


def _bytes_of(part: Tensor) -> memoryview:
    assert part.is_contiguous()
    return memoryview(part.view(torch.uint8).numpy())


@torch.library.impl(_LIBRARY, "push", "CPU")
def _write(part: Tensor, connection: int, group: str, tag: int) -> None:
    rest = _bytes_of(part)
    while rest:
        rest = rest[os.write(connection, rest) :]


@torch.library.impl(_LIBRARY, "pull", "CPU")
def _read(part: Tensor, connection: int, group: str, tag: int) -> None:
    rest = _bytes_of(part)
    while rest:
        count = os.readv(connection, [rest])
        if not count:
            raise ConnectionResetError
        rest = rest[count:]


class ServerLink:
    """One end of a connection between a worker and a shard, or two shards.

    `group`: the process group under whose name the numbers are counted.
    """

    def __init__(self, end: socket.socket, group: str = ""):
        self.end, self.group = end, group
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, header: dict[str, Any], *parts: Tensor) -> None:
        text = json.dumps(header).encode()
        self.end.sendall(_LENGTH.pack(len(text)) + text)
        for part in parts:
            torch.ops.meshwright.push(part, self.end.fileno(), self.group, 0)

    def receive(self) -> dict[str, Any]:
        """The next header; raises `ConnectionError` where the other end is gone."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > MOST_HEADER_BYTES:
            raise ConnectionAbortedError(f"a header of {length} bytes")
        value = json.loads(self._exactly(length))
        if not isinstance(value, dict):
            raise ConnectionAbortedError("a header that is no table")
        return value

    def fill(self, part: Tensor) -> None:
        """Read the numbers that follow the header."""
        torch.ops.meshwright.pull(part, self.end.fileno(), self.group, 0)

    def _exactly(self, length: int) -> bytes:
        found = b""
        while len(found) < length:
            found += (more := self.end.recv(length - len(found)))
            if not more:
                raise ConnectionResetError
        return found

    def close(self) -> None:
        self.end.close()
