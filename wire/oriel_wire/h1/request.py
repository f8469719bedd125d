"""A strict parser of HTTP/1.1 request heads. It does no I/O and keeps no state but the memo.

`h1_response` reads answers by the same rules, `h1_similar` recognises heads that differ in a few lines only.

Rules (RFC 9112, and stricter where leniency would permit request smuggling):

* A head is its lines joined by CRLF. A bare CR or LF, a NUL, a control character, a folded line, white space before
  the colon, an empty name: `BadMessage`.
* `Content-Length` at most once, digits only. `Transfer-Encoding` only as the single word `chunked`, only in HTTP/1.1,
  never together with `Content-Length`. `Host` exactly once in HTTP/1.1, and a name or an address.
* A target is a path, `*` for OPTIONS, or an absolute http URL without user information, of which the path counts, and
  the host instead of the `Host` field.
* The reader of the socket checks the bounds (bytes, fields, target) before this module sees a byte.

The memo is a cache, because real clients send the same header lines again and again. A line of at most 256 bytes is
validated once and then recognised by its bytes. Lines that differ per request, and credentials, are never kept. A line
is kept only when the caller asks for it (`LineMemo.keep`, after authentication), so unauthenticated clients cannot fill
the memo. It has two generations of `LineMemo.SIZE` lines: when the young one is full it becomes the old one, and lines
that are not used again are dropped.

When editing this module: a field's `kind` decides what a proxy does with it, and a name that is missing in
`_REQUEST_KINDS` is forwarded unchanged.
"""

import re
from collections.abc import Iterable, Sequence
from enum import IntEnum
from hashlib import sha256
from typing import Any, Final

from oriel_wire.errors import BadMessage, TooLarge


class Kind(IntEnum):
    """How server and proxy treat a field; 0 is the common case: forward it unchanged."""

    FORWARD = 0
    HOP = 1  # belongs to this connection only
    CONTENT_LENGTH = 2
    TRANSFER_ENCODING = 3
    CONNECTION = 4
    HOST = 5
    EXPECT = 6
    CREDENTIAL = 7
    TRACEPARENT = 8
    TRACESTATE = 9
    REQUEST_ID = 10
    TIMEOUT = 11
    INTERNAL = 12
    SERVER_TIMING = 13
    COST = 14
    CONTENT_ENCODING = 15
    FORWARDED = 16  # a proxy's report about the client: honoured from trusted proxies only
    DATE = 17
    TIER = 18
    HEADER_LENGTH = 19  # length of the JSON part of a v2 body
    USED = 20  # what the call used, as the server reports it


