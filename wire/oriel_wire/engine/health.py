"""`grpc.health.v1.Health/Watch` of every server: the state now, its changes, and an end when the server stops."""

import asyncio
from collections.abc import Callable
from typing import Final

SERVING: Final = 1
NOT_SERVING: Final = 2
SERVICE_UNKNOWN: Final = 3
POLL_S = 0.5
LAST_WORD_S = 0.2


def status_message(status: int) -> bytes:
    """The bytes of a `HealthCheckResponse`."""
    return b"\x08%c" % status


class Watches:
    """All watchers of one server."""

    def __init__(self) -> None:
        self.open: set[Watch] = set()
        self.stopping = False

    def stop(self) -> None:
        """End the streams because the server drains: every watcher gets the state, then its stream ends."""
        self.stopping = True
        for watch in list(self.open):
            watch.stop()


class Watch:
    """One watcher: sends the state when it begins, and every change within POLL_S, until one of both sides ends.

    status: returns the state now. send: sends a message; False if there is no room for another one yet (then call
    `resume` when there is). end: ends the stream, because the server stops. It is among `watches` until its call ends.
    """

    def __init__(
        self, watches: Watches, status: Callable[[], int], send: Callable[[bytes], bool], end: Callable[[], None]
    ) -> None:
        self._watches = watches
        self._status = status
        self._send = send
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._reported = 0
        self._may_send = True
        watches.open.add(self)
        self._poll()
        if watches.stopping:
            self.stop()

    def stop(self) -> None:
        """Report the state and end the stream."""
        self._cancel()
        self._report()
        # Clients built on gRPC's core may drop a message that arrives together with the end of its stream.
        self._timer = self._loop.call_later(LAST_WORD_S, self._stopped)

    def resume(self) -> None:
        """There is room for another message."""
        self._may_send = True

    def finished(self) -> None:
        """The call is over."""
        self._cancel()
        self._watches.open.discard(self)

    def _poll(self) -> None:
        self._timer = self._loop.call_later(POLL_S, self._poll)
        self._report()

    def _report(self) -> None:
        status = self._status()
        if status != self._reported and self._may_send:
            self._reported = status
            self._may_send = self._send(status_message(status))

    def _stopped(self) -> None:
        self.finished()
        self._end()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
