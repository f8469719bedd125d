"""Lets browser pages call the gateway (the CORS protocol of the Fetch standard); off unless the documents name origins.

Keys travel in headers that a page sets itself, so no answer ever allows credentials a browser would add by itself.
An origin is compared byte by byte: browsers send it in one spelling. If the gateway sends lines about origins,
those of the upstream are dropped.
"""

import re

from oriel_policies.documents import Snapshot
from oriel_wire.h1.request import RequestHead

__all__ = ["cors_lines", "dressed", "is_preflight", "preflight_lines"]

MAX_AGE_S = 600
_METHODS = "GET, HEAD, POST"
# Authorization has to be named: "*" does not cover it.
_HEADERS = (
    "accept, authorization, content-type, x-api-key, x-request-id, x-request-timeout-ms, x-request-tier, "
    "inference-header-content-length, traceparent, tracestate, grpc-timeout, x-grpc-web, x-user-agent"
)
_NAMES = re.compile(r"[a-z0-9!#$%&'*+.^_`|~, \t-]{1,1024}\Z", re.IGNORECASE)
_EXPOSED = (
    "x-request-id, server-timing, retry-after, x-should-retry, ratelimit, ratelimit-policy, x-ratelimit-limit-tokens, "
    "x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens, traceresponse, www-authenticate, "
    "inference-header-content-length, grpc-status, grpc-message, x-oriel-reason"
)
_PREFIX = b"access-control-"


def is_preflight(head: RequestHead) -> bool:
    """Return whether this is a browser's preflight. It carries no key: the page's headers are what it asks about."""
    return (
        head.line.method == "OPTIONS"
        and head.get("origin") is not None
        and head.get("access-control-request-method") is not None
    )


def cors_lines(origin: str | None, origins: tuple[str, ...]) -> bytes:
    """Return the header lines for every answer to a page of this origin, joined by CRLF."""
    if origins == ("*",):
        return b"access-control-allow-origin: *\r\naccess-control-expose-headers: " + _EXPOSED.encode()
    if origin is None or origin not in origins:
        return b"vary: origin"  # a cached copy of this answer must not be given to a page that may read it
    return (
        f"access-control-allow-origin: {origin}\r\naccess-control-expose-headers: {_EXPOSED}\r\nvary: origin".encode()
    )


def preflight_lines(allowed: bool, snapshot: Snapshot, requested: str | None) -> list[tuple[str, str]]:
    """Return the further header lines of a preflight's answer.

    It allows the headers that the gateway and its routes read, and those that the page wants to send: none of them lets
    a browser add a credential. requested: the names of these, which count up to 1,024 characters.
    """
    if not allowed:
        return []
    seen = {name for route in snapshot.routes for name, _ in route.headers}
    seen |= {name for route in snapshot.routes for name in (route.sticky, route.split_by)}
    names = [_HEADERS, *sorted(seen - {"", "stream", "tenant", "request"})]
    if requested is not None and _NAMES.match(requested) is not None:
        names.append(requested)
    return [
        ("access-control-allow-methods", _METHODS),
        ("access-control-allow-headers", ", ".join(names)),
        ("access-control-max-age", str(MAX_AGE_S)),
    ]


def dressed(lines: list[bytes], cors: bytes) -> list[bytes]:
    """Replace the lines about origins among an upstream's header lines by `cors`, the gateway's own."""
    return [*(line for line in lines if not line[:15].lower() == _PREFIX), cors]
