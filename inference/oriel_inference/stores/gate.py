"""Circuit breaker for one object store.

While the store answers, every request passes. After a failure only one request at a time passes, as a probe: at once if
the failed request had received bytes before its connection broke, otherwise after `OUTAGE_S`, doubling up to
`MAX_OUTAGE_S`. Meanwhile all other calls fail with the same error and send nothing. So a store that is down gets at
most one request per `OUTAGE_S`, however many pollers, clients and loads need it.

Every request to a store goes through `Gate.attempt`, which therefore also translates the errors of the client.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from oriel_inference.errors import LoadFailed, StoreUnavailable
from oriel_inference.stores.client_errors import load_failed
from oriel_wire.objects.errors import ObjectStoreError

OUTAGE_S = 10.0
MAX_OUTAGE_S = 60.0
# A connection that broke after fewer bytes counts as no answer at all.
BROUGHT_BYTES = 64 << 10


class Attempt:
    """One request under way. Its reader reports bytes as they arrive, so that others need not wait for its end."""

    def __init__(self, opens: Callable[[], None]) -> None:
        self._opens = opens
        self.brought_bytes = 0

    def brought(self, size_bytes: int) -> None:
        if not self.brought_bytes:
            self._opens()
        self.brought_bytes += size_bytes


class Gate:
    """The state of one store. now: monotonic seconds. Single writer: the event loop of the store's client."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._failure: StoreUnavailable | None = None
        self._again_at = 0.0
        self._pause_s = OUTAGE_S
        self._probing = asyncio.Lock()

    @property
    def failure(self) -> StoreUnavailable | None:
        """The error of the last request, None if it succeeded."""
        return self._failure

    @asynccontextmanager
    async def attempt(self) -> AsyncIterator[Attempt]:
        """Run one request in this context. Raises LoadFailed; StoreUnavailable at once while none may be sent."""
        probes = await self._admitted()

        def opens() -> None:
            nonlocal probes
            self._failure, self._pause_s = None, OUTAGE_S
            if probes:
                probes = False
                self._probing.release()

        attempt = Attempt(opens)
        try:
            try:
                yield attempt
            except ObjectStoreError as error:
                raise load_failed(error) from error
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
        """True for the request that probes. Raises StoreUnavailable if no request may be sent."""
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
