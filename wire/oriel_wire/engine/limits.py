"""The limits of one HTTP listener, and the reason phrases of statuses."""

from dataclasses import dataclass

SETTINGS_S = 5.0
INFLATED_BYTES = 4 << 20  # every compressed body may be inflated to as much
INFLATED_RATIO = 64

_REASONS = {
    200: "OK", 204: "No Content", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found",
    405: "Method Not Allowed", 408: "Request Timeout", 413: "Content Too Large", 414: "URI Too Long",
    415: "Unsupported Media Type", 422: "Unprocessable Content", 429: "Too Many Requests",
    431: "Request Header Fields Too Large", 500: "Internal Server Error", 501: "Not Implemented",
    502: "Bad Gateway", 503: "Service Unavailable", 504: "Gateway Timeout",
}  # fmt: skip


def reason_phrase(status: int) -> str:
    """The reason phrase of a status; empty for statuses that are never sent."""
    return _REASONS.get(status, "")


def inflated_limit(sent_bytes: int, most_bytes: int) -> int:
    """The bytes to which a compressed body may be inflated, so that few bytes from outside cause little work.

    sent_bytes: its size as it was sent. most_bytes: the bound of any body.
    """
    return min(most_bytes, max(INFLATED_BYTES, INFLATED_RATIO * sent_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Limits of one listener.

    max_head_bytes: request line and fields together; a larger head is answered 431. max_fields: header fields, the
    same. max_target_bytes: the request target; a longer one is answered 414.
    max_body_bytes: a larger body is answered 413 before it is read. At the gateway each pool has a bound of its own.
    max_connections: open connections; a new one takes the place of one without a request under way, or is closed.
    max_kept_bytes: bytes read of requests behind the current ones, all connections together; what is beyond is dropped
    and the connection closed after the current answer.
    head_timeout_s: seconds allowed from the first byte of a head to its last; then 408. body_timeout_s: the time in
    which a body has to bring `body_min_bytes`; else 408.
    body_min_bytes: the least progress of a body in `body_timeout_s`.
    idle_timeout_s: a connection without a request, from its start or its last answer; empty lines do not count.
    write_stall_s: a client that does not read its answer is cut after this time. The kernel probes a silent connection
    after two thirds of it, so that a client whose machine has vanished keeps no place (Linux).
    drain_bytes: bytes of a refused body that are read so that its client sees the answer.
    """

    max_head_bytes: int = 32 * 1024
    max_fields: int = 128
    max_target_bytes: int = 8 * 1024
    max_body_bytes: int = 64 * 1024 * 1024
    max_connections: int = 8192
    max_kept_bytes: int = 64 * 1024 * 1024
    head_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    body_min_bytes: int = 30 * 1024
    idle_timeout_s: float = 75.0
    write_stall_s: float = 30.0
    drain_bytes: int = 512 * 1024
