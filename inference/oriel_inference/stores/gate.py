"""When a store may be asked at all.

While it answers, everything may pass. After a failure one request at a time finds out whether it is back: at once when
the failed one had brought bytes (a connection that broke), else not before `OUTAGE_S`, doubling up to `MAX_OUTAGE_S`.
Who asks meanwhile hears of the same failure without a request. So a store that is down is sent one request per
`OUTAGE_S` at most, by however many pollers, clients and loads.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from oriel_inference.errors import LoadFailed, StoreUnavailable

__all__ = ["Attempt", "Gate"]

OUTAGE_S = 10.0
MAX_OUTAGE_S = 60.0
# A connection that broke after fewer bytes was none.
BROUGHT_BYTES = 64 << 10


class Attempt:
    """One request under way. Whoever reads its body says what came, so that the others need not wait for its end."""

    def __init__(self, opens: Callable[[], None]) -> None:
        self._opens = opens
        self.brought_bytes = 0

    def brought(self, size_bytes: int) -> None:
        if not self.brought_bytes:
            self._opens()
        self.brought_bytes += size_bytes


class Gate:
    """Single writer: the loop of the store's client. now: monotonic seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._failure: StoreUnavailable | None = None
        self._again_at = 0.0
        self._pause_s = OUTAGE_S
        self._probing = asyncio.Lock()

    @property
    def failure(self) -> StoreUnavailable | None:
        """Why the last request failed; None if it did not."""
        return self._failure

    @asynccontextmanager
    async def attempt(self) -> AsyncIterator[Attempt]:
        """Around one request. Raises StoreUnavailable without one while none may be sent."""
        probes = await self._admitted()

        def opens() -> None:
            nonlocal probes
            self._failure, self._pause_s = None, OUTAGE_S
            if probes:
                probes = False
                self._probing.release()

        attempt = Attempt(opens)
        try:
            yield attempt
            opens()
        except StoreUnavailable as failure:
            self._fail(failure, brought=attempt.brought_bytes >= BROUGHT_BYTES, probed=probes)
            raise
        except LoadFailed:
            opens()  # it answered
            raise
        finally:
            if probes:
                self._probing.release()

    async def _admitted(self) -> bool:
        """Whether the request is the one that finds out."""
        if self._failure is None:
            return False
        await self._probing.acquire()
        if self._failure is not None and self._now() >= self._again_at:
            return True
        self._probing.release()
        if self._failure is not None:
            raise StoreUnavailable(self._failure.reason) from self._failure
        return False

    def _fail(self, failure: StoreUnavailable, *, brought: bool, probed: bool) -> None:
        self._failure = failure
        if brought:
            self._again_at = self._now()
            return
        self._again_at = self._now() + self._pause_s
        if probed:
            self._pause_s = min(2 * self._pause_s, MAX_OUTAGE_S)
