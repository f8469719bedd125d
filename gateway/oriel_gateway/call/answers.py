"""Whole HTTP answers of the gateway itself: refusals and small answers."""

from typing import Any

import msgspec

from oriel_gateway.errors import Refused
from oriel_gateway.http_status import FINAL, WORDS
from oriel_gateway.observe.tracing import Mark
from oriel_wire.engine.limits import reason_phrase

__all__ = ["refusal_body", "refusal_bytes", "small_answer", "with_retry_after"]

CLOSE = "connection: close\r\n"
_RETRY_S = {429: 10**9, 500: 0, 502: 60, 503: 60, 504: 0}


def refusal_body(refused: Refused, request_id: str, *, v2: bool) -> bytes:
    """Return JSON in one line. v2 clients read `error` as a string; all others get the object of the OpenAI API with
    `reason` in it.
    """
    ids = {"reason": refused.outcome.value, "request_id": request_id}
    if v2:
        return msgspec.json.encode({"error": refused.message, **ids})
    kind, code = WORDS[refused.outcome]
    error: dict[str, Any] = {"message": refused.message, "type": kind, "param": None, "code": code, **ids}
    if refused.more is not None:
        error.update(refused.more)
    return msgspec.json.encode({"error": error})


def refusal_bytes(
    refused: Refused,
    *,
    status: int,
    v2: bool,
    mark: Mark,
    timing: str,
    date_line: bytes,
    close: bool,
    head_only: bool,
) -> bytes:
    """Return a whole answer. v2: see `refusal_body`."""
    body = refusal_body(refused, mark.request_id, v2=v2)
    more = "".join([f"{name}: {value}\r\n" for name, value in refused.headers]) if refused.headers else ""
    if refused.retry_after_s is not None:
        more += f"retry-after: {refused.retry_after_s}\r\n"
    if refused.outcome in FINAL:
        more += "x-should-retry: false\r\n"
    # As `small_answer` would write it, in one piece: an attack is answered with many of these.
    head = (
        f"HTTP/1.1 {status} {reason_phrase(status)}\r\ncontent-length: {len(body)}\r\n"
        f"content-type: application/json\r\n{more}x-request-id: {mark.request_id}\r\n"
        f"traceresponse: {mark.traceresponse()}\r\n"
        f"server-timing: {timing}{f', {refused.timing}' if refused.timing else ''}\r\n{CLOSE if close else ''}"
    ).encode("latin-1")
    return b"%b%b\r\n%b" % (head, date_line, b"" if head_only else body)


def with_retry_after(lines: list[bytes], status: int, own: str | None) -> list[bytes]:
    """Return the header lines of an upstream's error with when to come back.

    own: the upstream's own `Retry-After`. A 502 or 503 gets 1 to 60 whole seconds, whatever the upstream sent; a 429
    gets what it sent, at least a second; 500 and 504 get none, and clients
    are told not to repeat what was late.
    """
    if status not in _RETRY_S:
        return lines
    others = [line for line in lines if line[:12].lower() != b"retry-after:"]
    if status == 504:
        return [*(line for line in others if line[:15].lower() != b"x-should-retry:"), b"x-should-retry: false"]
    most_s = _RETRY_S[status]
    if not most_s:
        return others
    plain = own is not None and own.isascii() and own.isdigit() and len(own) < 10
    seconds = min(most_s, max(1, int(own))) if plain and own is not None else 1
    return [*others, b"retry-after: %d" % seconds]


def small_answer(
    status: int,
    headers: list[tuple[str, str]],
    body: bytes,
    date_line: bytes,
    *,
    close: bool,
    content_type: str = "application/json",
    head_only: bool = False,
) -> bytes:
    """Return a whole answer. head_only: without its body."""
    lines = [f"HTTP/1.1 {status} {reason_phrase(status)}"]
    if status != 204:
        lines.append(f"content-length: {len(body)}")
    if body:
        lines.append(f"content-type: {content_type}")
    lines += [f"{name}: {value}" for name, value in headers]
    if close:
        lines.append("connection: close")
    return b"%b\r\n%b\r\n%b" % ("\r\n".join(lines).encode("latin-1"), date_line, b"" if head_only else body)
