"""A strict parser of HTTP/1.1 response heads, by the rules of `h1`. It does no I/O and keeps no state but the memo.

Servers answer with the same lines again and again, and often with the same head: both are parsed once. A head with
a line that is new is not kept, so lines that differ in each answer never fill the memo of heads.
"""

import re
from collections.abc import Sequence
from typing import Final

from oriel_wire.context import ANNOUNCED, COST, COST_US
from oriel_wire.errors import BadMessage
from oriel_wire.h1.request import (
    CONNECTION,
    CONTENT_LENGTH,
    DATE,
    EVENTS,
    HOP,
    MAX_LINE,
    SERVER_TIMING,
    SPENT_US,
    TRANSFER_ENCODING,
    USED,
    Field,
    LineMemo,
)
from oriel_wire.observe.server_timing import bounded

_EVENT_TYPE: Final = re.compile(r"text/event-stream[ \t]*(?:;|\Z)", re.IGNORECASE)
# Headers of a stream of events, for proxies that would otherwise keep or collect it.
UNBUFFERED: Final = (("cache-control", "no-cache"), ("x-accel-buffering", "no"))
_MAX_KEPT_HEAD: Final = 1024
_MAX_HEADS: Final = 32
_MAX_FIELDS: Final = 256
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [\x20-\x7e\x80-\xff\t]*)?\Z")


class ResponseMemo(LineMemo):
    """Remembers what one upstream has answered: lines, status lines, and at most 32 whole heads of at most 1 KiB."""

    __slots__ = ("heads", "statuses")

    def __init__(self) -> None:
        super().__init__(response=True)
        self.statuses: dict[bytes, tuple[int, int]] = {}
        self.heads: dict[bytes, ResponseHead] = {}


class ResponseHead:
    """One response head from an upstream; `forward` are the lines a proxy passes on, the status line first.

    The object may be shared by all answers that begin with the same bytes, so only a copy may be changed.
    """

    content_length: int | None = None
    chunked = False
    close = False
    dated = False
    events = False  # a stream of events; `forward` says that it must be neither kept nor collected
    server_timing = ""
    cost_us = -1
    used = ""  # see `oriel_wire.context.parse_cost`
    start: bytes | None = None  # a proxy may cache here the head that it sends to its client

    def __init__(self, status: int, status_line: bytes, minor: int) -> None:
        self.status = status
        self.forward = [status_line]
        self.fields: list[Field] = []
        if not minor:
            self.close = True

    @property
    def code(self) -> int:
        """The status in the answer's own protocol, which here is `status`; over gRPC it is another number."""
        return self.status

    def get(self, name: str) -> str | None:
        """The first value of the field with this lower-case name."""
        for field in self.fields:
            if field.name == name:
                return field.value
        return None

    def copy(self) -> "ResponseHead":
        """A copy whose lines may be changed."""
        made = ResponseHead(self.status, b"", 1)
        made.content_length, made.chunked, made.close = self.content_length, self.chunked, self.close
        made.dated, made.server_timing, made.cost_us = self.dated, self.server_timing, self.cost_us
        made.used, made.events = self.used, self.events
        made.forward, made.fields = [*self.forward], self.fields
        return made


def read_cost(trailers: Sequence[bytes]) -> tuple[int, str]:
    """Return the cost that trailers report, in the two forms of `ResponseHead`: `cost_us` and `used`."""
    cost_us, used = -1, ""
    for line in trailers:
        name, _, value = line.decode("latin-1").partition(":")
        name, value = name.lower(), value.strip()
        if name == COST:
            used = value
        elif name == COST_US and value.isascii() and value.isdigit() and len(value) < 16:
            cost_us = int(value)
    return cost_us, used


def parse_response_head(block: bytes, memo: ResponseMemo) -> ResponseHead:
    """Parse a response head without its closing CRLFCRLF. Look it up in `memo.heads` first. Raises BadMessage."""
    repeated = len(block) <= _MAX_KEPT_HEAD
    lines = block.split(b"\r\n")
    if len(lines) > _MAX_FIELDS + 1:
        raise BadMessage(f"more than {_MAX_FIELDS} header fields")
    known = memo.statuses.get(lines[0])
    if known is None:
        match = _STATUS_LINE.match(lines[0])
        if match is None:
            raise BadMessage("the status line is malformed")
        known = int(match[2]), int(match[1])
        if len(memo.statuses) < memo.SIZE and len(lines[0]) <= MAX_LINE:
            memo.statuses[lines[0]] = known
    # A proxy answers in its own version, because a chunked body would be an error in HTTP/1.0.
    head = ResponseHead(known[0], lines[0] if known[1] else b"HTTP/1.1" + lines[0][8:], known[1])
    dropped: tuple[bytes, ...] = ()
    fields = head.fields
    forward = head.forward
    del lines[0]
    for line, field in zip(lines, map(memo.fields.get, lines), strict=True):
        if field is None:
            field = memo.classify(line)
            if field.name == "content-type" and _EVENT_TYPE.match(field.value) is not None:
                field.kind = EVENTS
            memo.keep((field,))
            repeated = False
        fields.append(field)
        kind = field.kind
        if kind == 0:
            forward.append(line)
        elif kind == CONTENT_LENGTH:
            if head.content_length is not None:
                raise BadMessage("Content-Length is given twice")
            head.content_length = field.number
        elif kind == TRANSFER_ENCODING:
            if head.chunked or field.value.lower() != "chunked":
                raise BadMessage("Transfer-Encoding can only be chunked")
            head.chunked = True
        elif kind == CONNECTION:
            words = {word.strip().lower() for word in field.value.split(",")}
            if "close" in words:
                head.close = True
            for word in words - {"close", "keep-alive", ""}:
                dropped = (*dropped, word.encode("ascii", "replace") + b":")
        elif kind == DATE:
            forward.append(line)
            head.dated = True
        elif kind == SERVER_TIMING:
            head.server_timing = bounded(f"{head.server_timing}, {field.value}" if head.server_timing else field.value)
        elif kind == SPENT_US and field.value.isascii() and field.value.isdigit() and len(field.value) < 16:
            head.cost_us = int(field.value)
        elif kind == USED:
            head.used = field.value
        elif kind == EVENTS:
            forward.append(line)
            head.events = True
        elif kind == HOP and field.name == "trailer" and field.value.lower() == COST:
            head.used = ANNOUNCED
    if head.events:
        forward += [f"{name}: {value}".encode() for name, value in UNBUFFERED if head.get(name) is None]
    if dropped:
        head.forward = [line for line in forward if not line.lower().startswith(dropped)]
    if head.chunked and head.content_length is not None:
        raise BadMessage("Transfer-Encoding does not go with Content-Length")
    if repeated and head.status != 503:  # a proxy may have to add lines to a refusal
        if len(memo.heads) >= _MAX_HEADS:
            memo.heads.clear()
        memo.heads[block] = head
    return head
