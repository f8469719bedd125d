"""Answers of gRPC upstreams: as a head that calls understand, and as the stream that reads them.

A call sees an answer over gRPC as it sees one over HTTP: a head with a status, and data, whole if it is small. The
status of a gRPC answer stands behind its data, so an answer is gathered up to `WHOLE_BYTES` before it is passed on.
"""

import re
from typing import Any, Final

from oriel_gateway.pools.upstream_answers import (
    NO_MEMORY,
    NOT_EXECUTED,
    NOT_HERE,
    AnswerKind,
    means_absent,
    means_refused,
)
from oriel_wire.context import COST, COST_US
from oriel_wire.engine.h2_upstream import H2Endpoint, H2Upstream, UpstreamStream
from oriel_wire.errors import UpstreamBroken
from oriel_wire.h2.grpc import (
    DATA_LOSS,
    DEADLINE_EXCEEDED,
    INTERNAL,
    NOT_FOUND,
    OK,
    PREFIX_BYTES,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    UNKNOWN,
    decode_text,
    status_of,
)
from oriel_wire.h2.known_fields import Field as HeaderField
from oriel_wire.outcomes import event_of

__all__ = ["WHOLE_BYTES", "GrpcAnswer", "GrpcExchange"]

WHOLE_BYTES: Final = 64 * 1024
# Counters, logs and the rules about endpoints see these HTTP statuses. Any other error counts as the caller's mistake.
_STATUS: Final[dict[int, int]] = {
    OK: 200,
    NOT_FOUND: 404,
    UNKNOWN: 500,
    INTERNAL: 500,
    DATA_LOSS: 500,
    UNAVAILABLE: 503,
    RESOURCE_EXHAUSTED: 429,
    DEADLINE_EXCEEDED: 504,
}
_REASON: Final = "x-oriel-reason"
_RETRY: Final = "x-oriel-retry"
_ADDRESS: Final = re.compile(
    r"(?:ipv[46]:\S+|unix(?:-abstract)?:\S+|\b(?=[^:\s]*[A-Za-z])[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){0,9}:\d{3,5}\b|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d{1,5})?|\[[0-9a-fA-F:]{2,}\](?::\d{1,5})?)"
)
# The error text of gRPC's C core when it stops with calls under way, and when the connections behind it break.
_LOST: Final = re.compile(
    rb"Cancelling all calls|Socket closed|Connection (?:reset|refused|timed out)|Broken pipe|Transport closed"
    rb"|GOAWAY|RST_STREAM|Stream removed|keepalive|recvmsg|sendmsg|Endpoint closing",
    re.IGNORECASE,
)
_WORD: Final = re.compile(r"[a-z_]{1,64}\Z")
_MAX_TEXT: Final = 500
_COST: Final = COST_US.encode()
_TIMING: Final = b"server-timing"
_USED: Final = COST.encode()


class GrpcAnswer:
    """The head and the trailers of an answer, with what a call and its receivers read of a `ResponseHead`.

    code: the gRPC status. status: the HTTP status that says the same. message_bytes: the size of the single message.
    forward: lines `name: value` that the client gets among its trailers.
    """

    content_length: int | None = None
    chunked = True
    fields = ()
    dated = True

    __slots__ = (
        *("code", "cost_us", "forward", "head", "message_bytes", "server_timing", "status", "text", "trailers", "used"),
    )

    def __init__(self, head: list[HeaderField], trailers: list[HeaderField]) -> None:
        self.head = head
        self.trailers = trailers
        self.forward: list[bytes] = []
        self.text = b""
        self.server_timing = ""
        self.cost_us = -1
        self.used = ""
        self.message_bytes = 0
        self.code = OK
        self.status = 200
        if trailers:
            self.code, self.text = status_of(head, trailers)
            self.status = _STATUS.get(self.code, 400)
            for name, value in trailers:
                if name == _COST:
                    self.cost_us = int(value) if value.isdigit() and len(value) < 16 else -1
                elif name == _TIMING:
                    self.server_timing = value.decode("latin-1")
                elif name == _USED:
                    self.used = value.decode("latin-1")

    def get(self, name: str) -> str | None:
        """The first value of this lower-case name in the trailers, or else in the head."""
        wanted = name.encode("ascii")
        for fields in (self.trailers, self.head):
            for field, value in fields:
                if field == wanted:
                    return value.decode("latin-1")
        return None

    def copy(self) -> "GrpcAnswer":
        """A copy whose lines may be changed."""
        made = GrpcAnswer(self.head, ())  # type: ignore[arg-type]
        made.trailers, made.forward, made.text = self.trailers, [*self.forward], self.text
        made.code, made.status, made.cost_us = self.code, self.status, self.cost_us
        made.message_bytes, made.server_timing = self.message_bytes, self.server_timing
        made.used = self.used
        return made

    @property
    def lost(self) -> bool:
        """Return whether a server or a proxy reports in its own words that the call was lost with a connection."""
        return self.get(_REASON) is None and _LOST.search(self.text) is not None

    @property
    def timed_out(self) -> bool:
        """Return whether the upstream says nothing but that the deadline has passed."""
        if self.code != DEADLINE_EXCEEDED or self.get(_REASON) is not None:
            return False
        return self.text.lower() in (b"", b"deadline exceeded")

    def kind(self, *, model: bool) -> AnswerKind:
        """Classify a status that a server sent; see `upstream_answers.classify_answer`."""
        code = self.code
        if code not in (NOT_FOUND, UNAVAILABLE):
            return AnswerKind.ANSWER
        reason, text = self.get(_REASON), decode_text(self.text)
        if reason is not None:
            if model and reason in NOT_HERE:
                return AnswerKind.ABSENT
            if model and reason == NO_MEMORY and self.cost_us <= 0:
                return AnswerKind.NO_MEMORY
            refused = event_of(reason) in NOT_EXECUTED
        elif model and means_absent(text):
            return AnswerKind.ABSENT
        else:
            refused = means_refused(text)
        if code == NOT_FOUND:
            return AnswerKind.PERHAPS_ABSENT if model and reason is None else AnswerKind.ANSWER
        # With a cost it was executed: a service can be full after its model has run.
        return AnswerKind.REFUSED if refused and self.cost_us <= 0 else AnswerKind.ANSWER

    def passed_on(self) -> tuple[str, list[tuple[str, str]]]:
        """Return the server's own error text without addresses, and the trailers that go with it."""
        text = _ADDRESS.sub("(an address)", decode_text(self.text))[:_MAX_TEXT]
        reason = self.get(_REASON)
        if reason is None or not _WORD.match(reason):
            reason = "deadline_exceeded" if self.code == DEADLINE_EXCEEDED else "upstream_error"
        trailers = [(_REASON, reason)]
        if self.code == UNAVAILABLE:
            trailers += [("retry-after", "1"), (_RETRY, "spent")]
        return text, trailers


