"""gzip and deflate in both directions. Large bodies are processed in threads, because zlib releases the interpreter
lock.

A body may decompress to `inflated_limit` and no further: zlib stops there, so a bomb costs no more than an honest body.
"""

import asyncio
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

from oriel_inference.errors import InferenceError, InvalidRequest, RequestTooLarge
from oriel_wire.engine.limits import inflated_limit

ACCEPTED = "gzip, deflate"
MIN_BYTES = 512  # a smaller answer is not worth compressing
_INLINE_IN = 16 * 1024
_INLINE_OUT = 256 * 1024
_LEVEL = 1
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS
_WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_THREADS = 2
_SLICE = 256 * 1024

_T = TypeVar("_T")
Parts = Sequence[bytes | memoryview]


def is_encoded(encoding: str | None) -> bool:
    """Return whether a Content-Encoding means that the body is compressed."""
    return bool(encoding) and encoding.lower() != "identity"  # type: ignore[union-attr]


def is_known(encoding: str) -> bool:
    """Return whether `Encodings.decompress` supports it."""
    return encoding.lower() in ("gzip", "x-gzip", "deflate")


@lru_cache(maxsize=256)
def negotiate(accept: str) -> str:
    """Choose from `Accept-Encoding`: "gzip", "deflate" or "" for an uncompressed body. The higher q wins, gzip among
    equals.
    """
    best, best_q = "", 0.0
    for each in accept.lower().split(",")[:16]:
        name, _, parameters = each.partition(";")
        name = name.strip()
        if name not in _WINDOWS:
            continue
        q = 1.0
        key, _, value = parameters.strip().partition("=")
        if key.strip() == "q":
            try:
                q = float(value)
            except ValueError:
                continue
        if q > best_q or (q == best_q and q > 0.0 and name == "gzip"):
            best, best_q = name, q
    return best


class Encodings:
    """Compresses and decompresses for one server. Callbacks are called on the loop, immediately for small bodies. End
    with `close`.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="oriel-encoding")

    def close(self) -> None:
        """Drop what has not begun; blocks until running work has ended."""
        self._threads.shutdown(cancel_futures=True)

    def decompress(self, body: bytes | memoryview, then: Callable[[bytes | InferenceError], None]) -> None:
        """Call `then` with the decompressed body, or with the error."""
        most = inflated_limit(len(body), self._limit)
        if len(body) <= _INLINE_IN:
            limit = min(_INLINE_OUT, most)
            result = _inflate(body, limit)
            if not isinstance(result, RequestTooLarge) or limit == most:
                then(result)
                return
        self._in_thread(lambda: _inflate(body, most), then)

    def compress(self, parts: Parts, encoding: str, then: Callable[[bytes], None]) -> None:
        """Call `then` with `parts` as one compressed body. encoding: a result of `negotiate`."""
        if sum(len(part) for part in parts) <= _INLINE_IN:
            then(_deflate(parts, encoding))
            return
        self._in_thread(lambda: _deflate(parts, encoding), then)

    def _in_thread(self, work: Callable[[], _T], then: Callable[[_T], None]) -> None:
        def job() -> None:
            result = work()
            self._loop.call_soon_threadsafe(then, result)

        self._threads.submit(job)


def _inflate(body: bytes | memoryview, limit: int) -> bytes | InferenceError:
    """Decompress in slices: zlib releases the interpreter lock while it works, but copies its input and output with the
    lock held.
    """
    stream = zlib.decompressobj(_GZIP_OR_ZLIB)
    pieces: list[bytes] = []
    left = limit + 1
    position = 0
    given: bytes | memoryview = b""
    view = memoryview(body)
    try:
        while left and not stream.eof:
            if not given:
                given = view[position : position + _SLICE]
                position += len(given)
            piece = stream.decompress(given, min(left, _SLICE))
            given = stream.unconsumed_tail
            if piece:
                pieces.append(piece)
                left -= len(piece)
            elif not given and position == len(body):
                break
    except zlib.error:
        return InvalidRequest("the body does not match its Content-Encoding")
    if not left:
        return RequestTooLarge(f"the body is larger than {limit} bytes once decompressed: send it without compression")
    if not stream.eof:
        return InvalidRequest("the compressed body ends early")
    if stream.unused_data or position < len(body):
        return InvalidRequest("the compressed body is followed by other bytes")
    return b"".join(pieces)


def _deflate(parts: Parts, encoding: str) -> bytes:
    stream = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOWS[encoding])
    pieces = [stream.compress(part) for part in parts]
    pieces.append(stream.flush())
    return b"".join(pieces)
