"""Limits of one HTTP/2 connection, and the token buckets that tell a busy peer from a flood."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class H2Limits:
    """Limits of one connection. A peer that exceeds them loses the connection with ENHANCE_YOUR_CALM, if nothing else
    is said.

    max_streams: the most streams that the peer may have open at once; further ones are answered with REFUSED_STREAM.
    stream_window_bytes, connection_window_bytes: bytes of DATA that the peer may send before `consumed` is called.
    max_frame_bytes: the most bytes of one frame that the peer sends (a larger one ends the connection with
    FRAME_SIZE_ERROR).
    max_kept_frame_bytes: the same of a frame that is kept until it is whole: one that is not DATA and came in parts.
    send_frame_bytes: the most bytes of one DATA frame that we send, if the peer allows as much.
    max_header_list_bytes, max_fields: the bounds of one decoded header list, as RFC 9113 counts its size. A
    larger one concerns its stream only.
    max_block_bytes, max_continuations: the bounds of one header block as received, before it is decoded. One
    of up to four times as many bytes concerns its stream only, once the peer has no dynamic table.
    rapid_reset_s: the age below which a reset stream counts as reset early.
    reset_burst, resets_per_s: resets within `rapid_reset_s` of the stream's begin, and frames that make us reset a
    stream. Each stream that ends properly allows one more.
    control_burst, controls_per_s: SETTINGS (each setting counts), PING, PRIORITY, WINDOW_UPDATE, interim answers,
    DATA without data, and frames on streams that are gone. `useful_bytes` of payload in either direction allow one
    more, a stream that ends properly four.
    max_unread_replies: acknowledgements and resets queued while the peer does not read.
    requests_per_turn: requests that one `receive` begins; what follows them is handled by the next call, so that one
    client does not hold up the others.
    max_age_s: after which a server asks its client to leave, varied by a tenth; streams that are open go on.
    keepalive_s: seconds of silence while streams are open, after which a server sends its client a PING.
    pong_s: after that PING, when the connection is cut if nothing has come.
    """

    max_streams: int = 128
    stream_window_bytes: int = 65535
    connection_window_bytes: int = 1024 * 1024
    max_frame_bytes: int = 256 * 1024
    max_kept_frame_bytes: int = 64 * 1024
    send_frame_bytes: int = 256 * 1024
    max_header_list_bytes: int = 16 * 1024
    max_fields: int = 128
    max_block_bytes: int = 32 * 1024
    max_continuations: int = 32
    rapid_reset_s: float = 0.1
    reset_burst: int = 200
    resets_per_s: float = 50.0
    control_burst: int = 1024
    controls_per_s: float = 256.0
    useful_bytes: int = 512
    max_unread_replies: int = 512
    requests_per_turn: int = 32
    max_age_s: float = 3600.0
    keepalive_s: float = 60.0
    pong_s: float = 20.0


class Bucket:
    """A token bucket that is filled only when it is empty: by the time since then, and by what was earned.

    It lets through at most twice its `burst` at once.
    """

    __slots__ = ("_burst", "_filled_s", "_per_s", "_tokens")

    def __init__(self, burst: int, per_s: float) -> None:
        self._burst = float(burst)
        self._per_s = per_s
        self._tokens = float(burst)
        self._filled_s = -1.0

    def spend(self, cost: int, now: float) -> bool:
        """Take tokens. False: there are not enough, and `refill` decides."""
        if self._filled_s < 0.0:
            self._filled_s = now
        self._tokens -= cost
        return self._tokens >= 0.0

    def excuse(self, tokens: float) -> None:
        """Let through this number more than the burst, until the next refill."""
        self._tokens = min(self._tokens, self._burst) + tokens

    def refill(self, earned: float, now: float) -> bool:
        """Add what time and useful work allow after `spend` has returned False. False: it is still not enough."""
        tokens = self._tokens + earned + (now - self._filled_s) * self._per_s
        self._tokens = min(tokens, self._burst)
        self._filled_s = now
        return tokens >= 0.0
