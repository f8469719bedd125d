"""The parts of the heads a call writes that stay the same from call to call."""

from oriel_gateway.answers import with_retry_after
from oriel_wire.h1 import RequestHead
from oriel_wire.h1_response import ResponseHead

__all__ = ["answer_start", "head_lines", "with_retry"]


def head_lines(head: RequestHead, tenant_lines: bytes, left_out: tuple[bytes, ...] = (b"content-length:",)) -> bytes:
    """What every request with such a head says to an upstream but its first line and Host, joined by CRLF.

    left_out: beginnings of the lines that are not sent, in lower case.
    """
    lines = [line for line in head.forward if not line.lower().startswith(left_out)]
    return b"\r\n".join((*lines, tenant_lines))


def answer_start(head: ResponseHead) -> bytes | None:
    """Every line of a whole answer but the call's own, each with its CRLF; kept in `head.start`.

    None: its length is not in the head, or it has none.
    """
    if head.content_length is None or head.status == 204:
        return None
    lines = [*head.forward, b"content-length: %d" % head.content_length]
    head.start = b"\r\n".join((*with_retry(head, lines), b""))
    return head.start


def with_retry(head: ResponseHead, lines: list[bytes]) -> list[bytes]:
    """`lines` of an answer; an error says when to come back, or that it does not help."""
    return with_retry_after(lines, head.status, head.get("retry-after")) if head.status >= 429 else lines
