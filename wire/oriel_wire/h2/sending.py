"""The sending half of an HTTP/2 connection: windows, data that waits for them, resets, pings, GOAWAY.

Theory of operation. Every frame is appended to `out`; the engine flushes it once after each `receive`, and when
`wants_write` is called. Data goes out at once if the stream's window, the connection's window and the transport
(`pause`, `resume`) have room for all of it. Otherwise what is left waits in `Stream.pending`: for its own
stream's window outside any queue, for the connection's window or the transport in `_waiting`, from which each stream
sends one frame in turn. So while `_waiting` has a stream that could send, there is no room on the connection. Frames
without data wait for nothing but data of their own stream.
"""

from collections import deque
from collections.abc import Sequence

from mypy_extensions import mypyc_attr

from oriel_wire.h2.frames import (
    CONTINUATION,
    DEFAULT_FRAME,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FRAME,
    HEADERS,
    MAX_ID,
    NO_ERROR,
    PING,
    RST_STREAM,
    H2Error,
    frame,
    goaway,
    window_update,
)
from oriel_wire.h2.hooks import H2Hooks
from oriel_wire.h2.limits import H2Limits
from oriel_wire.h2.streams import BODY, ENDED, HEAD, Stream

_DRAIN = b"draining"
_REMEMBERED = 512  # streams that we have reset