_REQUEST_KINDS: dict[str, int] = {
    "connection": Kind.CONNECTION,
    "keep-alive": Kind.HOP,
    "proxy-connection": Kind.HOP,
    "te": Kind.HOP,
    "trailer": Kind.HOP,
    "upgrade": Kind.HOP,
    "http2-settings": Kind.HOP,
    "proxy-authorization": Kind.HOP,
    "content-length": Kind.CONTENT_LENGTH,
    "transfer-encoding": Kind.TRANSFER_ENCODING,
    # A server that reads underscores as dashes would find other message boundaries than we do.
    "content_length": Kind.HOP,
    "transfer_encoding": Kind.HOP,
    # Not a credential here, but some servers would read it as one: a key is never forwarded.
    "x_api_key": Kind.HOP,
    "x_api-key": Kind.HOP,
    "x-api_key": Kind.HOP,
    "proxy_authorization": Kind.HOP,
    "host": Kind.HOST,
    "expect": Kind.EXPECT,
    "authorization": Kind.CREDENTIAL,
    "x-api-key": Kind.CREDENTIAL,
    "traceparent": Kind.TRACEPARENT,
    "tracestate": Kind.TRACESTATE,
    "x-request-id": Kind.REQUEST_ID,
    "x-request-timeout-ms": Kind.TIMEOUT,
    "x-request-tier": Kind.TIER,
    "content-encoding": Kind.CONTENT_ENCODING,
    "inference-header-content-length": Kind.HEADER_LENGTH,
    "inference_header_content_length": Kind.HOP,
    "forwarded": Kind.FORWARDED,
    "x-real-ip": Kind.FORWARDED,
    "endpoint-load-metrics-format": Kind.INTERNAL,  # the load of a server is not shown to tenants
}
_RESPONSE_KINDS: dict[str, int] = {
    "connection": Kind.CONNECTION,
    "keep-alive": Kind.HOP,
    "proxy-connection": Kind.HOP,
    "proxy-authenticate": Kind.HOP,
    "te": Kind.HOP,
    "trailer": Kind.HOP,
    "upgrade": Kind.HOP,
    "content-length": Kind.CONTENT_LENGTH,
    "transfer-encoding": Kind.TRANSFER_ENCODING,
    "x-request-id": Kind.REQUEST_ID,
    "traceresponse": Kind.TRACEPARENT,
    "date": Kind.DATE,
    "server-timing": Kind.SERVER_TIMING,
    "x-oriel-cost-us": Kind.COST,
    "x-oriel-cost": Kind.USED,
    "x-oriel-service-version": Kind.FORWARD,  # the only one of our own headers that is meant for callers
    "endpoint-load-metrics": Kind.INTERNAL,
    # The gateway keeps the limits and reports them itself.
    "ratelimit": Kind.INTERNAL,
    "ratelimit-policy": Kind.INTERNAL,
}
_REQUEST_KINDS = {name: int(kind) for name, kind in _REQUEST_KINDS.items()}
_RESPONSE_KINDS = {name: int(kind) for name, kind in _RESPONSE_KINDS.items()}
# The parser compares plain ints: an enum member costs a descriptor call per look-up.
_CONTENT_LENGTH: Final = int(Kind.CONTENT_LENGTH)
_CREDENTIAL: Final = int(Kind.CREDENTIAL)
_TRACEPARENT: Final = int(Kind.TRACEPARENT)
_TRACESTATE: Final = int(Kind.TRACESTATE)
_REQUEST_ID: Final = int(Kind.REQUEST_ID)
_TIMEOUT: Final = int(Kind.TIMEOUT)
_TIER: Final = int(Kind.TIER)
_CONNECTION: Final = int(Kind.CONNECTION)
_TRANSFER_ENCODING: Final = int(Kind.TRANSFER_ENCODING)
_EXPECT: Final = int(Kind.EXPECT)
_CONTENT_ENCODING: Final = int(Kind.CONTENT_ENCODING)
_HOST: Final = int(Kind.HOST)
_HOP: Final = int(Kind.HOP)
_INTERNAL: Final = int(Kind.INTERNAL)
_SERVER_TIMING: Final = int(Kind.SERVER_TIMING)
_COST: Final = int(Kind.COST)
_USED: Final = int(Kind.USED)
_FORWARDED: Final = int(Kind.FORWARDED)
_HEADER_LENGTH: Final = int(Kind.HEADER_LENGTH)
PASSED_ON: Final = frozenset({0, _CONTENT_LENGTH, _CONTENT_ENCODING, _HEADER_LENGTH})
# A server may decide by the type of the body whose call a request is, so two types make two shapes (`h1_similar`).
SAME: Final = frozenset({"content-type"})
_PER_REQUEST: Final = frozenset({_CREDENTIAL, _TRACEPARENT, _TRACESTATE, _REQUEST_ID, _SERVER_TIMING, _COST, _USED})
MAX_LINE, _MAX_NAMED = 256, 8  # bytes, names in one Connection line

_FIELD: Final = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):([\x20-\x7e\x80-\xff\t]*)\Z")
_REQUEST_LINE: Final = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]{1,24}) ([\x21-\x22\x24-\x7e]+) HTTP/1\.([01])\Z")
_AUTHORITY: Final = rb"(?:[A-Za-z0-9._~!$&'()*+;=%-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{0,5})?"
_ABSOLUTE: Final = re.compile(rb"(?i:https?)://(" + _AUTHORITY + rb")((?:[/?].*)?)\Z")
_HOST_VALUE: Final = re.compile(rb"(?:" + _AUTHORITY + rb")?\Z")


class Field:
    """One header line. `name` lower case, `value` stripped; `number` only for a Content-Length.

    owner: set for a credential that was recognised by its hash, by the code that stored it; line and value are then
    empty.
    """

    __slots__ = ("kind", "line", "name", "number", "owner", "value")

    def __init__(self, line: bytes, name: str, value: str, kind: int, number: int) -> None:
        self.line = line
        self.name = name
        self.value = value
        self.kind = kind
        self.number = number
        self.owner: Any = None

    def __repr__(self) -> str:
        return f"<Field {self.name}>"  # never the value: it may be a secret


