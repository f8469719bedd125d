"""Violations of RFC 9113 as bytes, each with the error that has to answer it, on the connection or on one stream."""

from dataclasses import dataclass

from oriel_wire.h2.frames import (
    COMPRESSION_ERROR,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PRIORITISED,
    PRIORITY,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    STREAM_CLOSED,
    WINDOW_UPDATE,
    frame,
    settings,
    window_update,
)
from oriel_wire.h2.hpack import Field

from .recorders import REQUEST, block

BOTH = END_HEADERS | END_STREAM
HEAD = block(REQUEST)


@dataclass(frozen=True, slots=True)
class Violation:
    """data: sent by a client after its preface and settings. code: of the expected GOAWAY, or of RST_STREAM on
    `stream_id`.
    """

    name: str
    data: bytes
    code: int
    stream_id: int = 0


def request(fields: list[Field], *, stream_id: int = 1, flags: int = BOTH) -> bytes:
    return frame(HEADERS, flags, stream_id, block(fields))


def with_length(length: bytes) -> bytes:
    return request([*REQUEST, (b"content-length", length)], flags=END_HEADERS)


OPEN = request(REQUEST, flags=END_HEADERS)  # stream 1, whose body is to come
DONE = request(REQUEST)  # stream 1, complete


def without(name: bytes) -> list[Field]:
    return [field for field in REQUEST if field[0] != name]


def instead(name: bytes, value: bytes) -> list[Field]:
    return [(each, value if each == name else old) for each, old in REQUEST]


