"""gRPC over HTTP/2: the head of a call, its message frames, its status and trailers. Pure.

After "gRPC over HTTP2" (github.com/grpc/grpc, doc/PROTOCOL-HTTP2.md). A message is five bytes (compressed or not, its
length) and the message itself. Metadata values are text; those of names that end in `-bin` are base64 and pass
unread.
"""

import re
from hashlib import sha256
from typing import Final

from oriel_wire.errors import BadMessage
from oriel_wire.h1.request import Field, LineMemo
from oriel_wire.h2.block_shapes import BlockShape
from oriel_wire.h2.hpack import literal
from oriel_wire.h2.known_fields import Field as HeaderField

OK: Final = 0
CANCELLED: Final = 1
UNKNOWN: Final = 2
INVALID_ARGUMENT: Final = 3
DEADLINE_EXCEEDED: Final = 4
NOT_FOUND: Final = 5
ALREADY_EXISTS: Final = 6
PERMISSION_DENIED: Final = 7
RESOURCE_EXHAUSTED: Final = 8
ABORTED: Final = 10
UNIMPLEMENTED: Final = 12
INTERNAL: Final = 13
UNAVAILABLE: Final = 14
DATA_LOSS: Final = 15
UNAUTHENTICATED: Final = 16
CODES: Final = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
    "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip
PREFIX_BYTES: Final = 5
HEAD: Final = b"\x88" + literal(b"content-type", b"application/grpc")  # the head of every answer

_UNITS: Final[dict[int, float]] = {
    ord("H"): 3600.0,
    ord("M"): 60.0,
    ord("S"): 1.0,
    ord("m"): 1e-3,
    ord("u"): 1e-6,
    ord("n"): 1e-9,
}
# A field of HTTP/2 has no space at its ends (RFC 9113 section 8.2.1).
_ESCAPED: Final = re.compile(rb"[^\x20-\x24\x26-\x7e]|^ | \Z")
_CODED: Final = re.compile(rb"%([0-9A-Fa-f]{2})")
# HTTP status -> gRPC status, for an answer without gRPC's own trailers, from a proxy on the way.
_OF_HTTP: Final[dict[bytes, int]] = {
    b"400": INTERNAL,
    b"401": UNAUTHENTICATED,
    b"403": PERMISSION_DENIED,
    b"404": UNIMPLEMENTED,
    b"429": UNAVAILABLE,
    b"502": UNAVAILABLE,
    b"503": UNAVAILABLE,
    b"504": UNAVAILABLE,
}
_CREDENTIAL: Final = 1
_TRACEPARENT: Final = 2
_TRACESTATE: Final = 3
_REQUEST_ID: Final = 4
_REQUESTED_MS: Final = 5
_TIER: Final = 6
_TIMEOUT: Final = 7
_ENCODING: Final = 8
_CONTENT_TYPE: Final = 9
_OWN: Final[dict[bytes, int]] = {
    b"authorization": _CREDENTIAL,
    b"x-api-key": _CREDENTIAL,
    b"traceparent": _TRACEPARENT,
    b"tracestate": _TRACESTATE,
    b"x-request-id": _REQUEST_ID,
    b"x-request-timeout-ms": _REQUESTED_MS,
    b"x-request-tier": _TIER,
    b"grpc-timeout": _TIMEOUT,
    b"grpc-encoding": _ENCODING,
    b"content-type": _CONTENT_TYPE,
}


class RpcHead:
    """The head of one gRPC call.

    path: the path as it came. timeout_s: seconds of `grpc-timeout`, None without one. encoding: the coding of
    compressed messages, "" for none.
    list_bytes: the size of its header list as RFC 9113 counts it. credentials: the fields of `authorization` and
    `x-api-key`; one that was authenticated before is recognised by its hash, as over HTTP/1.1. shape: None for a head
    that was not recognised by it.
    """

    # Class attributes are the defaults: most calls set only a few of them, and every assignment costs time.
    path = b""
    list_bytes = 0
    credentials: list[Field] | None = None
    request_id: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None
    requested_ms: str | None = None
    tier: str | None = None
    timeout_s: float | None = None
    encoding = b""
    content_type = b""

    def __init__(
        self,
        fields: list[HeaderField] | None,
        shape: "RpcShape | None" = None,
        values: list[bytes] | None = None,
    ) -> None:
        self._fields = fields
        self._values = values
        self.shape = shape

    @property
    def fields(self) -> list[HeaderField]:
        """All fields, in order."""
        fields = self._fields
        if fields is None:
            assert self.shape is not None and self._values is not None
            fields = self._fields = self.shape.block.fields_of(self._values)
        return fields

    def get(self, name: str) -> str | None:
        """The first value of the field with this lower-case name."""
        wanted = name.encode("latin-1", "replace")
        for field, value in self.fields:
            if field == wanted:
                return value.decode("latin-1")
        return None


def read_head(fields: list[HeaderField], memo: LineMemo) -> RpcHead:
    """Read the header list of a call. Raises BadMessage for what cannot be understood in only one way."""
    head = RpcHead(fields)
    size = 32 * len(fields)
    noted = []
    for number, (name, value) in enumerate(fields):
        size += len(name) + len(value)
        if name in _OWN:
            noted.append((number, name, _OWN[name]))
        elif name == b":path":
            head.path = value
    _note(head, noted, [value for _, value in fields], memo)
    head.list_bytes = size
    if head.encoding == b"identity":
        head.encoding = b""
    return head