class _Line:
    """A validated request line. authority: of an absolute target, else ""."""

    __slots__ = ("authority", "line", "method", "minor", "path", "query", "target")

    def __init__(self, line: bytes) -> None:
        match = _REQUEST_LINE.match(line)
        if match is None:
            raise BadMessage("the request line is not METHOD TARGET HTTP/1.1")
        method, target, minor = match.groups()
        self.authority = ""
        if target[:1] != b"/" and not (target == b"*" and method == b"OPTIONS"):
            absolute = _ABSOLUTE.match(target)
            if absolute is None:
                raise BadMessage("the request target has to begin with /")
            self.authority = absolute[1].decode("ascii")
            target = absolute[2] if absolute[2][:1] == b"/" else b"/" + absolute[2]
        self.line = line
        self.method = method.decode("ascii")
        self.target = target.decode("ascii")
        self.path: str
        self.query: str
        self.path, _, self.query = self.target.partition("?")
        self.minor = int(minor)


class LineMemo:
    """Header lines and request lines that have been validated, in two generations. parts: see `h1_similar`."""

    SIZE = 2048
    __slots__ = ("credentials", "kinds", "lines", "old", "old_lines", "parts", "young")

    def __init__(self, *, response: bool = False) -> None:
        self.kinds = _RESPONSE_KINDS if response else _REQUEST_KINDS
        self.young: dict[bytes, Field] = {}
        self.old: dict[bytes, Field] = {}
        self.parts: dict[bytes, Field | str] = {}
        self.lines: dict[bytes, _Line] = {}
        self.old_lines: dict[bytes, _Line] = {}
        self.credentials: dict[bytes, Field] = {}

    def find(self, line: bytes) -> Field | None:
        """Look the line up in the old generation; a line found there moves to the young one."""
        field = self.old.get(line)
        if field is not None:
            self._put(field)
        return field

    def keep(self, fields: Iterable[Field]) -> None:
        """Keep lines of an authenticated sender."""
        for field in fields:
            if len(field.line) <= MAX_LINE and field.kind not in _PER_REQUEST:
                self._put(field)

    def find_credential(self, line: bytes) -> Field | None:
        """The field of a credential line that was authenticated before, by its SHA-256; None for other lines."""
        if line[:1] in b"aAxX" and (line[:14].lower() == b"authorization:" or line[:10].lower() == b"x-api-key:"):
            return self.credentials.get(sha256(line).digest())
        return None

    def keep_credential(self, line: bytes, owner: object) -> None:
        """Keep the credential line of `owner`, by its hash only, until `forget_credentials`."""
        if len(self.credentials) >= self.SIZE:
            self.credentials.clear()
        field = Field(b"", "", "", _CREDENTIAL, -1)
        field.owner = owner
        self.credentials[sha256(line).digest()] = field

    def forget_credentials(self) -> None:
        """Drop all credentials, because the set of valid ones has changed."""
        self.credentials.clear()

    def keep_line(self, line: _Line) -> None:
        """Keep the request line of an authenticated sender."""
        if len(line.line) <= MAX_LINE:
            if len(self.lines) >= self.SIZE:
                self.old_lines, self.lines = self.lines, {}
            self.lines[line.line] = line

    def find_line(self, line: bytes) -> _Line | None:
        """Look the request line up in the old generation."""
        found = self.old_lines.get(line)
        if found is not None:
            self.keep_line(found)
        return found

    def _put(self, field: Field) -> None:
        if len(self.young) >= self.SIZE:
            self.old, self.young, self.parts = self.young, {}, {}
        self.young[field.line] = field
        by_name = field.kind in (0, _INTERNAL, _FORWARDED) and field.name not in SAME
        self.parts[field.line] = field.name if by_name else field

    def classify(self, line: bytes) -> Field:
        """Validate one header line. Raises BadMessage."""
        match = _FIELD.match(line)
        if match is None:
            raise BadMessage("a header line is malformed")
        name = match[1].decode("ascii").lower()
        raw = match[2].strip(b" \t")
        kind = self.kinds.get(name, -1)
        # Some servers read an underscore as a dash.
        if kind < 0:
            if name[:8].replace("_", "-") == "x-oriel-":
                kind = _INTERNAL
            elif name[:12].replace("_", "-") == "x-forwarded-" and self.kinds is _REQUEST_KINDS:
                kind = _FORWARDED
            else:
                kind = 0
        number = -1
        if kind == _CONTENT_LENGTH:
            if not raw.isdigit() or len(raw) > 15:
                raise BadMessage("Content-Length is not a plain number")
            number = int(raw)
        elif kind == _CONNECTION and raw.count(b",") >= _MAX_NAMED:
            raise BadMessage(f"Connection names more than {_MAX_NAMED} fields")
        elif kind == _HOST and _HOST_VALUE.match(raw) is None:
            raise BadMessage("Host is not a name or an address")
        return Field(line, name, raw.decode("latin-1"), kind, number)


