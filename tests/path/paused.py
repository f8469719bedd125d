"""Stops a process while calls reach it, and observes which of them it executes when it goes on."""

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import httpx
from stacks import Stack
from tests.waiting import wait_until

TIMEOUT_MS = 300  # the deadline of the calls, which lie unread for longer
LAIN_S = 0.6
FRAME_BYTES = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """One HTTP port of a unit, and a request to it that runs the model `digits` once."""

    unit: str
    path: str
    timeout: str
    fields: str
    body: bytes

    def request(self, timeout_ms: int) -> bytes:
        head = f"POST {self.path} HTTP/1.1\r\nhost: localhost\r\n{self.fields}{self.timeout}: {timeout_ms}\r\n"
        return f"{head}content-length: {len(self.body)}\r\n\r\n".encode() + self.body


class Caller:
    """A client on one connection."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._sock = socket.create_connection((host, int(port)), timeout=60)
        self._data = b""

    def send(self, request: bytes) -> None:
        self._sock.sendall(request)

    def answer(self) -> tuple[int, bytes]:
        """Return status and body of the next answer."""
        while b"\r\n\r\n" not in self._data:
            self._more()
        head, _, self._data = self._data.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").lower().split("\r\n")
        length = next(int(line.split(":")[1]) for line in lines if line.startswith("content-length:"))
        while len(self._data) < length:
            self._more()
        body, self._data = self._data[:length], self._data[length:]
        return int(lines[0].split()[1]), body

    def hears_nothing_for(self, seconds: float) -> None:
        self._sock.settimeout(seconds)
        with contextlib.suppress(TimeoutError):
            raise AssertionError(f"a stopped process answered: {self._sock.recv(64)!r}")
        self._sock.settimeout(60)

    def close(self) -> None:
        self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _more(self) -> None:
        data = self._sock.recv(FRAME_BYTES)
        assert data, "the connection was closed without an answer"
        self._data += data


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop the process for the duration of the `with`."""
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def executions(stack: Stack) -> int:
    """Return how many requests the model `digits` has executed."""
    url = f"http://{stack.address('inference', 'http')}/v2/models/digits/stats"
    (model,) = httpx.get(url, timeout=60, trust_env=False).json()["model_stats"]
    return int(model["inference_stats"]["success"]["count"])
