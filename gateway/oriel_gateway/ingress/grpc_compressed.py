"""Decompress gRPC messages within bounds.

The decompressed message is what is checked and sent on.

If the name were known only after decompression, any caller could make the gateway decompress bombs. So 64 KiB are
decompressed first: the name has to be in them, the caller has to be allowed to use it, and a route has to lead to a
pool. Only then the rest is decompressed, within that pool's byte budget, its `max_body_bytes` and what
`inflated_limit` allows for its size; the resulting message is checked like any other.
"""

import asyncio
import zlib

from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.pools.pool import PoolGate, holding_of
from oriel_policies.documents import Tenant
from oriel_wire.engine.limits import inflated_limit
from oriel_wire.errors import BadMessage
from oriel_wire.v2.grpc_names import MAX_PEEK, Beginning, peek_model

PIECE_BYTES = 256 * 1024  # decompressed at a time, in about a millisecond
_GZIP, _ZLIB = zlib.MAX_WBITS | 16, zlib.MAX_WBITS
_GZIP_MAGIC = 0x1F  # its first byte


class CompressedBeginning:
    """The same as `Beginning` for a compressed message: decompresses what has come since it was read last."""

    __slots__ = ("_inflater", "_names", "_plain", "_read")

    def __init__(self) -> None:
        self._inflater: zlib._Decompress | None = None
        self._names = Beginning()
        self._plain = bytearray()
        self._read = 0

    def read(self, message: bytes | bytearray | memoryview, start: int = 0) -> tuple[str, str]:
        """Return the name and the version as far as they are known. Raises Refused."""
        at, end = start + self._read, min(len(message), start + self._read + PIECE_BYTES)
        if at == end:
            return "", ""
        if (inflater := self._inflater) is None:
            inflater = self._inflater = zlib.decompressobj(_GZIP if message[at] == _GZIP_MAGIC else _ZLIB)
        self._read = end - start
        try:
            # there is room for more: of a beginning as long as this either the name is known or `read` has raised
            self._plain += inflater.decompress(message[at:end], MAX_PEEK - len(self._plain))
            name, version = self._names.read(self._plain)
        except (zlib.error, BadMessage):
            raise _unreadable() from None
        if inflater.eof and not name:
            raise _unreadable()
        return name, version


def compressed_model(message: bytes) -> tuple[str, str]:
    """Return the name and the version of the model that a whole compressed message begins with. Raises Refused."""
    name, version = CompressedBeginning().read(message)
    if not name:
        raise _unreadable()
    return name, version


async def decompress(gate: PoolGate, tenant: Tenant, model: tuple[str, str], message: bytes) -> bytes:
    """Return the decompressed message. Raises Refused. If this is cancelled, the reserved bytes are released.

    gate: the pool that the message is for. model: what `compressed_model` has returned.
    """
    form = _GZIP if message[:1] == bytes((_GZIP_MAGIC,)) else _ZLIB
    holding = holding_of(tenant)
    try:
        pieces, inflater = [], zlib.decompressobj(form)
        read, rest = 0, b""
        most = inflated_limit(len(message), gate.pool.max_body_bytes)
        while not inflater.eof:
            # Input and output are processed in pieces: a message of megabytes may also decompress into nothing.
            if not rest:
                if read >= len(message):
                    raise _unreadable()
                rest = message[read : read + PIECE_BYTES]
                read += PIECE_BYTES
            piece = inflater.decompress(rest, PIECE_BYTES)
            rest = inflater.unconsumed_tail
            if holding.units + len(piece) > most:
                text = f"the message is larger than {most} bytes once it is decompressed: send it without compression"
                raise Refused(Outcome.TOO_LARGE, text)
            if not gate.reserve_bytes(holding, len(piece)):
                raise gate.no_bytes_for(tenant)
            gate.bytes.fix(holding)  # it lasts for a moment only
            pieces.append(piece)
            await asyncio.sleep(0)
        whole = b"".join(pieces)
        if inflater.unused_data or read < len(message) or peek_model(whole) != model:
            raise _unreadable()
    except (zlib.error, BadMessage):
        raise _unreadable() from None
    finally:
        gate.bytes.release(holding)
    return whole


def _unreadable() -> Refused:
    return Refused(
        Outcome.INVALID_REQUEST,
        f"the message is not gzip or deflate of a v2 message with model_name and model_version in its first {MAX_PEEK} "
        "bytes",
    )
