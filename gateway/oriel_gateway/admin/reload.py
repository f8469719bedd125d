"""Reload policy documents without a restart: poll the source, compile beside the loop, and swap them all at once."""

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable
from time import monotonic

from oriel_gateway.core import Gateway
from oriel_gateway.documents.compiler import BadFolder
from oriel_gateway.documents.source import Stamp
from oriel_policies.documents import Snapshot
from oriel_policies.documents.packed import decoded
from oriel_policies.errors import BadDocument

_log = logging.getLogger(__name__)
POLL_S = 0.2
CALM_S = 5.0
SHRUNK_S = 1.0
_LOGGED_MISTAKES = 10
_SPARED = 1000


class Reloader:
    """Polls for new documents and lets its gateway adopt those that compile.

    read_stamp: returns the stamp of the documents that are there now; blocking. seen: the stamp of the first documents.

    Documents that change while they are compiled may be half of one set and half of another, or include a file that is
    still being written: half of the tenants would be unknown. They are compiled again at the next poll until they stay
    the same; but a source that changes for `CALM_S` is adopted as it is, so that a revoked key is not valid for longer
    than that. Documents that would drop many tenants have to stay the same for `shrunk_s`: a copy over a network may
    stall for longer than compiling takes.

    together: waits until the other workers of a gateway are about to adopt the same documents; None without them.

    Documents with a mistake leave those in force as they are, except for what they drop: see `documents.withdrawn`.
    """

    def __init__(
        self,
        gateway: Gateway,
        read_stamp: Callable[[], Stamp],
        build: Callable[[], Awaitable[Snapshot]],
        *,
        seen: Stamp,
        shrunk_s: float = SHRUNK_S,
        together: Callable[[], Awaitable[None]] | None = None,
        now: Callable[[], float] = monotonic,
    ) -> None:
        self._gateway = gateway
        self._shrunk_s = shrunk_s
        self._together = together
        self._read_stamp = read_stamp
        self._build = build
        self._seen = seen
        self._requested = asyncio.Event()
        self._spared = 0
        self._now = now
        self._again = False
        self._mark = ""  # digest of the withdrawn names: see `BadFolder`
        self._moving_s: float | None = None  # since when the source keeps changing

    def request(self) -> None:
        """Read the documents now, whether they changed or not (SIGHUP)."""
        self._requested.set()

    async def run(self) -> None:
        """Poll every `POLL_S`, and fetch the keys of issuers, until cancelled."""
        fetching: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as group:
            while True:
                if fetching is None and self._gateway.key_sets is not None:
                    fetching = group.create_task(self._gateway.key_sets.run())
                try:
                    async with asyncio.timeout(POLL_S):
                        await self._requested.wait()
                except TimeoutError:
                    pass
                try:
                    await self.poll()
                except Exception:
                    # This is the edge of a task that must live: the documents in force stay.
                    _log.exception("polling for new policies failed")

    async def poll(self) -> None:
        """Poll once: adopt new documents, or log their mistakes; close removed pools that have become empty."""
        requested = self._requested.is_set()
        self._requested.clear()
        stamp = await asyncio.to_thread(self._read_stamp)
        if requested or self._again or stamp != self._seen:
            self._seen, self._again = stamp, False
            await self._reload(stamp)
        await self._gateway.close_left_pools()
        self._spare_collector()

    def _spare_collector(self) -> None:
        """Keep tenants that became objects out of garbage collection, because they live as long as their snapshot.

        A hundred thousand of them would keep the collector, and the loop with it, busy for 100 ms and more at a time
        (benchmarks/results/2026-11-21-reload.md).
        """
        count = sum(map(len, decoded(self._gateway.snapshot)))
        if not 0 <= count - self._spared < _SPARED:
            self._spared = count
            gc.freeze()

    async def _moved(self, stamp: Stamp) -> bool:
        """Return whether the source changed since compiling began and has to be polled again before it is adopted."""
        now = self._now()
        if await asyncio.to_thread(self._read_stamp) == stamp:
            self._moving_s = None
            return False
        if self._moving_s is None:
            self._moving_s = now
        return now < self._moving_s + CALM_S

    async def _reload(self, stamp: Stamp) -> None:
        gateway = self._gateway
        snapshot: Snapshot | BadDocument
        try:
            snapshot = await self._build()
        except BadDocument as error:
            snapshot = error
        left = snapshot.remaining if isinstance(snapshot, BadFolder) else snapshot
        if isinstance(left, Snapshot) and _shrunk(gateway.snapshot, left):
            await asyncio.sleep(self._shrunk_s)
        if await self._moved(stamp):
            self._again = True
            return
        if self._together is not None:
            await self._together()
        if isinstance(snapshot, BadDocument):
            bad = snapshot
            gateway.documents.note_refused(bad)
            mistakes = (bad, *bad.others)
            for each in mistakes[:_LOGGED_MISTAKES]:
                _log.error("the policies on disk are not usable, the old ones stay in force: %s", each)
            if len(mistakes) > _LOGGED_MISTAKES:
                _log.error(
                    "the policies on disk have %d more mistakes: `oriel policies check` lists them",
                    len(mistakes) - _LOGGED_MISTAKES,
                )
            if isinstance(bad, BadFolder):
                self._withdraw(bad)
            return
        gateway.adopt(snapshot)
        self._mark = ""
        _log.info("new policies are in force: %d tenants, %d pools", len(snapshot.tenants), len(snapshot.pools))

    def _withdraw(self, bad: BadFolder) -> None:
        """Withdraw at once what the folder does not name any more, whatever mistakes the rest of it has."""
        if bad.remaining is None or bad.mark == self._mark:
            return
        self._mark = bad.mark
        self._gateway.adopt(bad.remaining, good=False)
        self._gateway.documents.withdrawn_keys = bad.keys
        if not bad.mark:
            _log.warning("keys, tenants or issuers that had been removed are back and accepted")
            return
        _log.warning(
            "the policies on disk have mistakes, so the old ones stay in force, but all that they no longer name is "
            "refused from now on, %d keys in all: %s",
            bad.keys,
            ", ".join(bad.withdrawn),
        )


def _shrunk(before: Snapshot, after: Snapshot) -> bool:
    """Return True if the number of tenants or keys that are gone suggests an incomplete file."""
    counts = ((len(before.tenants), len(after.tenants)), (len(before.keys), len(after.keys)))
    return any(was - now > max(100, was // 10) for was, now in counts)
