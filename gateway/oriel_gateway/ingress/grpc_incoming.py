"""The messages of one gRPC call that do not come in one piece with its metadata, or are many.

Until it is known which pool a message is for, its client may send no more than a stream's window (64 KiB): the name of
the model has to be in them. Then the limits of the tenant are view, once for a call. From then on what has come is on
that pool's byte budget, and one window more: as much again as has come, at least 64 KiB and at most 4 MiB, which the
client may send. One message of a stream is taken at a time; further ones wait at the client.
"""

import asyncio
from collections import deque
from typing import Any, Final

from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.ingress.grpc_compressed import CompressedBeginning
from oriel_gateway.ingress.grpc_rules import MODEL_PATHS, GrpcLimits, bound_message, no_message
from oriel_gateway.ingress.grpc_view import GrpcView
from oriel_gateway.pools.pool import PoolGate, holding_of
from oriel_gateway.routing.targets import check_model
from oriel_wire.errors import BadMessage
from oriel_wire.h2.grpc import PREFIX_BYTES
from oriel_wire.h2.streams import Stream
from oriel_wire.v2.grpc_names import MAX_BEGINNING, Beginning

__all__ = ["Incoming"]

_PIECE: Final = 2 * 1024
_LARGE: Final = 64 * 1024
_WIDEST: Final = 4 * 1024 * 1024


