"""Reads and writes streams of values: NDJSON (one JSON text per line) and server-sent events."""

from collections.abc import AsyncIterator, Callable
from typing import Any

from oriel_logic.errors import InputTooLarge, Refused

MAX_LINE_BYTES = 1 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


async def lines(pieces: AsyncIterator[bytes], *, limit_bytes: int, events: bool = False) -> AsyncIterator[bytes]:
    """Yield the lines of a body without their ends, empty ones too, each as soon as it is complete.

    events: split as server-sent events: a CR alone ends a line too, and a byte order mark before the first is dropped.
    Raises InputTooLarge past `limit_bytes` for the stream or MAX_LINE_BYTES for one line.
    """
    rest = bytearray()  # the incomplete last line; each of its bytes is searched once
    total = 0
    may_have_mark, after_cr = events, False
    async for piece in pieces:
        total += len(piece)
        if total > limit_bytes:
            raise InputTooLarge(f"the stream is larger than the {limit_bytes} bytes this service reads")
        if events and piece:
            ends_in_cr = piece.endswith(b"\r")
            if after_cr:
                piece = piece.removeprefix(b"\n")  # the line has ended with the CR
            after_cr = ends_in_cr
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        whole: list[bytes] = []
        if b"\n" in piece:
            *whole, piece = (bytes(rest) + piece).split(b"\n")
            rest.clear()
        rest += piece
        for each in whole:
            if len(each) > MAX_LINE_BYTES:
                raise line_too_long()
            if may_have_mark:
                each, may_have_mark = each.removeprefix(BYTE_ORDER_MARK), False
            yield each.removesuffix(b"\r")
        if len(rest) > MAX_LINE_BYTES:
            raise line_too_long()
    if rest:
        yield bytes(rest).removesuffix(b"\r")


def line_too_long() -> InputTooLarge:
    return InputTooLarge(f"a line of a stream may have {MAX_LINE_BYTES} bytes")


async def texts_of_events(found: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of server-sent events from their lines. An event that no blank line ends is dropped."""
    data: list[bytes] = []
    size = 0
    async for each in found:
        if not each:
            if data:
                yield b"\n".join(data)
            data, size = [], 0
            continue
        name, _, value = each.partition(b":")
        if name == b"data":
            value = value.removeprefix(b" ")
            size += len(value) + 1
            if size > MAX_LINE_BYTES:
                raise line_too_long()
            data.append(value)


async def items(
    pieces: AsyncIterator[bytes], decode: Callable[[bytes], Any], *, events: bool, limit_bytes: int
) -> AsyncIterator[Any]:
    """Yield the values of a streamed body. Raises Refused with the path of the invalid value in `field`:
    `$[3].price`.
    """
    found = lines(pieces, limit_bytes=limit_bytes, events=events)
    texts = texts_of_events(found) if events else found
    place = 0
    async for text in texts:
        if not text.strip():
            continue
        try:
            value = decode(text)
        except Refused as refused:
            field = f"$[{place}]{refused.field.removeprefix('$')}"
            raise type(refused)(f"item {place} of the stream: {refused.message}", field=field) from refused
        yield value
        place += 1


def line(text: bytes) -> bytes:
    """Write one line of NDJSON. JSON escapes line ends inside strings and has none elsewhere."""
    return text + b"\n"


def event(text: bytes) -> bytes:
    """Write one server-sent event."""
    if b"\n" not in text and b"\r" not in text:
        return b"data: " + text + b"\n\n"
    normal = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    return b"data: " + normal.replace(b"\n", b"\ndata: ") + b"\n\n"


def error_event(body: bytes) -> bytes:
    """Write the last event of a stream that failed after it began; its event name is `error`."""
    return b"event: error\n" + event(body)
