"""Measures how long a request had been waiting unread, so that a pause of the process does not extend its deadline.

A deadline counts from a request's arrival, but a server only knows when it read the request. While the event loop
polls, the two moments are the same. If the process or its machine was stopped for a while, all requests that arrived
meanwhile are read at once and would get their full time, although their senders may have given up long ago.

A timer fires every `BEAT_S`. The loop has paused if `PAUSE_S` pass without it; a shorter stall, such as a garbage
collection, is no pause. From then on, and for `DOUBT_S` after the loop has resumed, the kernel is asked for the age of
the data that is read: Linux records for each TCP connection when data last arrived. So a request is never judged older
than it is, and a request that arrives after the pause counts as new. Where the kernel keeps no such record (other
systems, Unix sockets), data that is read before the next beat counts as old as the pause, if the pause lasted for at
least `UNKNOWN_S`.

Without a pause, a reader compares two numbers and makes no system call.

gRPC reads its connections on its own threads and counts `grpc-timeout` from that moment. `GrpcPulse` adds the time for
which a call had lain unread when the process resumed. It counts only pauses in which the process used hardly any CPU
time: if only the loop was blocked, gRPC's threads went on reading. A call's connection is found by its peer's address.
A connection carries many calls: if bytes arrived both before and after the process resumed, it is not known which of
them were the call's, and the rule for a kernel without a record applies.
"""

import asyncio
from collections.abc import Callable
from math import inf
from time import monotonic, process_time

from oriel_wire.engine.kernel import Arrival, PeerSockets
from oriel_wire.engine.peers import address_of_grpc_peer

__all__ = ["GrpcPulse", "Pulse"]

BEAT_S = 0.05
PAUSE_S = 0.15
DOUBT_S = 1.0
UNKNOWN_S = 0.5


class Pulse:
    """Detects the pauses of one loop. Single writer: that loop.

    fresh_until: data that is read before this monotonic time has just arrived; for later reads call `age_s`.
    pauses: number of pauses so far. paused_s: how long the latest one lasted.
    """

    __slots__ = (
        "_beat_at",
        "_clock",
        "_just_resumed",
        "_loop",
        "_resumed_at",
        "_timer",
        "fresh_until",
        "paused_s",
        "pauses",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, *, clock: Callable[[], float] = monotonic) -> None:
        self._loop = loop
        self._clock = clock
        self._beat_at = clock()
        self.paused_s = 0.0
        self._just_resumed = False
        self._resumed_at = -inf
        self.pauses = 0
        self.fresh_until = self._beat_at + PAUSE_S
        self._timer: asyncio.TimerHandle | None = loop.call_later(BEAT_S, self._beat)

    def close(self) -> None:
        """Stop the timer. From then on everything that is read counts as new."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.fresh_until = inf

    def age_s(self, arrival: Arrival | None, now: float) -> float:
        """Seconds since the data read at `now` arrived. arrival: the kernel's record, None if there is none.

        Call it only from `fresh_until` on: the loop may have resumed without having run its timers yet.
        """
        if now - self._beat_at >= PAUSE_S:
            self._resume(now)
        if arrival is not None:
            return arrival.age_s
        return self._unknown_s()

    def shared_age_s(self, arrival: Arrival | None, now: float, before_s: float) -> float:
        """`age_s` for a connection that carries many requests, on which something was read last at `before_s`.

        Where its latest bytes came when the loop had resumed, and nothing was read from it since, they may hide
        requests that came during the pause, so the kernel's record says nothing about these.
        """
        age_s = self.age_s(arrival, now)
        if arrival is not None and age_s <= now - self._resumed_at and before_s < self._resumed_at:
            return max(age_s, self._unknown_s())
        return age_s

    def _unknown_s(self) -> float:
        return self.paused_s if self._just_resumed and self.paused_s >= UNKNOWN_S else 0.0

    def _resume(self, now: float) -> None:
        self.pauses += 1
        self.paused_s = now - self._beat_at
        self._resumed_at = self._beat_at = now
        self._just_resumed = True
        self.fresh_until = -inf

    def _beat(self) -> None:
        now = self._clock()
        self._timer = self._loop.call_later(BEAT_S, self._beat)
        if now - self._beat_at >= PAUSE_S:
            self._resume(now)
        elif now - self._resumed_at >= BEAT_S:
            self._just_resumed = False
        self._beat_at = now
        self.fresh_until = now + PAUSE_S if now - self._resumed_at >= DOUBT_S else -inf


class GrpcPulse(Pulse):
    """Measures the age of calls that gRPC, not the loop, has read from their connections."""

    __slots__ = ("_cpu_s", "_sockets")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._cpu_s = process_time()
        self._sockets = PeerSockets()

    def call_age_s(self, peer: str, now: float) -> float:
        """Seconds for which a call from `peer` (as gRPC writes it), begun `now`, lay unread before the process resumed.

        Call it only from `fresh_until` on.
        """
        if now - self._beat_at >= PAUSE_S:
            self._resume(now)
        port = peer.rpartition(":")[2]
        if now < self.fresh_until or not port.isdecimal():
            return 0.0
        found = self._sockets.arrival(address_of_grpc_peer(peer), int(port), now)
        if found is None:
            return 0.0  # a connection accepted since; its client has waited for the server's settings
        before_s = found.age_s - (now - self._resumed_at)
        return before_s if before_s > 0.0 else self._unknown_s()

    def _resume(self, now: float) -> None:
        if process_time() - self._cpu_s < (now - self._beat_at) / 2:
            super()._resume(now)
        else:
            self._beat_at, self.fresh_until = now, now + PAUSE_S

    def _beat(self) -> None:
        super()._beat()
        self._cpu_s = process_time()