class GrpcExchange(UpstreamStream):
    """One gRPC call to an upstream. Its sink is a `ResponseSink` that gets `GrpcAnswer`s as heads.

    whole_bytes: the size in bytes up to which an answer is delivered at once; the five bytes before its message are
    not.
    streamed: each message is delivered as soon as it is here, with its five bytes, and pieces of messages are not.
    """

    reported = None  # only answers over HTTP/1.1 have it; the trailers of this one come with its end
    __slots__ = ("_begun", "_head", "_parts", "_size", "_wanted", "most_bytes", "streamed", "whole_bytes")

    def __init__(self, endpoint: H2Endpoint, connection: H2Upstream, sink: Any) -> None:
        super().__init__(endpoint, connection, sink)
        self.whole_bytes = WHOLE_BYTES
        self.streamed = False
        self.most_bytes = 1 << 62
        self._head: list[HeaderField] = []
        self._parts: list[bytes | memoryview] = []
        self._size = 0
        self._wanted = 0  # streams only: bytes that are missing of the message that has begun
        self._begun = False

    def head(self, fields: list[HeaderField], end: bool) -> None:
        self._head = fields
        if end:
            self._end(fields)

    def data(self, data: bytes | memoryview, end: bool) -> None:
        size = len(data)
        self._size += size
        if self._size > self.most_bytes:
            self.fail(UpstreamBroken("the upstream's answer is larger than its pool allows"))
            return
        self.received(size)
        if self.streamed:
            self._messages(data)
        elif self._begun:
            self.sink.response_data(bytes(data), False)  # a large frame is a view, which compiled sinks refuse
        else:
            self._parts.append(data)
            if self._size > self.whole_bytes:
                self._begin(self._joined())
        if end and self.sink is not None:
            self.fail(UpstreamBroken("the upstream ended its answer without a status"))

    def trailers_came(self, fields: list[HeaderField]) -> None:
        self._end(fields)

    def _joined(self) -> bytes:
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 and isinstance(parts[0], bytes) else b"".join(parts)

    def _begin(self, data: bytes) -> None:
        if self._begun:
            self.sink.response_data(data, False)
            return
        self._begun = True
        answer = GrpcAnswer(self._head, [])
        if not self.streamed:
            answer.message_bytes = int.from_bytes(data[1:PREFIX_BYTES], "big")
            data = data[PREFIX_BYTES:]
        self.sink.response(answer, data, False)

    def _messages(self, data: bytes | memoryview) -> None:
        """Deliver whole messages of a stream."""
        parts = self._parts
        parts.append(data)
        while self.sink is not None:
            have = sum(map(len, parts))
            if have < max(PREFIX_BYTES, self._wanted):
                return
            whole = self._joined()
            parts = self._parts
            if not self._wanted:
                self._wanted = PREFIX_BYTES + int.from_bytes(whole[1:PREFIX_BYTES], "big")
                if self._wanted > self.most_bytes:
                    self.fail(UpstreamBroken("the upstream's answer is larger than its pool allows"))
                    return
                self.connection.widen(self, min(self._wanted, 4 * 1024 * 1024))
            wanted = self._wanted
            if have < wanted:
                parts.append(whole)
                return
            self._wanted = 0
            self._size = 0  # the bound is one message's
            if have > wanted:
                parts.append(whole[wanted:])
                whole = whole[:wanted]
            self._begin(whole)

    def _end(self, trailers: list[HeaderField]) -> None:
        answer = GrpcAnswer(self._head, trailers)
        if answer.code == UNAVAILABLE and answer.lost:
            self.fail(UpstreamBroken("the upstream closed the connection before its answer was complete"))
            return
        sink = self.sink
        self.complete()
        if self._begun:
            sink.trailers(answer)
            return
        data = self._joined() if self._parts else b""
        if data and not self.streamed:
            data = data[PREFIX_BYTES:]
            answer.message_bytes = len(data)
        sink.response(answer, data, True)
