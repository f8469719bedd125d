"""Looks after the endpoints of all pools: looks addresses up, probes, ejects the worse ones, tries them again.

One timer, ten times a second; what takes time is a callback or a task that ends with `close`.

* A pool with a probe path asks every endpoint for it each `probe_interval_s` (jittered; fewer when there are many:
  at most 100 probes a second and pool). 2xx is ready; any other answer, redirects included, is not.
* An endpoint that refuses connections or is not ready is asked again four times a second.
* An endpoint with work from which nothing came for a quarter of a second is asked at once; no answer within 0.4 s: it
  is stuck. A pool without a probe path judges that by the history of its endpoints.
* An ejected endpoint is probed when its time is over (without a path: connected to) and then on trial.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterator
from random import random, shuffle
from time import monotonic
from typing import Any

from oriel_gateway.discovery import Address, Discovery, DiscoveryFailed, DnsDiscovery
from oriel_gateway.endpoints import EndpointSet, HttpEndpoint, Reach, Standing, patience_s
from oriel_gateway.grpc_endpoint import GrpcEndpoint
from oriel_gateway.http_probe import CONNECTED, UNREACHABLE, HttpProbe
from oriel_gateway.pools import PoolGate
from oriel_policies.ejection import SUSPECT_S, Cause, outliers, silent_for_too_long

__all__ = ["Watch"]

_log = logging.getLogger(__name__)
TICK_S = 0.1
AGAIN_S = 0.25
SUSPECT_ANSWER_S = 0.4
PROBE_TIMEOUT_S = 1.0
PROBES_PER_S = 100
PROBES_PER_TICK = 20
MISSES = 2  # regular probes in a row without an answer
COMPARE_EVERY = 10  # ticks
FIRST_LOOK_TICKS = 30


class Watch:
    """See the module's head. pools: looked at anew each tick, so that a reload needs to tell nobody; calls may wait in
    one that the documents do not name any more.

    looked: every endpoint was asked once, or 3 s have passed: before that a gateway does not know whom it can ask.
    """

    def __init__(self, pools: Callable[[], Collection[PoolGate]]) -> None:
        self._pools = pools
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self.looked = False
        self._ticks = 0
        self._ticked_s = monotonic()
        self._late = False  # this loop stood still: that nothing was heard meanwhile says nothing of the servers
        self._turn = 0
        self._left = 0
        self._timer = self._loop.call_soon(self._tick)

    @staticmethod
    def discover(address: Address) -> Discovery:
        """How the name of a pool is looked up."""
        return DnsDiscovery(*address)

    async def close(self) -> None:
        """Stop looking; probes under way end with their endpoints."""
        self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(TICK_S, self._tick)
        now = monotonic()
        self._late, self._ticked_s = now - self._ticked_s > 2.0 * TICK_S, now
        self._ticks += 1
        self._left = PROBES_PER_TICK
        pools = list(self._pools())
        shuffle(pools)  # the bound on probes must not always spare the same ones
        for gate in pools:
            self._look_after(gate, gate.endpoints, gate.pool.discover)
            self._look_after(gate, gate.grpc, gate.pool.grpc_discover)
        if not self.looked:
            self.looked = self._ticks > FIRST_LOOK_TICKS or all(map(self._has_looked, pools))

    def _has_looked(self, gate: PoolGate) -> bool:
        if gate.pool.discover is not None and not gate.endpoints.looked_up:
            return False
        return not gate.pool.probe or all(member.reach is not Reach.UNKNOWN for member in gate.endpoints)

    def _look_after(self, gate: PoolGate, these: EndpointSet[Any], name: Address | None) -> None:
        now = monotonic()
        if name is not None and (these.look_up_s <= now or these.named != name):
            these.look_up_s, these.named = now + 60.0, name
            self._run(self._look_up(gate, these, name))
        for gone in these.gone() if these.leaving else ():
            self._run(gone.close())
        path = gate.pool.probe
        several = len(these.members) > 1
        tidy = self._ticks % COMPARE_EVERY == 0
        for member in self._in_turn(these):
            if member.heard:
                member.heard = False
                member.record.heard_s = now
            if tidy:
                member.tidy(now)
            if several and member.connecting_for_s(now) > SUSPECT_S and member.reach is not Reach.UNREACHABLE:
                self._give_up(gate, these, member, now)
            silence_s = now - member.record.heard_s if several and member.outstanding else 0.0
            if member.probing:
                # It may have been asked before it fell silent, and is asked once: a suspect has as long, no longer.
                late = min(silence_s - SUSPECT_S, now - member.probed_s) >= SUSPECT_ANSWER_S
                if late and path and member.ejection.cause is None:
                    these.eject(member, Cause.STUCK, now)
                continue
            if member.reach is Reach.UNREACHABLE or member.reach is Reach.NOT_READY:
                if now >= member.probe_due_s:
                    self._probe(these, member, path, PROBE_TIMEOUT_S)
            elif member.ejection.cause is not None:
                if now >= member.ejection.until_s:
                    self._probe(these, member, path, PROBE_TIMEOUT_S)
            elif silence_s > SUSPECT_S:
                if path:
                    self._probe(these, member, path, SUSPECT_ANSWER_S, suspect=True)
                elif silent_for_too_long(member.record, now) and self._others_are_well(these, member, now):
                    these.eject(member, Cause.STUCK, now)
            elif path and now >= member.probe_due_s:
                self._probe(these, member, path, PROBE_TIMEOUT_S)
            if member.probing:
                share = len(these.members) / PROBES_PER_S
                again_s = max(gate.pool.probe_interval_s, share)
                if member.reach in (Reach.UNREACHABLE, Reach.NOT_READY):
                    again_s = min(again_s, max(AGAIN_S, share))
                member.probe_due_s = now + again_s * (0.9 + 0.2 * random())
        if tidy and several:
            for index, cause in outliers([member.record for member in these.members]):
                member = these.members[index]
                if member.ejection.cause is None:
                    these.eject(member, cause, now)

    def _give_up(self, gate: PoolGate, these: EndpointSet[Any], member: Standing, now: float) -> None:
        """A connection is not made in time: its calls go to others, if there are any. Without a deadline of their own
        that is as short, they would learn nothing from it."""
        others = any(other is not member for other in these.usable)
        if others and member.connecting_for_s(now) > min(gate.pool.connect_timeout_s, patience_s(these)):
            these.found(member, Reach.UNREACHABLE)
            member.give_up_connecting()

    def _in_turn(self, these: EndpointSet[Any]) -> Iterator[Standing]:
        """All members, beginning elsewhere each time: the bound on probes must not always spare the same ones."""
        members = these.members
        self._turn += 7
        start = self._turn % len(members) if members else 0
        yield from members[start:]
        yield from members[:start]

    def _others_are_well(self, these: EndpointSet[Any], stuck: Standing, now: float) -> bool:
        """Another one has answered just now, or has nothing to answer: then all calls hang where they hang."""
        return not self._late and any(
            m is not stuck and (not m.outstanding or (m.record.answers and now - m.record.heard_s < SUSPECT_S))
            for m in these.usable
        )

    def _probe(
        self, these: EndpointSet[Any], member: Standing, path: str, timeout_s: float, *, suspect: bool = False
    ) -> None:
        if self._left <= 0:
            return
        self._left -= 1
        member.probing = True
        member.probed_s = monotonic()

        def done(reach: Reach | None) -> None:
            now = monotonic()
            member.probing = False
            if reach is None:
                self._missed(these, member, suspect, now)
                return
            member.probe_misses = 0
            these.found(member, reach)
            if reach is Reach.READY:
                if suspect:
                    member.record.heard_s = now
                elif member.ejection.cause is not None and now >= member.ejection.until_s:
                    these.admit(member, now)

        if isinstance(member, HttpEndpoint):
            HttpProbe(member.prober, path, timeout_s, lambda status: done(_reach(status)))
        elif isinstance(member, GrpcEndpoint):
            self._run(member.probe(timeout_s, bool(path), done))

    def _missed(self, these: EndpointSet[Any], member: Standing, suspect: bool, now: float) -> None:
        """No answer in time: worth an ejection if it has work that nothing came back from, or did not answer twice."""
        member.probe_misses += 1
        if member.ejection.cause is not None:
            if now >= member.ejection.until_s:  # else it was ejected while it was asked
                these.eject(member, member.ejection.cause, now)
        elif suspect or member.probe_misses >= MISSES:
            these.eject(member, Cause.STUCK, now)

    async def _look_up(self, gate: PoolGate, these: EndpointSet[Any], name: Address) -> None:
        discovery = self.discover(name)
        every_s = discovery.every_s
        try:
            found = await discovery.lookup()
            if name != (gate.pool.discover if these is gate.endpoints else gate.pool.grpc_discover):
                return  # the documents say something else by now
            if found != tuple(sorted(member.address for member in these.members)):
                these.assign(found)
        except DiscoveryFailed as error:
            _log.warning("the last known addresses stay: %s", error)
            every_s = min(every_s, 1.0)
        these.looked_up = True
        if not these.usable:
            every_s = min(every_s, 1.0)
        these.look_up_s = monotonic() + every_s * (0.9 + 0.2 * random())


def _reach(status: int | None) -> Reach | None:
    if status is None:
        return None
    if status == UNREACHABLE:
        return Reach.UNREACHABLE
    return Reach.READY if status == CONNECTED or 200 <= status < 300 else Reach.NOT_READY
