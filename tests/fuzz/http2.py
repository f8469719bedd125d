"""What must hold for every byte string that an HTTP/2 connection receives. `judge(data)` says which rule does not.

The input: `s` (from a client: its preface is put before) or `c` (from a server: four calls are open), one byte whose
bits say how the engine behaves, then frames.

1. `receive` raises nothing. Each stream gets a head, then its body, then one end, and nothing after that or after the
   end of the connection, whose reason is a printable sentence.
2. Where the bytes are cut into pieces changes nothing: neither what is received nor what is sent.
3. No byte of the connection's window is lost: it is free, held by a stream, or to be returned.
4. Streams, waiting data, incomplete frames and remembered numbers stay in their bounds, and nothing is sent without
   a reason in what was received.
"""

import random
from typing import Any

from oriel_wire.h2.connection import H2Connection
from oriel_wire.h2.frames import DATA, ENHANCE_YOUR_CALM, FRAME, PADDED, PREFACE
from oriel_wire.h2.hpack import Field, literal
from oriel_wire.h2.limits import H2Limits
from oriel_wire.h2.streams import Stream

__all__ = ["judge"]

LIMITS = H2Limits(
    max_streams=8,
    requests_per_turn=3,
    stream_window_bytes=20_000,
    connection_window_bytes=70_000,
    max_frame_bytes=16384,
    send_frame_bytes=500,
    max_header_list_bytes=2000,
    max_fields=24,
    max_block_bytes=4000,
    max_continuations=8,
    reset_burst=30,
    control_burst=200,
    max_unread_replies=20,
)
CONSUMES, ANSWERS, RESETS, PAUSES, DRAINS, ACKNOWLEDGES = 1, 2, 4, 8, 16, 32
_REQUEST: list[Field] = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"x")]
_HEAD = b"".join(literal(*field) for field in _REQUEST)
_ANSWER = literal(b":status", b"200")
_TRAILERS = literal(b"grpc-status", b"0")
_SETTINGS = bytes.fromhex("000000040000000000")
_SETTINGS_ACK = bytes.fromhex("000000040100000000")


class _Broken(Exception):
    """A rule does not hold."""


def _rule(holds: object, name: str) -> None:
    if not holds:
        raise _Broken(name)


class _Call(Stream):
    def __init__(self) -> None:
        super().__init__()
        self.head: list[Field] | None = None
        self.over = False


class _Connection(H2Connection):
    """A connection that records what its hooks are called with. how: bits that choose its behaviour."""

    def __init__(self, *, client: bool, how: int) -> None:
        super().__init__(client=client, limits=LIMITS)
        self.how = how
        self.log: list[Any] = []
        self.calls: list[_Call] = []
        self.reason = ""
        self.drained = False
        self.open()

    def _note(self, stream: Stream, *what: Any) -> _Call:
        assert isinstance(stream, _Call)
        _rule(not self.reason and not stream.over, f"{what[0]} after the end")
        last = self.log[-1] if self.log else None
        if what[0] == "data" and last and last[:2] == [stream.id, "data"] and not last[3]:
            last[2] += what[1]  # pieces do not count
            last[3] = what[2]
        else:
            self.log.append([stream.id, *what])
        return stream

    def new_stream(self, stream_id: int) -> Stream:
        call = _Call()
        self.calls.append(call)
        return call

    def on_headers(self, stream: Stream, fields: list[Field], end: bool) -> None:
        call = self._note(stream, "head", fields, end)
        _rule(call.head is None, "two heads")
        call.head, call.over = fields, end
        if not self.client and self.how & ANSWERS:
            self.send_headers(stream, _ANSWER, False)
            self.send_data(stream, bytes(700), False)
            if end:
                self.send_headers(stream, _TRAILERS, True)

    def on_too_large(self, stream: Stream, end: bool) -> None:
        call = self._note(stream, "too large", end)
        call.head, call.over = [], end
        self.send_headers(stream, _ANSWER, True)

    def on_trailers(self, stream: Stream, fields: list[Field]) -> None:
        call = self._note(stream, "trailers", fields)
        _rule(call.head is not None, "trailers before the head")
        call.over = True

    def on_data(self, stream: Stream, data: bytes | memoryview, end: bool) -> None:
        call = self._note(stream, "data", bytes(data), end)
        _rule(call.head is not None and (data or end), "data before the head, or no data")
        call.over = end
        if self.how & CONSUMES:
            self.consumed(stream, len(data))
        if self.how & RESETS:
            self.send_reset(stream, 8)
            call.over = True

    def on_reset(self, stream: Stream, code: int) -> None:
        assert isinstance(stream, _Call)
        stream.over = False  # a peer may reset what it has ended
        self._note(stream, "reset", code).over = True

    def on_stream_error(self, stream: Stream, code: int, message: str) -> None:
        assert isinstance(stream, _Call)
        stream.over = False
        self._note(stream, "error", code, message).over = True

    def on_room(self, stream: Stream) -> None:
        self.log.append([stream.id, "room"])
        if self.how & ANSWERS:
            self.send_headers(stream, _TRAILERS, True)

    def on_settings(self) -> None:
        self.log.append([0, "settings"])

    def on_goaway(self, last_id: int, code: int, debug: bytes) -> None:
        self.log.append([0, "goaway", last_id, code, debug])

    def on_drained(self) -> None:
        # Not in the log: it comes at the end of what is received at once.
        _rule(not self.streams and not self.drained and not self.reason, "drained with streams, or twice")
        self.drained = True

    def connection_error(self, code: int, message: str) -> None:
        _rule(not self.reason and 0 < len(message) <= 500 and message.isprintable(), "the reason of an end")
        self.log.append([0, "failed", code, message])
        self.reason = message


