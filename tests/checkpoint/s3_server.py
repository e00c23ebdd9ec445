"""An S3 server of this machine as a process, and a proxy before it that does what networks and storage do at worst."""

from __future__ import annotations

import http.client
import os
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BUCKET = "runs"
FAULTS = ("late", "twice", "later again", "refused", "busy", "answer lost", "never")
_SERVER = "import sys; from moto.server import main; main(['-H', '127.0.0.1', '-p', sys.argv[1]])"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def s3_server() -> Iterator[str]:
    """Its address; it has one empty bucket."""
    port = free_port()
    variables = {**os.environ, "AWS_ACCESS_KEY_ID": "toy", "AWS_SECRET_ACCESS_KEY": "toy"}
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(port)], env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        address, until = f"http://127.0.0.1:{port}", time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(urllib.request.Request(f"{address}/{BUCKET}", method="PUT"), timeout=20).close()
                break
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < until, "the S3 server does not answer"
                time.sleep(0.2)
        yield address
    finally:
        process.kill()
        process.wait()


def environment(address: str) -> dict[str, str]:
    """What tells an S3 client of this server."""
    return {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "toy",
        "AWS_SECRET_ACCESS_KEY": "never-to-be-shown",
        "AWS_REGION": "us-east-1",
    }


class FaultyProxy(ThreadingHTTPServer):
    """Passes requests on; a share of them meets a fault drawn from a seed, except while `is_calm`."""

    daemon_threads = True

    def __init__(self, target: str, share: float = 0.0, seed: int = 0):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = target.removeprefix("http://")
        self.share, self.dice, self.lock = share, random.Random(seed), threading.Lock()
        self.is_dead = False
        self.seen: Counter[str] = Counter()
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fault(self) -> str:
        with self.lock:
            fault = self.dice.choice(FAULTS) if self.dice.random() < self.share else ""
            fault = "never" if self.is_dead else fault
            self.seen[fault] += 1
        return fault

    def handle_error(self, *_: Any) -> None:
        """Clients give up; that is the point."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyProxy

    def log_message(self, *_: Any) -> None: ...

    def _pass_on(
        self, command: str, path: str, headers: Message, body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self.server.target, timeout=60)
        connection.putrequest(command, path, skip_accept_encoding=True, skip_host=True)
        for name, value in headers.items():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                connection.putheader(name, value)
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        return answer.status, answer.getheaders(), data

    def _do(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if len(body) < length:  # the client has given up; storage refuses half a request, which moto does not check
            self.close_connection = True
            return
        # When it is passed on later again, the connection may have another one already.
        request = (self.command, self.path, self.headers, body)
        fault = self.server.fault()
        if fault == "late":
            time.sleep(0.3)
        if fault == "never":
            time.sleep(5)
        if fault in ("never", "refused"):
            self.close_connection = True
            return
        if fault == "busy":
            self._answer(503, [], b"<Error><Code>SlowDown</Code></Error>")
            return
        if fault == "twice":
            self._pass_on(*request)
        if fault == "later again":
            threading.Timer(1.0, self._pass_on, request).start()
        status, headers, data = self._pass_on(*request)
        if fault == "answer lost":
            self.close_connection = True
            return
        self._answer(status, headers, data)

    def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes) -> None:
        self.send_response_only(status)
        length = len(data)
        for name, value in headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = int(value)
            elif name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _do
