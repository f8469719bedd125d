"""Chunked transfer coding (RFC 9112 section 7.1), as an incremental decoder without I/O.

Strict: sizes are 1 to 8 hex digits, extensions are dropped, trailers are bounded, every line ends in CRLF.
"""

import re

from oriel_wire.errors import BadMessage, TooLarge

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})(?:[ \t]*;[\x20-\x7e\x80-\xff\t]*)?\Z")
_TRAILER = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\x20-\x7e\x80-\xff\t]*\Z")
_MAX_LINE = 256
_MAX_TRAILERS = 4096
LAST_CHUNK = b"0\r\n\r\n"


def chunk(data: bytes | memoryview) -> bytes:
    """`data` (not empty) as one chunk."""
    return b"".join((b"%x\r\n" % len(data), data, b"\r\n"))


def last_chunk(trailers: str) -> bytes:
    """The end of a chunked body with trailers: lines, each with its CRLF."""
    return f"0\r\n{trailers}\r\n".encode("latin-1")


class ChunkedDecoder:
    """Decodes bytes as they arrive and returns the data in them.

    `done` is set once the last chunk and its `trailers` (lines) were read; `rest` then holds what followed.
    """

    __slots__ = ("_buffer", "_left", "_trailer_bytes", "_trailers", "done", "rest", "trailers")

    def __init__(self) -> None:
        self._buffer = b""
        self._left = -1  # data bytes of this chunk that are missing; -1: a size line comes next; 0: its CRLF comes next
        self._trailers = False
        self._trailer_bytes = 0
        self.trailers: list[bytes] = []
        self.done = False
        self.rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The pieces of payload in `data`, in order. Raises BadMessage; the connection cannot be used afterwards."""
        out: list[bytes] = []
        if self._buffer:
            data = self._buffer + data
            self._buffer = b""
        position, end = 0, len(data)
        while position < end:
            if self._left > 0:
                piece = data[position : position + self._left]
                out.append(piece)
                self._left -= len(piece)
                position += len(piece)
                continue
            stop = data.find(b"\r\n", position, position + _MAX_LINE + 2)
            if stop < 0:
                self._buffer = data[position:]
                if len(self._buffer) > _MAX_LINE + 1 or b"\n" in self._buffer:
                    raise BadMessage("a chunk is malformed")
                break
            line = data[position:stop]
            position = stop + 2
            if self._trailers:
                self._trailer_bytes += len(line) + 2
                if self._trailer_bytes > _MAX_TRAILERS:
                    raise TooLarge("the trailers are too long")
                if line and _TRAILER.match(line) is None:
                    raise BadMessage("a trailer is malformed")
                if not line:
                    self.done = True
                    self.rest = data[position:]
                    break
                self.trailers.append(line)
            elif self._left == 0:
                if line:
                    raise BadMessage("a chunk is longer than its size")
                self._left = -1
            else:
                match = _SIZE.match(line)
                if match is None:
                    raise BadMessage("a chunk size is malformed")
                self._left = int(match[1], 16)
                if self._left == 0:
                    self._trailers = True
        return out
