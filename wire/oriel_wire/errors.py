"""What can go wrong between bytes and messages.

WireError
├── BadMessage                 the sender's fault; the text is a sentence for them
│   └── TooLarge               a bound was passed (head, fields, body, JSON part)
└── UpstreamError              the next hop's fault
    ├── UpstreamUnreachable    nothing was sent: another endpoint may be tried
    ├── UpstreamUnread         a kept connection was closed before the request reached the other side: nothing executed
    ├── UpstreamBroken         it closed or broke the protocol part-way: it may have executed
    │   └── UpstreamHungUp     it closed a kept connection without a byte of answer: it hardly executed
    └── UpstreamTimedOut       the deadline passed while waiting for it

StartFailed                    a unit cannot start; one line that names the mend
"""

__all__ = [
    "BadMessage",
    "StartFailed",
    "TooLarge",
    "UpstreamBroken",
    "UpstreamError",
    "UpstreamHungUp",
    "UpstreamTimedOut",
    "UpstreamUnreachable",
    "UpstreamUnread",
    "WireError",
]


class WireError(Exception):
    """Root of everything this package raises about bytes."""


class BadMessage(WireError):
    """The bytes are not what the protocol says; `message` may be shown to who sent them."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class TooLarge(BadMessage):
    """The message is well-formed so far but passes a bound."""


class UpstreamError(WireError):
    """The next hop did not answer properly."""


class UpstreamUnreachable(UpstreamError):
    """No byte of the request reached the next hop."""


class UpstreamUnread(UpstreamError):
    """The next hop closed a kept connection before a byte of the request reached it: it may be sent again."""


class UpstreamBroken(UpstreamError):
    """The next hop closed or broke the protocol after the request was (partly) sent."""


class UpstreamHungUp(UpstreamBroken):
    """A connection that had answered before was closed without a byte of answer: its idle time was probably over.

    Whoever may run twice may be sent again.
    """


class UpstreamTimedOut(UpstreamError):
    """The request's deadline passed before the next hop answered."""


class StartFailed(Exception):
    """A unit cannot start. The text is one line that says what to do about it."""
