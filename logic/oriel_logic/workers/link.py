"""A worker's end of its socket: frames with their segments, blocking by default."""

import os
import select
import socket
import struct
from collections import deque
from typing import Any

from oriel_logic.workers.frames import Frame, Kind, Unframer, head, pack
from oriel_logic.workers.segments import written

CHUNK = 64 << 10
ONE_DESCRIPTOR = socket.CMSG_SPACE(struct.calcsize("i"))
CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


def descriptors_in(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """Return the descriptors that came with `recvmsg`."""
    found: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found += struct.unpack_from(f"{len(data) // 4}i", data)
    return found


class Link:
    """The socket. Used by the worker's main thread only. Every method raises OSError once the logic process has
    ended.
    """

    def __init__(self, sock: socket.socket, *, limit_bytes: int) -> None:
        self._sock = sock
        self._limit_bytes = limit_bytes
        self._unframer = Unframer(limit_bytes)
        self._frames: deque[Frame] = deque()
        self._gone: OSError | None = None

    def fileno(self) -> int:
        return self._sock.fileno()

    def is_gone(self, error: Exception) -> bool:
        """Return whether `error` is the end of this link rather than a handler's own error."""
        return error is self._gone

    def send(self, kind: Kind, value: Any, *, cpu_us: int = 0) -> None:
        """Send a value. Raises FrameTooLarge, and whatever pickling `value` raises; nothing was sent then."""
        data, shared = head(kind, pack(value, limit_bytes=self._limit_bytes), cpu_us=cpu_us)
        descriptor = written(shared) if shared else -1
        try:
            sent = socket.send_fds(self._sock, [data], [descriptor]) if shared else 0
            if sent < len(data):
                self._sock.sendall(memoryview(data)[sent:])
        except OSError as error:
            self._gone = error
            raise
        finally:
            if shared:
                os.close(descriptor)

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
            data, ancillary, _, _ = self._sock.recvmsg(CHUNK, ONE_DESCRIPTOR, CLOEXEC)
            if not data:
                raise ConnectionResetError("the logic process is gone")
        except OSError as error:
            self._gone = error
            raise
        self._frames.extend(self._unframer.feed(data, descriptors_in(ancillary)))
