"""One gRPC upstream address: its connections, its calls under way, and its probes."""

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Any, Final

from google.protobuf.message import DecodeError

from oriel_gateway.pools.endpoint_state import EndpointState, Reach
from oriel_gateway.pools.grpc_answers import GrpcAnswer, GrpcExchange
from oriel_gateway.pools.http_probe import MAX_INDEX_BYTES
from oriel_policies.documents import Pool
from oriel_wire.discovery.discovery import Address
from oriel_wire.engine.h2_upstream import H2Endpoint
from oriel_wire.errors import UpstreamError, UpstreamUnreachable
from oriel_wire.h2.grpc import DEADLINE_EXCEEDED, NOT_FOUND, UNAVAILABLE, UNIMPLEMENTED, encode_timeout, prefix
from oriel_wire.h2.hpack import literal
from oriel_wire.v2.grpc_names import append_model
from oriel_wire.v2.proto import v2_pb2

_FIRST: Final = b"\x83\x86"  # POST, http
_REST: Final = literal(b"content-type", b"application/grpc") + literal(b"te", b"trailers")
_SERVER_READY: Final = literal(b":path", b"/inference.GRPCInferenceService/ServerReady")
_INDEX: Final = literal(b":path", b"/inference.GRPCInferenceService/RepositoryIndex")
_MODEL_READY: Final = literal(b":path", b"/inference.GRPCInferenceService/ModelReady")
_TRUE: Final = b"\x08\x01"


class GrpcEndpoint(H2Endpoint, EndpointState):
    """A gRPC address of a pool."""

    def __init__(self, address: Address, pool: Pool) -> None:
        H2Endpoint.__init__(
            self, *address, GrpcExchange, connect_timeout_s=pool.connect_timeout_s, max_idle_s=pool.idle_timeout_s
        )
        EndpointState.__init__(self, address, pool)

    def adopt(self, pool: Pool) -> None:
        """Adopt the new bounds of the pool."""
        self.connect_timeout_s = pool.connect_timeout_s
        self.max_idle_s = pool.idle_timeout_s

    def probe(
        self, timeout_s: float, path: str, done: Callable[[Reach | None], None], *, attempt_s: float = 0.0
    ) -> None:
        """Probe the endpoint with `ServerReady`.

        path: the pool's probe over HTTP; "" if a connection is enough.
        done: called once with the result; None means no usable answer.
        attempt_s: without a connection after so long the attempt to connect ends; 0.0 for no such bound.
        """
        timer: asyncio.TimerHandle | None = None
        if attempt_s and not self.connected:
            timer = asyncio.get_running_loop().call_later(attempt_s, self._give_up_attempt)

        def probed(found: Found) -> None:
            if timer is not None:
                timer.cancel()
            reach = _reach(found, bool(path))
            if reach is Reach.NOT_READY and isinstance(found, tuple) and found[0].status == 200 and self.reads_index():
                GrpcProbe(self, _INDEX, b"", timeout_s, lambda index: done(self._by_index(index)))
            else:
                done(reach)

        GrpcProbe(self, _SERVER_READY, b"", timeout_s, probed)

    def _by_index(self, index: "Found") -> Reach:
        if not isinstance(index, tuple) or index[0].status != 200:
            return Reach.NOT_READY
        try:
            models = v2_pb2.RepositoryIndexResponse.FromString(index[1]).models
        except DecodeError:
            return Reach.NOT_READY
        return self.reach_by({each.state for each in models})

    def _give_up_attempt(self) -> None:
        if not self.connected:
            self.give_up_connecting()

    def ask_for_model(self, model: str, timeout_s: float, done: Callable[[bool | None], None]) -> None:
        name, _, version = model.partition("/versions/")
        question = append_model(b"", name, version)
        GrpcProbe(self, _MODEL_READY, question, timeout_s, lambda found: done(_has_model(found)))

    def tidy(self, now: float) -> None:
        self.close_stale(now)


# The answer of a probe, the error instead of one, or None if none came in time.
Found = tuple[GrpcAnswer, bytes] | UpstreamError | None


class GrpcProbe:
    """One call of our own; a ResponseSink. done: called once."""

    def __init__(
        self, endpoint: GrpcEndpoint, path: bytes, message: bytes, timeout_s: float, done: Callable[[Found], None]
    ) -> None:
        self._endpoint = endpoint
        self._path = path
        self._message = message
        self._timeout_s = timeout_s
        self._done: Callable[[Found], None] | None = done
        self._exchange: GrpcExchange | None = None
        self._data = bytearray()
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._end, None)
        exchange = endpoint.begin(self, monotonic())
        if exchange is not None:
            self.connected(exchange)

    def connected(self, connection: Any) -> None:
        self._exchange = connection
        timeout = literal(b"grpc-timeout", encode_timeout(self._timeout_s))
        block = _FIRST + self._endpoint.authority_block + self._path + _REST + timeout
        connection.send(block, prefix(len(self._message)) + self._message, True)

    def response(self, head: GrpcAnswer, data: bytes, complete: bool) -> None:
        self.response_data(data, False)
        if complete:
            self.trailers(head)

    def response_data(self, data: bytes, complete: bool) -> None:
        self._data += data
        if len(self._data) > MAX_INDEX_BYTES:
            self._end(None)

    def trailers(self, answer: GrpcAnswer) -> None:
        self._exchange = None
        self._end((answer, bytes(self._data)))

    def failed(self, error: UpstreamError) -> None:
        self._exchange = None
        self._end(error)

    def _end(self, found: Found) -> None:
        done, self._done = self._done, None
        if done is None:
            return
        self._timer.cancel()
        if self._exchange is not None:
            self._exchange.abandon()
            self._exchange = None
        elif found is None:
            self._endpoint.borrower_left(self)
        done(found)


def _reach(found: Found, ready: bool) -> Reach | None:
    if found is None:
        return None
    if isinstance(found, UpstreamError):
        return Reach.UNREACHABLE if isinstance(found, UpstreamUnreachable) else Reach.NOT_READY
    answer, data = found
    if answer.status == 200:
        return Reach.READY if data[:2] == _TRUE or not ready else Reach.NOT_READY
    if answer.code == UNIMPLEMENTED:
        return Reach.READY  # it speaks gRPC but has no readiness method
    return None if answer.code == DEADLINE_EXCEEDED else Reach.NOT_READY


def _has_model(found: Found) -> bool | None:
    if found is None or isinstance(found, UpstreamError):
        return None
    answer, data = found
    if answer.status == 200:
        return data[:2] == _TRUE
    return False if answer.code in (NOT_FOUND, UNAVAILABLE) else None
