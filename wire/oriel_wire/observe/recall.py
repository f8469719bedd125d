"""Asks servers for their spans of traces that are kept only at their end, and answers such requests.

`POST /oriel/v1/keep` has up to 256 trace ids in hexadecimal, one a line; the answer says of how many the server still
knew something: `{"known": 3}`. Only servers that trust the sender answer it. A server that does not know the path is
not asked again for a while: it is not ours.

A port that speaks gRPC only has the same as a method: one message each way, with the same bytes.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Final

import msgspec

from oriel_wire.engine.client import HttpClient
from oriel_wire.engine.grpc_client import GrpcClient
from oriel_wire.errors import UpstreamError, UpstreamTimedOut, WireError
from oriel_wire.h2.grpc import DEADLINE_EXCEEDED, OK, UNAVAILABLE
from oriel_wire.observe.trace import SpanSink
from oriel_wire.observe.unsampled import MAX_TRACES, Noted, keep_body, requested_traces

__all__ = ["KEEP", "KEEP_METHOD", "Recaller", "keep_requested"]

KEEP: Final = "/oriel/v1/keep"
KEEP_METHOD: Final = b"/oriel.v1.Traces/Keep"
EVERY_S: Final = 0.2
TIMEOUT_S: Final = 2.0
NOT_OURS_S: Final = 60.0
MAX_SERVERS: Final = 256
MAX_WAITING: Final = 4096  # trace ids for one server
_ANSWER_BYTES: Final = 4096
_LATER: Final = (DEADLINE_EXCEEDED, UNAVAILABLE)  # one of our servers may answer this too
_log = logging.getLogger(__name__)

Address = tuple[str, int, bool]  # host, port, and whether it speaks gRPC only


class _Answer(msgspec.Struct):
    known: int = 0


class Recaller:
    """Gathers trace ids by server and sends them every `EVERY_S`. Single writer: the loop that calls `run`.

    found, gone: traces of which a server still knew something, and those that came too late or were not answered.
    """

    def __init__(self) -> None:
        self._waiting: dict[Address, dict[str, None]] = {}
        self._clients: dict[Address, HttpClient | GrpcClient] = {}
        self._not_ours: dict[Address, float] = {}
        self._pending = asyncio.Event()
        self.found = 0
        self.gone = 0

    def ask(self, host: str, port: int, trace: str, *, grpc: bool = False) -> None:
        """Ask this server for its spans of a trace, soon.

        trace: 32 hexadecimal digits. grpc: True if the port speaks gRPC only.
        """
        address = host, port, grpc
        waiting = self._waiting.get(address)
        if waiting is None:
            if len(self._waiting) >= MAX_SERVERS or self._not_ours.get(address, 0.0) > monotonic():
                return
            waiting = self._waiting[address] = {}
        if len(waiting) >= MAX_WAITING:
            self.gone += 1
            return
        waiting[trace] = None
        if not self._pending.is_set():
            self._pending.set()

    async def run(self) -> None:
        """Send what is asked for until cancelled."""
        try:
            while True:
                await self._pending.wait()
                await asyncio.sleep(EVERY_S)
                await self.flush()
        finally:
            await self.close()

    async def close(self) -> None:
        """Close the connections."""
        async with asyncio.timeout(1.0):
            for client in self._clients.values():
                await client.close()

    async def flush(self) -> None:
        """Send all that waits, and wait for the answers."""
        self._pending.clear()
        waiting, self._waiting = self._waiting, {}
        async with asyncio.TaskGroup() as group:
            for address, traces in waiting.items():
                group.create_task(self._send(address, list(traces)))

    async def _send(self, address: Address, traces: list[str]) -> None:
        client = self._clients.get(address)
        if client is None:
            if len(self._clients) >= MAX_SERVERS:
                oldest = next(iter(self._clients))
                await self._clients.pop(oldest).close()
            client = self._clients[address] = _client(address)
        for begin in range(0, len(traces), MAX_TRACES):
            piece = traces[begin : begin + MAX_TRACES]
            try:
                body = keep_body(piece)
                if isinstance(client, GrpcClient):
                    answer = await _ask_grpc(client, body)
                else:
                    answer = await _ask_http(client, body)
                if answer is not None:
                    known = min(max(0, msgspec.json.decode(answer, type=_Answer).known), len(piece))
                    self.found += known
                    self.gone += len(piece) - known
                    continue
            except (WireError, msgspec.DecodeError) as error:
                _log.debug("%s:%d could not be asked to keep %d traces: %s", *address[:2], len(piece), error)
                self.gone += len(traces) - begin
                return
            self._leave_alone(address)
            return

    def _leave_alone(self, address: Address) -> None:
        now = monotonic()
        self._not_ours = {each: until for each, until in self._not_ours.items() if until > now}
        if len(self._not_ours) < MAX_SERVERS:
            self._not_ours[address] = now + NOT_OURS_S


def _client(address: Address) -> HttpClient | GrpcClient:
    host, port, grpc = address
    if grpc:
        return GrpcClient(host=host, port=port, max_message_bytes=_ANSWER_BYTES)
    return HttpClient(host=host, port=port, max_connections=1)


async def _ask_http(client: HttpClient, body: bytes) -> bytes | None:
    """Return a server's answer, None if it is not ours. Raises UpstreamError."""
    answer = await client.request("POST", KEEP, (), body, deadline=monotonic() + TIMEOUT_S)
    return bytes(answer.body) if answer.status == 200 else None


async def _ask_grpc(client: GrpcClient, body: bytes) -> bytes | None:
    """Return a server's answer, None if it is not ours. Raises WireError."""
    call = client.call(KEEP_METHOD, (), (body,), TIMEOUT_S)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            answer = await call.read()
            if answer is not None:
                await call.read()  # the end of the call
                return answer
    except TimeoutError as error:
        raise UpstreamTimedOut("no answer in time") from error
    finally:
        call.cancel()
    if call.code in _LATER:
        raise UpstreamError(call.text)
    return b"" if call.code == OK else None


def keep_requested(
    sink: SpanSink, body: bytes, pass_on: Callable[[Iterable[Noted]], None] | None = None
) -> bytes | None:
    """Send the spans of the traces that a request asks for; return the answer's body, None for one that is not valid.

    pass_on: gets what was noted of them, to ask further servers.
    """
    traces = requested_traces(body)
    if traces is None:
        return None
    known, found = sink.ring.pop(traces)
    if sink.enabled:
        for _, build, record, spans in found:
            if build is not None:
                sink.keep(build, record, spans)
    if pass_on is not None:
        pass_on(found)
    return b'{"known":%d}' % known