ON_CONNECTION = [
    # Frame sizes.
    Violation("a frame above MAX_FRAME_SIZE", frame(DATA, 0, 1, bytes(256 * 1024 + 1)), FRAME_SIZE_ERROR),
    Violation("RST_STREAM of 3 bytes", OPEN + frame(RST_STREAM, 0, 1, bytes(3)), FRAME_SIZE_ERROR),
    Violation("SETTINGS of 5 bytes", frame(SETTINGS, 0, 0, bytes(5)), FRAME_SIZE_ERROR),
    Violation("an acknowledgement with settings", frame(SETTINGS, 1, 0, bytes(6)), FRAME_SIZE_ERROR),
    Violation("PING of 7 bytes", frame(PING, 0, 0, bytes(7)), FRAME_SIZE_ERROR),
    Violation("GOAWAY of 7 bytes", frame(GOAWAY, 0, 0, bytes(7)), FRAME_SIZE_ERROR),
    Violation("WINDOW_UPDATE of 3 bytes", frame(WINDOW_UPDATE, 0, 0, bytes(3)), FRAME_SIZE_ERROR),
    Violation("padded HEADERS without a pad length", frame(HEADERS, BOTH | PADDED, 1), FRAME_SIZE_ERROR),
    Violation("padded DATA without a pad length", OPEN + frame(DATA, PADDED, 1), FRAME_SIZE_ERROR),
    Violation("HEADERS shorter than their priority", frame(HEADERS, BOTH | PRIORITISED, 1, b"1"), FRAME_SIZE_ERROR),
    # Padding.
    Violation("DATA shorter than their padding", OPEN + frame(DATA, PADDED, 1, b"\x05abc"), PROTOCOL_ERROR),
    Violation("DATA that are only a pad length too high", OPEN + frame(DATA, PADDED, 1, b"\x01"), PROTOCOL_ERROR),
    Violation("HEADERS shorter than their padding", frame(HEADERS, BOTH | PADDED, 1, b"\xff" + HEAD), PROTOCOL_ERROR),
    Violation(
        "padding that reaches into the priority",
        frame(HEADERS, BOTH | PADDED | PRIORITISED, 1, b"\x03" + bytes(7)),
        PROTOCOL_ERROR,
    ),
    # Settings.
    Violation("ENABLE_PUSH of 2", settings({2: 2}), PROTOCOL_ERROR),
    Violation("INITIAL_WINDOW_SIZE of 2^31", settings({4: 1 << 31}), FLOW_CONTROL_ERROR),
    Violation("MAX_FRAME_SIZE of 16383", settings({5: 16383}), PROTOCOL_ERROR),
    Violation("MAX_FRAME_SIZE of 2^24", settings({5: 1 << 24}), PROTOCOL_ERROR),
    Violation(
        "INITIAL_WINDOW_SIZE that makes a window overflow",
        OPEN + window_update(1, 0x7FFFFFFF - 65535) + settings({4: 65536}),
        FLOW_CONTROL_ERROR,
    ),
    # Streams.
    Violation("DATA on stream 0", frame(DATA, 0, 0, b"a"), PROTOCOL_ERROR),
    Violation("HEADERS on stream 0", frame(HEADERS, BOTH, 0, HEAD), PROTOCOL_ERROR),
    Violation("PRIORITY on stream 0", frame(PRIORITY, 0, 0, bytes(4) + b"\x10"), PROTOCOL_ERROR),
    Violation("RST_STREAM on stream 0", frame(RST_STREAM, 0, 0, bytes(4)), PROTOCOL_ERROR),
    Violation("SETTINGS on stream 1", OPEN + frame(SETTINGS, 0, 1), PROTOCOL_ERROR),
    Violation("PING on stream 1", OPEN + frame(PING, 0, 1, bytes(8)), PROTOCOL_ERROR),
    Violation("GOAWAY on stream 1", OPEN + frame(GOAWAY, 0, 1, bytes(8)), PROTOCOL_ERROR),
    Violation("HEADERS on an even stream", frame(HEADERS, BOTH, 2, HEAD), PROTOCOL_ERROR),
    Violation("a number below the last one", request(REQUEST, stream_id=5) + DONE, PROTOCOL_ERROR),
    Violation("DATA on an idle stream", frame(DATA, 0, 1, b"a"), PROTOCOL_ERROR),
    Violation("DATA on an even stream", OPEN + frame(DATA, 0, 2, b"a"), PROTOCOL_ERROR),
    Violation("RST_STREAM on an idle stream", frame(RST_STREAM, 0, 1, bytes(4)), PROTOCOL_ERROR),
    Violation("WINDOW_UPDATE on an idle stream", window_update(1, 1), PROTOCOL_ERROR),
    Violation("PUSH_PROMISE", OPEN + frame(PUSH_PROMISE, END_HEADERS, 1, bytes(4) + HEAD), PROTOCOL_ERROR),
    Violation("HEADERS after a reset by the client", OPEN + frame(RST_STREAM, 0, 1, bytes(4)) + DONE, STREAM_CLOSED),
    Violation("PRIORITY of 4 bytes on an idle stream", frame(PRIORITY, 0, 1, bytes(4)), FRAME_SIZE_ERROR),
    Violation("an idle stream that depends on itself", frame(PRIORITY, 0, 1, b"\0\0\0\1\0"), PROTOCOL_ERROR),
    # Header blocks.
    Violation("CONTINUATION first", frame(CONTINUATION, END_HEADERS, 1, HEAD), PROTOCOL_ERROR),
    Violation("CONTINUATION after a whole block", OPEN + frame(CONTINUATION, END_HEADERS, 1), PROTOCOL_ERROR),
    Violation(
        "CONTINUATION of another stream",
        frame(HEADERS, 0, 1, HEAD) + frame(CONTINUATION, END_HEADERS, 3),
        PROTOCOL_ERROR,
    ),
    Violation("a PING in a header block", frame(HEADERS, 0, 1, HEAD) + frame(PING, 0, 0, bytes(8)), PROTOCOL_ERROR),
    Violation("an unknown frame in a header block", frame(HEADERS, 0, 1, HEAD) + frame(0x16, 0, 1), PROTOCOL_ERROR),
    Violation("HEADERS in a header block", frame(HEADERS, 0, 1, HEAD) + frame(HEADERS, 4, 3, HEAD), PROTOCOL_ERROR),
    Violation("a block that is no HPACK", frame(HEADERS, BOTH, 1, b"\xff\xff\xff\xff\xff\xff\xff"), COMPRESSION_ERROR),
    Violation("an entry that is in no table", frame(HEADERS, BOTH, 1, HEAD + b"\xbe"), COMPRESSION_ERROR),
    # Windows.
    Violation("WINDOW_UPDATE of the connection by 0", window_update(0, 0), PROTOCOL_ERROR),
    Violation("a window of the connection above 2^31-1", window_update(0, 0x7FFFFFFF), FLOW_CONTROL_ERROR),
]
ON_STREAM = [
    Violation("WINDOW_UPDATE by 0", OPEN + window_update(1, 0), PROTOCOL_ERROR, 1),
    Violation("a window above 2^31-1", OPEN + window_update(1, 0x7FFFFFFF), FLOW_CONTROL_ERROR, 1),
    Violation("more DATA than the stream's window", OPEN + 2 * frame(DATA, 0, 1, bytes(32768)), FLOW_CONTROL_ERROR, 1),
    Violation("DATA after the end", DONE + frame(DATA, 0, 1, b"a"), STREAM_CLOSED, 1),
    Violation("HEADERS after the end", DONE + DONE, STREAM_CLOSED, 1),
    Violation(
        "DATA after a reset by the client",
        OPEN + frame(RST_STREAM, 0, 1, bytes(4)) + frame(DATA, 0, 1, b"a"),
        STREAM_CLOSED,
        1,
    ),
    Violation("PRIORITY of 4 bytes", OPEN + frame(PRIORITY, 0, 1, bytes(4)), FRAME_SIZE_ERROR, 1),
    Violation("PRIORITY that depends on itself", OPEN + frame(PRIORITY, 0, 1, b"\0\0\0\1\0"), PROTOCOL_ERROR, 1),
    Violation(
        "HEADERS that depend on themselves",
        frame(HEADERS, BOTH | PRIORITISED, 1, b"\x80\0\0\1\0" + HEAD),
        PROTOCOL_ERROR,
        1,
    ),
    # Messages.
    Violation("less DATA than content-length", with_length(b"5") + frame(DATA, 1, 1, b"abcd"), PROTOCOL_ERROR, 1),
    Violation("more DATA than content-length", with_length(b"5") + frame(DATA, 0, 1, b"abcdef"), PROTOCOL_ERROR, 1),
    Violation("a length and no DATA", request([*REQUEST, (b"content-length", b"5")]), PROTOCOL_ERROR, 1),
    Violation(
        "trailers before all of content-length",
        with_length(b"5") + frame(DATA, 0, 1, b"abcd") + request([(b"a", b"b")]),
        PROTOCOL_ERROR,
        1,
    ),
    Violation("a content-length that is no number", with_length(b"+5"), PROTOCOL_ERROR, 1),
    Violation(
        "two lengths", request([*REQUEST, (b"content-length", b"0"), (b"content-length", b"0")]), PROTOCOL_ERROR, 1
    ),
    Violation("trailers that end nothing", OPEN + request([(b"a", b"b")], flags=END_HEADERS), PROTOCOL_ERROR, 1),
    Violation("a pseudo-header field in trailers", OPEN + request([(b":path", b"/")]), PROTOCOL_ERROR, 1),
    Violation("a content-length in trailers", OPEN + request([(b"content-length", b"0")]), PROTOCOL_ERROR, 1),
    Violation("an upper-case name in trailers", OPEN + request([(b"A", b"b")]), PROTOCOL_ERROR, 1),
    Violation("no method", request(without(b":method")), PROTOCOL_ERROR, 1),
    Violation("no scheme", request(without(b":scheme")), PROTOCOL_ERROR, 1),
    Violation("no path", request(without(b":path")), PROTOCOL_ERROR, 1),
    Violation("no host at all", request(without(b":authority")), PROTOCOL_ERROR, 1),
    Violation("an empty path", request(instead(b":path", b"")), PROTOCOL_ERROR, 1),
    Violation("a path with a space", request(instead(b":path", b"/a HTTP/1.1")), PROTOCOL_ERROR, 1),
    Violation("a path that is relative", request(instead(b":path", b"a")), PROTOCOL_ERROR, 1),
    Violation("* of a POST", request(instead(b":path", b"*")), PROTOCOL_ERROR, 1),
    Violation("a scheme that is a URL", request(instead(b":scheme", b"http://x/")), PROTOCOL_ERROR, 1),
    Violation("a method with a space", request(instead(b":method", b"GET /")), PROTOCOL_ERROR, 1),
    Violation("CONNECT", request([(b":method", b"CONNECT"), (b":authority", b"x:1")]), PROTOCOL_ERROR, 1),
    Violation("CONNECT to a path", request(instead(b":method", b"CONNECT")), PROTOCOL_ERROR, 1),
    Violation("an authority with a user", request(instead(b":authority", b"u@x")), PROTOCOL_ERROR, 1),
    Violation("two hosts", request([*REQUEST, (b"host", b"x"), (b"host", b"x")]), PROTOCOL_ERROR, 1),
    Violation("a host beside another authority", request([*REQUEST, (b"host", b"y")]), PROTOCOL_ERROR, 1),
    Violation("a method twice", request([(b":method", b"POST"), *REQUEST]), PROTOCOL_ERROR, 1),
    Violation("a path behind other fields", request([*without(b":path"), (b":path", b"/")]), PROTOCOL_ERROR, 1),
    Violation("a status in a request", request([(b":status", b"200"), *REQUEST]), PROTOCOL_ERROR, 1),
    Violation("an unknown pseudo-header field", request([(b":x", b"y"), *REQUEST]), PROTOCOL_ERROR, 1),
    Violation("an upper-case name", request([*REQUEST, (b"X-A", b"b")]), PROTOCOL_ERROR, 1),
    Violation("an empty name", request([*REQUEST, (b"", b"b")]), PROTOCOL_ERROR, 1),
    Violation("a name with a space", request([*REQUEST, (b"a b", b"b")]), PROTOCOL_ERROR, 1),
    Violation("a value with CR LF", request([*REQUEST, (b"a", b"b\r\nc: d")]), PROTOCOL_ERROR, 1),
    Violation("a value with NUL", request([*REQUEST, (b"a", b"b\0")]), PROTOCOL_ERROR, 1),
    Violation("a value with a space before it", request([*REQUEST, (b"a", b" b")]), PROTOCOL_ERROR, 1),
    Violation("a value with a space behind it", request([*REQUEST, (b"a", b"b ")]), PROTOCOL_ERROR, 1),
    Violation("connection", request([*REQUEST, (b"connection", b"close")]), PROTOCOL_ERROR, 1),
    Violation("proxy-connection", request([*REQUEST, (b"proxy-connection", b"close")]), PROTOCOL_ERROR, 1),
    Violation("keep-alive", request([*REQUEST, (b"keep-alive", b"1")]), PROTOCOL_ERROR, 1),
    Violation("transfer-encoding", request([*REQUEST, (b"transfer-encoding", b"chunked")]), PROTOCOL_ERROR, 1),
    Violation("upgrade", request([*REQUEST, (b"upgrade", b"h2c")]), PROTOCOL_ERROR, 1),
    Violation("te that is not trailers", request([*without(b"te"), (b"te", b"gzip")]), PROTOCOL_ERROR, 1),
]


