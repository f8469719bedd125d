"""Keeps the usage of a stream from a client that has not asked for it.

The gateway asks engines for the usage of each stream of the OpenAI API, to count its tokens. It comes in one event of
its own, without a choice, which this filter takes out. Events are passed on whole: a client can use nothing less.
"""

from typing import Any, Final

import msgspec

__all__ = ["WithoutUsage"]

MOST_BYTES: Final = 64 * 1024  # of an event; more of it is passed on unread
_LF: Final = b"\n\n"
_CRLF: Final = b"\r\n\r\n"
_decode = msgspec.json.Decoder(msgspec.defstruct("Event", [("choices", list[Any] | None, None), ("usage", Any, None)]))


class WithoutUsage:
    """The events of one answer. Its writer is the call's `Extras`."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes, complete: bool) -> bytes:
        """Return what may be passed on, after `data` has come."""
        rest = self._rest
        before = max(0, len(rest) - 3)
        rest += data
        mark = _LF if rest.rfind(_CRLF, before) < 0 else _CRLF
        end = rest.rfind(mark, before) + len(mark)
        if complete or len(rest) > MOST_BYTES:
            end = len(rest)
        elif end < len(mark):
            return b""
        events = bytes(rest[:end])
        del rest[:end]
        if b'"usage"' not in events:
            return events
        return mark.join([each for each in events.split(mark) if not _is_usage(each)])


def _is_usage(event: bytes) -> bool:
    if not event.startswith(b"data:") or b'"usage"' not in event:
        return False
    try:
        content: Any = _decode.decode(event[5:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return content.choices == [] and content.usage is not None