@mypyc_attr(allow_interpreted_subclasses=True)
class Sender(H2Hooks):
    """The state that both directions share, and what an engine calls to send."""

    __slots__ = (
        "_accepts_up_to",
        "_credit",
        "_drained",
        "_next_id",
        "_receiving",
        "_replies",
        "_resets",
        "_stateless",
        "_waiting",
        "_window",
        "client",
        "closed",
        "draining",
        "finished",
        "last_id",
        "limits",
        "out",
        "paused",
        "peer_frame_bytes",
        "peer_leaves",
        "peer_max_streams",
        "peer_window",
        "send_frame_bytes",
        "send_window",
        "settings_received",
        "streams",
        "useful_bytes",
    )

    def __init__(self, *, client: bool, limits: H2Limits) -> None:
        self.client = client
        self.limits = limits
        self.out: list[bytes | memoryview] = []
        self.streams: dict[int, Stream] = {}
        self.closed = False  # True after an error: nothing is received or sent any more
        self.draining = False
        self._drained = False  # and `on_drained` was called
        self.paused = False
        self.peer_leaves = False  # it has sent GOAWAY
        self.last_id = 0  # highest stream that the peer has opened
        self.peer_max_streams = 100  # until its SETTINGS are there
        self.settings_received = False
        self.peer_window = DEFAULT_WINDOW
        self.peer_frame_bytes = DEFAULT_FRAME
        self.send_frame_bytes = min(DEFAULT_FRAME, limits.send_frame_bytes)
        self.send_window = DEFAULT_WINDOW
        self.finished = 0  # streams that ended properly
        self.useful_bytes = 0  # payload of DATA in both directions
        self._window = DEFAULT_WINDOW  # bytes the peer may still send
        self._credit = 0
        self._next_id = 1
        self._accepts_up_to = MAX_ID  # last stream of our final GOAWAY
        self._waiting: deque[Stream] = deque()
        self._resets: dict[int, None] = {}  # the oldest first
        self._receiving = False
        self._replies = 0
        self._stateless = False  # the peer knows that our header blocks use no dynamic table

    # For the engine --------------------------------------------------------------------------------------------

    def can_open(self) -> bool:
        """Return whether a client may open one more stream now."""
        return (
            len(self.streams) < self.peer_max_streams
            and not self.peer_leaves
            and not self.closed
            and not self.draining
            and self._next_id <= MAX_ID
        )

    def send_headers(self, stream: Stream, block: bytes, end: bool) -> None:
        """Send an encoded header block: a head, an interim answer, or (always with `end`) trailers.

        A client's new stream gets its number here, if `can_open`. Trailers wait for data that waits. Ignored on a
        stream that has ended.
        """
        if self.closed or stream.sending == ENDED:
            return
        if stream.pending is not None:
            stream.trailers = block
            stream.end_pending = end
            return
        if stream.id == 0:
            stream.id = self._next_id
            self._next_id += 2
            stream.send_window = self.peer_window
            self._begin(stream)
        stream.sending = BODY
        if not self._stateless:
            # RFC 7541 section 4.2: the peer may have asked for a smaller table, which has to be acknowledged once.
            self._stateless = True
            block = b"\x20" + block
        size = len(block)
        out = self.out
        empty = not out
        if size <= self.peer_frame_bytes:
            out.append(FRAME.pack(size << 8 | HEADERS, END_HEADERS | end, stream.id))
            out.append(block)
        else:
            out.append(self._split(stream.id, block, end))
        if end:
            self._sent_end(stream)
        if empty and not self._receiving:
            self.wants_write()

    def send_data(self, stream: Stream, data: bytes | memoryview, end: bool) -> bool:
        """Send data as far as the windows allow and keep the rest. False: some is kept, and `on_room` will be called.

        The bytes must not change afterwards. Ignored on a stream that has ended.
        """
        size = len(data)
        if (
            size > stream.send_window
            or size > self.send_window
            or size > self.send_frame_bytes
            or self.paused
            or stream.pending is not None
            or stream.sending != BODY
        ):
            return self._send_slowly(stream, data, end)
        self.send_window -= size
        stream.send_window -= size
        self.useful_bytes += size
        out = self.out
        empty = not out
        out.append(FRAME.pack(size << 8, end, stream.id))
        if size:
            out.append(data)
        if end:
            self._sent_end(stream)
        if empty and not self._receiving:
            self.wants_write()
        return True

    def send_whole(self, stream: Stream, head: bytes, data: bytes, trailers: bytes | None = None) -> None:
        """Send a head, data, and trailers if they end it, like `send_headers` and `send_data` one after the other."""
        size, most, idle = len(data), self.peer_frame_bytes, stream.id == 0
        if (
            stream.sending != HEAD
            or not self._stateless
            or self.paused
            or self.closed
            or size > (self.peer_window if idle else stream.send_window)
            or size > self.send_window
            or size > self.send_frame_bytes
            or len(head) > most
            or (trailers is not None and len(trailers) > most)
        ):
            self.send_headers(stream, head, False)
            self.send_data(stream, data, trailers is None)
            if trailers is not None:
                self.send_headers(stream, trailers, True)
            return
        if idle:
            stream.id = self._next_id
            self._next_id += 2
            stream.send_window = self.peer_window
            self._begin(stream)
        self.send_window -= size
        stream.send_window -= size
        self.useful_bytes += size
        out, number, pack = self.out, stream.id, FRAME.pack
        empty = not out
        head_frame = pack(len(head) << 8 | HEADERS, END_HEADERS, number)
        if trailers is None:
            out += (head_frame, head, pack(size << 8, END_STREAM, number), data)
        else:
            end_frame = pack(len(trailers) << 8 | HEADERS, END_HEADERS | END_STREAM, number)
            out += (head_frame, head, pack(size << 8, 0, number), data, end_frame, trailers)
        self._sent_end(stream)
        if empty and not self._receiving:
            self.wants_write()

    def send_pieces(self, stream: Stream, pieces: Sequence[bytes | memoryview], end: bool) -> bool:
        """Send data that lies in several pieces, none of them empty, in as few frames as `send_data` would."""
        if self.closed or stream.sending != BODY or stream.end_pending:
            return True
        stream.end_pending = end
        if stream.pending is not None:
            stream.pending.extend(pieces)
            return False
        stream.pending = deque(pieces)
        self._send_pending(stream, -1)
        return stream.pending is None

    def send_reset(self, stream: Stream, code: int) -> None:
        """Reset a stream. Its late frames are swallowed, and what is not consumed goes back to the connection's window.

        NO_ERROR after a whole answer asks a client to stop sending its request. Ignored if the stream is closed.
        """
        if self.streams.get(stream.id) is stream:
            self._send_reset(stream.id, code)
            self._drop(stream)

    def consumed(self, stream: Stream, size: int) -> None:
        """Give credit for `size` bytes of `on_data` back to the peer; the frames go out when half a window is due.

        Every byte must be consumed once, or its stream be reset: the connection's window is shared.
        """
        if stream.held_bytes < size:
            size = stream.held_bytes  # it was reset meanwhile
        stream.held_bytes -= size
        credit = self._credit + size
        self._credit = credit
        if credit << 1 >= self.limits.connection_window_bytes:
            self._return_credit()
        if stream.receiving != ENDED:
            credit = stream.credit + size
            stream.credit = credit
            if credit << 1 >= stream.window_size:
                stream.credit = 0
                stream.window += credit
                self._queue(window_update(stream.id, credit))

    def widen(self, stream: Stream, size: int) -> None:
        """Let the peer send `size` bytes on this stream before any of them is consumed (if it may not already)."""
        more = size - stream.window_size
        if more > 0 and stream.receiving != ENDED:
            stream.window_size = size
            stream.window += more
            self._queue(window_update(stream.id, more))

    def ping(self, payload: bytes) -> None:
        """Send a PING of eight bytes."""
        self._queue(frame(PING, 0, 0, payload))

    def goaway(self, code: int, last_id: int, debug: bytes = b"") -> None:
        """Send GOAWAY. New streams above `last_id` are ignored from now on; streams that are open go on."""
        self._accepts_up_to = min(self._accepts_up_to, last_id)
        self._queue(goaway(self._accepts_up_to, code, debug))

    def drain(self) -> None:
        """Stop taking new streams without losing one (RFC 9113 section 6.8).

        First GOAWAY without a last stream; when the peer has acknowledged a ping, and so has stopped, GOAWAY with it.
        Then `on_drained` is called once no stream is left. A client only stops opening streams.
        """
        if self.draining:
            return
        self.draining = True
        if self.client:
            self._finish_drain()
        else:
            self._queue(goaway(MAX_ID, NO_ERROR) + frame(PING, 0, 0, _DRAIN))

    def pause(self) -> None:
        """The transport is full: keep data from now on. Replies to the peer's own frames are counted."""
        self.paused = True

    def resume(self) -> None:
        """The transport has room again."""
        self.paused = False
        self._replies = 0
        self._send_waiting()

    def stalled(self, now: float, after_s: float) -> list[Stream]:
        """Streams whose data has waited for the peer, without progress, for `after_s`. Call it regularly: the time
        counts from the first call that finds a stream waiting.
        """
        late = []
        for stream in self.streams.values():
            if stream.pending is not None:
                if not stream.stalled_since:
                    stream.stalled_since = now
                elif now - stream.stalled_since >= after_s:
                    late.append(stream)
        return late

    # Frames ----------------------------------------------------------------------------------------------------

    def _queue(self, data: bytes) -> None:
        if self.closed:
            return
        out = self.out
        out.append(data)
        if len(out) == 1 and not self._receiving:
            self.wants_write()

    def _reply(self, data: bytes) -> None:
        """Queue what a frame of the peer makes us send. Raises H2Error if it reads none of that."""
        if self.paused:
            self._replies += 1
            if self._replies > self.limits.max_unread_replies:
                raise H2Error(ENHANCE_YOUR_CALM, "the peer does not read the replies to its frames")
        self._queue(data)

    def _split(self, stream_id: int, block: bytes, end: bool) -> bytes:
        """The frames of a header block that is too large for one."""
        most = self.peer_frame_bytes
        pieces = [block[start : start + most] for start in range(0, len(block), most)]
        frames = [frame(HEADERS, int(end), stream_id, pieces[0])]
        frames += [frame(CONTINUATION, 0, stream_id, piece) for piece in pieces[1:-1]]
        return b"".join([*frames, frame(CONTINUATION, END_HEADERS, stream_id, pieces[-1])])

    def _send_reset(self, stream_id: int, code: int) -> None:
        self._remember_reset(stream_id)
        self._queue(frame(RST_STREAM, 0, stream_id, code.to_bytes(4, "big")))

    def _remember_reset(self, stream_id: int) -> None:
        """Swallow late frames of this stream from now on, until a few hundred others were reset."""
        if len(self._resets) >= _REMEMBERED:
            del self._resets[next(iter(self._resets))]
        self._resets[stream_id] = None

    def _was_reset(self, stream_id: int) -> bool:
        return stream_id in self._resets

    # Waiting data ----------------------------------------------------------------------------------------------

    def _send_slowly(self, stream: Stream, data: bytes | memoryview, end: bool) -> bool:
        if self.closed or stream.sending != BODY or stream.end_pending:
            return True
        if not data and stream.pending is None:
            if end:  # it uses no window, and like a head it does not wait for the transport
                self._queue(FRAME.pack(0, END_STREAM, stream.id))
                self._sent_end(stream)
            return True
        if not data and not end:
            return False
        stream.end_pending = end
        if stream.pending is not None:
            if data:
                stream.pending.append(data)
            return False
        stream.pending = deque((data,))
        self._send_pending(stream, -1)
        return stream.pending is None

    def _send_pending(self, stream: Stream, frames: int) -> None:
        """Send at most `frames` frames (-1: all) of the data that waits in a stream."""
        pending = stream.pending
        if pending is None:
            return
        while pending and frames:
            most = min(stream.send_window, self.send_window, self.send_frame_bytes)
            if most <= 0 or self.paused:
                break
            frames -= 1
            left = most
            payload: list[bytes | memoryview] = []
            while pending and left:
                data = pending.popleft()
                if len(data) > left:
                    view = memoryview(data)
                    pending.appendleft(view[left:])
                    data = view[:left]
                left -= len(data)
                payload.append(data)
            size = most - left
            self.send_window -= size
            stream.send_window -= size
            self.useful_bytes += size
            stream.stalled_since = 0.0
            last = stream.end_pending and not pending and stream.trailers is None
            self._queue(FRAME.pack(size << 8, END_STREAM if last else 0, stream.id))
            self.out.extend(payload)
        if pending:
            if stream.send_window > 0 and not stream.waiting:
                stream.waiting = True
                self._waiting.append(stream)
            return
        stream.pending = None
        if stream.end_pending:
            if stream.trailers is not None:
                self.send_headers(stream, stream.trailers, True)
            else:
                self._sent_end(stream)

    def _send_more(self, stream: Stream, frames: int) -> None:
        """Send what waits in a stream, and call `on_room` if that is all."""
        self._send_pending(stream, frames)
        if stream.pending is None:
            self.on_room(stream)

    def _send_waiting(self) -> None:
        """Use room on the connection: each stream that waits for it sends one frame in turn."""
        waiting = self._waiting
        while waiting and self.send_window > 0 and not self.paused and not self.closed:
            stream = waiting.popleft()
            stream.waiting = False
            if stream.pending is not None:
                self._send_more(stream, 1)

    # Ends of streams -------------------------------------------------------------------------------------------

    def _begin(self, stream: Stream) -> None:
        """Enter a stream that a client opens."""
        raise NotImplementedError

    def _sent_end(self, stream: Stream) -> None:
        stream.sending = ENDED
        if stream.receiving == ENDED:
            self._finish(stream)

    def _finish(self, stream: Stream) -> None:
        """Forget a stream that has ended properly in both directions."""
        self.finished += 1
        self.streams.pop(stream.id, None)
        if self.draining and not self.streams and not self._receiving:
            self._note_drained()

    def _drop(self, stream: Stream) -> None:
        """Forget a stream that was reset, and return what it held of the connection's window."""
        self.streams.pop(stream.id, None)
        stream.receiving = ENDED
        stream.sending = ENDED
        stream.pending = None
        stream.trailers = None
        if stream.waiting:
            stream.waiting = False
            self._waiting.remove(stream)
        if stream.held_bytes:
            self._return(stream.held_bytes)
            stream.held_bytes = 0
        if self.draining and not self.streams and not self._receiving:
            self._note_drained()

    def _return(self, size: int) -> None:
        """Give bytes that no stream holds back to the connection's window."""
        self._credit += size
        if self._credit << 1 >= self.limits.connection_window_bytes:
            self._return_credit()

    def _return_credit(self) -> None:
        credit, self._credit = self._credit, 0
        self._window += credit
        self._queue(window_update(0, credit))

    def _finish_drain(self) -> None:
        """Fix the last stream, now that the peer knows of the drain."""
        self.goaway(NO_ERROR, self.last_id)
        if not self.streams and not self._receiving:
            self._note_drained()

    def _note_drained(self) -> None:
        if self._accepts_up_to != MAX_ID and not self._drained and not self.closed:
            self._drained = True
            self.on_drained()

    def _acknowledged_ping(self, payload: bytes) -> None:
        if payload == _DRAIN and self.draining and not self.client and self._accepts_up_to == MAX_ID:
            self._finish_drain()
