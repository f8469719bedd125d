"""The hooks that a server connection calls in its subclass; `server` describes when."""

import asyncio

from mypy_extensions import mypyc_attr

from oriel_wire.h1.request import RequestHead


@mypyc_attr(allow_interpreted_subclasses=True)
class ServerHooks(asyncio.Protocol):
    """The hooks, without state. They are called on the loop and must not wait."""

    __slots__ = ()

    def on_head(self, head: RequestHead) -> None:
        """Called when a head is complete; `head.content_length` is within max_body_bytes. May answer at once."""
        raise NotImplementedError

    def on_data(self, data: bytes | memoryview) -> None:
        """Called with each piece of the body: never empty, chunk framing removed. The first piece of a large body is a
        memoryview.
        """
        raise NotImplementedError

    def on_end(self) -> None:
        """Called when the body is complete, right after on_head if there is none."""
        raise NotImplementedError

    def on_lost(self) -> None:
        """Called when the client has left while a request was unanswered."""
        raise NotImplementedError

    def on_refused(self, status: int, message: str) -> None:
        """Called when the framing is wrong or the rest of a request is late: end the request and write an answer.

        The connection is closed right afterwards, and `on_lost` is not called any more.
        """
        raise NotImplementedError

    def on_http2(self, data: bytes) -> bool:
        """Called if a new connection begins with the preface of HTTP/2, or the first 18 bytes of it and more; over TLS
        if the handshake has chosen HTTP/2, before anything is received.

        data: all that was received. True: another protocol has the transport from now on. False: this server does not
        take HTTP/2, and refuses the request.
        """
        return False

    def eof_received(self) -> bool:
        """Treat a half-closed client as gone, because it cannot be distinguished from one that left."""
        return False

    def on_writable(self, writable: bool) -> None:
        """Called when the client has stopped or resumed reading its answer."""