def _made(data: bytes) -> _Connection:
    """Return the connection on which the frames of an input arrive."""
    how = data[1] if len(data) > 1 else 0
    made = _Connection(client=data[:1] == b"c", how=how)
    acknowledged = _SETTINGS_ACK if how & ACKNOWLEDGES else b""
    made.receive((b"" if made.client else PREFACE) + _SETTINGS + acknowledged, 0.0)
    if made.client:
        for size in (0, 10, 30_000, 60_000):
            call = _Call()
            made.calls.append(call)
            made.send_headers(call, _HEAD, not size)
            if size:
                made.send_data(call, bytes(size), size == 10)
    if how & PAUSES:
        made.pause()
    if how & DRAINS:
        made.drain()
    return made


def _drive(data: bytes, pieces: list[bytes]) -> tuple[_Connection, bytes]:
    """Feed the pieces of an input; returns what was received and what was sent."""
    made = _made(data)
    sent = b""
    for piece in pieces:
        made.receive(piece, 0.0)
        while made.unhandled:
            made.receive(b"", 0.0)
        sent += b"".join(made.out)
        made.out.clear()
        _bounds(made)
    return made, sent


def _bounds(made: _Connection) -> None:
    _rule(len(made.streams) <= LIMITS.max_streams, "too many streams")
    _rule(len(made._waiting) <= len(made.streams), "streams that are gone wait")
    _rule(len(made._resets) <= 512, "too many numbers are remembered")
    _rule(made._block_bytes <= LIMITS.max_block_bytes + LIMITS.max_frame_bytes, "too large a block is kept")
    if made.reason:
        return
    _rule(made._rest is None or len(made._rest) < LIMITS.max_frame_bytes + 9, "more than a frame is kept")
    held = sum(call.held_bytes for call in made.calls)
    _rule(made._window + made._credit + held == LIMITS.connection_window_bytes, "bytes of the window are lost")
    for stream in made.streams.values():
        _rule(not stream.closed and stream.id and stream.held_bytes >= 0, "a closed stream is kept")
        _rule(stream.window + stream.credit <= max(stream.window_size, 65535), "a window grows")


def _check_frames(sent: bytes) -> None:
    sent = sent.removeprefix(PREFACE)
    while sent:
        _rule(len(sent) >= 9, "half a frame is sent")
        head, _, _ = FRAME.unpack_from(sent)
        _rule(len(sent) >= 9 + (head >> 8) and head & 255 <= 9, "no frame is sent")
        sent = sent[9 + (head >> 8) :]


def _past_data(frames: bytes, cut: int) -> int:
    """Move a cut out of the payload of a DATA frame, which is passed on as it comes."""
    start = 0
    while start + 9 <= cut:
        head, flags, _ = FRAME.unpack_from(frames, start)
        end = start + 9 + (head >> 8)
        if cut < end:
            return min(end, len(frames)) if head & 255 == DATA and not flags & PADDED else cut
        start = end
    return cut


def _pieces(frames: bytes, cuts: list[int]) -> list[bytes]:
    return [frames[start:end] for start, end in zip([0, *cuts], [*cuts, len(frames)], strict=True)]


def judge(data: bytes) -> tuple[str, str]:
    """Return why the connection ended and the rule that does not hold; each is "" if there is none."""
    frames = data[2:]
    rng = random.Random(data)
    cuts = sorted(rng.randrange(len(frames) + 1) for _ in range(rng.choice((1, 5, 50)))) if frames else []
    try:
        whole, sent = _drive(data, [frames])
        cut, sent_of_pieces = _drive(data, _pieces(frames, [_past_data(frames, cut) for cut in cuts]))
        torn, sent_of_torn = _drive(data, _pieces(frames, cuts))
        _check_frames(sent)
        _check_frames(sent_of_torn)
        _rule(whole.reason == torn.reason, "pieces of DATA end the connection")
        _rule(whole.log == cut.log, "pieces are received otherwise")
        _rule(sent == sent_of_pieces, "pieces are answered otherwise")
        _rule(len(sent) <= 100_000 + 100 * len(frames), "too much is sent")
        last = whole.log[-1] if whole.log else None
        _rule(not whole.reason or (last and last[1] == "failed" and last[2] <= ENHANCE_YOUR_CALM), "more than an end")
    except _Broken as broken:
        return "", str(broken)
    return whole.reason, ""
