"""Builds the heads that a call writes, to the upstream and to the client."""

from collections.abc import Sequence
from dataclasses import dataclass

from oriel_gateway.call.answers import with_retry_after
from oriel_gateway.call.cors import dressed
from oriel_gateway.routing.targets import Target
from oriel_policies.documents import ApiKey, Snapshot
from oriel_wire.h1.request import RequestHead
from oriel_wire.h1.response import ResponseHead

__all__ = ["Known", "answer_lines", "answer_start", "head_lines"]


@dataclass(frozen=True, slots=True)
class Known:
    """The sender and the target of all heads of one shape with the same credentials, by one snapshot of the documents.

    lines: the header lines that an upstream gets for such a head, without those that differ from head to head.
    varies: True if some differ. fronted: True if browsers or proxies have to be asked about the client.
    """

    snapshot: Snapshot
    key: ApiKey
    target: Target
    lines: bytes
    varies: bool
    fronted: bool


def head_lines(
    head: RequestHead,
    tenant_lines: bytes,
    left_out: tuple[bytes, ...] = (b"content-length:",),
    varying: Sequence[bytes] = (),
) -> bytes:
    """Return what every request with such a head sends to an upstream but its first line and Host, joined by CRLF.

    left_out: beginnings of the lines that are not sent, in lower case. varying: lines that each request adds.
    """
    lines = [line for line in head.forward if line not in varying and not line.lower().startswith(left_out)]
    return b"\r\n".join((*lines, tenant_lines))


def answer_start(head: ResponseHead) -> bytes | None:
    """Return every line of a whole answer but the call's own, each with its CRLF, and keep them in `head.start`.

    None: its length is not in the head, or it has none.
    """
    if head.content_length is None or head.status == 204:
        return None
    lines = [*head.forward, b"content-length: %d" % head.content_length]
    head.start = b"\r\n".join((*_with_retry(head, lines), b""))
    return head.start


def answer_lines(head: ResponseHead, cors: bytes, length: int | None, *, close: bool, chunked: bool = False) -> bytes:
    """Return the first lines of an answer that is not like most, each with its CRLF.

    cors: lines for browsers. length: announced bytes of the body, or None. close: True if the connection ends with it.
    """
    lines = dressed(head.forward, cors) if cors else [*head.forward]
    if length is not None:
        lines.append(b"content-length: %d" % length)
    elif chunked:
        lines.append(b"transfer-encoding: chunked")
    if close:
        lines.append(b"connection: close")
    return b"\r\n".join((*_with_retry(head, lines), b""))


def _with_retry(head: ResponseHead, lines: list[bytes]) -> list[bytes]:
    """Return `lines` of an answer; an error tells when to come back, or that it does not help."""
    return with_retry_after(lines, head.status, head.get("retry-after")) if head.status >= 429 else lines