class RequestHead:
    """One request head.

    content_length: None when absent. fresh: fields that were validated anew; give them to `LineMemo.keep` once the
    sender is authenticated. key, lines, shape: see `h1_similar`. decision: the server's, about heads of this shape and
    these credentials.
    """

    # Class attributes are the defaults: most requests set only two or three of them, and every assignment costs time.
    content_length: int | None = None
    chunked = False
    close = False
    expect_continue = False
    dropped: tuple[bytes, ...] = ()
    credentials: list[Field] | None = None
    traceparent: str | None = None
    tracestate: str | None = None
    request_id: str | None = None
    timeout: str | None = None
    tier: str | None = None
    content_encoding: str | None = None
    header_length: str | None = None
    fresh: Sequence[Field] = ()
    decision: Any = None
    key: tuple[Any, ...] = ()
    lines: Sequence[bytes] = ()
    shape: Any = None
    _fields: list[Field] | None = None
    _by_name: dict[str, str] | None = None

    def __init__(self, line: _Line) -> None:
        self.line = line

    @property
    def fields(self) -> list[Field]:
        """Every header in order."""
        found = self._fields
        if found is None:
            found = self._fields = self.shape.fields_of(self)
        return found

    @property
    def forward(self) -> list[bytes]:
        """The raw lines a proxy passes on as they are."""
        if self._fields is None:
            return self.shape.forward_of(self)  # type: ignore[no-any-return]
        found = [field.line for field in self._fields if field.kind in PASSED_ON]
        return [line for line in found if not line.lower().startswith(self.dropped)] if self.dropped else found

    @property
    def varying(self) -> list[bytes]:
        """The lines of `forward` on which `decision` does not depend."""
        if self.shape is None:
            return []
        lines = self.lines or [b"", *[field.line for field in self.fields]]
        return [lines[number] for number in self.shape.varying]

    @property
    def forwarded(self) -> list[Field]:
        """The fields in which proxies report about the client."""
        return [field for field in self.fields if field.kind == _FORWARDED]

    @property
    def method(self) -> str:
        return self.line.method

    @property
    def target(self) -> str:
        """Path and query as sent (an absolute form is cut to its path)."""
        return self.line.target

    @property
    def host(self) -> str:
        """The addressed host. An absolute target overrides `Host` (RFC 9112, 3.2.2); "" if there is neither."""
        return self.line.authority or self.get("host") or ""

    @property
    def path(self) -> str:
        """The path of the target, not percent-decoded."""
        return self.line.path

    @property
    def query(self) -> str:
        return self.line.query

    def get(self, name: str) -> str | None:
        """The first value of the field with this lower-case name."""
        for field in self.fields:
            if field.name == name:
                return field.value
        return None

    def by_name(self) -> dict[str, str]:
        """Lower-case name -> the first value of that name."""
        found = self._by_name
        if found is None:
            if self._fields is None:
                found = self.shape.names_of(self)
            else:
                found = {field.name: field.value for field in reversed(self._fields)}
            self._by_name = found
        return found

    def items(self) -> list[tuple[str, str]]:
        """Every field as (lower-case name, value), in order."""
        return [(field.name, field.value) for field in self.fields]

    def sent_on(self) -> list[tuple[str, str]]:
        """Every field that a proxy passes on, as (lower-case name, value), in order: the fields behind `forward`."""
        lines = set(self.forward)
        return [(field.name, field.value) for field in self.fields if field.line in lines]


