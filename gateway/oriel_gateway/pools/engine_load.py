"""Steers the concurrency of a pool of engines of others by the calls that wait inside them.

Nobody can reorder what waits in there, so as few calls as keep the engines busy are let in (`EngineLimit`). Each engine
is asked for its metrics while the pool has calls. While none of them can be read, the limit that is learned from
latency counts.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Final

from oriel_gateway.pools.endpoint_state import HttpEndpoint
from oriel_gateway.pools.http_probe import HttpProbe
from oriel_policies.upstreams.engines import Engine, EngineLimit, EngineLoad, read_load
from oriel_policies.waiting.admission import Admission

_log = logging.getLogger(__name__)
EVERY_S: Final = 0.25
READS_PER_S: Final = 100  # of one pool at most
TIMEOUT_S: Final = 1.0
PATIENCE: Final = 3  # reads without an answer until the limit that is learned from latency counts
FULL: Final = 0.95  # an engine whose cache is fuller is avoided, as if one more call waited there


class EngineSteering:
    """Reads the load of one pool's engines. Single writer: the loop.

    pool: its name. admission: its permits. changed: called when the engines were read.
    load: the latest load of all that answered. readable: one of them did lately. missing: none did, which is logged
    once.
    due_s: when they are asked next. awaited: answers that have not come yet.
    """

    def __init__(
        self, engine: Engine, pool: str, ceiling: int, admission: Admission, changed: Callable[[], None]
    ) -> None:
        self.limit = EngineLimit(ceiling)
        self.load = EngineLoad(0.0, 0.0, 0.0)
        self.readable = self.missing = False
        self.due_s = 0.0
        self.awaited = 0
        self._unread = 0  # reads in a row that no engine has answered
        self._engine = engine
        self._pool = pool
        self._admission = admission
        self._changed = changed
        self._found: list[EngineLoad] = []

    def read(self, members: Sequence[HttpEndpoint], now: float) -> None:
        """Ask the engines for their load, if that is due."""
        if now < self.due_s or self.awaited or not members:
            return
        self.due_s = now + max(EVERY_S, len(members) / READS_PER_S)
        self.awaited, self._found = len(members), []
        for member in members:
            self._ask(member)

    def _ask(self, member: HttpEndpoint) -> None:
        def done(status: int | None) -> None:
            load = read_load(self._engine, probe.body or b"") if status == 200 else None
            member.waiting = 0 if load is None else int(load.waiting) + (load.cache > FULL)
            if load is not None:
                self._found.append(load)
            self.awaited -= 1
            if not self.awaited:
                self._judge()

        probe = HttpProbe(member.meter, self._engine.metrics, TIMEOUT_S, done)

    def _judge(self) -> None:
        found = self._found
        self._unread = 0 if found else self._unread + 1
        self.readable = bool(found) or (self.readable and self._unread < PATIENCE)
        if found:
            self.load = EngineLoad(
                sum([each.waiting for each in found]),
                sum([each.running for each in found]),
                max([each.cache for each in found]),
            )
            self.limit.note(
                int(self.load.waiting),
                self._admission.inflight,
                engines=len(found),
                queued=bool(self._admission.queue.items),
            )
        elif not (self.readable or self.missing):
            _log.warning(
                "pool %s: no engine says at %s how many calls wait in it (docs/engines.md has the flags); the "
                "concurrency is learned from latency",
                self._pool,
                self._engine.metrics,
            )
        self.missing = not self.readable
        self._changed()
