"""Compressed gRPC messages: unfolded here, within bounds, and only where the route names one model.

gRPC gives them to us as they came (its own unfolding has no bound of ours), and does not say that they are compressed.
It need not: a v2 message begins neither as gzip nor as zlib does (0x1F is no field's tag, 0x78 is field 15's), and what
is judged and sent on is in any case what we made of it.

A message whose name is known only when it is unfolded would make everybody's work of everybody's bombs. So 64 KiB of it
are unfolded first: the name has to be there, has to be the caller's to use, and a route has to be written for exactly
this name. Only then the rest is, on its pool's byte budget, up to the pool's `max_body_bytes`; the message that comes
out is judged like any other.
"""

import asyncio
import zlib

from oriel_gateway.core import Gateway
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.grpc_model import MAX_PEEK, peek_beginning, peek_model
from oriel_gateway.pools import PoolGate
from oriel_gateway.targets import check_model
from oriel_policies.documents import Tenant
from oriel_wire.errors import BadMessage

__all__ = ["is_folded", "unfold"]

PIECE_BYTES = 256 * 1024  # unfolded at a time: about a millisecond
_GZIP, _ZLIB = zlib.MAX_WBITS | 16, zlib.MAX_WBITS


def is_folded(message: bytes) -> bool:
    """Whether `message` begins as compressed ones do."""
    return message[:2] == b"\x1f\x8b" or _begins_as_zlib(message)


def _begins_as_zlib(message: bytes) -> bool:
    return message[:1] == b"\x78" and len(message) > 1 and (0x7800 | message[1]) % 31 == 0


async def unfold(gateway: Gateway, tenant: Tenant, message: bytes) -> bytes:
    """What a compressed message says. Raises Refused; cancelled, the budget has its bytes back."""
    form = _GZIP if message[:1] == b"\x1f" else _ZLIB
    try:
        name, version = peek_beginning(zlib.decompressobj(form).decompress(message[:PIECE_BYTES], MAX_PEEK))
    except (zlib.error, BadMessage):
        raise _unreadable() from None
    gate = _gate(gateway, tenant, name, version)
    urgent = tenant.tier.band == gateway.top_band
    held = 0
    try:
        pieces, inflater = [], zlib.decompressobj(form)
        read, rest = 0, b""
        while not inflater.eof:
            # In pieces both ways: there are messages of megabytes that unfold into nothing, too.
            if not rest:
                if read >= len(message):
                    raise _unreadable()
                rest = message[read : read + PIECE_BYTES]
                read += PIECE_BYTES
            piece = inflater.decompress(rest, PIECE_BYTES)
            rest = inflater.unconsumed_tail
            if held + len(piece) > (most := gate.pool.max_body_bytes):
                raise Refused(Outcome.TOO_LARGE, f"the message is larger than {most} bytes once it is decompressed")
            if not gate.hold(len(piece), urgent=urgent):
                retry_after_s = gate.admission.retry_after_s()
                raise Refused(Outcome.QUEUE_FULL, "too many bytes wait for this pool", retry_after_s=retry_after_s)
            held += len(piece)
            pieces.append(piece)
            await asyncio.sleep(0)
        whole = b"".join(pieces)
        if inflater.unused_data or read < len(message) or peek_model(whole) != (name, version):
            raise _unreadable()
    except (zlib.error, BadMessage):
        raise _unreadable() from None
    finally:
        gate.release(held)
    return whole


def _gate(gateway: Gateway, tenant: Tenant, name: str, version: str) -> PoolGate:
    """The pool of the route that names this model."""
    if not name:
        raise _unreadable()
    check_model(tenant, name, version)
    routes = gateway.routes.for_model(name, version)
    if not routes or any(route.model != name for route in routes):
        raise Refused(
            Outcome.ENCODING_UNSUPPORTED,
            "compressed messages are taken only where a route names the model exactly; send it without compression",
        )
    return gateway.pools[routes[0].pool]


def _unreadable() -> Refused:
    return Refused(
        Outcome.BAD_REQUEST,
        f"the message is not gzip or deflate of a v2 message with model_name and model_version in its first {MAX_PEEK} "
        "bytes",
    )
