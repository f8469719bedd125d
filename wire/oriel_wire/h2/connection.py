"""The state machine of one HTTP/2 connection, client or server, without I/O (RFC 9113).

An engine subclasses `H2Connection`, gives it received bytes with the time, and flushes `out`. There are no event
objects: the hooks of `hooks` are called directly, each as the last step of its frame, so that they may send, reset and
end anything. `sending` explains how data goes out.

Rules:

* An error of the connection queues GOAWAY, calls `connection_error`, and nothing is received or sent any more. An
  error of a stream resets it and calls `on_stream_error`, if the engine knows the stream.
* A stream leaves `streams` when both directions have ended or one side has reset it. Late frames of streams that we
  have reset are swallowed: their numbers are remembered until a few hundred others were reset. DATA counts on the
  connection's window all the same, and its credit returns at once. DATA on any other closed stream is answered with
  STREAM_CLOSED, HEADERS end the connection.
* Header blocks of swallowed streams are decoded as well while the peer may still use a dynamic table.
* Credit returns to the peer when `consumed` is called and half a window is due, so the engine decides how much it
  holds: at most stream_window_bytes for each stream and connection_window_bytes for all.
* The payload of a DATA frame is passed on as it comes: a frame is never gathered, unless it is padded.
* Frames that cost the peer little and us much are paid from two token buckets (`limits`).
"""

from mypy_extensions import mypyc_attr

from oriel_wire.h2.frames import (
    ACK,
    CODES,
    CONTINUATION,
    DATA,
    DEFAULT_WINDOW,
    ENABLE_PUSH,
    END_HEADERS,
    END_STREAM,
    FLOW_CONTROL_ERROR,
    FRAME,
    FRAME_SIZE_ERROR,
    HEADER_TABLE_SIZE,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    MAX_FRAME_SIZE,
    MAX_HEADER_LIST_SIZE,
    MAX_ID,
    PADDED,
    PREFACE,
    PRIORITISED,
    PROTOCOL_ERROR,
    RST_STREAM,
    SETTINGS,
    STREAM_CLOSED,
    WINDOW_UPDATE,
    H2Error,
    goaway,
    settings,
    unpadded,
    window_update,
)
from oriel_wire.h2.headers import ANY, FIRST, HeaderBlocks
from oriel_wire.h2.known_fields import FieldMemo
from oriel_wire.h2.limits import H2Limits
from oriel_wire.h2.streams import BODY, ENDED, ON_DATA, Stream

# A payload is passed on as a view from this size on, if it is a good part of what it keeps in memory.
_LARGE = 32 * 1024
_UNUSUAL = END_HEADERS | PADDED | PRIORITISED