class Incoming:
    """The received part of one call's messages. Used on the loop. complete: the client sends nothing else."""

    __slots__ = (
        *("_view", "_beginning", "_messages", "_parts", "_size", "_stream", "_waiter", "_wanted"),
        "complete",
    )

    def __init__(self, view: GrpcView, stream: Stream) -> None:
        self._view = view
        self._stream = stream
        self._parts: list[bytes | bytearray | memoryview] = []  # the parts of an incomplete message
        self._size = 0  # their bytes
        self._wanted = 0  # the bytes that complete the message; 0 if that is not known
        self._beginning: Beginning | CompressedBeginning | None = None  # reads its model, while that is not known
        # of a stream: whole messages that were not taken yet, and whether each is compressed
        self._messages: deque[tuple[bytes, bool]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.complete = False

    def whole(self, data: bytes | memoryview) -> bytes:
        """Return all bytes so far, `data` the last of them; nothing is kept."""
        parts = self._parts
        if not parts:
            return bytes(data) if isinstance(data, memoryview) else data
        self._parts, self._size, self._wanted, self._beginning = [], 0, 0, None
        return b"".join((*parts, data))

    def pieces(self, data: bytes | memoryview) -> bytes | list[bytes | memoryview]:
        """Return all bytes so far as they are, uncopied if they are many. The prefix of the message is whole in the
        first piece.
        """
        parts, size = self._parts, self._size + len(data)
        if size < _LARGE or not parts or len(parts[0]) < PREFIX_BYTES or _kept_bytes(parts) > 2 * size:
            return self.whole(data)
        self._parts, self._size, self._wanted = [], 0, 0
        if data:
            parts.append(data)
        return [bytes(part) if isinstance(part, bytearray) else part for part in parts]

    def keep(self, data: bytes | memoryview) -> None:
        """Keep more of an incomplete message, and let its client send on if its pool has room. Raises Refused."""
        parts, size = self._parts, len(data)
        if parts and size < _PIECE and isinstance(last := parts[-1], bytearray):
            last += data  # joined, because an object for each small piece would take more memory than the piece
        else:
            parts.append(bytearray(data) if size < _PIECE else data)
        self._size += size
        if not self._wanted and self._size >= PREFIX_BYTES:
            self._read_prefix()
        if self._size >= PREFIX_BYTES and not self._messages:
            self._reserve()

    def _read_prefix(self) -> None:
        """Learn the length of an incomplete message."""
        parts = self._parts
        if len(parts[0]) < PREFIX_BYTES:
            parts[:] = [b"".join(parts)]
        size = int.from_bytes(parts[0][1:PREFIX_BYTES], "big")
        if size > GrpcLimits.MAX_MESSAGE_BYTES:
            raise Refused(Outcome.TOO_LARGE, f"the message is larger than {GrpcLimits.MAX_MESSAGE_BYTES} bytes")
        self._wanted = size + PREFIX_BYTES

    def _reserve(self) -> None:
        """Take what has come of a message, and one window, from the budget of its pool, once its model is known."""
        view, stream = self._view, self._stream
        if self._size > self._wanted:
            raise no_message()
        gate = view.gate or self._likely_gate()
        if gate is None:
            return
        tenant = view.tenant
        assert tenant is not None
        if (holding := view.holding) is None:
            bound_message(self._wanted - PREFIX_BYTES, gate.pool)
            view.gate = gate
            holding = view.holding = holding_of(tenant, view)
        window = min(max(self._size, _LARGE), _WIDEST)
        if (more := min(self._size + window, self._wanted) - PREFIX_BYTES - holding.units) > 0:
            if not gate.reserve_bytes(holding, more):
                raise gate.no_bytes_for(tenant)
            view.connection.widen(stream, window)
        view.connection.consumed(stream, stream.held_bytes)

    def _likely_gate(self) -> PoolGate | None:
        """Return the pool that an incomplete message is for, by the names in its beginning; None while these are
        incomplete.
        """
        view = self._view
        tenant, call = view.tenant, view.call
        assert tenant is not None
        if call is not None:
            return call.gate
        if view.rpc.path not in MODEL_PATHS:
            name = version = ""
        else:
            parts = self._parts
            if (beginning := self._beginning) is None:
                beginning = self._beginning = CompressedBeginning() if parts[0][0] == 1 else Beginning()
            if len(parts) > 1:  # joined, so that it is read on where it was left
                first = parts[0]
                one = parts[0] = first if isinstance(first, bytearray) else bytearray(first)
                one += b"".join(parts[1:])
                del parts[1:]
            try:
                name, version = beginning.read(parts[0], PREFIX_BYTES)
            except BadMessage as error:
                raise Refused(Outcome.INVALID_REQUEST, error.message) from error
            if not name:
                view.connection.widen(self._stream, PREFIX_BYTES + MAX_BEGINNING)  # base64 text is longer
                return None
            self._beginning = None
            check_model(tenant, name, version)
        return view.reserve(tenant, view.target_of(tenant, name, version), self._wanted - PREFIX_BYTES)

    def drop(self) -> None:
        """The call is over: keep nothing any more."""
        self._parts = []
        self._messages.clear()

    # Messages of a stream --------------------------------------------------------------------------------------

    def feed(self, data: bytes | memoryview) -> bool:
        """Take whole messages out of what has come, and keep the rest. Returns whether one waits. Raises Refused."""
        if self._size + len(data) < self._wanted and not self.complete:
            self.keep(data)
            return bool(self._messages)
        whole = self.whole(data)
        at, size = 0, len(whole)
        while size - at >= PREFIX_BYTES:
            end = at + PREFIX_BYTES + int.from_bytes(whole[at + 1 : at + PREFIX_BYTES], "big")
            if end > size:
                break
            self._messages.append((whole[at + PREFIX_BYTES : end], whole[at] == 1))
            at = end
        if at < size:
            if self.complete:
                raise no_message()
            self.keep(whole[at:])
        if (self._messages or self.complete) and (waiter := self._waiter) is not None and not waiter.done():
            waiter.set_result(None)
        return bool(self._messages)

    async def next_message(self) -> tuple[bytes, bool] | None:
        """The next message of a stream and whether it is compressed; None after the last one."""
        view, stream = self._view, self._stream
        while not self._messages:
            if self.complete:
                return None
            self._waiter = view.connection.server.loop.create_future()
            if self._size >= PREFIX_BYTES:
                try:
                    self._reserve()  # its bytes could not be reserved while an earlier message waited
                except Refused as refused:
                    view.refuse(refused)
                    return None
            await self._waiter
        view.release()
        message = self._messages.popleft()
        view.connection.consumed(stream, min(stream.held_bytes, len(message[0]) + PREFIX_BYTES))
        return message

    @property
    def over(self) -> bool:
        """Return whether the client has sent its last message, and all of them were taken."""
        return self.complete and not self._messages


def _kept_bytes(parts: list[bytes | bytearray | memoryview]) -> int:
    """Return how much memory these pieces occupy: a view keeps everything that was received with it."""
    size = 0
    last: Any = None
    for part in parts:
        owner: Any = part.obj if isinstance(part, memoryview) else part
        if owner is not last:
            size += len(owner)
            last = owner
    return size
