"""The errors between bytes and messages.

WireError
├── BadMessage                 the sender's mistake; the text may be shown to the sender
│   ├── TooLarge               a limit was exceeded (head, fields, body, JSON part)
│   │   └── HeaderListTooLarge HTTP/2: a header list exceeds its bound; the connection can go on
│   └── HpackError             HTTP/2: header compression is broken; the connection has to end
└── UpstreamError              the next hop's fault
    ├── UpstreamUnreachable    nothing was sent: another endpoint can be tried
    ├── UpstreamUnread         a kept connection was closed before the request reached the other side: nothing executed
    ├── UpstreamBroken         it closed or broke the protocol part-way: it may have executed
    │   └── UpstreamHungUp     it closed a kept connection without a byte of answer: it hardly executed
    └── UpstreamTimedOut       the deadline passed while waiting for it

StartFailed                    a unit cannot start; the text is one line with the fix
"""


class WireError(Exception):
    """Root of this package's errors."""


class BadMessage(WireError):
    """The bytes violate the protocol. `message` may be shown to their sender."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class TooLarge(BadMessage):
    """The message is well-formed so far but exceeds a limit."""


class HeaderListTooLarge(TooLarge):
    """A decoded header list exceeds its bound. The decoder's table is in step: the connection can go on."""


class HpackError(BadMessage):
    """A header block violates RFC 7541 (COMPRESSION_ERROR): what follows on the connection cannot be read."""


class UpstreamError(WireError):
    """The next hop did not answer properly."""


class UpstreamUnreachable(UpstreamError):
    """No byte of the request reached the next hop."""


class UpstreamUnread(UpstreamError):
    """The next hop closed a kept connection before a byte of the request reached it: it may be sent again."""


class UpstreamBroken(UpstreamError):
    """The next hop closed or broke the protocol after the request was (partly) sent."""


class UpstreamHungUp(UpstreamBroken):
    """A connection that had answered before was closed without a byte of answer, probably because it was idle too long.

    A request that may run twice can be sent again.
    """


class UpstreamTimedOut(UpstreamError):
    """The request's deadline passed before the next hop answered."""


class StartFailed(Exception):
    """A unit cannot start. The text is one line that says how to fix it."""


def json_fault(body: bytes, error: Exception) -> str:
    """Return what is wrong with a text that is no JSON, by the error of msgspec.

    msgspec counts the position of a byte that is not UTF-8 from the start of its string, and reports half a surrogate
    pair at the end of a text as a text that ends early.
    """
    try:
        str(body, "utf-8")
    except UnicodeDecodeError as found:
        return f"byte 0x{body[found.start]:02x} at position {found.start} is not UTF-8"
    _, half, digits = body[-8:].lower().rpartition(rb"\ud")
    if half and digits[:1] in (b"8", b"9", b"a", b"b") and "truncated" in str(error):
        return "it ends with half of a surrogate pair"
    return str(error)
