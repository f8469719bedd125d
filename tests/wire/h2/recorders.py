"""HTTP/2 connections that record the calls of their hooks, and the bytes to feed them with."""

from dataclasses import dataclass
from typing import Any

from oriel_wire.h2.connection import H2Connection
from oriel_wire.h2.frames import FRAME, PREFACE, SETTINGS, SETTINGS_ACK, frame
from oriel_wire.h2.hpack import Field, literal
from oriel_wire.h2.limits import H2Limits
from oriel_wire.h2.streams import Stream

REQUEST: list[Field] = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/a.B/C"),
    (b":authority", b"x"),
    (b"te", b"trailers"),
]
ANSWER: list[Field] = [(b":status", b"200"), (b"content-type", b"application/grpc")]
TRAILERS: list[Field] = [(b"grpc-status", b"0")]


def block(fields: list[Field]) -> bytes:
    """Encode a header block that uses no dynamic table."""
    return b"".join(literal(*field) for field in fields)


class Recorded(Stream):
    """A stream and what it received. auto: consume data as it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.fields: list[Field] | None = None
        self.trailers_received: list[Field] | None = None
        self.body = bytearray()
        self.ended = False
        self.reset: int | None = None
        self.error: tuple[int, str] | None = None
        self.rooms = 0


class Recorder(H2Connection):
    """A connection that records. consumes: return flow-control credit at once."""

    def __init__(self, *, client: bool = False, consumes: bool = True, **limits: Any) -> None:
        super().__init__(client=client, limits=H2Limits(**limits))
        self.seen: dict[int, Recorded] = {}
        self.consumes = consumes
        self.failed: tuple[int, str] | None = None
        self.goaways: list[tuple[int, int, bytes]] = []
        self.writes = 0
        self.drained = 0
        self.settings_changes = 0
        self.open()

    def wants_write(self) -> None:
        self.writes += 1

    def new_stream(self, stream_id: int) -> Stream:
        stream = self.seen[stream_id] = Recorded()
        return stream

    def on_headers(self, stream: Stream, fields: list[Field], end: bool) -> None:
        assert isinstance(stream, Recorded) and stream.fields is None and not self.failed
        stream.fields, stream.ended = fields, end

    def on_too_large(self, stream: Stream, end: bool) -> None:
        assert isinstance(stream, Recorded)
        stream.fields, stream.ended = [], end
        self.send_headers(stream, block([(b":status", b"431")]), True)

    def on_trailers(self, stream: Stream, fields: list[Field]) -> None:
        assert isinstance(stream, Recorded) and not stream.ended
        stream.trailers_received, stream.ended = fields, True

    def on_data(self, stream: Stream, data: bytes | memoryview, end: bool) -> None:
        assert isinstance(stream, Recorded) and not stream.ended and (data or end) and not self.failed
        stream.body += data
        stream.ended = end
        if self.consumes:
            self.consumed(stream, len(data))

    def on_reset(self, stream: Stream, code: int) -> None:
        assert isinstance(stream, Recorded) and stream.reset is None
        stream.reset = code

    def on_stream_error(self, stream: Stream, code: int, message: str) -> None:
        assert isinstance(stream, Recorded) and stream.error is None and message
        stream.error = code, message

    def on_room(self, stream: Stream) -> None:
        assert isinstance(stream, Recorded)
        stream.rooms += 1

    def on_settings(self) -> None:
        self.settings_changes += 1

    def on_goaway(self, last_id: int, code: int, debug: bytes) -> None:
        self.goaways.append((last_id, code, debug))

    def on_drained(self) -> None:
        assert not self.streams
        self.drained += 1

    def connection_error(self, code: int, message: str) -> None:
        assert self.failed is None and message.isprintable()
        self.failed = code, message

    # For tests -------------------------------------------------------------------------------------------------

    def start(self, fields: list[Field] | None = None, *, end: bool = False) -> Recorded:
        """Open a stream as a client."""
        assert self.can_open()
        stream = Recorded()
        self.send_headers(stream, block(fields or REQUEST), end)
        self.seen[stream.id] = stream
        return stream

    def taken(self) -> bytes:
        """Return the bytes that are to be sent."""
        out = b"".join(self.out)
        self.out.clear()
        return out

    def frames(self) -> list["Frame"]:
        """Return what is to be sent, as frames."""
        return frames_of(self.taken())


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame that was sent."""

    kind: int
    flags: int
    stream_id: int
    payload: bytes

    @property
    def number(self) -> int:
        """Return the payload as one number, such as an error code or a window increment."""
        return int.from_bytes(self.payload, "big")


def frames_of(data: bytes) -> list[Frame]:
    found = []
    data = data.removeprefix(PREFACE)
    while data:
        head, flags, stream_id = FRAME.unpack_from(data)
        length = head >> 8
        assert len(data) >= 9 + length
        found.append(Frame(head & 255, flags, stream_id, data[9 : 9 + length]))
        data = data[9 + length :]
    return found


def server(**limits: Any) -> Recorder:
    """A server whose client has sent its preface and empty settings, and acknowledged ours."""
    made = Recorder(**limits)
    made.receive(PREFACE + frame(SETTINGS, 0, 0) + SETTINGS_ACK, 0.0)
    assert made.failed is None
    made.taken()
    return made


def client(**limits: Any) -> Recorder:
    """A client whose server has sent empty settings, and acknowledged ours."""
    made = Recorder(client=True, **limits)
    made.receive(frame(SETTINGS, 0, 0) + SETTINGS_ACK, 0.0)
    assert made.failed is None
    made.taken()
    return made


def exchange(one: Recorder, other: Recorder, now: float = 0.0) -> None:
    """Carry bytes in both directions until none are left."""
    while one.out or other.out or one.unhandled or other.unhandled:
        other.receive(one.taken(), now)
        one.receive(other.taken(), now)