def parse_request_head(block: bytes, memo: LineMemo, *, max_fields: int = 128) -> RequestHead:
    """Read a head without its closing CRLFCRLF. Raises BadMessage, TooLarge for more than `max_fields` fields."""
    lines = block.split(b"\r\n")
    if len(lines) > max_fields + 1:
        raise TooLarge(f"more than {max_fields} header fields")
    return parse_lines(lines, list(map(memo.young.get, lines)), memo)


def parse_lines(lines: Sequence[bytes], known: Sequence[Any], memo: LineMemo) -> RequestHead:
    """Read the lines of a head. known: what the memo's young generation has for each; its first is not used.

    Raises BadMessage.
    """
    first = lines[0]
    request_line = memo.lines.get(first) or memo.find_line(first) or _Line(first)
    head = RequestHead(request_line)
    if not request_line.minor:
        head.close = True
    head._fields = fields = []
    head.fresh = fresh = []
    hosts = 0
    for number in range(1, len(lines)):
        field: Field | None = known[number]
        if field is None:
            line = lines[number]
            field = memo.find(line) or memo.find_credential(line)
            if field is None:
                field = memo.classify(line)
                if field.kind not in _PER_REQUEST and field.kind != _CONTENT_LENGTH:
                    fresh.append(field)
        fields.append(field)
        kind = field.kind
        if kind == _HOST:
            hosts += 1
        elif kind == _CONTENT_LENGTH:
            if head.content_length is not None:
                raise BadMessage("Content-Length is given twice")
            head.content_length = field.number
        elif kind != 0 and kind != _HOP:
            _note(head, field)
    if hosts != 1 and (hosts or request_line.minor):
        raise BadMessage("a request carries exactly one Host header")
    if head.chunked and (head.content_length is not None or not request_line.minor):
        raise BadMessage("Transfer-Encoding does not go with Content-Length or HTTP/1.0")
    return head


def _note(head: RequestHead, field: Field) -> None:
    """Store a field that the server itself uses in the attribute for it."""
    kind = field.kind
    if kind == _CREDENTIAL:
        if head.credentials is None:
            head.credentials = [field]
        else:
            head.credentials.append(field)
    elif kind == _TRACEPARENT:
        head.traceparent = field.value if head.traceparent is None else ""
    elif kind == _TRACESTATE:
        head.tracestate = field.value if head.tracestate is None else f"{head.tracestate},{field.value}"
    elif kind == _REQUEST_ID:
        head.request_id = field.value
    elif kind == _TIMEOUT:
        if head.timeout is not None:
            raise BadMessage("x-request-timeout-ms is given twice")
        head.timeout = field.value
    elif kind == _TIER:
        if head.tier is not None:
            raise BadMessage("x-request-tier is given twice")
        head.tier = field.value
    elif kind == _CONNECTION:
        words = {word.strip().lower() for word in field.value.split(",")}
        if "close" in words:
            head.close = True
        for word in words - {"close", "keep-alive", ""}:
            # A sender may name further hop-by-hop fields. Naming one that frames the message or carries our own context
            # is an attempt to make two hops read two different requests.
            if word in _REQUEST_KINDS and _REQUEST_KINDS[word] != Kind.HOP:
                raise BadMessage("Connection names a field that may not be dropped")
            head.dropped = (*head.dropped, word.encode("ascii", "replace") + b":")
    elif kind == _TRANSFER_ENCODING:
        if head.chunked or field.value.lower() != "chunked":
            raise BadMessage("Transfer-Encoding can only be chunked")
        head.chunked = True
    elif kind == _EXPECT:
        if field.value.lower() != "100-continue":
            raise BadMessage("Expect can only be 100-continue")
        head.expect_continue = head.line.minor == 1
    elif kind == _CONTENT_ENCODING:
        seen = head.content_encoding
        head.content_encoding = field.value if seen is None else f"{seen}, {field.value}"
    elif kind == _HEADER_LENGTH:
        if head.header_length is not None:
            raise BadMessage("Inference-Header-Content-Length is given twice")
        head.header_length = field.value
