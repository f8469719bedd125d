"""Sends one stream's request, as cheaply as Python can: no task per HTTP request, its bytes made once.

The generator makes a `Ticket` for each request. A sender reports the end of each ticket exactly once, unless the
generator cancels the ticket first; then it reports nothing.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from oriel_tools.load.answers import MAX_JUDGED_BYTES, Body, body_of, http_reason, shown, stream_fault
from oriel_tools.load.bodies import Prepared
from oriel_tools.load.tally import Outcome
from oriel_wire.engine.upstream import Endpoint, UpstreamConnection
from oriel_wire.errors import UpstreamError, UpstreamUnreachable
from oriel_wire.h1.response import ResponseHead
from oriel_wire.v2 import grpc as v2_grpc

GOOD = Outcome("good")
STREAM = f"/{v2_grpc.SERVICE}/ModelStreamInfer"


@dataclass(slots=True, eq=False, repr=False)
class Ticket:
    """One request under way. due_s, sent_s: monotonic seconds; phase: index; handle: the sender's own."""

    phase: int
    due_s: float
    sent_s: float
    finished: Callable[["Ticket", Outcome], None]
    handle: Any = None


class HttpSender:
    """Sends requests over keep-alive connections, and opens another connection whenever none is free."""

    def __init__(self, prepared: Prepared, endpoint: Endpoint) -> None:
        host = f"[{prepared.host}]" if ":" in prepared.host else prepared.host
        lines = [f"{prepared.method} {prepared.path} HTTP/1.1", f"host: {host}:{prepared.port}"]
        lines += [f"{name}: {value}" for name, value in prepared.fields]
        if prepared.body or prepared.method not in ("GET", "HEAD"):
            lines.append(f"content-length: {len(prepared.body)}")
        self._request = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + prepared.body
        self._head_only = prepared.method == "HEAD"
        self._endpoint = endpoint

    def send(self, ticket: Ticket) -> None:
        sink = ticket.handle = _HttpAnswer(ticket, self._request)
        connection = self._endpoint.begin(sink, ticket.sent_s, head_only=self._head_only)
        if connection is not None:
            sink.connected(connection)

    def cancel(self, ticket: Ticket) -> None:
        sink: _HttpAnswer = ticket.handle
        if sink.connection is not None:
            sink.connection.abandon()
        else:
            self._endpoint.borrower_left(sink)

    async def close(self) -> None:
        await self._endpoint.close()


class _HttpAnswer:
    """One request's ResponseSink."""

    __slots__ = ("_body", "_head", "_refusal", "_request", "_ticket", "connection")

    def __init__(self, ticket: Ticket, request: bytes) -> None:
        self._ticket = ticket
        self._request = request
        self._head: ResponseHead | None = None
        self._body: Body | None = None  # the body of an answer with a good status
        self._refusal = b""
        self.connection: UpstreamConnection | None = None

    def connected(self, connection: UpstreamConnection) -> None:
        self.connection = connection
        connection.transport.write(self._request)
        connection.request_done = True

    def response(self, head: ResponseHead, data: bytes, complete: bool) -> None:
        self._head = head
        # Most answers are complete at once and do not contain "error": nothing to examine.
        at_once = complete and head.content_length is not None and b"error" not in data
        if 200 <= head.status < 300 and not at_once:
            self._body = body_of(head)
        self.response_data(data, complete)

    def response_data(self, data: bytes, complete: bool) -> None:
        head = self._head
        assert head is not None
        good, body = 200 <= head.status < 300, self._body
        if body is not None:
            body.feed(data)
        elif not good and len(self._refusal) < MAX_JUDGED_BYTES:
            self._refusal += data
        if complete:
            self.connection = None
            fault = body.fault() if body is not None else ""
            outcome = Outcome("failed", f"{head.status} {fault}") if fault else GOOD if good else self._refused(head)
            self._ticket.finished(self._ticket, outcome)

    def failed(self, error: UpstreamError) -> None:
        self.connection = None
        reason = "unreachable" if isinstance(error, UpstreamUnreachable) else "broken"
        self._ticket.finished(self._ticket, Outcome("failed", reason))

    def upstream_writable(self, writable: bool) -> None:
        """The request is in the transport's buffer already; max_in_flight bounds how many are."""

    def _refused(self, head: ResponseHead) -> Outcome:
        reason = f"{head.status} {http_reason(self._refusal)}".strip()
        return Outcome("refused", reason, _seconds(head.get("retry-after")))


def _seconds(text: str | None) -> float | None:
    # A date, the header's other form, is ignored: no inference server sends one.
    return float(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 10 else None


class GrpcSender:
    """Calls over a few channels of grpc.aio, in turn; messages stay bytes.

    A call of ModelStreamInfer sends one message; all messages until the stream ends are its answer.
    """

    def __init__(self, prepared: Prepared, channels: int, *, deadline_s: float | None) -> None:
        import grpc

        self._error = grpc.aio.AioRpcError
        # Channels with equal arguments would share one connection.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        target = f"{prepared.host}:{prepared.port}"
        self._channels = [grpc.aio.insecure_channel(target, options=options) for _ in range(channels)]
        self._exchange = self._stream if prepared.path == STREAM else self._unary
        kind = "unary_stream" if prepared.path == STREAM else "unary_unary"
        self._calls = [getattr(channel, kind)(prepared.path, None, None) for channel in self._channels]
        self._body = prepared.body
        self._metadata = tuple(prepared.fields)
        self._deadline_s = deadline_s
        self._next = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, ticket: Ticket) -> None:
        call = self._calls[self._next]
        self._next = (self._next + 1) % len(self._calls)
        task = ticket.handle = asyncio.get_running_loop().create_task(self._exchange(call, ticket))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self, ticket: Ticket) -> None:
        ticket.handle.cancel()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for channel in self._channels:
            await channel.close(None)

    async def _unary(self, call: Any, ticket: Ticket) -> None:
        try:
            await call(self._body, timeout=self._deadline_s, metadata=self._metadata)
        except self._error as error:
            ticket.finished(ticket, _grpc_refusal(error))
        else:
            ticket.finished(ticket, GOOD)

    async def _stream(self, call: Any, ticket: Ticket) -> None:
        fault, begun = "", False
        try:
            async for message in call(self._body, timeout=self._deadline_s, metadata=self._metadata):
                begun = True
                fault = fault or stream_fault(message)
        except self._error as error:
            outcome = _grpc_refusal(error)
            # A stream that has begun cannot be refused any more.
            ticket.finished(ticket, Outcome("failed", outcome.reason) if begun else outcome)
        else:
            ticket.finished(ticket, Outcome("failed", f"OK {fault}") if fault else GOOD)


# `send` sends at once, and `finished` of its ticket is called once, never before `send` returns; `cancel` stops
# waiting, so that the server sees the departure.
Sender = HttpSender | GrpcSender


def _grpc_refusal(error: Any) -> Outcome:
    trailers = {str(name): value for name, value in error.trailing_metadata() or ()}
    reason = trailers.get("x-oriel-reason", "")
    name = f"{error.code().name} {shown(reason) if isinstance(reason, str) else ''}".strip()
    wait = trailers.get("retry-after")
    # An error of the client library itself, when no server answers, has no trailers.
    if not trailers and name in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"):
        return Outcome("failed", name)
    return Outcome("refused", name, _seconds(wait) if isinstance(wait, str) else None)
