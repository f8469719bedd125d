"""A worker's end of its socket, blocking by default."""

import select
import socket
from collections import deque
from typing import Any

from oriel_logic.workers.frames import Frame, Kind, body_bound, decoded, encoded, pack
from oriel_logic.workers.memory import MemoryBound, array_memory
from oriel_wire.process import messages


class Link:
    """The socket. Used by the worker's main thread only. Every method raises OSError once the logic process has
    ended.

    memory: the bound of this process; received frames do not use it up.
    """

    def __init__(self, sock: socket.socket, memory: MemoryBound, *, limit_bytes: int) -> None:
        self._sock = sock
        self._memory = memory
        self._limit_bytes = limit_bytes
        self._assembler = messages.Assembler(body_bound(limit_bytes), array_memory)
        self._frames: deque[Frame] = deque()
        self._gone: OSError | None = None

    def fileno(self) -> int:
        return self._sock.fileno()

    def is_gone(self, error: Exception) -> bool:
        """Return whether `error` is the end of this link rather than a handler's own error."""
        return error is self._gone

    def send(self, kind: Kind, value: Any, *, cpu_us: int = 0) -> None:
        """Send a value. Raises FrameTooLarge, and whatever pickling `value` raises; nothing was sent then."""
        pieces = encoded(kind, pack(value, limit_bytes=self._limit_bytes), cpu_us=cpu_us)
        try:
            messages.send(self._sock, pieces)
        except OSError as error:
            self._gone = error
            raise

    def receive(self) -> Frame:
        """Wait for the next frame. Raises OSError at the end."""
        while not self._frames:
            self._read()
        return self._frames.popleft()

    def pending(self) -> list[Frame]:
        """Return the frames that have arrived, without waiting. Raises OSError at the end."""
        while select.select([self._sock], [], [], 0)[0]:
            self._read()
        found = list(self._frames)
        self._frames.clear()
        return found

    def _read(self) -> None:
        try:
            count = self._sock.recv_into(self._assembler.buffer())
            if not count:
                raise ConnectionResetError("the logic process is gone")
        except OSError as error:
            self._gone = error
            raise
        received = self._memory.receive(self._assembler, count)
        self._frames.extend([decoded(head, body) for head, body in received])
