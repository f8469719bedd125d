"""Server-sent events (`text/event-stream`): an answer that cannot go on reports why in one more event.

This is done only between two events, that is after a blank line or before the first: within one, whatever is written
would become a part of it. And only where the end of the answer can be told as well, which takes chunks. Every other
answer is cut, which a client cannot take for a whole one. Line ends are those of the HTML standard, 9.2.5: LF, CR,
CRLF.
"""

from oriel_wire.h1.response import ResponseHead

__all__ = ["Events", "events_of"]

_ENDS = 4  # bytes: two line ends


class Events:
    """Tracks whether an answer is between two events."""

    __slots__ = ("_tail",)

    def __init__(self) -> None:
        self._tail = b"\n\n"  # nothing yet is between two events

    def sent(self, data: bytes) -> None:
        """Take more of the answer, without the framing of its chunks."""
        self._tail = data[-_ENDS:] if len(data) >= _ENDS else (self._tail + data)[-_ENDS:]

    @property
    def between(self) -> bool:
        """Return whether an event may begin here."""
        return self._tail.replace(b"\r\n", b"\n").replace(b"\r", b"\n").endswith(b"\n\n")


def events_of(head: ResponseHead, data: bytes) -> Events | None:
    """Return the tracker of a chunked answer that begins with `data`, None unless it is one of plain events."""
    if not head.events or head.status != 200 or (head.get("content-encoding") or "identity").lower() != "identity":
        return None
    events = Events()
    events.sent(data)
    return events
