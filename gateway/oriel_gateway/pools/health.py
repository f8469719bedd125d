"""Monitor the endpoints of all pools: look up addresses, probe endpoints, eject the worse ones and restore them.

One timer fires ten times a second; what takes time is a callback, or a task that ends with `close`.

* In a pool with a probe path every endpoint is probed each `probe_interval_s` (with jitter; less often when there are
  many endpoints: at most 100 probes per second and pool). 2xx means ready; any other answer, redirects included, does
  not.
* An endpoint that refuses connections or is not ready is probed again four times a second.
* An endpoint with work that sent nothing for a quarter of a second is probed at once; if it does not answer within 0.4
  s, it is stuck. A pool without a probe path decides that by the history of its endpoints.
* An ejected endpoint is probed when its ejection ends (without a path: connected to) and is then on trial.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterator
from random import random, shuffle
from time import monotonic
from typing import Any

from oriel_gateway.pools.endpoints import EndpointSet, EndpointState, HttpEndpoint, Reach, patience_s
from oriel_gateway.pools.grpc_endpoint import GrpcEndpoint
from oriel_gateway.pools.http_probe import CONNECTED, UNREACHABLE, HttpProbe
from oriel_gateway.pools.pool import PoolGate
from oriel_policies.ejection import SUSPECT_S, Cause, outliers, silent_for_too_long
from oriel_wire.engine.discovery import Address, Discovery, DiscoveryFailed, DnsDiscovery

_log = logging.getLogger(__name__)
TICK_S = 0.1
AGAIN_S = 0.25
SUSPECT_ANSWER_S = 0.4
PROBE_TIMEOUT_S = 1.0
PROBES_PER_S = 100
PROBES_PER_TICK = 20
MISSES = 2  # regular probes in a row without an answer
COMPARE_EVERY = 10  # ticks
FIRST_PROBE_TICKS = 30


class Watch:
    """Monitors the endpoints of all pools.

    pools: returns the pools, and those that the documents do not name any more while calls may wait in them. It is
    called at each tick, so that a reload need not notify the monitor.
    probed_once: whether every endpoint was probed once, or 3 s have passed: before that a gateway does not know which
    endpoints are usable.
    tick_s: between two checks of all endpoints.
    again_s: between two probes of an endpoint that refuses connections or is not ready.
    probe_timeout_s: for the answer to a regular probe.
    probes_per_s: at most so many in one pool.
    """

    def __init__(self, pools: Callable[[], Collection[PoolGate]]) -> None:
        self._pools = pools
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self.probed_once = False
        self.tick_s = TICK_S
        self.again_s = AGAIN_S
        self.probe_timeout_s = PROBE_TIMEOUT_S
        self.probes_per_s = PROBES_PER_S
        self._ticks = 0
        self._ticked_s = monotonic()
        self._late = False  # this loop stood still: then the silence of servers means nothing
        self._turn = 0
        self._left = 0
        self._timer = self._loop.call_soon(self._tick)

    @staticmethod
    def discover(address: Address) -> Discovery:
        """Return the discovery for the name of a pool."""
        return DnsDiscovery(*address)

    async def close(self) -> None:
        """Stop monitoring; probes under way end with their endpoints."""
        self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self.tick_s, self._tick)
        now = monotonic()
        self._late, self._ticked_s = now - self._ticked_s > 2.0 * self.tick_s, now
        self._ticks += 1
        self._left = PROBES_PER_TICK
        pools = list(self._pools())
        shuffle(pools)  # the bound on probes must not always spare the same ones
        for gate in pools:
            self._look_after(gate, gate.endpoints, gate.pool.discover)
            self._look_after(gate, gate.grpc, gate.pool.grpc_discover)
        if not self.probed_once:
            self.probed_once = self._ticks > FIRST_PROBE_TICKS or all(map(self._has_probed, pools))

    def _has_probed(self, gate: PoolGate) -> bool:
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
                # It may have been probed before it fell silent, and is probed once: a suspect has as long as that, no
                # longer.
                late = min(silence_s - SUSPECT_S, now - member.probed_s) >= SUSPECT_ANSWER_S
                if late and path and member.ejection.cause is None:
                    these.eject(member, Cause.STUCK, now)
                continue
            if member.reach is Reach.UNREACHABLE or member.reach is Reach.NOT_READY:
                if now >= member.probe_due_s:
                    self._probe(these, member, path, self.probe_timeout_s)
            elif member.ejection.cause is not None:
                if now >= member.ejection.until_s:
                    self._probe(these, member, path, self.probe_timeout_s)
            elif silence_s > SUSPECT_S:
                if path:
                    self._probe(these, member, path, SUSPECT_ANSWER_S, suspect=True)
                elif silent_for_too_long(member.record, now) and self._others_are_well(these, member, now):
                    these.eject(member, Cause.STUCK, now)
            elif path and now >= member.probe_due_s:
                self._probe(these, member, path, self.probe_timeout_s)
            if member.probing:
                share = len(these.members) / self.probes_per_s
                again_s = max(gate.pool.probe_interval_s, share)
                if member.reach in (Reach.UNREACHABLE, Reach.NOT_READY):
                    again_s = min(again_s, max(self.again_s, share))
                member.probe_due_s = now + again_s * (0.9 + 0.2 * random())
        if tidy and several:
            for index, cause in outliers([member.record for member in these.members]):
                member = these.members[index]
                if member.ejection.cause is None:
                    these.eject(member, cause, now)

    def _give_up(self, gate: PoolGate, these: EndpointSet[Any], member: EndpointState, now: float) -> None:
        """Give up connections that are not made in time, so that their calls go to other endpoints, if there are any.

        This bounds the attempt for calls whose own deadline is not as short: they would learn nothing from it.
        """
        others = any(other is not member for other in these.usable)
        if others and member.connecting_for_s(now) > min(gate.pool.connect_timeout_s, patience_s(these)):
            these.note_reach(member, Reach.UNREACHABLE)
            member.give_up_connecting()

    def _in_turn(self, these: EndpointSet[Any]) -> Iterator[EndpointState]:
        """Iterate over all members, beginning elsewhere each time: the bound on probes must not always spare the same
        ones.
        """
        members = these.members
        self._turn += 7
        start = self._turn % len(members) if members else 0
        yield from members[start:]
        yield from members[:start]

    def _others_are_well(self, these: EndpointSet[Any], stuck: EndpointState, now: float) -> bool:
        """Whether another endpoint has answered just now, or has nothing to answer. If not, all calls hang for one
        cause.
        """
        return not self._late and any(
            m is not stuck and (not m.outstanding or (m.record.answers and now - m.record.heard_s < SUSPECT_S))
            for m in these.usable
        )

    def _probe(
        self, these: EndpointSet[Any], member: EndpointState, path: str, timeout_s: float, *, suspect: bool = False
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
            these.note_reach(member, reach)
            if reach is Reach.READY:
                if suspect:
                    member.record.heard_s = now
                elif member.ejection.cause is not None and now >= member.ejection.until_s:
                    these.restore(member, now)

        if isinstance(member, HttpEndpoint):
            HttpProbe(member.prober, path, timeout_s, lambda status: done(_reach(status)))
        elif isinstance(member, GrpcEndpoint):
            member.probe(timeout_s, bool(path), done)

    def _missed(self, these: EndpointSet[Any], member: EndpointState, suspect: bool, now: float) -> None:
        """Eject an endpoint whose probe got no answer, if it has work and is silent, or if it missed two probes in a
        row.
        """
        member.probe_misses += 1
        if member.ejection.cause is not None:
            if now >= member.ejection.until_s:  # otherwise it was ejected while it was probed
                these.eject(member, member.ejection.cause, now)
        elif suspect or member.probe_misses >= MISSES:
            these.eject(member, Cause.STUCK, now)

    async def _look_up(self, gate: PoolGate, these: EndpointSet[Any], name: Address) -> None:
        discovery = self.discover(name)
        every_s = discovery.every_s
        try:
            found = await discovery.lookup()
            if name != (gate.pool.discover if these is gate.endpoints else gate.pool.grpc_discover):
                return  # the documents name another address by now
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