@mypyc_attr(allow_interpreted_subclasses=True)
class H2Connection(HeaderBlocks):
    """One connection; the module's docstring describes its rules, `hooks` its hooks."""

    __slots__ = (
        "_data_end",
        "_data_id",
        "_data_left",
        "_later",
        "_max_frame",
        "_preface_bytes",
        "_rest",
        "_rest_s",
        "_wanted",
    )

    def __init__(self, *, client: bool, limits: H2Limits, memo: FieldMemo | None = None) -> None:
        super().__init__(client=client, limits=limits, memo=memo)
        self._max_frame = limits.max_frame_bytes
        self._preface_bytes = 0 if client else len(PREFACE)  # still to come
        self._rest: bytearray | None = None  # an incomplete frame
        self._later = b""  # frames that this turn has not handled
        self._wanted = 0  # bytes that complete it
        self._rest_s = 0.0  # when the frame began that is incomplete
        self._data_id = self._data_end = 0  # stream and END_STREAM of a DATA frame that has begun
        self._data_left = 0  # bytes of this frame that have not come

    def open(self) -> None:
        """Queue what a connection begins with: the preface of a client, our settings, the connection's window."""
        limits = self.limits
        values = {HEADER_TABLE_SIZE: 0}
        if self.client:
            values[ENABLE_PUSH] = 0
        else:
            values[MAX_CONCURRENT_STREAMS] = limits.max_streams
        values[INITIAL_WINDOW_SIZE] = limits.stream_window_bytes
        values[MAX_FRAME_SIZE] = limits.max_frame_bytes
        values[MAX_HEADER_LIST_SIZE] = limits.max_header_list_bytes
        first = (PREFACE if self.client else b"") + settings(values)
        more = limits.connection_window_bytes - DEFAULT_WINDOW
        if more > 0:
            self._window += more
            first += window_update(0, more)
        self._queue(first)

    def receive(self, data: bytes, now: float) -> None:
        """Handle all whole frames and keep the rest; `now` is monotonic. Never raises for what the peer sends.

        If `unhandled` is true afterwards, call it again in another turn of the loop, with no bytes.
        """
        self.now = now
        if self.closed:
            self._later = b""
            return
        self._begun = 0
        if self._later:
            data, self._later = self._later + data, b""
        rest = self._rest
        if rest is not None:
            if len(rest) + len(data) < self._wanted:
                rest += data
                return
            self._rest = None
            data = b"".join((rest, data))
        self._receiving = True
        try:
            if self._preface_bytes:
                self._read_preface(data)
            else:
                start = self._more_data(data, 0) if self._data_left else 0
                if start < len(data) and not self.closed:
                    self._read_frames(data, start)
        except H2Error as error:
            self._fail(error.code, error.message)
        finally:
            self._receiving = False
        if self.draining and not self.streams:
            self._note_drained()

    @property
    def unhandled(self) -> bool:
        """Return whether frames are left for another turn, because this one has begun `requests_per_turn`."""
        return self._later != b""

    @property
    def kept_bytes(self) -> int:
        """Bytes that were received and are not handled yet: DATA that is not consumed, and what is incomplete."""
        size = max(DEFAULT_WINDOW, self.limits.connection_window_bytes) - self._window - self._credit
        size += len(self._later)
        if self._rest is not None:
            size += len(self._rest)
        return size + self._block_bytes if self._block else size

    @property
    def unfinished_since(self) -> float:
        """The time at which an unfinished header block, or frame other than DATA, began; 0.0 if there is none."""
        if self._block:
            return self._block_s
        rest = self._rest
        if rest is None or (len(rest) > 3 and rest[3] == DATA and not self._preface_bytes):
            return 0.0
        return self._rest_s

    def note_resets(self, data: bytes) -> None:
        """Take note of the streams that the peer resets in `data`, which `receive` gets next.

        Their requests are not begun. For data that has lain unread for a while: who sent them waits for no answer.
        """
        data = (self._later if self._rest is None else bytes(self._rest)) + data
        start, size = self._preface_bytes + self._data_left, len(data)
        while size - start >= 9:
            head, _, stream_id = FRAME.unpack_from(data, start)
            if head & 255 == RST_STREAM:
                self._reset_ahead.add(stream_id & MAX_ID)
            start += 9 + (head >> 8)

    def _fail(self, code: int, message: str) -> None:
        """End the connection with an error."""
        self._queue(goaway(self.last_id, code, message.encode("ascii", "replace")))
        self.closed = True
        self._rest = None
        self._later = b""
        self._block.clear()
        self.connection_error(code, f"{CODES[code]}: {message}")

    # Frames ----------------------------------------------------------------------------------------------------

    def _read_preface(self, data: bytes) -> None:
        size = len(PREFACE)
        if data[:size] != PREFACE[: len(data)]:
            raise H2Error(PROTOCOL_ERROR, "the client does not begin with the preface of HTTP/2")
        if len(data) < size:
            self._keep(data, 0, size)
            return
        self._preface_bytes = 0
        self._read_frames(data, size)

    def _keep(self, data: bytes, start: int, wanted: int) -> None:
        self._rest = bytearray(memoryview(data)[start:])
        self._rest_s = self.now
        self._wanted = wanted

    def _read_frames(self, data: bytes, start: int) -> None:
        unpack = FRAME.unpack_from
        size = len(data)
        head: int  # compiled, a number of an unknown type costs more
        flags: int
        stream_id: int
        while size - start >= 9:
            head, flags, stream_id = unpack(data, start)
            length = head >> 8
            first = start + 9
            end = first + length
            if length > self._max_frame:
                raise H2Error(FRAME_SIZE_ERROR, "a frame is larger than MAX_FRAME_SIZE")
            if end > size:
                if head & 255 == DATA and not flags & PADDED and not self._expects:
                    self._begin_data(flags, stream_id & MAX_ID, length)
                    self._more_data(data, first)
                    return
                if head & 255 != DATA and length > self.limits.max_kept_frame_bytes:
                    raise H2Error(FRAME_SIZE_ERROR, "a frame that is no DATA is too large")
                self._keep(data, start, 9 + length)
                return
            start = end
            kind = head & 255
            stream_id &= MAX_ID
            if self._expects:
                self._check_order(kind, flags, stream_id)
            if kind == DATA:
                if length >= _LARGE and length << 2 >= size:
                    self._data(flags, stream_id, memoryview(data)[first:end], length)
                else:
                    self._data(flags, stream_id, data[first:end], length)
            elif kind == HEADERS:
                if flags & _UNUSUAL == END_HEADERS and length <= self._max_block:
                    self._decode(flags, stream_id, data[first:end])
                else:
                    self._headers(flags, stream_id, data[first:end])
                if self._begun >= self.limits.requests_per_turn and not self.closed:
                    self._later = data[start:]
                    return
            elif kind == WINDOW_UPDATE and length == 4:
                self._window_update(stream_id, int.from_bytes(data[first:end], "big"))
            elif kind == CONTINUATION:
                self._continuation(flags, stream_id, data[first:end])
            else:
                self._control(kind, flags, stream_id, data[first:end])
            if self.closed:
                return
        if size > start:
            self._keep(data, start, 9)

    def _check_order(self, kind: int, flags: int, stream_id: int) -> None:
        """Check a frame that comes first, or into a header block."""
        if self._expects == FIRST:
            if kind != SETTINGS or flags & ACK:
                raise H2Error(PROTOCOL_ERROR, "the first frame is not SETTINGS")
            self._expects = ANY
        elif kind != CONTINUATION or stream_id != self._block_id:
            raise H2Error(PROTOCOL_ERROR, "a frame interrupts a header block")

    # DATA and windows ------------------------------------------------------------------------------------------

    def _data(self, flags: int, stream_id: int, data: bytes | memoryview, length: int) -> None:
        window = self._window - length
        if window < 0:
            raise H2Error(FLOW_CONTROL_ERROR, "more DATA than the connection's window")
        self._window = window
        stream = self.streams.get(stream_id)
        if stream is None or stream.receiving != BODY:
            self._late_data(stream_id, stream, length)
            return
        if flags & PADDED:
            data = unpadded(flags, data, False)
        window = stream.window - length
        stream.window = window
        size = len(data)
        if window < 0:
            self._return(length)
            self._stream_error(stream_id, stream, FLOW_CONTROL_ERROR, "more DATA than the stream's window")
            return
        end = flags & END_STREAM
        if stream.expected >= 0:
            stream.expected -= size
            if stream.expected < 0 or (end and stream.expected):
                self._return(length)
                self._stream_error(stream_id, stream, PROTOCOL_ERROR, "DATA differs from content-length")
                return
        stream.held_bytes += length
        if length != size:
            self.consumed(stream, length - size)
        self.useful_bytes += size
        if end:
            stream.receiving = ENDED
            if stream.sending == ENDED:
                self._finish(stream)
        elif not size:
            self._charge(1)
            return
        self.on_data(stream, data, end != 0)

    def _begin_data(self, flags: int, stream_id: int, length: int) -> None:
        """Judge a DATA frame whose end has not come."""
        if length > self._window:
            raise H2Error(FLOW_CONTROL_ERROR, "more DATA than the connection's window")
        stream = self.streams.get(stream_id)
        if stream is None or stream.receiving != BODY:
            self._late_data(stream_id, stream, 0)
        elif length > stream.window:
            self._stream_error(stream_id, stream, FLOW_CONTROL_ERROR, "more DATA than the stream's window")
        self._data_id, self._data_end, self._data_left = stream_id, flags & END_STREAM, length

    def _more_data(self, data: bytes, start: int) -> int:
        """Pass on what has come of the DATA frame that has begun; return where it ends."""
        size = len(data)
        end = min(size, start + self._data_left)
        length = end - start
        if not length or self.closed:
            return end
        self._data_left -= length
        stream = self.streams.get(self._data_id)
        if stream is None or stream.receiving != BODY:
            self._window -= length
            self._return(length)
            return end
        flags = 0 if self._data_left else self._data_end
        if length >= _LARGE and length << 2 >= size:
            self._data(flags, self._data_id, memoryview(data)[start:end], length)
        else:
            self._data(flags, self._data_id, data[start:end], length)
        return end

    def _late_data(self, stream_id: int, stream: Stream | None, length: int) -> None:
        """DATA on a stream that takes none."""
        if stream is None and self._idle(stream_id):
            raise H2Error(PROTOCOL_ERROR, "DATA on an idle stream")
        self._return(length)
        if stream is not None:
            code = ON_DATA[stream.receiving]
            self._stream_error(stream_id, stream, code, "DATA before the head or after the end")
        elif self._was_reset(stream_id) or (not self.client and stream_id > self._accepts_up_to):
            self._charge(1)
        else:
            self._stream_error(stream_id, None, STREAM_CLOSED, "DATA on a closed stream")
