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
the memo. It is emptied when it has `LineMemo.SIZE` lines.

When editing this module: a field's `kind` decides what a proxy does with it, and a name that is missing in
`_REQUEST_KINDS` is forwarded unchanged.
"""

import re
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Any, Final

from oriel_wire.errors import BadMessage, TooLarge

# The kind of a field: how server and proxy treat it. Plain numbers, because a member of an enum costs a descriptor call
# per look-up.
FORWARD: Final = 0  # the common case: forward it unchanged
HOP: Final = 1  # belongs to this connection only
CONTENT_LENGTH: Final = 2
TRANSFER_ENCODING: Final = 3
CONNECTION: Final = 4
HOST: Final = 5
EXPECT: Final = 6
CREDENTIAL: Final = 7
TRACEPARENT: Final = 8
TRACESTATE: Final = 9
REQUEST_ID: Final = 10
TIMEOUT: Final = 11
INTERNAL: Final = 12
SERVER_TIMING: Final = 13
SPENT_US: Final = 14
CONTENT_ENCODING: Final = 15
FORWARDED: Final = 16  # a proxy's report about the client: honoured from trusted proxies only
DATE: Final = 17
TIER: Final = 18
HEADER_LENGTH: Final = 19  # length of the JSON part of a v2 body
USED: Final = 20  # the call's use, as the server reports it
EVENTS: Final = 21  # the Content-Type of an answer that is a stream of events

_REQUEST_KINDS: dict[str, int] = {
    "connection": CONNECTION,
    "keep-alive": HOP,
    "proxy-connection": HOP,
    "te": HOP,
    "trailer": HOP,
    "upgrade": HOP,
    "http2-settings": HOP,
    "proxy-authorization": HOP,
    "content-length": CONTENT_LENGTH,
    "transfer-encoding": TRANSFER_ENCODING,
    # A server that reads underscores as dashes would find other message boundaries than we do.
    "content_length": HOP,
    "transfer_encoding": HOP,
    # Not a credential here, but some servers would read it as one: a key is never forwarded.
    "x_api_key": HOP,
    "x_api-key": HOP,
    "x-api_key": HOP,
    "proxy_authorization": HOP,
    "host": HOST,
    "expect": EXPECT,
    "authorization": CREDENTIAL,
    "x-api-key": CREDENTIAL,
    "traceparent": TRACEPARENT,
    "tracestate": TRACESTATE,
    "x-request-id": REQUEST_ID,
    "x-request-timeout-ms": TIMEOUT,
    "x-request-tier": TIER,
    "content-encoding": CONTENT_ENCODING,
    "inference-header-content-length": HEADER_LENGTH,
    "inference_header_content_length": HOP,
    "forwarded": FORWARDED,
    "x-real-ip": FORWARDED,
    "endpoint-load-metrics-format": INTERNAL,  # the load of a server is not shown to tenants
}
_RESPONSE_KINDS: dict[str, int] = {
    "connection": CONNECTION,
    "keep-alive": HOP,
    "proxy-connection": HOP,
    "proxy-authenticate": HOP,
    "te": HOP,
    "trailer": HOP,
    "upgrade": HOP,
    "content-length": CONTENT_LENGTH,
    "transfer-encoding": TRANSFER_ENCODING,
    "x-request-id": REQUEST_ID,
    "traceresponse": TRACEPARENT,
    "date": DATE,
    "server-timing": SERVER_TIMING,
    "x-oriel-cost-us": SPENT_US,
    "x-oriel-cost": USED,
    "x-oriel-service-version": FORWARD,  # the only one of our own headers that is meant for callers
    "endpoint-load-metrics": INTERNAL,
    # The gateway keeps the limits and reports them itself.
    "ratelimit": INTERNAL,
    "ratelimit-policy": INTERNAL,
}
PASSED_ON: Final = frozenset({0, CONTENT_LENGTH, CONTENT_ENCODING, HEADER_LENGTH})
# A server may decide by the type of the body whose call a request is, so two types make two shapes (`h1_similar`).
SAME: Final = frozenset({"content-type"})
_PER_REQUEST: Final = frozenset({CREDENTIAL, TRACEPARENT, TRACESTATE, REQUEST_ID, SERVER_TIMING, SPENT_US, USED})
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


class _Line:
    """A validated request line. authority: the authority of an absolute target, else ""."""

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
    """Header lines and request lines that have been validated. parts: see `similar`."""

    SIZE = 4096
    __slots__ = ("credentials", "fields", "kinds", "lines", "parts")

    def __init__(self, *, response: bool = False) -> None:
        self.kinds = _RESPONSE_KINDS if response else _REQUEST_KINDS
        self.fields: dict[bytes, Field] = {}
        self.parts: dict[bytes, Field | str] = {}
        self.lines: dict[bytes, _Line] = {}
        self.credentials: dict[bytes, Field] = {}

    def keep(self, fields: Iterable[Field]) -> None:
        """Keep lines of an authenticated sender."""
        for field in fields:
            if len(field.line) <= MAX_LINE and field.kind not in _PER_REQUEST:
                if len(self.fields) >= self.SIZE:
                    self.fields, self.parts = {}, {}
                self.fields[field.line] = field
                by_name = field.kind in (FORWARD, INTERNAL, FORWARDED) and field.name not in SAME
                self.parts[field.line] = field.name if by_name else field

    def find_credential(self, line: bytes) -> Field | None:
        """The field of a credential line that was authenticated before, by its SHA-256; None for other lines."""
        if line[:1] in b"aAxX" and (line[:14].lower() == b"authorization:" or line[:10].lower() == b"x-api-key:"):
            return self.credentials.get(sha256(line).digest())
        return None

    def keep_credential(self, line: bytes, owner: object, most: int = 0) -> None:
        """Keep the credential line of `owner`, by its hash only, until `forget_credentials`.

        most: lines that are kept at least, if that is more than `SIZE`.
        """
        if len(self.credentials) >= max(self.SIZE, most):
            self.credentials.clear()
        field = Field(b"", "", "", CREDENTIAL, -1)
        field.owner = owner
        self.credentials[sha256(line).digest()] = field

    def forget_credentials(self) -> None:
        """Drop all credentials, because the set of valid ones has changed."""
        self.credentials.clear()

    def keep_line(self, line: _Line) -> None:
        """Keep the request line of an authenticated sender."""
        if len(line.line) <= MAX_LINE:
            if len(self.lines) >= self.SIZE:
                self.lines.clear()
            self.lines[line.line] = line

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
                kind = INTERNAL
            elif name[:12].replace("_", "-") == "x-forwarded-" and self.kinds is _REQUEST_KINDS:
                kind = FORWARDED
            else:
                kind = 0
        number = -1
        if kind == CONTENT_LENGTH:
            if not raw.isdigit() or len(raw) > 15:
                raise BadMessage("Content-Length is not a plain number")
            number = int(raw)
        elif kind == CONNECTION and raw.count(b",") >= _MAX_NAMED:
            raise BadMessage(f"Connection names more than {_MAX_NAMED} fields")
        elif kind == HOST and _HOST_VALUE.match(raw) is None:
            raise BadMessage("Host is not a name or an address")
        return Field(line, name, raw.decode("latin-1"), kind, number)


class RequestHead:
    """One request head.

    content_length: body bytes, or None. fresh: fields that were validated anew; give them to `LineMemo.keep` once the
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
        return [field for field in self.fields if field.kind == FORWARDED]

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
    return parse_lines(lines, list(map(memo.fields.get, lines)), memo)


