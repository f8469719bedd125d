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
    """Limits of one listener. docs/limits.md lists them."""

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
