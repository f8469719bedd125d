"""An awaitable client for gRPC calls of one message, with any number of answers, on the connections of `h2_upstream`.

Whole messages wait in their call until they are read. While any do, the server may send what is left of the call's
window and no more, so a call that nobody reads holds one message and one window at most. The window of a connection is
so large that such calls do not hold up the others.

A call that certainly was not executed, because its stream was refused or its connection was about to close, is begun
once more.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Final

from oriel_wire.engine.h2_upstream import H2Endpoint, UpstreamStream
from oriel_wire.errors import BadMessage, UpstreamBroken, UpstreamError, UpstreamUnread, WireError
from oriel_wire.h2.grpc import OK, decode_text, encode_timeout, prefix, status_of
from oriel_wire.h2.grpc_reader import MessageReader
from oriel_wire.h2.hpack import literal
from oriel_wire.h2.known_fields import Field
from oriel_wire.h2.limits import H2Limits

LIMITS: Final = H2Limits(
    stream_window_bytes=256 * 1024, connection_window_bytes=1 << 30, max_header_list_bytes=64 * 1024
)
_TIDY_S: Final = 1.0
_METHOD: Final = b"\x83\x86"  # POST, http
_FIXED: Final = literal(b"te", b"trailers") + literal(b"content-type", b"application/grpc")


class GrpcCall:
    """One call, the borrower of a stream. `cancel` it in any case: what is over already is not affected.

    code, text, trailers: the status of the call, once `read` has returned None.
    tap: offered each message that comes while `read` waits for one; it returns True if it has used the message, which
    `read` then does not return, and must not raise. None if nobody wants them so.
    """

    def __init__(self, endpoint: H2Endpoint, block: bytes, message: bytes, max_message_bytes: int) -> None:
        self.code = OK
        self.text = ""
        self.trailers: list[Field] = []
        self.tap: Callable[[bytes], bool] | None = None
        self._endpoint = endpoint
        self._block = block
        self._message = message
        self._reader = MessageReader(max_message_bytes)
        self._messages: deque[bytes] = deque()
        self._stream: UpstreamStream | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._error: WireError | None = None
        self._over = self._retried = False
        self._begin()

    async def read(self) -> bytes | None:
        """Return the next message, or None when the server has ended the call.

        Raises UpstreamUnreachable, UpstreamUnread (nothing was executed) or UpstreamBroken; TooLarge for a message of
        too many bytes, BadMessage for one that is compressed.
        """
        waiting = self._messages
        while not waiting:
            if self._error is not None:
                raise self._error
            if self._over:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        message = waiting.popleft()
        if not waiting and self._stream is not None:
            self._stream.resume()
        return message

    def cancel(self) -> None:
        """End the call, so that the server sees that the caller left. Messages that have come are lost."""
        if self._over:
            return
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.abandon()
        else:
            self._endpoint.borrower_left(self)
        self._end(UpstreamBroken("the call was cancelled"))

    # Request and answer ----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        stream = self._endpoint.begin(self, monotonic())
        if stream is not None:
            self.connected(stream)

    def connected(self, stream: UpstreamStream) -> None:
        self._stream = stream
        stream.send(self._block, self._message, True)

    def failed(self, error: UpstreamError) -> None:
        self._stream = None
        if isinstance(error, UpstreamUnread) and not self._retried:
            self._retried = True
            self._begin()
        else:
            self._end(error)

    def came(self, data: bytes | memoryview) -> None:
        """Read more of the answer's body."""
        stream = self._stream
        assert stream is not None
        try:
            self._reader.feed(data)
            while (message := self._reader.next()) is not None:
                if self._reader.compressed:
                    raise BadMessage("a message of the answer is compressed, although compression was not offered")
                whole = bytes(message)
                if self.tap is None or self._waiter is None or self._messages or not self.tap(whole):
                    self._messages.append(whole)
        except BadMessage as error:
            self._stream = None
            stream.abandon()
            self._end(error)
            return
        if self._messages:
            stream.pause()
            self._wake()
        stream.received(len(data))

    def completed(self, head: list[Field], trailers: list[Field]) -> None:
        """The answer is complete."""
        stream, self._stream = self._stream, None
        assert stream is not None
        stream.complete()
        self.code, text = status_of(head, trailers)
        self.text, self.trailers = decode_text(text), trailers
        broken = self.code == OK and not self._reader.empty
        self._end(UpstreamBroken("the answer ended within a message") if broken else None)

    def _end(self, error: WireError | None) -> None:
        self._error = error
        self._over = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _CallStream(UpstreamStream):
    """The stream of a call."""

    __slots__ = ("_head",)

    def head(self, fields: list[Field], end: bool) -> None:
        self._head = fields
        if end:
            self.sink.completed(fields, fields)
        elif fields[0][1] != b"200":  # the body is the page of some proxy
            self.sink.completed(fields, [])

    def data(self, data: bytes | memoryview, end: bool) -> None:
        if data:
            self.sink.came(data)
        if end and self.sink is not None:
            self.sink.completed(self._head, [])

    def trailers_came(self, fields: list[Field]) -> None:
        self.sink.completed(self._head, fields)


class GrpcClient:
    """Calls to one endpoint that speaks HTTP/2 with prior knowledge; its connections are made when they are needed.

    max_message_bytes: the most bytes of one message of an answer.
    """

    def __init__(self, *, host: str, port: int, max_message_bytes: int) -> None:
        self._endpoint = H2Endpoint(host, port, _CallStream, limits=LIMITS)
        self.max_message_bytes = max_message_bytes
        self._timer: asyncio.TimerHandle | None = None

    def call(
        self, path: bytes, metadata: Iterable[tuple[str, str]], message: Sequence[bytes | memoryview], timeout_s: float
    ) -> GrpcCall:
        """Begin a call. message: its pieces, which are copied. timeout_s: seconds that the server is given; the caller
        ends the call.
        """
        if self._timer is None:
            self._tidy()
        size = sum([len(piece) for piece in message])
        block = b"".join(
            [
                _METHOD,
                literal(b":path", path),
                self._endpoint.authority_block,
                _FIXED,
                literal(b"grpc-timeout", encode_timeout(timeout_s)),
                *[literal(name.encode(), value.encode("latin-1")) for name, value in metadata],
            ]
        )
        return GrpcCall(self._endpoint, block, b"".join([prefix(size), *message]), self.max_message_bytes)

    def _tidy(self) -> None:
        self._endpoint.close_stale(monotonic())
        self._timer = asyncio.get_running_loop().call_later(_TIDY_S, self._tidy)

    async def close(self) -> None:
        """Close idle connections; calls that are under way go on, and end their connection."""
        if self._timer is not None:
            self._timer.cancel()
        await self._endpoint.close()