def parse_lines(lines: Sequence[bytes], known: Sequence[Any], memo: LineMemo) -> RequestHead:
    """Read the lines of a head. known: the memo's entry for each; its first is not used.

    Raises BadMessage.
    """
    first = lines[0]
    request_line = memo.lines.get(first) or _Line(first)
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
            field = memo.find_credential(line)
            if field is None:
                field = memo.classify(line)
                if field.kind not in _PER_REQUEST and field.kind != CONTENT_LENGTH:
                    fresh.append(field)
        fields.append(field)
        kind = field.kind
        if kind == HOST:
            hosts += 1
        elif kind == CONTENT_LENGTH:
            if head.content_length is not None:
                raise BadMessage("Content-Length is given twice")
            head.content_length = field.number
        elif kind != 0 and kind != HOP:
            _note(head, field)
    if hosts != 1 and (hosts or request_line.minor):
        raise BadMessage("a request must carry exactly one Host header")
    if head.chunked and (head.content_length is not None or not request_line.minor):
        raise BadMessage("Transfer-Encoding does not go with Content-Length or HTTP/1.0")
    return head


def _note(head: RequestHead, field: Field) -> None:
    """Store a field that the server itself uses in the attribute for it."""
    kind = field.kind
    if kind == CREDENTIAL:
        if head.credentials is None:
            head.credentials = [field]
        else:
            head.credentials.append(field)
    elif kind == TRACEPARENT:
        head.traceparent = field.value if head.traceparent is None else ""
    elif kind == TRACESTATE:
        head.tracestate = field.value if head.tracestate is None else f"{head.tracestate},{field.value}"
    elif kind == REQUEST_ID:
        head.request_id = field.value
    elif kind == TIMEOUT:
        if head.timeout is not None:
            raise BadMessage("x-request-timeout-ms is given twice")
        head.timeout = field.value
    elif kind == TIER:
        if head.tier is not None:
            raise BadMessage("x-request-tier is given twice")
        head.tier = field.value
    elif kind == CONNECTION:
        words = {word.strip().lower() for word in field.value.split(",")}
        if "close" in words:
            head.close = True
        for word in words - {"close", "keep-alive", ""}:
            # A sender may name further hop-by-hop fields. Naming one that frames the message or carries our own context
            # is an attempt to make two hops read two different requests.
            if word in _REQUEST_KINDS and _REQUEST_KINDS[word] != HOP:
                raise BadMessage("Connection names a field that may not be dropped")
            head.dropped = (*head.dropped, word.encode("ascii", "replace") + b":")
    elif kind == TRANSFER_ENCODING:
        if head.chunked or field.value.lower() != "chunked":
            raise BadMessage("Transfer-Encoding can only be chunked")
        head.chunked = True
    elif kind == EXPECT:
        if field.value.lower() != "100-continue":
            raise BadMessage("Expect can only be 100-continue")
        head.expect_continue = head.line.minor == 1
    elif kind == CONTENT_ENCODING:
        seen = head.content_encoding
        head.content_encoding = field.value if seen is None else f"{seen}, {field.value}"
    elif kind == HEADER_LENGTH:
        if head.header_length is not None:
            raise BadMessage("Inference-Header-Content-Length is given twice")
        head.header_length = field.value
