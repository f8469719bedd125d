"""gRPC-Web, the form of gRPC for browsers (github.com/grpc/grpc, doc/PROTOCOL-WEB.md): its types and its body. Pure.

Messages are framed as in gRPC. The trailers are one more frame, the last, marked by the highest bit of its first byte.
In the text form the whole body is base64; a sender may pad wherever it has flushed.
"""

import re
from binascii import Error, a2b_base64, b2a_base64
from collections.abc import Iterable
from typing import Final

from oriel_wire.errors import BadMessage
from oriel_wire.h2.known_fields import Field as HeaderField

BINARY: Final = b"application/grpc-web"
TEXT: Final = b"application/grpc-web-text"
_TYPE: Final = re.compile(rb"application/grpc-web(?:-text)?(?:\+proto)?[ \t]*(?:;.*)?\Z", re.IGNORECASE)
_PADDED: Final = re.compile(rb"[^=]*={0,2}")
_TRAILERS: Final = b"\x80"
# Headers that browsers and libraries of gRPC-Web add to a request for themselves.
_OF_BROWSERS: Final = frozenset(
    {
        *(b"accept", b"cache-control", b"content-encoding", b"cookie", b"dnt", b"origin", b"pragma", b"priority"),
        *(b"referer", b"upgrade-insecure-requests", b"x-grpc-web", b"x-user-agent"),
    }
)


def is_grpc_web(content_type: bytes) -> bool:
    """Return whether a body of this type is a call of gRPC-Web whose messages are protobuf."""
    return _TYPE.match(content_type) is not None


def metadata(fields: Iterable[HeaderField]) -> list[HeaderField]:
    """The fields of a request that are those of its call, without what browsers add for themselves."""
    return [
        field for field in fields if field[0] not in _OF_BROWSERS and not field[0].startswith((b"accept-", b"sec-"))
    ]


def trailer_frame(trailers: Iterable[HeaderField]) -> bytes:
    """The last frame of an answer."""
    text = b"".join([b"%b: %b\r\n" % field for field in trailers])
    return _TRAILERS + len(text).to_bytes(4, "big") + text


def encode_piece(data: bytes | memoryview) -> bytes:
    """A piece of a body in the text form."""
    return b2a_base64(data, newline=False)


class TextReader:
    """Decodes a body in the text form as it comes."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""  # less than four characters

    def feed(self, data: bytes | memoryview, end: bool) -> bytes:
        """Read more of the body. Raises BadMessage for what is not base64, or at its end not all of it."""
        text = self._rest + data
        whole = len(text) & ~3
        self._rest = text[whole:]
        if end and self._rest:
            raise BadMessage("the body ends within four characters of base64")
        try:
            if b"=" not in text:
                return a2b_base64(text[:whole], strict_mode=True)
            return b"".join([a2b_base64(piece, strict_mode=True) for piece in _PADDED.findall(text, 0, whole)])
        except Error as error:
            raise BadMessage("the body is not base64") from error
