"""The parts of the heads a call writes that stay the same from call to call."""

from oriel_wire.h1 import RequestHead
from oriel_wire.h1_response import ResponseHead

__all__ = ["answer_start", "head_lines", "retry_lines"]


def head_lines(head: RequestHead, tenant_lines: bytes) -> bytes:
    """What every request with such a head says to an upstream but its first line, Host and length, joined by CRLF."""
    lines = [line for line in head.forward if line[:15].lower() != b"content-length:"]
    return b"\r\n".join((*lines, tenant_lines))


def answer_start(head: ResponseHead) -> bytes | None:
    """Every line of a whole answer but the call's own, each with its CRLF; kept in `head.start`.

    None: its length is not in the head, or it has none.
    """
    if head.content_length is None or head.status == 204:
        return None
    lines = [*head.forward, b"content-length: %d" % head.content_length, *retry_lines(head), b""]
    head.start = b"\r\n".join(lines)
    return head.start


def retry_lines(head: ResponseHead) -> tuple[bytes, ...]:
    """A server that cannot answer now and does not say when to come back: soon."""
    return (b"retry-after: 1",) if head.status in (502, 503) and head.get("retry-after") is None else ()