def _note(head: RpcHead, noted: list[tuple[int, bytes, int]], values: list[bytes], memo: LineMemo) -> None:
    """Store the fields that have attributes of their own. Raises BadMessage.

    noted: the number in `values`, the name and the kind of each of them.
    """
    for number, name, kind in noted:
        value = values[number]
        if kind == _TRACEPARENT:
            head.traceparent = value.decode("latin-1") if head.traceparent is None else ""
        elif kind == _REQUEST_ID:
            if head.request_id is None:
                head.request_id = value.decode("latin-1")
        elif kind == _CREDENTIAL:
            line = b"%b: %b" % (name, value)
            known = memo.credentials.get(sha256(line).digest())
            field = known or Field(line, name.decode(), value.decode("latin-1"), 0, -1)
            if head.credentials is None:
                head.credentials = [field]
            else:
                head.credentials.append(field)
        elif kind == _TIMEOUT:
            if head.timeout_s is not None:
                raise BadMessage("grpc-timeout is given twice")
            head.timeout_s = parse_timeout_s(value)
            if head.timeout_s is None:
                raise BadMessage("grpc-timeout has to be at most eight digits and a unit")
        elif kind == _CONTENT_TYPE:
            if head.content_type:
                raise BadMessage("content-type is given twice")
            head.content_type = value
        elif kind == _ENCODING:
            if head.encoding and head.encoding != value:
                raise BadMessage("grpc-encoding is given twice")
            head.encoding = value
        elif kind == _TRACESTATE:
            state = value.decode("latin-1")
            head.tracestate = state if head.tracestate is None else f"{head.tracestate},{state}"
        elif kind == _REQUESTED_MS:
            if head.requested_ms is not None:
                raise BadMessage("x-request-timeout-ms is given twice")
            head.requested_ms = value.decode("latin-1")
        elif head.tier is not None:
            raise BadMessage("x-request-tier is given twice")
        else:
            head.tier = value.decode("latin-1")


class RpcShape:
    """The common part of the heads of calls whose blocks have one shape, and a decision about it. No varying values.

    block: the shape. lines: for whoever passes calls on, what the next hop gets of the metadata of each of them.
    """

    __slots__ = ("_content_type", "_encoding", "_noted", "_path", "_tier", "block", "lines")

    def __init__(self, block: BlockShape, like: RpcHead) -> None:
        self.block = block
        self.lines: bytes | None = None
        self._noted = [(number, name, _OWN[name]) for number, name in enumerate(block.names) if name in _OWN]
        self._path, self._tier = like.path, like.tier
        self._encoding, self._content_type = like.encoding, like.content_type

    @property
    def usable(self) -> bool:
        """Return whether the fields that differ from head to head can be read without those that do not."""
        kinds = [kind for _, _, kind in self._noted]
        return not {_TIER, _ENCODING, _CONTENT_TYPE} & {*kinds} and kinds.count(_CREDENTIAL) < 2

    def read(self, values: list[bytes], memo: LineMemo) -> RpcHead:
        """The head with these values. Raises BadMessage as `read_head` does."""
        head = RpcHead(None, self, values)
        _note(head, self._noted, values, memo)
        head.path, head.tier = self._path, self._tier
        head.encoding, head.content_type = self._encoding, self._content_type
        head.list_bytes = self.block.list_bytes + sum(map(len, values))
        return head


def parse_timeout_s(value: bytes) -> float | None:
    """Seconds of a `grpc-timeout`; None if it is none."""
    digits = value[:-1]
    if not digits or len(digits) > 8 or not digits.isdigit() or value[-1] not in _UNITS:
        return None
    return int(digits) * _UNITS[value[-1]]


def encode_timeout(seconds: float) -> bytes:
    """Return the value of `grpc-timeout` for a time in seconds, at least a millisecond."""
    milliseconds = int(seconds * 1e3)
    if milliseconds < 100_000_000:
        return b"%dm" % (milliseconds if milliseconds > 0 else 1)
    return b"%dS" % min(int(seconds), 99_999_999)


def encode_text(text: str) -> bytes:
    """The value of `grpc-message` for a text."""
    data = text.encode("utf-8", "replace")
    return _ESCAPED.sub(lambda match: b"%%%02X" % match[0][0], data) if _ESCAPED.search(data) else data


def decode_text(value: bytes) -> str:
    """The text of a `grpc-message`; what cannot be decoded is replaced."""
    if b"%" in value:
        value = _CODED.sub(lambda match: bytes((int(match[1], 16),)), value)
    return value.decode("utf-8", "replace")


def prefix(size: int) -> bytes:
    """Return the five bytes before an uncompressed message of `size` bytes."""
    return b"\0" + size.to_bytes(4, "big")


def status_of(head: list[HeaderField], trailers: list[HeaderField]) -> tuple[int, bytes]:
    """Return the status of a call and its `grpc-message` from the head and the trailers of its answer.

    trailers: the head's own fields, if the answer has nothing else. A status that is none is UNKNOWN.
    """
    code, text = -1, b""
    for name, value in trailers:
        if name == b"grpc-status":
            code = OK if value == b"0" else int(value) if value.isdigit() and len(value) < 4 else UNKNOWN
        elif name == b"grpc-message":
            text = value
    if code >= 0:
        return code if code < len(CODES) else UNKNOWN, text
    status = head[0][1] if head else b""
    if status != b"200":
        return _OF_HTTP.get(status, UNKNOWN), b"the server answered HTTP status " + status
    return UNKNOWN, b"the answer has no grpc-status"
