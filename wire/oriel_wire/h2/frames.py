"""Frames of HTTP/2 (RFC 9113 section 6): constants, error codes, encoders, and the sizes that each type must have."""

from struct import Struct
from typing import Final

from oriel_wire.errors import WireError

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# Length and type in one number, flags, stream: the nine bytes before a payload.
FRAME: Final = Struct(">LBL")
PAIR: Final = Struct(">LL")
SETTING: Final = Struct(">HL")

DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
PRIORITISED: Final = 0x20

HEADER_TABLE_SIZE: Final = 1
ENABLE_PUSH: Final = 2
MAX_CONCURRENT_STREAMS: Final = 3
INITIAL_WINDOW_SIZE: Final = 4
MAX_FRAME_SIZE: Final = 5
MAX_HEADER_LIST_SIZE: Final = 6

NO_ERROR: Final = 0
PROTOCOL_ERROR: Final = 1
INTERNAL_ERROR: Final = 2
FLOW_CONTROL_ERROR: Final = 3
STREAM_CLOSED: Final = 5
FRAME_SIZE_ERROR: Final = 6
REFUSED_STREAM: Final = 7
CANCEL: Final = 8
COMPRESSION_ERROR: Final = 9
ENHANCE_YOUR_CALM: Final = 11

# Error code -> its name, for messages and logs.
CODES: Final = (
    "NO_ERROR", "PROTOCOL_ERROR", "INTERNAL_ERROR", "FLOW_CONTROL_ERROR", "SETTINGS_TIMEOUT", "STREAM_CLOSED",
    "FRAME_SIZE_ERROR", "REFUSED_STREAM", "CANCEL", "COMPRESSION_ERROR", "CONNECT_ERROR", "ENHANCE_YOUR_CALM",
    "INADEQUATE_SECURITY", "HTTP_1_1_REQUIRED",
)  # fmt: skip

MAX_ID: Final = 0x7FFFFFFF  # largest stream id
MAX_WINDOW: Final = 0x7FFFFFFF
DEFAULT_WINDOW: Final = 65535
DEFAULT_FRAME: Final = 16384
LARGEST_FRAME: Final = 0xFFFFFF


class H2Error(WireError):
    """The peer broke a rule for which the whole connection ends with `code`. `message` may be shown to the peer."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """One frame as bytes."""
    return FRAME.pack(len(payload) << 8 | kind, flags, stream_id) + payload


def settings(values: dict[int, int]) -> bytes:
    """A SETTINGS frame with `values`: identifier -> value."""
    return frame(SETTINGS, 0, 0, b"".join([SETTING.pack(name, value) for name, value in values.items()]))


def goaway(last_id: int, code: int, debug: bytes = b"") -> bytes:
    """A GOAWAY frame: the highest stream that was or may be handled, the error code, and a text for people."""
    return frame(GOAWAY, 0, 0, PAIR.pack(last_id, code) + debug)


def window_update(stream_id: int, increment: int) -> bytes:
    """A WINDOW_UPDATE frame; stream 0 is the connection."""
    return FRAME.pack(4 << 8 | WINDOW_UPDATE, 0, stream_id) + increment.to_bytes(4, "big")


SETTINGS_ACK: Final = FRAME.pack(SETTINGS, ACK, 0)
# Frame type -> the only size its payload may have.
_SIZES: Final = {RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}
# Types of which each frame is about the connection (True) or about a stream (False).
_ON_CONNECTION: Final = {SETTINGS: True, PING: True, GOAWAY: True, RST_STREAM: False, PRIORITY: False}


def check_size(kind: int, flags: int, stream_id: int, length: int) -> None:
    """Check the size and the stream of a frame other than DATA, HEADERS and CONTINUATION. Raises H2Error.

    The size of a PRIORITY frame is no error of the connection, and so is not checked here.
    """
    wanted = _SIZES.get(kind)
    if wanted is not None and length != wanted:
        raise H2Error(FRAME_SIZE_ERROR, f"a frame of type {kind} must have {wanted} bytes")
    if kind == SETTINGS and (length and flags & ACK or length % 6):
        raise H2Error(FRAME_SIZE_ERROR, "a SETTINGS frame must have 6 bytes for each setting, its acknowledgement none")
    if kind == GOAWAY and length < 8:
        raise H2Error(FRAME_SIZE_ERROR, "a GOAWAY frame must have at least 8 bytes")
    about = _ON_CONNECTION.get(kind)
    if about is not None and about != (stream_id == 0):
        raise H2Error(PROTOCOL_ERROR, f"a frame of type {kind} came on a wrong stream")


def check_setting(name: int, value: int, *, client: bool) -> None:
    """Check one setting of the peer; client: our role. Raises H2Error."""
    if name == ENABLE_PUSH and (value > 1 or (client and value)):
        raise H2Error(PROTOCOL_ERROR, "ENABLE_PUSH must be 0 or, from a client, 1")
    if name == INITIAL_WINDOW_SIZE and value > MAX_WINDOW:
        raise H2Error(FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE is above 2^31-1")
    if name == MAX_FRAME_SIZE and not DEFAULT_FRAME <= value <= LARGEST_FRAME:
        raise H2Error(PROTOCOL_ERROR, "MAX_FRAME_SIZE is below 2^14 or above 2^24-1")


def unpadded(flags: int, payload: bytes | memoryview, priority: bool) -> bytes | memoryview:
    """The content of a DATA or HEADERS frame that has padding or (`priority`) a priority. Raises H2Error."""
    start, end = 0, len(payload)
    if flags & PADDED:
        if not end:
            raise H2Error(FRAME_SIZE_ERROR, "a padded frame has no pad length")
        start = 1
        end -= payload[0]
    if priority:
        start += 5
    if start > end:
        if priority and len(payload) < start:
            raise H2Error(FRAME_SIZE_ERROR, "a HEADERS frame is shorter than its priority")
        raise H2Error(PROTOCOL_ERROR, "the padding is longer than its frame")
    return payload[start:end]
