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
* Frames that cost the peer little and us much are paid from two token buckets (`limits`).
"""

from mypy_extensions import mypyc_attr

from oriel_wire.errors import BadMessage, HeaderListTooLarge, HpackError
from oriel_wire.h2.control import Control
from oriel_wire.h2.fields import check_request, check_response, check_trailers
from oriel_wire.h2.frames import (
    ACK,
    CODES,
    COMPRESSION_ERROR,
    CONTINUATION,
    DATA,
    DEFAULT_WINDOW,
    ENABLE_PUSH,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
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
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    STREAM_CLOSED,
    WINDOW_UPDATE,
    H2Error,
    frame,
    goaway,
    settings,
    unpadded,
    window_update,
)
from oriel_wire.h2.known_fields import Field, FieldMemo
from oriel_wire.h2.limits import H2Limits
from oriel_wire.h2.streams import BODY, ENDED, IS_HEAD, ON_DATA, ON_HEADERS, Stream

__all__ = ["H2Connection"]

# A payload is passed on as a view from this size on, if it is a good part of what it keeps in memory.
_LARGE = 32 * 1024
# A flag of our own: an error of the stream only, so its header block has to be decoded all the same.
_SELF_DEPENDENT = 0x100
_UNUSUAL = END_HEADERS | PADDED | PRIORITISED
# What the next frame has to be.
_ANY = 0
_FIRST = 1  # SETTINGS
_MORE = 2  # CONTINUATION


@mypyc_attr(allow_interpreted_subclasses=True)
class H2Connection(Control):
    """One connection; the module's docstring describes its rules, `hooks` its hooks."""

    __slots__ = (
        "_begun",
        "_block",
        "_block_bytes",
        "_block_flags",
        "_block_id",
        "_block_s",
        "_expects",
        "_later",
        "_max_block",
        "_max_frame",
        "_opened",
        "_preface_bytes",
        "_rest",
        "_rest_s",
        "_table_gone",
        "_wanted",
    )

    def __init__(self, *, client: bool, limits: H2Limits, memo: FieldMemo | None = None) -> None:
        super().__init__(client=client, limits=limits, memo=memo)
        self._max_block = limits.max_block_bytes
        self._max_frame = limits.max_frame_bytes
        self._preface_bytes = 0 if client else len(PREFACE)  # still to come
        self._expects = _FIRST
        self._rest: bytearray | None = None  # an incomplete frame
        self._later = b""  # frames that this turn has not handled
        self._begun = 0  # requests of this turn
        self._wanted = 0  # bytes that complete it
        self._table_gone = False  # the peer has no dynamic table any more: no block has to be decoded for its sake
        self._block: list[bytes] = []
        self._block_id = self._block_flags = self._block_bytes = 0
        self._block_s = self._rest_s = 0.0  # when the header block, or the frame, began that is incomplete
        self._opened = 0  # streams that the peer has opened

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
            return
        self._begun = 0
        if self._later:
            data, self._later = self._later + data, b""
        rest = self._rest
        if rest is not None:
            rest += data
            if len(rest) < self._wanted:
                return
            self._rest = None
            data = bytes(rest)
        self._receiving = True
        try:
            if self._preface_bytes:
                self._read_preface(data)
            else:
                self._read_frames(data, 0)
        except H2Error as error:
            self._fail(error.code, error.message)
        finally:
            self._receiving = False
        if self.draining and not self.streams:
            self._note_drained()

    @property
    def unhandled(self) -> bool:
        """Whether frames are left for another turn, because this one has begun `requests_per_turn`."""
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
        """When the header block, or frame other than DATA, began of which a part has come; 0.0 if there is none."""
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
        start, size = self._preface_bytes, len(data)
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
        while size - start >= 9:
            head, flags, stream_id = unpack(data, start)
            length = head >> 8
            first = start + 9
            end = first + length
            if length > self._max_frame:
                raise H2Error(FRAME_SIZE_ERROR, "a frame is larger than MAX_FRAME_SIZE")
            if end > size:
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
        if self._expects == _FIRST:
            if kind != SETTINGS or flags & ACK:
                raise H2Error(PROTOCOL_ERROR, "the first frame is not SETTINGS")
            self._expects = _ANY
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

    # HEADERS ---------------------------------------------------------------------------------------------------

    def _headers(self, flags: int, stream_id: int, block: bytes) -> None:
        if flags & (PADDED | PRIORITISED):
            if flags & PRIORITISED:
                at = 1 if flags & PADDED else 0
                if int.from_bytes(block[at : at + 4], "big") & MAX_ID == stream_id and len(block) >= at + 5:
                    flags |= _SELF_DEPENDENT
            block = bytes(unpadded(flags, block, flags & PRIORITISED != 0))
        if len(block) > self._max_block:
            raise H2Error(ENHANCE_YOUR_CALM, "a header block is too large")
        if flags & END_HEADERS:
            self._decode(flags, stream_id, block)
            return
        self._expects = _MORE
        self._block_s = self.now
        self._block_id, self._block_flags, self._block_bytes = stream_id, flags, len(block)
        self._block.append(block)

    def _continuation(self, flags: int, stream_id: int, block: bytes) -> None:
        if self._expects != _MORE:
            raise H2Error(PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        self._block_bytes += len(block)
        if self._block_bytes > self._max_block or len(self._block) > self.limits.max_continuations:
            raise H2Error(ENHANCE_YOUR_CALM, "a header block is too large or in too many frames")
        self._block.append(block)
        if flags & END_HEADERS:
            block = b"".join(self._block)
            self._block.clear()
            self._expects = _ANY
            self._decode(self._block_flags, stream_id, block)

    def _decode(self, flags: int, stream_id: int, block: bytes) -> None:
        """Handle a whole header block."""
        stream = self.streams.get(stream_id)
        swallow = stream is None and self._swallows(stream_id)
        if swallow and self._table_gone:
            self._charge(1)
            return
        fields: list[Field] | None = None
        try:
            fields = self.decoder.decode(block)
        except HeaderListTooLarge:
            pass
        except HpackError as error:
            raise H2Error(COMPRESSION_ERROR, error.message) from None
        self._table_gone = self.settings_acknowledged
        if swallow:
            self._charge(1)
        elif self.decoder.malformed or flags & _SELF_DEPENDENT:
            message = self.decoder.malformed or "a stream depends on itself"
            self._stream_error(stream_id, stream, PROTOCOL_ERROR, message)
        elif stream is None:
            self._request(stream_id, fields, flags & END_STREAM != 0)
        else:
            self._more_headers(stream, fields, flags & END_STREAM != 0)

    def _swallows(self, stream_id: int) -> bool:
        """Note a new stream of a client; or whether HEADERS on a stream that is gone are swallowed. Raises H2Error."""
        if self._idle(stream_id):
            if self.client or not stream_id & 1:
                raise H2Error(PROTOCOL_ERROR, "HEADERS on an idle stream, or on one of the server")
            self.last_id = stream_id
            self._opened += 1
            return stream_id > self._accepts_up_to
        if self._was_reset(stream_id) or (not self.client and stream_id > self._accepts_up_to):
            return True
        if not self.client and self._opened != (self.last_id + 1) >> 1:  # some number was left out
            raise H2Error(PROTOCOL_ERROR, "the number of a new stream is not above the others")
        raise H2Error(STREAM_CLOSED, "HEADERS on a closed stream")

    def _request(self, stream_id: int, fields: list[Field] | None, end: bool) -> None:
        """Open a stream for a client's request."""
        if self._reset_ahead and stream_id in self._reset_ahead:
            self._charge(1)
            self._remember_reset(stream_id)
            return
        if len(self.streams) >= self.limits.max_streams:
            if self.settings_acknowledged:
                self._charge_reset()
            else:
                self._charge(1)  # it does not know the limit yet
            self._remember_reset(stream_id)
            self._reply(frame(RST_STREAM, 0, stream_id, REFUSED_STREAM.to_bytes(4, "big")))
            return
        length = -1
        if fields is not None:
            try:
                length = check_request(fields)
                if end and length > 0:
                    raise BadMessage("DATA differs from content-length")
            except BadMessage as error:
                self._stream_error(stream_id, None, PROTOCOL_ERROR, error.message)
                return
        self._begun += 1
        stream = self.new_stream(stream_id)
        stream.id = stream_id
        stream.opened_s = self.now
        stream.send_window = self.peer_window
        stream.expected = length
        stream.receiving = ENDED if end else BODY
        self._begin(stream)
        if fields is None:
            self.on_too_large(stream, end)
        else:
            self.on_headers(stream, fields, end)

    def _begin(self, stream: Stream) -> None:
        stream.window = self._stream_window
        stream.window_size = self.limits.stream_window_bytes
        self.streams[stream.id] = stream

    def _more_headers(self, stream: Stream, fields: list[Field] | None, end: bool) -> None:
        """HEADERS on an open stream: an answer, interim or final, or trailers."""
        meaning = ON_HEADERS[stream.receiving]
        try:
            if meaning >= 0:
                self._stream_error(stream.id, stream, meaning, "HEADERS after the end")
                return
            if fields is None:
                self._stream_error(stream.id, stream, ENHANCE_YOUR_CALM, "the header list is too large")
                return
            if meaning == IS_HEAD:
                self._answer(stream, fields, end)
                return
            check_trailers(fields)
            if not end:
                raise BadMessage("trailers do not end their stream")
            if stream.expected > 0:
                raise BadMessage("DATA differs from content-length")
        except BadMessage as error:
            self._stream_error(stream.id, stream, PROTOCOL_ERROR, error.message)
            return
        self._received_end(stream)
        self.on_trailers(stream, fields)

    def _answer(self, stream: Stream, fields: list[Field], end: bool) -> None:
        """The head of an answer. Raises BadMessage."""
        length = check_response(fields)
        status = fields[0][1]
        if status[0] == 0x31:
            if end:
                raise BadMessage("an interim answer ends its stream")
            self._charge(1)
            self.on_interim(stream, fields)
            return
        if stream.head_only or status == b"204" or status == b"304":
            length = 0
        if end:
            if length > 0:
                raise BadMessage("DATA differs from content-length")
            self._received_end(stream)
        else:
            stream.expected = length
            stream.receiving = BODY
        self.on_headers(stream, fields, end)

    def _received_end(self, stream: Stream) -> None:
        stream.receiving = ENDED
        if stream.sending == ENDED:
            self._finish(stream)