def answer(fields: list[Field], flags: int = BOTH) -> bytes:
    return frame(HEADERS, flags, 1, block(fields))


OK = answer([(b":status", b"200")], END_HEADERS)
# Sent by a server to a client that has opened stream 1.
OF_SERVERS = [
    Violation("push switched on", settings({2: 1}), PROTOCOL_ERROR),
    Violation("a pushed stream", frame(HEADERS, BOTH, 2, block([(b":status", b"200")])), PROTOCOL_ERROR),
    Violation("PUSH_PROMISE", frame(PUSH_PROMISE, END_HEADERS, 1, bytes(4) + HEAD), PROTOCOL_ERROR),
    Violation("an answer to nothing", frame(HEADERS, BOTH, 3, block([(b":status", b"200")])), PROTOCOL_ERROR),
    Violation("DATA on an idle stream", frame(DATA, 0, 3, b"a"), PROTOCOL_ERROR),
    Violation("GOAWAY that grows", frame(GOAWAY, 0, 0, bytes(8)) + frame(GOAWAY, 0, 0, b"\0\0\0\1" + bytes(4)), 1),
    Violation("an answer after a reset", frame(RST_STREAM, 0, 1, bytes(4)) + OK, STREAM_CLOSED),
    Violation("DATA before the head", frame(DATA, 0, 1, b"a"), PROTOCOL_ERROR, 1),
    Violation("DATA after an interim head", answer([(b":status", b"103")], 4) + frame(DATA, 0, 1, b"a"), 1, 1),
    Violation("no status", answer([(b"a", b"b")]), PROTOCOL_ERROR, 1),
    Violation("an empty head", answer([]), PROTOCOL_ERROR, 1),
    Violation("two statuses", answer([(b":status", b"200"), (b":status", b"200")]), PROTOCOL_ERROR, 1),
    Violation("a status of two digits", answer([(b":status", b"20")]), PROTOCOL_ERROR, 1),
    Violation("a status below 100", answer([(b":status", b"099")]), PROTOCOL_ERROR, 1),
    Violation("101", answer([(b":status", b"101")], END_HEADERS), PROTOCOL_ERROR, 1),
    Violation("a path in an answer", answer([(b":status", b"200"), (b":path", b"/")]), PROTOCOL_ERROR, 1),
    Violation("an interim answer that ends", answer([(b":status", b"103")]), PROTOCOL_ERROR, 1),
    Violation("a length and no DATA", answer([(b":status", b"200"), (b"content-length", b"5")]), PROTOCOL_ERROR, 1),
    Violation("a body of 204", answer([(b":status", b"204")], END_HEADERS) + frame(DATA, 1, 1, b"a"), 1, 1),
    Violation("a second head", OK + OK, PROTOCOL_ERROR, 1),
    Violation("DATA after the end", OK + frame(DATA, 1, 1, b"a") + frame(DATA, 0, 1, b"a"), STREAM_CLOSED, 1),
]
