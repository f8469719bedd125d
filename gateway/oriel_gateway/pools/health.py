"""Monitor the endpoints of all pools: look up addresses, probe endpoints, eject the worse ones and restore them.

One timer fires ten times a second; what takes time is a callback, or a task that ends with `close`.

* In a pool with a probe path every endpoint is probed each `probe_interval_s` (with jitter; less often when there are
  many endpoints: at most 100 probes per second and pool). 2xx means ready; any other answer, redirects included, does
  not. A server of models that says so because of some of its models is judged by its index of them, read four times a
  second at most: it is ready if one of them serves and none is being loaded for the first time. A service that is no
  logic server may not know the path `/health/ready`: there 4xx means ready too.
* In a pool that scales and has a probe path, an address that was never probed is not used: only a server that can
  answer ends the hold of the calls that wait.
* An endpoint that refuses connections or is not ready is probed again four times a second; while calls wait for its
  pool, 40 times a second. Its probe does not wait long for a connection: if the first packet to an address that is not
  up yet is lost, the kernel repeats it only after 1 s, then 3 s, then 7 s; a new attempt gets through at once.
* The pods of a Kubernetes service are adopted the moment that the cluster announces them. One that is not ready for
  Kubernetes, which asks every few seconds, is used as soon as it passes our own probe.
* An endpoint with work that sent nothing for a quarter of a second is probed at once; if it does not answer within 0.4
  s, it is stuck. A pool without a probe path decides that by the history of its endpoints.
* An ejected endpoint is probed when its ejection ends (without a path: connected to) and is then on trial.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterator
from functools import partial
from random import random, shuffle
from time import monotonic
from typing import Any

from oriel_gateway.pools.endpoint_state import HttpEndpoint, Reach, patience_s
from oriel_gateway.pools.endpoints import EndpointSet, PoolEndpoint
from oriel_gateway.pools.pool import PoolGate
from oriel_policies.upstreams.ejection import SUSPECT_S, Cause, outliers_by_model, silent_for_too_long
from oriel_wire.discovery.discovery import Address, Discovery, DiscoveryFailed, DnsDiscovery
from oriel_wire.discovery.endpoint_slices import KUBERNETES, EndpointSlices

_log = logging.getLogger(__name__)
TICK_S = 0.1
AGAIN_S = 0.25
WAITED_FOR_S = 0.025  # seconds between two probes of an endpoint that calls wait for
EARLY_S = 0.002  # timers of the loop may fire so much too early
ATTEMPT_S = 0.1  # for a connection to an endpoint that is down; four round trips if that is longer
LONG_ATTEMPT_S = 0.5  # instead, once in LONG_EVERY attempts, where no round trip is known
LONG_EVERY = 4
SUSPECT_ANSWER_S = 0.4
PROBE_TIMEOUT_S = 1.0
PROBES_PER_S = 100
PROBES_PER_TICK = 20
MISSES = 2  # regular probes in a row without an answer
COMPARE_EVERY = 10  # compare the endpoints at every so many ticks
FIRST_PROBE_TICKS = 30


class Watch:
    """Monitors the endpoints of all pools.

    pools: returns the pools, and those that the documents do not name any more while calls may wait in them. It is
    called at each tick, so that a reload need not notify the monitor.
    probed_once: True once every endpoint was probed, or 3 s have passed: before that a gateway does not know which
    endpoints are usable.
    tick_s: between two checks of all endpoints.
    again_s: between two probes of an endpoint that refuses connections or is not ready.
    waited_for_s: the same while calls wait for the pool.
    probe_timeout_s: seconds allowed for the answer to a regular probe.
    probes_per_s: the most probes a second in one pool; four times as many while calls wait for it.
    """

    def __init__(self, pools: Callable[[], Collection[PoolGate]]) -> None:
        self._pools = pools
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self.probed_once = False
        self.tick_s = TICK_S
        self.again_s = AGAIN_S
        self.waited_for_s = WAITED_FOR_S
        self.probe_timeout_s = PROBE_TIMEOUT_S
        self.probes_per_s = PROBES_PER_S
        self._ticks = 0
        self._ticked_s = monotonic()
        self._late = False  # True if this loop stood still, so that the silence of servers means nothing
        self._turn = 0
        self._left = 0
        self._services: dict[str, tuple[EndpointSlices, asyncio.Task[None]]] = {}
        self._hurry_timer: asyncio.TimerHandle | None = None
        self._timer = self._loop.call_soon(self._tick)

    @staticmethod
    def discover(address: Address) -> Discovery:
        """Return the discovery for the name of a pool."""
        return DnsDiscovery(*address)

    @staticmethod
    def watch_service(service: str, changed: Callable[[], None]) -> EndpointSlices:
        """Return the watch of a Kubernetes service."""
        return EndpointSlices(service, changed=changed)

    async def close(self) -> None:
        """Stop monitoring; probes under way end with their endpoints."""
        self._timer.cancel()
        if self._hurry_timer is not None:
            self._hurry_timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self.tick_s, self._tick)
        now = monotonic()
        self._late, self._ticked_s = now - self._ticked_s > 2.0 * self.tick_s, now
        self._ticks += 1
        self._left = PROBES_PER_TICK
        pools = list(self._pools())
        shuffle(pools)  # the bound on probes must not always spare the same ones
        for gate in pools:
            # until none waits, or the next call would find an engine busy that is not
            if gate.engines is not None and (gate.calls or gate.engines.load.waiting):
                gate.engines.read(gate.endpoints.usable, now)
            self._look_after(gate, gate.endpoints, gate.pool.discover)
            self._look_after(gate, gate.grpc, gate.pool.grpc_discover)
        if self._services and self._ticks % COMPARE_EVERY == 0:
            self._forget_services(pools)
        if self._hurry_timer is None:
            self._hurry()
        if not self.probed_once:
            self.probed_once = self._ticks > FIRST_PROBE_TICKS or all(map(self._has_probed, pools))

    def _has_probed(self, gate: PoolGate) -> bool:
        if gate.pool.discover is not None and not gate.endpoints.looked_up:
            return False
        return not gate.pool.probe or all(member.reach is not Reach.UNKNOWN for member in gate.endpoints)

    def _look_after(self, gate: PoolGate, these: EndpointSet[Any], name: Address | None) -> None:
        now = monotonic()
        if name is None:
            these.named = None
        elif name[0].startswith(KUBERNETES):
            self._follow(gate, these, name)
        elif these.look_up_s <= now or these.named != name:
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
                    self._probe(
                        these, member, path, self.probe_timeout_s, attempt_s=attempt_limit_s(these, member, path)
                    )
            elif member.ejection.cause is not None:
                if now >= member.ejection.until_s:
                    self._probe(these, member, path, self.probe_timeout_s)
            elif silence_s > SUSPECT_S:
                if path:
                    self._probe(these, member, path, SUSPECT_ANSWER_S, suspect=True)
                elif silent_for_too_long(member.record, now, member.records.values()) and self._others_are_well(
                    these, member, now
                ):
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
            for index, model, cause in outliers_by_model([member.records for member in these.members]):
                member = these.members[index]
                if member.ejection.cause is None and model:
                    these.withhold(member, model, cause, now)
                elif member.ejection.cause is None:
                    these.eject(member, cause, now)

    def _follow(self, gate: PoolGate, these: EndpointSet[Any], name: Address) -> None:
        """Adopt what the watch of a Kubernetes service has found, and begin that watch if there is none."""
        host, port = name
        if host not in self._services:
            slices = self.watch_service(host.removeprefix(KUBERNETES), partial(self._service_changed, host))
            self._services[host] = slices, self._run(slices.run())
        slices, _ = self._services[host]
        if slices.found is not None and (these.named != name or these.listed is not slices.found):
            these.named = name
            these.assign_listed(slices.found, port, probed=bool(gate.pool.probe))
        these.looked_up = slices.found is not None or bool(slices.failure)

    def _service_changed(self, host: str) -> None:
        for gate in list(self._pools()):
            for these, name in ((gate.endpoints, gate.pool.discover), (gate.grpc, gate.pool.grpc_discover)):
                if name is not None and name[0] == host:
                    self._follow(gate, these, name)
        if self._hurry_timer is None:
            self._hurry()

    def _forget_services(self, pools: list[PoolGate]) -> None:
        """End the watches of services that no pool names any more."""
        named = {name[0] for gate in pools for name in (gate.pool.discover, gate.pool.grpc_discover) if name}
        for host in self._services.keys() - named:
            self._services.pop(host)[1].cancel()

    def _give_up(self, gate: PoolGate, these: EndpointSet[Any], member: PoolEndpoint, now: float) -> None:
        """Give up connections that are not made in time, so that their calls go to other endpoints, if there are any.

        This bounds the attempt for calls whose own deadline is not as short: they would learn nothing from it.
        """
        others = any(other is not member for other in these.usable)
        if others and member.connecting_for_s(now) > min(gate.pool.connect_timeout_s, patience_s(these)):
            these.note_reach(member, Reach.UNREACHABLE)
            member.give_up_connecting()

    def _in_turn(self, these: EndpointSet[Any]) -> Iterator[PoolEndpoint]:
        """Iterate over all members, beginning elsewhere each time: the bound on probes must not always spare the same
        ones.
        """
        members = these.members
        self._turn += 7
        start = self._turn % len(members) if members else 0
        yield from members[start:]
        yield from members[:start]

    def _others_are_well(self, these: EndpointSet[Any], stuck: PoolEndpoint, now: float) -> bool:
        """Return whether another endpoint has answered just now, or has nothing to answer.

        If not, the calls of all endpoints hang for one common cause.
        """
        return not self._late and any(
            m is not stuck and (not m.outstanding or (m.record.answers and now - m.record.heard_s < SUSPECT_S))
            for m in these.usable
        )

    def _hurry(self) -> None:
        """Probe the endpoints that calls wait for, and come back soon if there are any."""
        self._hurry_timer = None
        now = monotonic()
        again = False
        self._left = PROBES_PER_TICK
        for gate in self._pools():
            queued = gate.admission.queue.items
            for these in (gate.endpoints, gate.grpc):
                if not (queued or these.parked):
                    continue
                down = [m for m in these.members if m.reach in (Reach.UNREACHABLE, Reach.NOT_READY)]
                again = again or bool(down)
                every_s = max(self.waited_for_s, len(down) / (4.0 * self.probes_per_s))
                for member in down:
                    if not member.probing and now >= min(member.probe_due_s, member.probed_s + every_s - EARLY_S):
                        path = gate.pool.probe
                        limit_s = attempt_limit_s(these, member, path)
                        self._probe(these, member, path, self.probe_timeout_s, attempt_s=limit_s)
        if again:
            self._hurry_timer = self._loop.call_later(self.waited_for_s, self._hurry)

    def _probe(
        self,
        these: EndpointSet[Any],
        member: PoolEndpoint,
        path: str,
        timeout_s: float,
        *,
        suspect: bool = False,
        attempt_s: float = 0.0,
    ) -> None:
        """Probe an endpoint. attempt_s: bounds the attempt to connect; 0.0 for no bound but the probe's."""
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
            lost = reach is Reach.UNREACHABLE and attempt_s and now - member.probed_s >= attempt_s
            member.lost_attempts = member.lost_attempts + 1 if lost else 0
            these.note_reach(member, reach)
            if reach is Reach.READY:
                if suspect:
                    member.record.heard_s = now
                elif member.ejection.cause is not None and now >= member.ejection.until_s:
                    these.restore(member, now)

        member.probe(timeout_s, path, done, attempt_s=attempt_s)

    def _missed(self, these: EndpointSet[Any], member: PoolEndpoint, suspect: bool, now: float) -> None:
        """Eject an endpoint whose probe got no answer, if it has work and is silent, or if it missed two probes in a
        row. One that is not used anyway is not: a server that starts may be too busy to answer.
        """
        if member.reach is Reach.UNREACHABLE or member.reach is Reach.NOT_READY:
            return
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
                if not found:
                    _log.warning("%s: there is no such name, so the pool is empty", name[0])
                these.assign(found)
        except DiscoveryFailed as error:
            _log.warning("the last known addresses stay in use: %s", error)
            every_s = min(every_s, 1.0)
        these.looked_up = True
        if not these.usable:
            every_s = min(every_s, 1.0)
        these.look_up_s = monotonic() + every_s * (0.9 + 0.2 * random())


def attempt_limit_s(these: EndpointSet[Any], member: PoolEndpoint, path: str) -> float:
    """Return how long an attempt to connect to an endpoint that is down may take; 0.0 for no bound of its own.

    A connection over HTTP that comes too late is kept for the next probe of a path, so that a long round trip does no
    harm. If it is not kept, the round trips that were seen in this pool are the measure.
    """
    longest_s = max((other.connect_s for other in these.members), default=0.0)
    if longest_s or (path and isinstance(member, HttpEndpoint)):
        return max(ATTEMPT_S, 4.0 * longest_s)
    if isinstance(member, HttpEndpoint):
        return 0.0
    return LONG_ATTEMPT_S if member.lost_attempts % LONG_EVERY == LONG_EVERY - 1 else ATTEMPT_S
