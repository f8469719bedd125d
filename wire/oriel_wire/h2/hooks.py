"""The hooks that an HTTP/2 connection calls in its subclass; `connection` describes when."""

from mypy_extensions import mypyc_attr

from oriel_wire.h2.block_shapes import BlockShape
from oriel_wire.h2.known_fields import Field
from oriel_wire.h2.streams import Stream


@mypyc_attr(allow_interpreted_subclasses=True)
class H2Hooks:
    """The hooks, without state. They may call any method of the connection but `receive`, and must not raise."""

    __slots__ = ()

    def wants_write(self) -> None:
        """`out` is no longer empty, outside `receive`: flush it soon."""

    def new_stream(self, stream_id: int) -> Stream:
        """Make the object of a stream that the client opens; `on_headers` or `on_too_large` follows."""
        return Stream()

    def on_headers(self, stream: Stream, fields: list[Field], end: bool) -> None:
        """The header list of a request, or of the final answer. end: the peer sends nothing else on this stream."""
        raise NotImplementedError

    def on_recognised(self, stream: Stream, shape: BlockShape, values: list[bytes], end: bool) -> None:
        """Begin a request, as `on_headers` does, whose block has this shape. Only after `trust_fields` was called."""
        self.on_headers(stream, shape.fields_of(values), end)

    def on_too_large(self, stream: Stream, end: bool) -> None:
        """The header list of a request is larger than the limits; it may be answered."""
        raise NotImplementedError

    def on_trailers(self, stream: Stream, fields: list[Field]) -> None:
        """The trailers, which end what the peer sends on this stream."""
        raise NotImplementedError

    def on_data(self, stream: Stream, data: bytes | memoryview, end: bool) -> None:
        """Some bytes of the body, without padding; empty only with `end`. Call `consumed` when they have gone on.

        A view of what was received if the piece is large.
        """
        raise NotImplementedError

    def on_reset(self, stream: Stream, code: int) -> None:
        """The peer has reset the stream, or REFUSED_STREAM: its GOAWAY says that it was surely not executed."""
        raise NotImplementedError

    def on_stream_error(self, stream: Stream, code: int, message: str) -> None:
        """The peer broke a rule on this stream, which was therefore reset with `code`."""
        raise NotImplementedError

    def on_room(self, stream: Stream) -> None:
        """Take note that what `send_data` kept is sent. The stream takes data again, unless its end was sent too."""

    def on_settings(self) -> None:
        """The peer has sent settings; they are in force."""

    def on_goaway(self, last_id: int, code: int, debug: bytes) -> None:
        """The peer takes no new streams. `on_reset` follows for each of ours above `last_id`."""

    def on_drained(self) -> None:
        """The last stream after `drain` has ended and no more can come; the connection may be closed."""

    def connection_error(self, code: int, message: str) -> None:
        """The peer broke a rule of the connection, or a limit. GOAWAY is in `out`; flush it and close.

        The streams that were open are still in `streams`. Nothing else is called or sent any more.
        """
        raise NotImplementedError
