"""Decompress gRPC messages within bounds, and only where the route names one model.

The decompressed message is what is checked and sent on.

If the name were known only after decompression, any caller could make the gateway decompress bombs. So 64 KiB are
decompressed first: the name has to be in them, the caller has to be allowed to use it, and a route has to name exactly
this model. Only then the rest is decompressed, within its pool's byte budget and up to the pool's `max_body_bytes`; the
resulting message is checked like any other.
"""

import asyncio
import zlib

from oriel_gateway.core import Gateway
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.pools.holding import no_bytes_for
from oriel_gateway.pools.pool import PoolGate
from oriel_gateway.routing.targets import check_model
from oriel_policies.documents import Tenant
from oriel_wire.errors import BadMessage
from oriel_wire.v2.grpc_names import MAX_PEEK, peek_beginning, peek_model

PIECE_BYTES = 256 * 1024  # decompressed at a time, in about a millisecond
_GZIP, _ZLIB = zlib.MAX_WBITS | 16, zlib.MAX_WBITS


def names_of_compressed(beginning: bytes | memoryview) -> tuple[str, str]:
    """Return the model's name and version in the first bytes of a compressed message. Raises Refused."""
    form = _GZIP if beginning[:1] == b"\x1f" else _ZLIB
    try:
        return peek_beginning(zlib.decompressobj(form).decompress(beginning[:PIECE_BYTES], MAX_PEEK))
    except (zlib.error, BadMessage):
        raise _unreadable() from None


async def decompress(gateway: Gateway, tenant: Tenant, message: bytes) -> bytes:
    """Return the decompressed message. Raises Refused. If this is cancelled, the reserved bytes are released."""
    form = _GZIP if message[:1] == b"\x1f" else _ZLIB
    name, version = names_of_compressed(message)
    gate = _gate(gateway, tenant, name, version)
    urgent = tenant.tier.band == gateway.top_band
    held = 0
    try:
        pieces, inflater = [], zlib.decompressobj(form)
        read, rest = 0, b""
        while not inflater.eof:
            # Input and output are processed in pieces: a message of megabytes may also decompress into nothing.
            if not rest:
                if read >= len(message):
                    raise _unreadable()
                rest = message[read : read + PIECE_BYTES]
                read += PIECE_BYTES
            piece = inflater.decompress(rest, PIECE_BYTES)
            rest = inflater.unconsumed_tail
            if held + len(piece) > (most := gate.pool.max_body_bytes):
                raise Refused(Outcome.TOO_LARGE, f"the message is larger than {most} bytes once it is decompressed")
            if not gate.reserve_bytes(len(piece), urgent=urgent):
                raise no_bytes_for(gate, tenant)
            held += len(piece)
            pieces.append(piece)
            await asyncio.sleep(0)
        whole = b"".join(pieces)
        if inflater.unused_data or read < len(message) or peek_model(whole) != (name, version):
            raise _unreadable()
    except (zlib.error, BadMessage):
        raise _unreadable() from None
    finally:
        gate.release_bytes(held)
    return whole


def _gate(gateway: Gateway, tenant: Tenant, name: str, version: str) -> PoolGate:
    """Return the pool of the route that names this model."""
    if not name:
        raise _unreadable()
    check_model(tenant, name, version)
    routes = gateway.targets.routes.for_model(name, version)
    if not routes or any(route.model != name for route in routes):
        raise Refused(
            Outcome.ENCODING_UNSUPPORTED,
            "compressed messages are taken only where a route names the model exactly; send it without compression",
        )
    return gateway.pools[routes[0].pool]


def _unreadable() -> Refused:
    return Refused(
        Outcome.INVALID_REQUEST,
        f"the message is not gzip or deflate of a v2 message with model_name and model_version in its first {MAX_PEEK} "
        "bytes",
    )
