"""New policy documents without a restart: look, compile beside the loop, swap whole, let go of the old bit by bit."""

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable
from time import monotonic

from oriel_gateway.compiler import BadFolder
from oriel_gateway.core import Gateway
from oriel_gateway.sources import PolicySource, Stamp
from oriel_policies.documents import Snapshot
from oriel_policies.documents.packed import decoded
from oriel_policies.errors import BadDocument

__all__ = ["CALM_S", "POLL_S", "Reloader"]

_log = logging.getLogger(__name__)
POLL_S = 0.2
CALM_S = 5.0
SHRUNK_S = 1.0
_LOGGED_MISTAKES = 10
_SPARED = 1000


class Reloader:
    """Watches a source and gives its gateway what compiles. seen: the stamp of what the gateway began with.

    What changes while it is compiled may be half of one set and half of another, or a file that is still being written:
    half of the tenants would be strangers. It is compiled again at the next look, until it holds still; but a source
    that does not for `CALM_S` is taken as it is, so that a revoked key does not live on for that. What would leave many
    tenants out has to hold still for `SHRUNK_S`: a copy over a network may stall for longer than compiling takes.

    Documents with a mistake leave those in force as they are, but for what they drop: see `documents.withdrawn`.
    """

    def __init__(
        self,
        gateway: Gateway,
        source: PolicySource,
        build: Callable[[], Awaitable[Snapshot]],
        *,
        seen: Stamp,
        now: Callable[[], float] = monotonic,
    ) -> None:
        self._gateway = gateway
        self._source = source
        self._build = build
        self._seen = seen
        self._asked = asyncio.Event()
        self._spared = 0
        self._now = now
        self._again = False
        self._mark = ""  # of what was withdrawn: see `BadFolder`
        self._moving_s: float | None = None  # since when what is read does not hold still

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
        if asked or self._again or stamp != self._seen:
            self._seen, self._again = stamp, False
            await self._reload(stamp)
        await self._gateway.close_left_pools()
        self._spare_collector()

    def _spare_collector(self) -> None:
        """Tenants that became objects live as long as their snapshot: a hundred thousand of them would keep the garbage
        collector, and the loop with it, busy for 100 ms and more at a time (tests/bench/reload.py)."""
        count = sum(map(len, decoded(self._gateway.snapshot)))
        if not 0 <= count - self._spared < _SPARED:
            self._spared = count
            gc.freeze()

    async def _moved(self, stamp: Stamp) -> bool:
        """Whether something else lies there now than when compiling began, and that is worth another look."""
        now = self._now()
        if await asyncio.to_thread(self._source.stamp) == stamp:
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
            await asyncio.sleep(SHRUNK_S)
        if await self._moved(stamp):
            self._again = True
            return
        if isinstance(snapshot, BadDocument):
            bad = snapshot
            gateway.documents.kept(bad)
            mistakes = (bad, *bad.others)
            for each in mistakes[:_LOGGED_MISTAKES]:
                _log.error("the policies on disk are not usable, the old ones stay in force: %s", each)
            if len(mistakes) > _LOGGED_MISTAKES:
                _log.error("and %d more mistakes: `oriel policies check` names them", len(mistakes) - _LOGGED_MISTAKES)
            if isinstance(bad, BadFolder):
                self._withdraw(bad)
            return
        gateway.adopt(snapshot)
        self._mark = ""
        _log.info("new policies are in force: %d tenants, %d pools", len(snapshot.tenants), len(snapshot.pools))

    def _withdraw(self, bad: BadFolder) -> None:
        """What the folder names no more ends now, whatever is wrong with the rest of it."""
        if bad.remaining is None or bad.mark == self._mark:
            return
        self._mark = bad.mark
        self._gateway.adopt(bad.remaining, good=False)
        self._gateway.documents.withdrawn_keys = bad.keys
        if not bad.mark:
            _log.warning("what the policies on disk had dropped is there again and counts")
            return
        _log.warning(
            "the policies on disk have mistakes, but what they drop is refused from now on, %d keys in all: %s",
            bad.keys,
            ", ".join(bad.withdrawn),
        )


def _shrunk(before: Snapshot, after: Snapshot) -> bool:
    """Whether so many tenants or keys are gone that a file may be half of itself."""
    counts = ((len(before.tenants), len(after.tenants)), (len(before.keys), len(after.keys)))
    return any(was - now > max(100, was // 10) for was, now in counts)
