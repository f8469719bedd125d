"""Server-sent events (WHATWG HTML, 9.2) as the OpenAI API writes them: one JSON value each."""

import msgspec

__all__ = ["DONE", "EVENT_STREAM", "event"]

EVENT_STREAM = "text/event-stream"
DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def event(value: object) -> bytes:
    """`value` as one event. JSON has no raw line ends, so it is one line."""
    return b"data: " + _encode(value) + b"\n\n"
