"""One stream of an HTTP/2 connection: the phases of its two directions, its windows, and data that waits for them.

Each direction goes HEAD -> BODY -> ENDED on its own; a pair of phases is a state of RFC 9113 section 5.1:

    receiving \\ sending    HEAD or BODY             ENDED
    HEAD or BODY           open                     half-closed (local)
    ENDED                  half-closed (remote)     closed

A stream with both phases HEAD that has no number yet is idle. The meaning of a HEADERS or DATA frame depends on the
receiving phase alone: `ON_HEADERS`, `ON_DATA`. A reset ends both directions at once.
"""

from collections import deque
from typing import Final

from mypy_extensions import mypyc_attr

from oriel_wire.h2.frames import PROTOCOL_ERROR, STREAM_CLOSED

HEAD: Final = 0  # the (final) header block has not passed
BODY: Final = 1
ENDED: Final = 2

# Receiving phase -> what a HEADERS frame is. Not in the table: an error of the stream.
IS_HEAD: Final = -1
IS_TRAILERS: Final = -2
ON_HEADERS: Final = (IS_HEAD, IS_TRAILERS, STREAM_CLOSED)
# Receiving phase -> the error of a DATA frame, NO_ERROR if there is none.
ON_DATA: Final = (PROTOCOL_ERROR, 0, STREAM_CLOSED)


@mypyc_attr(allow_interpreted_subclasses=True)
class Stream:
    """One stream. An engine subclasses it, so that its own state of a call is the same object.

    id: 0 until the stream is opened. opened_s: the time when its first bytes were received (server), on the clock of
    `receive`. send_window may be negative (RFC 9113 section 6.9.2). window: bytes the peer may still send. window_size:
    what `window` is restored to. held_bytes: received and not yet consumed. expected: bytes of a declared
    content-length that have not come, -1 if it is unknown. head_only: set by a client that sends HEAD: the answer has
    no body.
    pending: data that waits for a window; `end_pending` and `trailers` follow it.
    stalled_since: the time when the waiting data was first seen to wait by `H2Connection.stalled`; 0.0 after progress.
    """

    __slots__ = (
        "credit",
        "end_pending",
        "expected",
        "head_only",
        "held_bytes",
        "id",
        "opened_s",
        "pending",
        "receiving",
        "send_window",
        "sending",
        "stalled_since",
        "trailers",
        "waiting",
        "window",
        "window_size",
    )

    def __init__(self) -> None:
        self.id = 0
        self.receiving = HEAD
        self.sending = HEAD
        self.opened_s = 0.0
        self.send_window = 0
        self.window = 0
        self.window_size = 0
        self.credit = 0  # consumed bytes that were not returned to the peer yet
        self.held_bytes = 0
        self.expected = -1
        self.head_only = False
        self.pending: deque[bytes | memoryview] | None = None
        self.end_pending = False
        self.trailers: bytes | None = None
        self.waiting = False  # is queued for the connection's window
        self.stalled_since = 0.0

    @property
    def closed(self) -> bool:
        """Return whether both directions have ended."""
        return self.receiving == ENDED and self.sending == ENDED
