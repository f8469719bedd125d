"""Facts about header fields that are always known: the static table, which fields HTTP/2 has, which may be kept."""

import re
from collections.abc import Iterable
from typing import Any, Final

Field = tuple[bytes, bytes]

# RFC 7541, appendix A: name and value of the entries 1 to 61.
_TABLE: Final = """\
:authority
:method GET
:method POST
:path /
:path /index.html
:scheme http
:scheme https
:status 200
:status 204
:status 206
:status 304
:status 400
:status 404
:status 500
accept-charset
accept-encoding gzip, deflate
accept-language
accept-ranges
accept
access-control-allow-origin
age
allow
authorization
cache-control
content-disposition
content-encoding
content-language
content-length
content-location
content-range
content-type
cookie
date
etag
expect
expires
from
host
if-match
if-modified-since
if-none-match
if-range
if-unmodified-since
last-modified
link
location
max-forwards
proxy-authenticate
proxy-authorization
range
referer
refresh
retry-after
server
set-cookie
strict-transport-security
transfer-encoding
user-agent
vary
via
www-authenticate"""


def _static() -> list[Field]:
    """The static table; entry 0 is not used."""
    lines = [line.partition(" ") for line in _TABLE.split("\n")]
    return [(b"", b""), *[(name.encode(), value.encode()) for name, _, value in lines]]


STATIC: Final = _static()
CREDENTIALS: Final = frozenset(
    {b"authorization", b"proxy-authorization", b"x-api-key", b"cookie", b"set-cookie"}
    # Some servers read an underscore as a dash.
    | {b"proxy_authorization", b"x_api_key", b"x_api-key", b"x-api_key", b"set_cookie"}
)
PER_REQUEST: Final = CREDENTIALS | {
    b"traceparent",
    b"tracestate",
    b"traceresponse",
    b"baggage",
    b"x-request-id",
    b"grpc-timeout",
    b"grpc-trace-bin",
    b"x-request-timeout-ms",
    b"content-length",
    b"inference-header-content-length",
    b"date",
    b"server-timing",
    b"x-oriel-cost-us",
    b"x-oriel-cost",
}
_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+\Z")
_PSEUDO: Final = frozenset({b":method", b":scheme", b":authority", b":path", b":status"})
_OF_A_CONNECTION: Final = frozenset(
    {b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"}
)
_VALID_NAMES: Final = _PSEUDO | PER_REQUEST | {name for name, _ in STATIC[1:]} - _OF_A_CONNECTION
CONTROL: Final = bytes([*range(9), *range(10, 32), 127])


def malformed(name: bytes, value: bytes) -> str:
    """Say why HTTP/2 has no such field (RFC 9113, 8.2); "" for one that it may have.

    The order and the number of fields are not judged here. `grpc-message` may begin and end with spaces, because gRPC's
    own servers do not encode those.
    """
    if name not in _VALID_NAMES:
        if _NAME.match(name) is None:
            return "the name of a header field is not a lower-case token"
        if name in _OF_A_CONNECTION:
            return "a header field that belongs to HTTP/1.1 connections"
        if name == b"te" and value != b"trailers":
            return "te can only be trailers"
    controls = len(value.translate(None, CONTROL)) != len(value)
    if controls or (len(value.strip()) != len(value) and name != b"grpc-message"):
        return "the value of a header field has characters that it cannot have"
    return ""


class FieldMemo:
    """Cache of validated header fields, which connections may share. It holds at most `size` fields.

    fields: maps the encoded bytes of a field to its name and value.
    shapes: maps the bytes that all header blocks of one shape share to that shape, see `block_shapes`.
    """

    MAX_SHAPES: Final = 512

    __slots__ = ("_size", "fields", "shapes")

    def __init__(self, size: int = 4096) -> None:
        self._size = size
        self.fields: dict[bytes, Field] = {}
        self.shapes: dict[tuple[bytes, ...], Any] = {}

    def keep(self, fresh: Iterable[tuple[bytes, Field]]) -> None:
        """Keep what a decoder lists in `fresh`, of an authenticated sender."""
        for encoded, field in fresh:
            if len(self.fields) >= self._size:
                self.fields.clear()
            self.fields[encoded] = field
