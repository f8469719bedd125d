"""The pool's end of a worker's socket: frames with their segments, on the loop.

It is not an asyncio transport, because those cannot pass descriptors. Frames are short (long values are in segments),
so a frame is sent at once unless the worker has stopped reading; the frames that wait then are bounded by the job.
"""

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable

from oriel_logic.workers.frames import Frame, FrameTooLarge, Kind, Packed, Unframer, head
from oriel_logic.workers.link import CHUNK, CLOEXEC, ONE_DESCRIPTOR, descriptors_in
from oriel_logic.workers.segments import drop, written

# Received bytes are copied before the next socket is read, so one buffer serves all channels of a loop.
BUFFER = bytearray(CHUNK)
VIEW = memoryview(BUFFER)


class Channel:
    """One worker's socket.

    on_frame: called with every frame, which it then owns.
    on_lost: called once, when the worker has ended or broken the protocol. Neither is called from `send` or `close`.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        limit_bytes: int,
        on_frame: Callable[[Frame], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._unframer = Unframer(limit_bytes)
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._unsent: deque[tuple[memoryview, int]] = deque()
        self._open = True
        self._loop.add_reader(sock.fileno(), self._readable)

    def send(self, kind: Kind, packed: Packed) -> None:
        """Send a frame. Raises OSError if there is no memory or no descriptor for its segment; nothing was sent
        then.
        """
        if not self._open:
            return
        data, shared = head(kind, packed)
        descriptor = written(shared) if shared else -1
        self._unsent.append((memoryview(data), descriptor))
        if len(self._unsent) == 1:
            self._writable()

    def lose(self) -> None:
        """End the connection at once; the loop calls `on_lost` afterwards."""
        if self._open:
            self._close()
            self._loop.call_soon(self._on_lost)

    def _close(self) -> None:
        self._open = False
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        for descriptor in [*self._unframer.left_over(), *(each for _, each in self._unsent if each >= 0)]:
            os.close(descriptor)
        self._unsent.clear()

    def _readable(self) -> None:
        try:
            count, ancillary, _, _ = self._sock.recvmsg_into([BUFFER], ONE_DESCRIPTOR, CLOEXEC)
            if not count:
                self.lose()
                return
            frames = self._unframer.feed(VIEW[:count], descriptors_in(ancillary))
        except BlockingIOError:
            return
        except (OSError, FrameTooLarge, ValueError):  # it has ended, or broken the protocol
            self.lose()
            return
        for frame in frames:
            if self._open:
                self._on_frame(frame)
            else:
                drop(frame)

    def _writable(self) -> None:
        while self._unsent:
            data, descriptor = self._unsent[0]
            try:
                if descriptor >= 0:
                    sent = socket.send_fds(self._sock, [data], [descriptor])
                    os.close(descriptor)
                else:
                    sent = self._sock.send(data)
            except BlockingIOError:
                self._loop.add_writer(self._sock.fileno(), self._writable)
                return
            except OSError:
                self.lose()
                return
            if sent < len(data):
                self._unsent[0] = (data[sent:], -1)
            else:
                self._unsent.popleft()
        self._loop.remove_writer(self._sock.fileno())
