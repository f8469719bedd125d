"""`GET /console/live`: one snapshot a second for all viewers, as server-sent events, and none while nobody looks.

The page reads the stream with `fetch`, so that the token can be a header; `oriel top` reads it too. A viewer that reads
slowly gets the latest snapshot when it is ready for it, not all of those it missed; one that does not read at all is
cut.
"""

import asyncio
import logging
from collections.abc import Sequence
from time import monotonic, time
from typing import Final

from oriel_gateway.admin.console.reading import Moment, Promises, promises, read
from oriel_gateway.admin.console.recent import Recent
from oriel_gateway.admin.console.reports import EVERY_S, Reports
from oriel_gateway.admin.console.suspects import suspects
from oriel_gateway.admin.guard import Receive, Scope, Send
from oriel_gateway.admin.troubles import troubles
from oriel_gateway.core import Gateway
from oriel_policies.promise.error_budget import WINDOWS
from oriel_wire.distribution import installed_version
from oriel_wire.engine.tls import Certificates
from oriel_wire.usage.lines import LedgerCounts

_log = logging.getLogger(__name__)
STREAM: Final = "/console/live"
MAX_VIEWERS: Final = 8
SECOND_S: Final = 1.0
COMMENT_S: Final = 15.0
PROMISES_S: Final = 5.0  # attainment and budgets are of minutes and days, and are read less often than the rest
STALL_S: Final = 10.0  # a viewer that takes nothing for so long is cut
_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-accel-buffering", b"no"),
]
_FULL: Final = b'{"error":{"message":"8 viewers are connected already: close one of them","reason":"queue_full"}}'


class Source:
    """Makes the snapshots of one gateway. Its counts exist from the first snapshot until `rest`.

    certificates, usage: those of `troubles`.
    """

    def __init__(
        self, gateway: Gateway, certificates: Certificates | None = None, usage: LedgerCounts | None = None
    ) -> None:
        self._gateway = gateway
        self._certificates = certificates
        self._usage = usage
        self._version = installed_version()
        self._reports = Reports()
        self._recent: Recent | None = None
        self._last_s: float | None = None
        self._promises: Promises = {}
        self._promises_due_s = 0.0

    def snapshot(self) -> bytes:
        """Return the snapshot of now."""
        gateway, now = self._gateway, monotonic()
        stats = gateway.records.stats
        stats.count()
        recent = self._recent
        if recent is None:
            recent = self._recent = Recent(gateway.records.decisions, stats.finished_count, now)
            stats.readers.append(recent.count)
        else:
            recent.update(now)
        since_s = None if self._last_s is None else now - self._last_s
        self._last_s = now
        moment = Moment(now=now, wall=time(), since_s=since_s)
        if now >= self._promises_due_s:
            self._promises, self._promises_due_s = promises(gateway, moment.wall), now + PROMISES_S
        named = [
            *suspects(recent, now, self._reports.targets, self._usual),
            *troubles(gateway, self._certificates, self._usage),
        ]
        return read(gateway, recent, self._reports, self._promises, moment, self._version, named)

    def _usual(self, tenant: str) -> float:
        """Return the calls a second of the tenant in the last hour, without its last five minutes."""
        tiers = {tier.name: tier.objective for tier in self._gateway.snapshot.tiers.values()}
        pairs, _ = self._gateway.records.stats.objectives.budgets.of_pairs(tiers, time(), tenant=tenant)
        calls = sum(figures["calls"]["1h"] - figures["calls"]["5m"] for _, figures in pairs)
        return float(calls / (WINDOWS["1h"] - WINDOWS["5m"]))

    async def ask(self) -> None:
        """Ask the servers of the busiest models and services every `EVERY_S`, until cancelled."""
        while True:
            if self._recent is not None:
                targets = sorted(self._recent.targets.items(), key=lambda item: -item[1].calls)
                known = [self._recent.of_target[name] for name, _ in targets if name in self._recent.of_target]
                await self._reports.ask(known, self._gateway.pools)
            await asyncio.sleep(EVERY_S)

    def rest(self) -> None:
        """Forget the counts: nobody looks."""
        if self._recent is not None:
            self._gateway.records.stats.readers.remove(self._recent.count)
        self._recent = self._last_s = None


class Live:
    """The streams of one admin port. Single writer: the loop.

    source: makes the snapshots. second_s, comment_s, stall_s: see the constants.
    made: snapshots so far.
    """

    def __init__(
        self,
        source: Source,
        *,
        second_s: float = SECOND_S,
        comment_s: float = COMMENT_S,
        stall_s: float = STALL_S,
    ) -> None:
        self._source = source
        self._second_s = second_s
        self._comment_s = comment_s
        self._stall_s = stall_s
        self._viewers = 0
        self._latest = b""
        self._fresh = asyncio.Event()
        self._closing = asyncio.Event()
        self._making: asyncio.Task[None] | None = None
        self.made = 0

    @property
    def viewers(self) -> int:
        """Streams that are open."""
        return self._viewers

    def close(self) -> None:
        """End the streams, and refuse further ones."""
        self._closing.set()
        self._fresh.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a stream until its viewer leaves or the gateway stops."""
        if self._viewers >= MAX_VIEWERS or self._closing.is_set():
            await whole(send, 503, [(b"content-type", b"application/json"), (b"retry-after", b"15")], _FULL)
            return
        self._viewers += 1
        if self._making is None:
            self._make()
            self._making = asyncio.create_task(self._keep_making())
        left = asyncio.ensure_future(_departure(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await self._stream(send, left)
        finally:
            left.cancel()
            self._viewers -= 1
            if not self._viewers and self._making is not None:
                self._making.cancel()
                self._making, self._latest = None, b""
                self._source.rest()

    async def _stream(self, send: Send, left: "asyncio.Future[None]") -> None:
        sent, comment_due_s = b"", monotonic() + self._comment_s
        while not left.done() and not self._closing.is_set():
            fresh, body = self._fresh, b""
            if self._latest is not sent:
                sent = self._latest
                body = b"data: %b\n\n" % sent
            if monotonic() >= comment_due_s:
                comment_due_s += self._comment_s
                body += b": the stream is open\n\n"
            if body:
                try:
                    async with asyncio.timeout(self._stall_s):
                        await send({"type": "http.response.body", "body": body, "more_body": True})
                except TimeoutError:
                    return  # without an end: the server aborts the connection
            wait = asyncio.ensure_future(fresh.wait())
            try:
                await asyncio.wait((left, wait), timeout=self._comment_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                wait.cancel()
        await send({"type": "http.response.body", "body": b""})

    async def _keep_making(self) -> None:
        asking = asyncio.create_task(self._source.ask())
        try:
            while True:
                await asyncio.sleep(self._second_s)
                self._make()
        finally:
            asking.cancel()

    def _make(self) -> None:
        try:
            self._latest = self._source.snapshot()
            self.made += 1
        except Exception:
            # This is the edge of a task that must live: viewers see that their snapshot grows old.
            _log.exception("the console's snapshot cannot be made")
        fresh, self._fresh = self._fresh, asyncio.Event()
        fresh.set()


async def whole(send: Send, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
    """Send a whole answer."""
    length = [(b"content-length", b"%d" % len(body))] if status != 304 else []
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *length]})
    await send({"type": "http.response.body", "body": body})


async def _departure(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
