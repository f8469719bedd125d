"""Asks servers for their spans of traces that are kept only at their end, and answers such requests.

`POST /oriel/v1/keep` has up to 256 trace ids in hexadecimal, one a line; the answer says of how many the server still
knew something: `{"known": 3}`. Only servers that trust the sender answer it. A server that does not know the path is
not asked again for a while: it is not ours.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Final

import msgspec

from oriel_wire.engine.client import HttpClient
from oriel_wire.errors import UpstreamError
from oriel_wire.trace import SpanSink
from oriel_wire.unsampled import MAX_TRACES, Noted, keep_body, requested_traces

__all__ = ["KEEP", "Recaller", "keep_requested"]

KEEP: Final = "/oriel/v1/keep"
EVERY_S: Final = 0.2
TIMEOUT_S: Final = 2.0
NOT_OURS_S: Final = 60.0
MAX_SERVERS: Final = 256
MAX_WAITING: Final = 4096  # trace ids for one server
_log = logging.getLogger(__name__)

Address = tuple[str, int]


class _Answer(msgspec.Struct):
    known: int = 0


class Recaller:
    """Gathers trace ids by server and sends them every `EVERY_S`. Single writer: the loop that calls `run`.

    found, gone: traces of which a server still knew something, and those that came too late or were not answered.
    """

    def __init__(self, *, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._waiting: dict[Address, dict[str, None]] = {}
        self._clients: dict[Address, HttpClient] = {}
        self._not_ours: dict[Address, float] = {}
        self._pending = asyncio.Event()
        self.found = 0
        self.gone = 0

    def ask(self, host: str, port: int, trace: str) -> None:
        """Ask this server for its spans of a trace, soon. trace: 32 hexadecimal digits."""
        address = host, port
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
                await asyncio.sleep(self._every_s)
                await self.flush()
        finally:
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
            client = self._clients[address] = HttpClient(host=address[0], port=address[1], max_connections=1)
        for begin in range(0, len(traces), MAX_TRACES):
            piece = traces[begin : begin + MAX_TRACES]
            try:
                answer = await client.request("POST", KEEP, (), keep_body(piece), deadline=monotonic() + TIMEOUT_S)
                if answer.status == 200:
                    known = min(max(0, msgspec.json.decode(bytes(answer.body), type=_Answer).known), len(piece))
                    self.found += known
                    self.gone += len(piece) - known
                    continue
            except (UpstreamError, msgspec.DecodeError) as error:
                _log.debug("%s:%d was not asked for %d traces: %s", *address, len(piece), error)
                self.gone += len(traces) - begin
                return
            self._leave_alone(address)
            return

    def _leave_alone(self, address: Address) -> None:
        now = monotonic()
        self._not_ours = {each: until for each, until in self._not_ours.items() if until > now}
        if len(self._not_ours) < MAX_SERVERS:
            self._not_ours[address] = now + NOT_OURS_S


def keep_requested(
    sink: SpanSink, body: bytes, pass_on: Callable[[Iterable[Noted]], None] | None = None
) -> bytes | None:
    """Send the spans of the traces that a request asks for; return the answer's body, None for one that is not valid.

    pass_on: gets what was noted of them, to ask further servers.
    """
    traces = requested_traces(body)
    if traces is None:
        return None
    known, found = sink.ring.take(traces)
    if sink.enabled:
        for _, build, record, spans in found:
            if build is not None:
                sink.keep(build, record, spans)
    if pass_on is not None:
        pass_on(found)
    return b'{"known":%d}' % known
