"""Probe an HTTP server beside its calls: whether it is ready, or has a model. Only the status of the answer counts, but
for the index of its models and the metrics of an engine.
"""

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Final

import msgspec

from oriel_policies.upstreams.engines import ENGINES
from oriel_wire.engine.upstream import Endpoint, UpstreamConnection
from oriel_wire.errors import UpstreamError, UpstreamHungUp, UpstreamUnreachable, UpstreamUnread
from oriel_wire.h1.response import ResponseHead

CONNECTED = 0
UNREACHABLE = -1
INDEX: Final = "/v2/repository/index"
_READ: Final = frozenset({INDEX, *(engine.metrics for engine in ENGINES.values() if engine.metrics)})
MAX_INDEX_BYTES: Final = 4 * 1024 * 1024  # the index of 10,000 models has 1 MB


class HttpProbe:
    """One probe; a ResponseSink.

    path: the path to GET; "" if a connection is enough. For INDEX, which is a POST, and for the paths of metrics
    the body of the answer is read.
    done: called once with the status, `CONNECTED` or `UNREACHABLE`; or with None if no readable answer came in time.
    attempt_s: without a connection after so long the endpoint is unreachable; 0.0 for no such bound. One attempt goes
    on beside the following probes, which may use its connection.
    """

    def __init__(
        self,
        prober: Endpoint,
        path: str,
        timeout_s: float,
        done: Callable[[int | None], None],
        *,
        attempt_s: float = 0.0,
    ) -> None:
        self._done: Callable[[int | None], None] | None = done
        self._prober = prober
        self._connection: UpstreamConnection | None = None
        verb, length = ("POST", b"\r\ncontent-length: 0") if path == INDEX else ("GET", b"")
        head = f"{verb} {path} HTTP/1.1\r\n".encode("ascii") + prober.host_line + length + b"\r\n\r\n"
        self._request = head if path else b""
        self.body = bytearray() if path in _READ else None
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._end, None)
        self._fresh = not path
        self._attempt: asyncio.TimerHandle | None = None
        connection = prober.begin(self, monotonic(), fresh=self._fresh)
        if connection is not None:
            self.connected(connection)
        elif attempt_s:
            self._attempt = asyncio.get_running_loop().call_later(attempt_s, self._give_up)

    def _give_up(self) -> None:
        if self._connection is None:
            self._prober.borrower_left(self)
            self._end(UNREACHABLE)

    def connected(self, connection: UpstreamConnection) -> None:
        self._connection = connection
        if self._request:
            connection.transport.write(self._request)
            connection.request_done = True
        else:
            self._end(CONNECTED)

    def response(self, head: ResponseHead, data: bytes, complete: bool) -> None:
        if complete:
            self._connection = None
        if self.body is None or head.status != 200:
            self._end(head.status)
        else:
            self.response_data(data, complete)

    def response_data(self, data: bytes, complete: bool) -> None:
        if self.body is not None and self._done is not None:
            self.body += data
            if complete:
                self._connection = None
                self._end(200)

    def failed(self, error: UpstreamError) -> None:
        self._connection = None
        if isinstance(error, UpstreamHungUp | UpstreamUnread) and not self._fresh and self._done is not None:
            self._fresh = True
            self._prober.begin(self, monotonic(), fresh=True)
            return
        self._end(UNREACHABLE if isinstance(error, UpstreamUnreachable) else None)

    def upstream_writable(self, writable: bool) -> None:
        """Ignored: a probe fits into any buffer."""

    def _end(self, status: int | None) -> None:
        done, self._done = self._done, None
        if done is None:
            return
        self._timer.cancel()
        if self._attempt is not None:
            self._attempt.cancel()
        if self._connection is not None:
            self._connection.abandon()
            self._connection = None
        elif status is None:
            self._prober.borrower_left(self)
        done(status)


class _Listed(msgspec.Struct):
    state: str = ""


_decode = msgspec.json.Decoder(list[_Listed]).decode


def states_in(index: bytearray | None) -> set[str]:
    """Return the states of the models in an answer to INDEX; empty if it is none, or did not come whole."""
    try:
        return {each.state for each in _decode(index or b"[]")}
    except msgspec.MsgspecError:
        return set()
