"""An awaitable client for whole requests and answers, on the callback-driven connections of `upstream`."""

import asyncio
from collections.abc import Sequence
from time import monotonic

from oriel_wire.engine.upstream import Endpoint, UpstreamConnection
from oriel_wire.errors import UpstreamError, UpstreamTimedOut
from oriel_wire.h1.response import ResponseHead

_MAX_BODY = 256 * 1024 * 1024
_JOIN_BYTES = 64 * 1024


class HttpResponse:
    """A whole answer. server_timing: "" if it has none; cost_us: the cost that the server reports, -1 if none; used:
    what it says it used, "" if nothing.
    """

    __slots__ = ("_head", "body", "cost_us", "server_timing", "status", "used")

    def __init__(self, head: ResponseHead, body: bytes) -> None:
        self._head = head
        self.status = head.status
        self.server_timing = head.server_timing
        self.cost_us = head.cost_us
        self.used = head.used
        self.body = body

    def get(self, name: str) -> str | None:
        """The first value of the field with this lower-case name."""
        return self._head.get(name)


class _Waiter:
    """The ResponseSink of one request; collects the answer into a future."""

    __slots__ = ("_head", "_parts", "_request", "connection", "ended", "future")

    def __init__(self, request: Sequence[bytes | memoryview], future: "asyncio.Future[HttpResponse]") -> None:
        self._request = request
        self.future = future
        self.connection: UpstreamConnection | None = None
        self.ended = False  # the endpoint makes no further callback
        self._head: ResponseHead | None = None
        self._parts: list[bytes] = []

    def connected(self, connection: UpstreamConnection) -> None:
        self.connection = connection
        if len(self._request) == 1:
            connection.request_bytes = len(self._request[0])
            connection.transport.write(self._request[0])
        else:
            connection.request_bytes = sum(memoryview(part).nbytes for part in self._request)
            connection.transport.writelines(self._request)
        connection.request_done = True

    def response(self, head: ResponseHead, data: bytes, complete: bool) -> None:
        if complete:
            self._end(HttpResponse(head, data))
        else:
            self._head = head
            self.response_data(data, False)

    def response_data(self, data: bytes, complete: bool) -> None:
        self._parts.append(data)
        assert self._head is not None
        if complete:
            self._end(HttpResponse(self._head, b"".join(self._parts)))

    def _end(self, response: HttpResponse) -> None:
        self.connection = None
        self.ended = True
        if not self.future.done():
            self.future.set_result(response)

    def failed(self, error: UpstreamError) -> None:
        self.connection = None
        self.ended = True
        if not self.future.done():
            self.future.set_exception(error)

    def expire(self) -> None:
        if not self.future.done():
            self.future.set_exception(_late())

    def upstream_writable(self, writable: bool) -> None:
        """Does nothing: the whole request is in the transport's buffer already, and its size was bounded before."""


class HttpClient:
    """Unary requests to one endpoint over keep-alive connections.

    max_connections bounds requests under way; further callers wait in order until their own deadline.
    max_response_bytes: the most bytes of one answer's body.
    """

    def __init__(self, *, host: str, port: int, max_connections: int = 64, max_response_bytes: int = _MAX_BODY) -> None:
        self.endpoint = Endpoint(host, port, max_response_bytes=max_response_bytes)
        self._host_line = f"HTTP/1.1\r\n{self.endpoint.host_line.decode()}\r\n"
        self._slots = asyncio.Semaphore(max_connections)

    @property
    def outstanding(self) -> int:
        """Requests that are sent but not answered."""
        return self.endpoint.outstanding

    async def request(
        self,
        method: str,
        target: str,
        headers: Sequence[tuple[str, str]] | str,
        body: bytes | Sequence[bytes | memoryview] = b"",
        *,
        deadline: float,
    ) -> HttpResponse:
        """Send one request and wait for the whole answer.

        headers: names and values, or lines that are written already, each with its CRLF. deadline: absolute
        `time.monotonic()` seconds. Raises UpstreamUnreachable or UpstreamUnread (nothing was executed), UpstreamBroken
        or UpstreamTimedOut. Cancelling closes the connection, so the server sees that the caller left.
        """
        now = monotonic()
        left_s = deadline - now
        if left_s <= 0:
            raise _late()
        slots = self._slots
        if slots.locked():
            try:
                async with asyncio.timeout(left_s):
                    await slots.acquire()
            except TimeoutError:
                raise _late() from None
            now = monotonic()
        else:
            await slots.acquire()  # returns at once
        try:
            loop = asyncio.get_running_loop()
            waiter = _Waiter(self._bytes(method, target, headers, body), loop.create_future())
            timer = loop.call_later(deadline - now, waiter.expire)
            try:
                connection = self.endpoint.begin(waiter, now, method == "HEAD")
                if connection is not None:
                    waiter.connected(connection)
                return await waiter.future
            finally:
                timer.cancel()
                if waiter.connection is not None:
                    waiter.connection.abandon()
                elif not waiter.ended:
                    self.endpoint.borrower_left(waiter)
        finally:
            slots.release()

    def _bytes(
        self,
        method: str,
        target: str,
        headers: Sequence[tuple[str, str]] | str,
        body: bytes | Sequence[bytes | memoryview],
    ) -> Sequence[bytes | memoryview]:
        """The bytes to send: in one piece unless copying the body would cost more than a second write."""
        if not isinstance(headers, str):
            headers = "".join([f"{name}: {value}\r\n" for name, value in headers])
        parts: Sequence[bytes | memoryview] = (body,) if isinstance(body, bytes) else body
        size = sum([part.nbytes if isinstance(part, memoryview) else len(part) for part in parts])
        head = f"{method} {target} {self._host_line}{headers}content-length: {size}\r\n\r\n".encode("latin-1")
        return [b"".join((head, *parts))] if size <= _JOIN_BYTES else [head, *parts]

    async def close(self) -> None:
        """Close idle connections."""
        await self.endpoint.close()


def _late() -> UpstreamTimedOut:
    return UpstreamTimedOut("the deadline passed while waiting for the upstream")
