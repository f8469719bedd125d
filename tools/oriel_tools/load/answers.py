"""Reads bodies of answers: the reason of a refusal, or an error behind a good status. Pure.

A stream of events (`text/event-stream`) has sent its 200 when it fails: it says so in an event of the name `error`, or
whose data is an object with `error`, as the gateway and the inference server write it and as services in OpenAI's form
do. One that ends within an event was cut, though its chunks may have ended well: whoever passed it on cannot know. A
whole JSON answer can be such an object too. An object that names its model is an answer of that model, whatever its
outputs are called, and an `error` that is neither text nor an object is a figure.
"""

from typing import Any

import msgspec
from google.protobuf.message import DecodeError

from oriel_wire.h1.response import ResponseHead
from oriel_wire.v2.proto import v2_pb2

MAX_JUDGED_BYTES = 64 * 1024  # largest answer or event that is searched for an error; larger ones are data
MAX_REASON_CHARS = 60
CUT = "cut"


class Events:
    """A stream of events. Line ends are those of the HTML standard, 9.2.5: LF, CR, CRLF."""

    __slots__ = ("_fault", "_large", "_rest")

    def __init__(self) -> None:
        self._rest = b""  # since the last blank line
        self._large = False  # the event that has begun is none to be judged
        self._fault = ""

    def feed(self, data: bytes) -> None:
        """Take in more of the body."""
        if self._fault:
            return
        text = self._rest + data
        held = b"\r" if text.endswith(b"\r") else b""  # half a line end, perhaps
        *events, rest = _lines_ended(text[: len(text) - len(held)]).split(b"\n\n")
        if events and self._large:
            del events[0]
            self._large = False
        for event in events:
            self._fault = self._fault or _event_fault(event)
        if len(rest) > MAX_JUDGED_BYTES:
            self._large = True
            rest = rest[-1:]
        self._rest = rest + held

    def fault(self) -> str:
        """Return, at the end, why this is no good answer; empty if it is one."""
        if self._fault:
            return self._fault
        rest = _lines_ended(self._rest)
        if rest.endswith(b"\n\n"):
            return _event_fault(rest)
        # A client drops an event without its blank line; some servers leave that of the last word out.
        lines = [line.replace(b" ", b"") for line in rest.split(b"\n") if line and not line.startswith(b":")]
        if self._large or lines not in ([], [b"data:[DONE]"]):
            return _event_fault(rest) or CUT
        return ""


class Whole:
    """A JSON answer."""

    __slots__ = ("_body", "_size")

    def __init__(self) -> None:
        self._body = b""
        self._size = 0

    def feed(self, data: bytes) -> None:
        """Take in more of the body."""
        self._size += len(data)
        if self._size <= MAX_JUDGED_BYTES:
            self._body += data

    def fault(self) -> str:
        """See `Events.fault`."""
        if self._size > MAX_JUDGED_BYTES or b'"error"' not in self._body:
            return ""
        return _error(_object(self._body))


Body = Events | Whole


def body_of(head: ResponseHead) -> Body | None:
    """Return the judge for the body of a good answer with this head; None if no such body can be an error."""
    if (head.get("content-encoding") or "identity").lower() != "identity":
        return None
    kind = (head.get("content-type") or "").partition(";")[0].strip().lower()
    if kind == "text/event-stream":
        return Events()
    return Whole() if kind == "application/json" or kind.endswith("+json") else None


def http_reason(body: bytes) -> str:
    """Return the machine-readable reason in a refusal's body (`reason`, or `error.reason`); empty if there is none."""
    return shown(_reason(_object(body)))


def stream_fault(message: bytes) -> str:
    """Return the error text of one message of ModelStreamInfer; empty for an answer of the model."""
    try:
        return shown(v2_pb2.ModelStreamInferResponse.FromString(message).error_message)
    except DecodeError:
        return "unreadable"


def shown(words: str) -> str:
    """Shorten a text from outside to one line."""
    return "".join(char for char in words[:MAX_REASON_CHARS] if char.isprintable())


def _lines_ended(text: bytes) -> bytes:
    return text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _event_fault(event: bytes) -> str:
    if b"error" not in event:
        return ""
    name, data = b"", []
    for line in event.split(b"\n"):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"event":
            name = value
        elif field == b"data":
            data.append(value)
    words = b"\n".join(data)
    fault = _error(_object(words))
    if not fault and name == b"error":
        fault = shown(words.decode(errors="replace")) or "error"
    return fault


def _object(text: bytes) -> dict[str, Any]:
    try:
        document = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _error(document: dict[str, Any]) -> str:
    error = document.get("error")
    if not error or not isinstance(error, str | dict) or "model_name" in document:
        return ""
    words = error if isinstance(error, str) else error.get("message")
    return shown(_reason(document) or (words if isinstance(words, str) else "")) or "error"


def _reason(document: dict[str, Any]) -> str:
    for place in (document, document.get("error")):
        if isinstance(place, dict) and isinstance(found := place.get("reason"), str):
            return found
    return ""
