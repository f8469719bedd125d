"""An awaitable client for whole requests and answers, over the callback pool of `upstream`."""

import asyncio
from collections.abc import Sequence
from time import monotonic

from oriel_wire.engine.upstream import Endpoint, UpstreamConnection
from oriel_wire.errors import UpstreamBroken, UpstreamError, UpstreamTimedOut
from oriel_wire.h1_response import ResponseHead

__all__ = ["HttpClient", "HttpResponse"]

_MAX_BODY = 256 * 1024 * 1024


class HttpResponse:
    """A whole answer."""

    __slots__ = ("_head", "body", "status")

    def __init__(self, head: ResponseHead, body: bytes) -> None:
        self._head = head
        self.status = head.status
        self.body = body

    def get(self, name: str) -> str | None:
        """The first value of the field with this lower-case name."""
        return self._head.get(name)


class _Waiter:
    """One request's ResponseSink: gathers the answer into a future."""

    __slots__ = ("_head", "_parts", "_request", "_size", "connection", "future")

    def __init__(self, request: Sequence[bytes | memoryview], future: "asyncio.Future[HttpResponse]") -> None:
        self._request = request
        self.future = future
        self.connection: UpstreamConnection | None = None
        self._head: ResponseHead | None = None
        self._parts: list[bytes] = []
        self._size = 0

    def connected(self, connection: UpstreamConnection) -> None:
        self.connection = connection
        connection.transport.writelines(self._request)
        connection.request_done = True

    def response(self, head: ResponseHead, data: bytes, complete: bool) -> None:
        self._head = head
        self.response_data(data, complete)

    def response_data(self, data: bytes, complete: bool) -> None:
        self._parts.append(data)
        self._size += len(data)
        assert self._head is not None
        if complete:
            self.connection = None
            if not self.future.done():
                self.future.set_result(HttpResponse(self._head, b"".join(self._parts)))
        elif self._size > _MAX_BODY:
            assert self.connection is not None
            self.connection.abandon()
            self.failed(UpstreamBroken("the upstream's answer is too large"))

    def failed(self, error: UpstreamError) -> None:
        self.connection = None
        if not self.future.done():
            self.future.set_exception(error)

    def upstream_writable(self, writable: bool) -> None:
        """The whole request is in the transport's buffer already; its size was bounded before."""


class HttpClient:
    """Unary requests to one endpoint over keep-alive connections.

    max_connections bounds requests under way; further callers wait their turn under their own deadline.
    """

    def __init__(self, *, host: str, port: int, max_connections: int = 64) -> None:
        self.endpoint = Endpoint(host, port)
        self._places = asyncio.Semaphore(max_connections)

    @property
    def outstanding(self) -> int:
        """Requests that were sent and are not answered yet."""
        return self.endpoint.outstanding

    async def request(
        self,
        method: str,
        target: str,
        headers: Sequence[tuple[str, str]],
        body: bytes | Sequence[bytes | memoryview] = b"",
        *,
        deadline: float,
    ) -> HttpResponse:
        """Send one request and wait for the whole answer.

        deadline: absolute `time.monotonic()` seconds. Raises UpstreamUnreachable (nothing was sent), UpstreamBroken or
        UpstreamTimedOut. Cancelling closes the connection, so the server sees that the caller left.
        """
        parts: Sequence[bytes | memoryview] = (body,) if isinstance(body, bytes) else body
        size = sum([part.nbytes if isinstance(part, memoryview) else len(part) for part in parts])
        lines = [f"{method} {target} HTTP/1.1\r\nhost: {self.endpoint.host}:{self.endpoint.port}\r\n"]
        lines.extend([f"{name}: {value}\r\n" for name, value in headers])
        lines.append(f"content-length: {size}\r\n\r\n")
        head = "".join(lines).encode("latin-1")
        request = [b"".join((head, *parts))] if size <= 65536 else [head, *parts]
        try:
            async with asyncio.timeout(deadline - monotonic()), self._places:
                waiter = _Waiter(request, asyncio.get_running_loop().create_future())
                connection = self.endpoint.begin(waiter, monotonic(), head_only=method == "HEAD")
                if connection is not None:
                    waiter.connected(connection)
                try:
                    return await waiter.future
                finally:
                    if waiter.connection is not None:
                        waiter.connection.abandon()
                    elif not waiter.future.done() or waiter.future.cancelled():
                        self.endpoint.forget(waiter)
        except TimeoutError:
            raise UpstreamTimedOut("the deadline passed while waiting for the upstream") from None

    async def close(self) -> None:
        """Close idle connections."""
        await self.endpoint.close()
