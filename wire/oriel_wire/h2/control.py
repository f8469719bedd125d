"""Handles the peer's frames other than DATA and HEADERS: settings, windows, resets, pings, GOAWAY.

Also what such frames cost (`limits` describes the buckets), and the errors of single streams.
"""

from mypy_extensions import mypyc_attr

from oriel_wire.h2.frames import (
    ACK,
    DEFAULT_WINDOW,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    GOAWAY,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    MAX_FRAME_SIZE,
    MAX_ID,
    MAX_WINDOW,
    PAIR,
    PING,
    PRIORITY,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    REFUSED_STREAM,
    RST_STREAM,
    SETTING,
    SETTINGS,
    SETTINGS_ACK,
    H2Error,
    check_setting,
    check_size,
    frame,
)
from oriel_wire.h2.hpack import Decoder
from oriel_wire.h2.known_fields import FieldMemo
from oriel_wire.h2.limits import Bucket, H2Limits
from oriel_wire.h2.sending import Sender
from oriel_wire.h2.streams import Stream


@mypyc_attr(allow_interpreted_subclasses=True)
class Control(Sender):
    """The receiving half of a connection but DATA and header blocks.

    now: the time given to the last `receive`. settings_acknowledged: True if the peer has confirmed our settings;
    the engine bounds the time until then. decoder: the decoder of header blocks; in `on_headers` it says which fields a
    memo may keep.
    """

    __slots__ = (
        "_controls",
        "decoder",
        "_finished_then",
        "_peer_last_id",
        "_reset_ahead",
        "_reset_bucket",
        "_stream_window",
        "_useful_then",
        "now",
        "settings_acknowledged",
    )

    def __init__(self, *, client: bool, limits: H2Limits, memo: FieldMemo | None) -> None:
        super().__init__(client=client, limits=limits)
        self.now = 0.0
        self.settings_acknowledged = False
        self.decoder = Decoder(max_list_bytes=limits.max_header_list_bytes, max_fields=limits.max_fields, memo=memo)
        self._stream_window = DEFAULT_WINDOW  # the peer's idea of it, until it has our settings
        self._peer_last_id = MAX_ID  # last stream id in the peer's GOAWAY
        self._controls = Bucket(limits.control_burst, limits.controls_per_s)
        self._reset_bucket = Bucket(limits.reset_burst, limits.resets_per_s)
        self._useful_then = self._finished_then = 0
        self._reset_ahead: set[int] = set()  # streams that the bytes being handled open or reset, and reset later on

    def _control(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Handle the frames that are rare."""
        check_size(kind, flags, stream_id, len(payload))
        if kind == RST_STREAM:
            self._reset(stream_id, int.from_bytes(payload, "big"))
        elif kind == SETTINGS:
            self._settings(flags, payload)
        elif kind == PING:
            self._charge(1)
            if flags & ACK:
                self._acknowledged_ping(payload)
            else:
                self._reply(frame(PING, ACK, 0, payload))
        elif kind == GOAWAY:
            self._goaway(payload)
        elif kind == PRIORITY:
            self._charge(1)
            if len(payload) != 5:
                self._bad_priority(stream_id, FRAME_SIZE_ERROR)
            elif int.from_bytes(payload[:4], "big") & MAX_ID == stream_id:
                self._bad_priority(stream_id, PROTOCOL_ERROR)
        elif kind == PUSH_PROMISE:
            raise H2Error(PROTOCOL_ERROR, "PUSH_PROMISE came, although push is switched off")
        else:
            self._charge(1)  # an unknown type is ignored

    def _window_update(self, stream_id: int, increment: int) -> None:
        self._charge(1)
        increment &= MAX_WINDOW
        if not stream_id:
            if not increment:
                raise H2Error(PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
            self.send_window += increment
            if self.send_window > MAX_WINDOW:
                raise H2Error(FLOW_CONTROL_ERROR, "the connection's window is above 2^31-1")
            if self._waiting:
                self._send_waiting()
            return
        stream = self.streams.get(stream_id)
        if stream is None:
            if self._idle(stream_id):
                raise H2Error(PROTOCOL_ERROR, "WINDOW_UPDATE on an idle stream")
        elif not increment:
            self._stream_error(stream_id, stream, PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
        else:
            stream.send_window += increment
            if stream.send_window > MAX_WINDOW:
                self._stream_error(stream_id, stream, FLOW_CONTROL_ERROR, "the stream's window is above 2^31-1")
            elif stream.pending is not None and not stream.waiting:
                self._send_more(stream, -1)

    def _settings(self, flags: int, payload: bytes) -> None:
        self._charge(1 + len(payload) // 6)
        if flags & ACK:
            if not self.settings_acknowledged:
                self.settings_acknowledged = True
                self.decoder.allow_table(0)
                more = self.limits.stream_window_bytes - self._stream_window
                self._stream_window += more
                for stream in self.streams.values():
                    stream.window += more
            return
        if not self.settings_received:
            self.settings_received = True
            self.peer_max_streams = MAX_ID
        for start in range(0, len(payload), 6):
            name, value = SETTING.unpack_from(payload, start)
            check_setting(name, value, client=self.client)
            if name == INITIAL_WINDOW_SIZE:
                self._change_windows(value - self.peer_window)
                self.peer_window = value
            elif name == MAX_FRAME_SIZE:
                self.peer_frame_bytes = value
                self.send_frame_bytes = min(value, self.limits.send_frame_bytes)
            elif name == MAX_CONCURRENT_STREAMS:
                self.peer_max_streams = value
        self._reply(SETTINGS_ACK)
        for stream in list(self.streams.values()):
            if stream.pending is not None and not stream.waiting:
                self._send_more(stream, -1)
        self.on_settings()

    def _change_windows(self, more: int) -> None:
        """Apply a new initial window to the streams that are open."""
        for stream in self.streams.values():
            stream.send_window += more
            if stream.send_window > MAX_WINDOW:
                raise H2Error(FLOW_CONTROL_ERROR, "a stream's window is above 2^31-1")

    def _reset(self, stream_id: int, code: int) -> None:
        stream = self.streams.get(stream_id)
        if stream is None:
            if self._idle(stream_id):
                raise H2Error(PROTOCOL_ERROR, "RST_STREAM on an idle stream")
            self._reset_ahead.discard(stream_id)
            self._charge(1)
            return
        if not self.client and self.now - stream.opened_s < self.limits.rapid_reset_s:
            self._charge_reset()
        self._drop(stream)
        self.on_reset(stream, code)

    def _goaway(self, payload: bytes) -> None:
        self._charge(1)
        last_id, code = PAIR.unpack_from(payload)
        last_id &= MAX_ID
        if last_id > self._peer_last_id:
            raise H2Error(PROTOCOL_ERROR, "a GOAWAY names a higher last stream than the one before")
        self._peer_last_id = last_id
        self.peer_leaves = True
        self.on_goaway(last_id, code, payload[8:])
        if self.client:
            for stream in [stream for stream in self.streams.values() if stream.id > last_id]:
                if not stream.closed:
                    self._remember_reset(stream.id)
                    self._drop(stream)
                    self.on_reset(stream, REFUSED_STREAM)

    def _bad_priority(self, stream_id: int, code: int) -> None:
        stream = self.streams.get(stream_id)
        if stream is None and self._idle(stream_id):
            raise H2Error(
                code, "a PRIORITY frame has a wrong size or names its own stream"
            )  # an idle stream cannot be reset
        self._stream_error(stream_id, stream, code, "a PRIORITY frame has a wrong size or names its own stream")

    def _idle(self, stream_id: int) -> bool:
        """Return whether a stream was never opened. The other side's streams of our parity are never."""
        if self.client:
            return not stream_id & 1 or stream_id >= self._next_id
        return not stream_id & 1 or stream_id > self.last_id

    def _stream_error(self, stream_id: int, stream: Stream | None, code: int, message: str) -> None:
        """Reset a stream on which the peer broke a rule. Raises H2Error if that happens too often."""
        self._charge_reset()
        self._reply(frame(RST_STREAM, 0, stream_id, code.to_bytes(4, "big")))
        self._remember_reset(stream_id)
        if stream is not None:
            self._drop(stream)
            self.on_stream_error(stream, code, message)

    def excuse(self, seconds: float) -> None:
        """Note that nothing was read for `seconds`: the frames that the peer sent meanwhile arrive together, and are no
        flood.

        It is not known how long streams that it has reset meanwhile were open: as many are excused as it could
        have reset in that time, each `rapid_reset_s` after its begin, and a few frames of each.
        """
        limits = self.limits
        resets = seconds * limits.max_streams / limits.rapid_reset_s
        self._reset_bucket.excuse(resets)
        self._controls.excuse(seconds * limits.controls_per_s + 4.0 * resets)

    def _charge(self, cost: int) -> None:
        """Pay for a frame that brings nothing. Raises H2Error."""
        if not self._controls.spend(cost, self.now):
            useful = self.useful_bytes // self.limits.useful_bytes + 4 * self.finished
            earned, self._useful_then = useful - self._useful_then, useful
            if not self._controls.refill(earned, self.now):
                raise H2Error(ENHANCE_YOUR_CALM, "too many frames without content")

    def _charge_reset(self) -> None:
        """Pay for a stream that was reset early, or that the peer made us reset. Raises H2Error."""
        if not self._reset_bucket.spend(1, self.now):
            earned, self._finished_then = self.finished - self._finished_then, self.finished
            if not self._reset_bucket.refill(earned, self.now):
                raise H2Error(ENHANCE_YOUR_CALM, "too many streams are reset")
