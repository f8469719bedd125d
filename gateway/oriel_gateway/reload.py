"""New policy documents without a restart: look, compile beside the loop, swap whole, let go of the old bit by bit."""

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable

from oriel_gateway.core import Gateway
from oriel_gateway.sources import PolicySource, Stamp
from oriel_policies.documents import Snapshot
from oriel_policies.documents.packed import decoded
from oriel_policies.errors import BadDocument

__all__ = ["POLL_S", "Reloader"]

_log = logging.getLogger(__name__)
POLL_S = 0.5
_LOGGED_MISTAKES = 10
_SPARED = 1000


class Reloader:
    """Watches a source and gives its gateway what compiles. seen: the stamp of what the gateway began with."""

    def __init__(
        self, gateway: Gateway, source: PolicySource, build: Callable[[], Awaitable[Snapshot]], *, seen: Stamp
    ) -> None:
        self._gateway = gateway
        self._source = source
        self._build = build
        self._seen = seen
        self._asked = asyncio.Event()
        self._spared = 0

    def ask(self) -> None:
        """Read the documents now, changed or not (SIGHUP)."""
        self._asked.set()

    async def run(self) -> None:
        """Look every `POLL_S`, and fetch the keys of issuers, until cancelled."""
        fetching: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as group:
            while True:
                if fetching is None and self._gateway.key_sets is not None:
                    fetching = group.create_task(self._gateway.key_sets.run())
                try:
                    async with asyncio.timeout(POLL_S):
                        await self._asked.wait()
                except TimeoutError:
                    pass
                try:
                    await self.look()
                except Exception:
                    # The edge of a task that must live: the documents in force go on to be served.
                    _log.exception("looking for new policies failed")

    async def look(self) -> None:
        """One look: adopt what is new and good, name what is new and bad; close pools that have run empty."""
        asked = self._asked.is_set()
        self._asked.clear()
        stamp = await asyncio.to_thread(self._source.stamp)
        if asked or stamp != self._seen:
            # A file written while it is compiled gets another stamp, and the next look compiles again.
            self._seen = stamp
            await self._reload()
        await self._gateway.close_left_pools()
        self._spare_collector()

    def _spare_collector(self) -> None:
        """Tenants that became objects live as long as their snapshot: a hundred thousand of them would keep the garbage
        collector, and the loop with it, busy for 100 ms and more at a time (tests/bench/reload.py)."""
        count = sum(map(len, decoded(self._gateway.snapshot)))
        if not 0 <= count - self._spared < _SPARED:
            self._spared = count
            gc.freeze()

    async def _reload(self) -> None:
        gateway = self._gateway
        try:
            snapshot = await self._build()
        except BadDocument as bad:
            gateway.documents.kept(bad)
            mistakes = (bad, *bad.others)
            for each in mistakes[:_LOGGED_MISTAKES]:
                _log.error("the policies on disk are not usable, the old ones stay in force: %s", each)
            if len(mistakes) > _LOGGED_MISTAKES:
                _log.error("and %d more mistakes: `oriel policies check` names them", len(mistakes) - _LOGGED_MISTAKES)
            return
        gateway.adopt(snapshot)
        _log.info("new policies are in force: %d tenants, %d pools", len(snapshot.tenants), len(snapshot.pools))
